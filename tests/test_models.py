"""Models of ``transformers`` with default settings: exact gradients, scores and coverage."""

import contextlib
import re

import pytest
import torch
from models import (
    MODELS,
    alone,
    assert_same_gradients,
    build,
    captured,
    default_dtype,
    exactly,
    rows_of,
    text_rows,
)
from torch import nn

import gradtrail
from gradtrail import reference

SHARED = "one value serves the whole batch, so its examples cannot be told apart"
# by model, what is not covered: parameter names -> reason
UNCOVERED = {
    "vit": {
        r"vit\.embeddings\.cls_token": "ViTEmbeddings has no rule for 'cls_token'",
        r"vit\.embeddings\.position_embeddings": (
            "ViTEmbeddings has no rule for 'position_embeddings'"
        ),
    },
    "t5": {
        r"(en|de)coder\.block\.0\.layer\.0\.SelfAttention\.relative_attention_bias\.weight": SHARED
    },
    # experts and routers are raw tensors since transformers 5, modules of their own before
    "mixtral": {
        r"model\.layers\.\d\.mlp\.gate\.weight": "MixtralTopKRouter has no rule for 'weight'",
        r"model\.layers\.\d\.mlp\.experts\.(gate_up|down)_proj": "MixtralExperts has no rule for",
        r"model\.layers\.\d\.block_sparse_moe\.experts\.\d\.w\d\.weight": "a router chooses",
    },
}
NAMES = list(MODELS)


