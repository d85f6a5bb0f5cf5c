"""Losses: what is inferred from a batch and a model, and how a scalar is undivided."""

import logging
from types import SimpleNamespace

import pytest
import torch
from models import alone, build, captured, pad_left, rows_of, text_rows, tiny
from torch import nn
from torch.nn import functional as F

import gradtrail
from gradtrail.attribution.data import pad_rows
from gradtrail.attribution.losses import call_model, resolve_loss
from gradtrail.hooks import counted_labels, model_kind

TRAIN = text_rows((5, 3, 7, 1, 6))


class Returns(nn.Module):
    """A model that returns what it was given."""

    def __init__(self, **config):
        super().__init__()
        self.config = SimpleNamespace(**config) if config else None

    def forward(self, x):
        return x


class ReturnsForCausalLM(Returns):
    def forward(self, x):
        return {"logits": x}


class ReturnsForTokenClassification(ReturnsForCausalLM):
    pass


class ReturnsForSequenceClassification(ReturnsForCausalLM):
    pass


def infer(model, batch):
    loss = resolve_loss(None, None)
    return loss(model, batch), loss.description


def logits(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def cross_entropy(logits, label):
    return float(-logits.log_softmax(-1)[label])


# ---------------------------------------------------------------- inferred


def test_causal_labels_are_shifted():
    x = logits(2, 4, 5)
    labels = torch.tensor([[1, 2, -100, 3], [0, 4, 1, -100]])
    values, description = infer(ReturnsForCausalLM(), {"x": x, "labels": labels})
    expected = [
        cross_entropy(x[0, 0], 2) + cross_entropy(x[0, 2], 3),
        cross_entropy(x[1, 0], 4) + cross_entropy(x[1, 1], 1),
    ]
    assert values.tolist() == pytest.approx(expected, rel=1e-12)
    assert description == "cross-entropy of tokens, shifted, summed"


def test_causal_label_after_padding_has_nothing_to_be_predicted_from():
    x, labels = logits(1, 4, 5), torch.tensor([[-100, 1, 2, 3]])
    mask = torch.tensor([[0, 1, 1, 1]])
    values, _ = infer(ReturnsForCausalLM(), {"x": x, "labels": labels, "attention_mask": mask})
    assert values.item() == pytest.approx(cross_entropy(x[0, 1], 2) + cross_entropy(x[0, 2], 3))


def test_token_labels_are_not_shifted():
    x, labels = logits(1, 3, 5), torch.tensor([[1, -100, 3]])
    values, description = infer(ReturnsForTokenClassification(), {"x": x, "labels": labels})
    assert values.item() == pytest.approx(cross_entropy(x[0, 0], 1) + cross_entropy(x[0, 2], 3))
    assert "unshifted" in description


def test_class_labels():
    x = logits(3, 4)
    for labels in (torch.tensor([1, 3, -100]), torch.tensor([1, 3, -100], dtype=torch.int32)):
        for batch in ({"x": x, "labels": labels}, (x, labels), [x, labels]):
            values, description = infer(ReturnsForSequenceClassification(), batch)
            expected = [cross_entropy(x[0], 1), cross_entropy(x[1], 3), 0]
            assert values.tolist() == pytest.approx(expected)
            assert description == "cross-entropy"


@pytest.mark.parametrize(
    ("outputs", "shape"),
    [
        *(((3, *sides), (3, *sides)) for sides in ((), (1,), (2,), (2, 4), (2, 1))),
        ((3, 1), (3,)),
        ((3, 2, 1), (3, 2)),
    ],
    ids=str,
)
def test_half_squared_error(outputs, shape):
    x = logits(*outputs)
    targets = logits(*shape, seed=1)
    values, description = infer(Returns(), (x, targets))
    expected = (x.reshape(3, -1) - targets.reshape(3, -1)).square().sum(1) / 2
    torch.testing.assert_close(values, expected, rtol=1e-12, atol=0)
    assert description == "half squared error, summed"


def test_positions_with_integer_targets():
    x, labels = logits(2, 3, 5), torch.tensor([[1, 2, 3], [-100, -100, -100]])
    values, description = infer(Returns(), (x, labels))
    expected = sum(cross_entropy(x[0, s], s + 1) for s in range(3))
    assert values.tolist() == pytest.approx([expected, 0])
    assert description == "cross-entropy of positions, summed"


def test_regression_head():
    x, labels = logits(3, 1), torch.tensor([0.5, 1.0, -1.0])
    values, _ = infer(
        ReturnsForSequenceClassification(problem_type="regression"), {"x": x, "labels": labels}
    )
    torch.testing.assert_close(values, (x[:, 0] - labels.double()).square() / 2)


def test_low_precision_losses_are_computed_in_float32():
    x, labels = logits(2, 4).bfloat16(), torch.tensor([1, 2])
    values, _ = infer(Returns(), (x, labels))
    assert values.dtype == torch.float32
    torch.testing.assert_close(values, F.cross_entropy(x.float(), labels, reduction="none"))
    values, _ = infer(Returns(), (x, x.float() + 1e-3))
    torch.testing.assert_close(values, torch.full((2,), 4 * 1e-6 / 2), rtol=1e-2, atol=0)


@pytest.mark.parametrize("name", ["gpt2", "bert", "t5", "vit", "llama"])
def test_inferred_loss_is_the_models_own(name):
    """``transformers`` gives the mean over labels that count; ours is the sum by example."""
    model = build(name, torch.float32).eval()
    rows = rows_of(name, torch.float32)
    batch = torch.utils.data.default_collate(rows) if name == "vit" else pad_rows(rows, 0)
    values, _ = infer(model, batch)
    own = model(**batch).loss
    torch.testing.assert_close(values.sum() / counted_labels(model, batch["labels"]), own)


def test_what_was_inferred_is_said_once(caplog):
    loss = resolve_loss(None, None)
    batch = {"x": logits(2, 3, 5), "labels": torch.zeros(2, 3, dtype=torch.long)}
    with caplog.at_level(logging.INFO, logger="gradtrail"):
        loss(ReturnsForCausalLM(), batch)
        loss(ReturnsForCausalLM(), batch)
    assert [record.message for record in caplog.records] == [
        "loss inferred: cross-entropy of tokens, shifted, summed"
    ]


@pytest.mark.parametrize(
    ("model", "batch", "match"),
    [
        (Returns(), {"x": logits(2, 3)}, r"needs 'labels' or must be an .* pair, got \['x'\]"),
        (Returns(), logits(2, 3), "got Tensor"),
        (Returns(), (logits(2), logits(2), logits(2)), "got tuple"),
        (Returns(), (logits(2, 3), "labels"), "got tuple"),
        (Returns(), (logits(2, 3), logits(2, 4)), r"outputs \(2, 3\) and targets \(2, 4\)"),
        (Returns(), (logits(2, 3), logits(2)), r"outputs \(2, 3\) and targets \(2,\)"),
        (
            Returns(),
            (logits(2), torch.tensor([1, 0])),
            r"outputs \(2,\) and integer targets \(2,\)",
        ),
        (Returns(), (logits(3, 4), torch.tensor([1, 0])), r"\(3, 4\) and integer targets \(2,\)"),
        (Returns(), (logits(2, 3, 4), torch.zeros(2, 4).long()), r"integer targets \(2, 4\)"),
        (
            ReturnsForCausalLM(),
            {"x": logits(2, 3, 4), "labels": torch.zeros(2, 5).long()},
            r"logits \(2, 3, 4\) and labels \(2, 5\) of ReturnsForCausalLM",
        ),
        (
            Returns(),
            {"x": logits(2, 3, 4), "labels": torch.zeros(2, 3).long()},
            r"logits \(2, 3, 4\) and labels \(2, 3\) of Returns",
        ),
        (
            ReturnsForSequenceClassification(problem_type=None),
            {"x": logits(2, 3), "labels": torch.ones(2, 3)},
            r"logits \(2, 3\) and labels \(2, 3\)",
        ),
    ],
    ids=str,
)
def test_batches_without_an_inferred_loss(model, batch, match):
    with pytest.raises(ValueError, match=match) as info:
        infer(model, batch)
    assert "Pass loss" in str(info.value)


def test_model_output_without_logits():
    class Tuple(nn.Module):
        def forward(self, x):
            return (x, x)

    for batch in (
        {"x": logits(2, 3), "labels": torch.tensor([1, 0])},
        (logits(2, 3), logits(2, 3)),
    ):
        with pytest.raises(ValueError, match="the model returned tuple without logits"):
            infer(Tuple(), batch)


# ---------------------------------------------------------------- calling the model


class Fields(nn.Module):
    def forward(self, input_ids, attention_mask=None, **kwargs):
        return input_ids, attention_mask, kwargs


class Anything(nn.Module):
    def forward(self, **kwargs):
        return kwargs


def test_model_is_called_with_the_tensors_it_takes():
    ids, mask, other = torch.zeros(1), torch.ones(1), torch.zeros(2)
    batch = {
        "input_ids": ids, "attention_mask": mask, "row": other, "labels": other, "text": ["a"],
    }  # fmt: skip
    assert call_model(Fields(), batch) == (ids, mask, {})
    assert set(call_model(Anything(), batch)) == {"input_ids", "attention_mask", "row"}
    assert "labels" in call_model(Anything(), batch, keep_labels=True)
    compiled = torch.compile(Fields(), backend="eager", disable=True)
    assert call_model(compiled, batch) == (ids, mask, {})


def test_kinds_of_models():
    assert model_kind(build("gpt2")) == model_kind(build("opt")) == "causal"
    assert model_kind(build("bert")) == "position"
    assert model_kind(build("t5")) == "encoder-decoder"
    assert model_kind(build("vit")) is None
    assert model_kind(nn.Sequential(build("llama"))) == "causal"


def test_counting_labels():
    labels = torch.tensor([[1, 2, -100], [-100, -100, 3]])
    assert counted_labels(ReturnsForCausalLM(), labels) == 2
    assert counted_labels(ReturnsForTokenClassification(), labels) == 3
    assert counted_labels(Returns(), torch.tensor([1, -100, 0])) == 2


# ---------------------------------------------------------------- labels that do not count


def test_example_whose_labels_do_not_count_has_a_zero_gradient():
    model = tiny()
    rows = [dict(row) for row in TRAIN]
    for row in (rows[0], rows[2]):
        row["labels"] = torch.full_like(row["labels"], -100)
    for size in (1, 2, 5):
        gradients, _ = captured(model, rows, batch_size=size)
        for value in gradients.values():
            assert value.isfinite().all()
            assert not value[[0, 2, 3]].any()
    expected = alone(model, rows)
    for name, value in gradients.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_mean_over_no_labels_has_a_zero_gradient(size):
    """The mean itself is NaN, and so would be every gradient of it."""

    def loss(model, batch):
        logits = model(batch["input_ids"], batch["attention_mask"])["logits"][:, :-1]
        return F.cross_entropy(logits.transpose(1, 2), batch["labels"][:, 1:])

    model = tiny()
    rows = [dict(row) for row in TRAIN]
    rows[0]["labels"] = torch.full_like(rows[0]["labels"], -100)
    options = {"loss": loss, "loss_reduction": "token_mean", "progress": False}
    scores = gradtrail.attribute(model, rows, TRAIN[2:3], batch_size=size, **options)
    expected = gradtrail.attribute(model, rows, TRAIN[2:3], progress=False)
    torch.testing.assert_close(scores.values, expected.values, rtol=1e-5, atol=1e-5)
    assert scores.values[[0, 3]].tolist() == [[0.0], [0.0]]
    nothing = [dict(row, labels=torch.full_like(row["labels"], -100)) for row in rows]
    with pytest.warns(gradtrail.GradTrailWarning, match="No gradient ever reached 6"):
        assert not gradtrail.self_influence(model, nothing, batch_size=size, **options).any()


def test_loss_that_is_zero_by_a_constant():
    """A loss without a graph is an error, unless it is zero: then so is every gradient."""
    model = tiny()

    def loss(model, batch):
        values = resolve_loss(None, None)(model, batch)
        return values if len(batch["input_ids"]) < 2 else values.new_full(values.shape, constant)

    constant = 0.0
    scores = gradtrail.attribute(model, TRAIN[:2], TRAIN[2:3], loss=loss, progress=False)
    assert not scores.values.any()
    constant = 1.0
    with pytest.raises(gradtrail.CaptureError, match="the loss does not depend on them"):
        gradtrail.attribute(model, TRAIN[:2], TRAIN[2:3], loss=loss, progress=False)


# ---------------------------------------------------------------- a user's loss


def test_scalar_is_refused_without_its_reduction():
    def loss(model, batch):
        return resolve_loss(None, None)(model, batch).mean()

    match = r'one value an example, shape \(\d,\), got \(\). For a scalar pass loss_reduction="sum"'
    with pytest.raises(ValueError, match=match):
        gradtrail.attribute(tiny(), TRAIN, TRAIN, loss=loss, progress=False)


@pytest.mark.parametrize(
    ("value", "got"),
    [
        (lambda values: values.unsqueeze(1), r"\(\d, 1\)"),
        (lambda values: values.tolist(), "list"),
        (lambda values: torch.cat([values, values]), r"\(\d+,\)"),
    ],
    ids=["column", "list", "twice"],
)
def test_losses_of_other_shapes_are_refused(value, got):
    def loss(model, batch):
        return value(resolve_loss(None, None)(model, batch))

    with pytest.raises(ValueError, match=rf"one value an example, shape \(\d,\), got {got}"):
        gradtrail.attribute(tiny(), TRAIN, TRAIN, loss=loss, progress=False)


def per_example(model, batch):
    return resolve_loss(None, None)(model, batch)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"loss_reduction": "mean"}, ValueError, "must go with a loss that returns a scalar"),
        (
            {"loss": per_example, "loss_reduction": "average"},
            ValueError,
            "loss_reduction must be one of 'sum', 'mean', 'token_mean', got 'average'",
        ),
        ({"loss": "cross_entropy"}, TypeError, r"loss must be a callable .* got str"),
        (
            {"loss": per_example, "loss_reduction": "mean"},
            ValueError,
            r"must return a scalar with loss_reduction='mean', got shape \(\d,\)",
        ),
        (
            {
                "loss": lambda model, batch: per_example(model, batch[0]).mean(),
                "loss_reduction": "token_mean",
                "collate_fn": lambda rows: (pad_rows(rows, 0), 0),
            },
            ValueError,
            "loss_reduction='token_mean' must find 'labels' in the batch, got none",
        ),
    ],
    ids=["inferred", "unknown", "string", "not a scalar", "no labels"],
)
def test_losses_that_are_refused(options, error, match):
    with pytest.raises(error, match=match):
        gradtrail.attribute(tiny(), TRAIN, TRAIN, progress=False, **options)


def test_description_of_a_users_loss():
    assert resolve_loss(per_example, None).description == "per_example"
    assert resolve_loss(per_example, "mean").description == "per_example (mean)"
    module = nn.Module()
    assert resolve_loss(module, None).description == "Module"


def test_token_mean_counts_like_the_model_itself():
    """A left-padded batch through the loss that ``transformers`` computes."""
    model = build("llama", torch.float32)
    rows = text_rows((4, 4, 4))

    def own(model, batch):
        return model(**batch).loss

    scores = gradtrail.attribute(
        model, rows, rows[:1], loss=own, loss_reduction="token_mean", collate_fn=pad_left,
        progress=False,
    )  # fmt: skip
    expected = gradtrail.attribute(model, rows, rows[:1], progress=False)
    torch.testing.assert_close(scores.values, expected.values, rtol=1e-4, atol=1e-4)