def leaving_out(name):
    """The one warning that is due: T5's tables are found out on the first row."""
    if name != "t5":
        return contextlib.nullcontext()
    match = "2 layers are left out .*relative_attention_bias: one value serves"
    return pytest.warns(gradtrail.GradTrailWarning, match=match)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_equal_each_example_alone(name):
    model, rows = build(name), rows_of(name)
    with exactly():
        with leaving_out(name):
            got, coverage = captured(model, rows)
        expected = alone(model, rows, names=list(got))
    assert set(got) == {entry.name for entry in coverage.with_status("covered")}
    assert_same_gradients(got, expected, 1e-10)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_in_float32(name):
    model, rows = build(name, torch.float32), rows_of(name, torch.float32)
    with leaving_out(name):
        got, _ = captured(model, rows)
    assert_same_gradients(got, alone(model, rows, names=list(got)), 1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_scores_equal_dot_products(name):
    model, rows = build(name), rows_of(name)
    with exactly():
        with leaving_out(name):
            scores = gradtrail.attribute(
                model, rows, rows[:3], batch_size=2, query_batch_size=3, progress=False
            )
        covered = [entry.name for entry in scores.coverage.with_status("covered")]
        gradients = alone(model, rows, names=covered)
    expected = reference.dot_products(gradients, {key: g[:3] for key, g in gradients.items()})
    scale = float(expected.abs().max())
    torch.testing.assert_close(scores.values.double(), expected, rtol=1e-9, atol=1e-10 * scale)


@pytest.mark.parametrize("name", NAMES)
def test_coverage(name):
    model, rows = build(name, torch.float32), rows_of(name, torch.float32)
    with leaving_out(name):
        coverage = gradtrail.attribute(model, rows[:2], rows[:1], progress=False).coverage
    reasons = UNCOVERED.get(name, {})
    uncovered = {
        parameter: reasons[pattern]
        for parameter, _ in model.named_parameters()
        for pattern in reasons
        if re.fullmatch(pattern, parameter)
    }
    unsupported = coverage.with_status("unsupported")
    assert bool(unsupported) == bool(reasons)
    assert {entry.name for entry in unsupported} == set(uncovered)
    assert all(entry.reason.startswith(uncovered[entry.name]) for entry in unsupported)
    assert not coverage.with_status("left out")
    sizes = {parameter: value.numel() for parameter, value in model.named_parameters()}
    left = sum(sizes[parameter] for parameter in uncovered)
    assert coverage.share == pytest.approx(1 - left / sum(sizes.values()))
    assert f"covered share {coverage.share:.1%}" in str(coverage)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_check_agrees(name, dtype):
    model = build(name, dtype)
    rows = gradtrail.attribution.data.as_rows(rows_of(name, dtype), "train", None, 0)
    with default_dtype(dtype), leaving_out(name):
        report = gradtrail.check(model, rows.batch(range(5)))
    assert report.ok, str(report)
    assert report.num_examples == 4


def test_share_of_the_experts_is_known_before_any_data():
    model = build("mixtral")
    coverage = gradtrail.coverage(model)
    experts = sum(value.numel() for name, value in model.named_parameters() if "experts" in name)
    left = sum(
        entry.numel for entry in coverage.with_status("unsupported") if "experts" in entry.name
    )
    assert left == experts
    assert 0.1 < coverage.share < 0.3


def test_tied_embedding_and_head_are_one_parameter():
    model = build("gpt2")
    assert model.lm_head.weight is model.transformer.wte.weight
    entries = {entry.name: entry for entry in gradtrail.coverage(model).entries}
    assert "lm_head.weight" not in entries
    assert entries["transformer.wte.weight"].layer == "transformer.wte"


def test_bias_that_a_head_only_names_is_covered():
    """BERT's prediction head holds its decoder's bias under a name of its own."""
    model = build("bert")
    head = model.cls.predictions
    assert head.bias is head.decoder.bias
    entries = {entry.name: entry for entry in gradtrail.coverage(model).entries}
    assert entries["cls.predictions.bias"].layer == "cls.predictions.decoder.bias"


@pytest.mark.filterwarnings("ignore:. layers are left out")
@pytest.mark.parametrize("lengths", [(1, 1, 1), (1, 3, 2), (3, 1, 1)], ids=str)
def test_one_token_does_not_pass_for_a_batch(lengths):
    """T5's bias table reads ``[1, 1]`` then, as a position table that may be expanded would."""
    model = build("t5")
    questions, answers = text_rows(lengths), text_rows(lengths[::-1], seed=1)
    rows = [
        {"input_ids": question["input_ids"], "labels": answer["labels"]}
        for question, answer in zip(questions, answers, strict=True)
    ]
    with exactly():
        got, _ = captured(model, rows)
        assert_same_gradients(got, alone(model, rows, names=list(got)), 1e-10)


class DistanceForCausalLM(nn.Module):
    """Adds a table of distances to its attention, one value for the whole batch."""

    def __init__(self):
        super().__init__()
        self.embed, self.table, self.out = nn.Embedding(29, 4), nn.Embedding(8, 1), nn.Linear(4, 29)

    def forward(self, input_ids):
        hidden = self.embed(input_ids)
        places = torch.arange(input_ids.shape[1])
        bias = self.table((places[:, None] - places).abs())[-len(places) :, :, 0]
        weights = (hidden @ hidden.transpose(1, 2) + bias).softmax(-1)
        return {"logits": self.out(weights @ hidden)}


def test_table_that_is_found_to_be_shared_late_is_refused():
    """The first rows are too short to tell, and later as many positions meet as many rows."""
    torch.manual_seed(0)
    model = DistanceForCausalLM().double()
    with pytest.raises(gradtrail.CaptureError, match="table must see one row .*one value serves"):
        captured(model, text_rows((1, 1, 1, 1, 4, 4, 4, 4)))
    rows = text_rows((1, 1, 1, 1, 4, 4, 4, 4))[4:]
    with pytest.warns(gradtrail.GradTrailWarning, match="table: one value serves"):
        got, _ = captured(model, rows)
    assert_same_gradients(got, alone(model, rows, names=list(got)), 1e-10)


def test_shared_table_that_was_asked_for_is_refused():
    with pytest.raises(
        gradtrail.CaptureError, match="must name layers that see one row an example"
    ):
        captured(build("t5"), rows_of("t5"), layers="*relative_attention_bias")


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_bfloat16_model_sums_in_float32(name):
    rows = rows_of(name, torch.float32)
    model = build(name, torch.float32)
    exact = alone(model, rows)
    with leaving_out(name):
        got, _ = captured(model.bfloat16(), rows)
    for parameter, value in got.items():
        assert value.dtype == torch.float32
        # what remains is bf16's own rounding in the forward and backward
        cosine = torch.nn.functional.cosine_similarity(
            value.flatten(), exact[parameter].flatten(), dim=0
        )
        assert cosine > 0.95 or exact[parameter].norm() < 1e-3, parameter
