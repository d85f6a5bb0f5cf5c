"""``attribute`` and ``self_influence``: exact scores, invariances, and what they leave alone."""

import copy
import json
import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from models import (
    TinyForCausalLM,
    alone,
    build,
    default_dtype,
    exactly,
    pad_left,
    rows_of,
    text_rows,
    tiny,
)
from torch import nn
from torch.nn import functional as F

import gradtrail
from gradtrail import InnerProductAttributor, Projection, reference
from gradtrail.attribution import METHODS, AbstractAttributor
from gradtrail.attribution.losses import resolve_loss
from gradtrail.attribution.method import MethodEntry

TRAIN = text_rows((5, 3, 7, 1, 6))
QUERY = text_rows((4, 6, 2), seed=1)
NO_GRADIENT = 3  # the row of one token: nothing to predict


def attribute(model, train, query, **options):
    """Score in float64 from end to end, without bars."""
    with exactly():
        return gradtrail.attribute(model, train, query, progress=False, **options)


def self_influence(model, train, **options):
    with exactly():
        return gradtrail.self_influence(model, train, progress=False, **options)


def oracle(model, train, query, *, normalize=False, **options):
    left, right = (alone(model, rows, **options) for rows in (train, query))
    return reference.dot_products(left, right, normalize=normalize)


def assert_equal(got, expected, tolerance=1e-10):
    scale = float(expected.abs().max()) if expected.numel() else 1.0
    torch.testing.assert_close(got.double(), expected.double(), rtol=0, atol=tolerance * scale)


def reordered(rows, order):
    return [rows[number] for number in order]


def others(model, count=2):
    """State dicts that a training run could have left."""
    torch.manual_seed(5)
    states = []
    for _ in range(count):
        other = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.add_(0.2 * torch.randn_like(parameter))
        states.append(other.state_dict())
    return states


def with_weights(model, state):
    other = copy.deepcopy(model)
    other.load_state_dict(state)
    return other


# ---------------------------------------------------------------- exact scores


def test_graddot_equals_dense_dot_products():
    model = tiny()
    assert_equal(attribute(model, TRAIN, QUERY).values, oracle(model, TRAIN, QUERY))


def test_gradcos_equals_dense_cosines():
    model = tiny()
    expected = oracle(model, TRAIN, QUERY, normalize=True)
    scores = attribute(model, TRAIN, QUERY, method="gradcos")
    assert_equal(scores.values, expected)
    assert scores.values.abs().max() <= 1
    assert not scores.values[NO_GRADIENT].any()


def test_tracin_equals_the_weighted_sum_over_checkpoints():
    model = tiny()
    states = others(model)
    expected = sum(
        rate * oracle(with_weights(model, state), TRAIN, QUERY)
        for state, rate in zip(states, (0.3, 0.05), strict=True)
    )
    scores = attribute(
        model, TRAIN, QUERY, method="tracin", checkpoints=states, checkpoint_weights=[0.3, 0.05]
    )
    assert_equal(scores.values, expected)
    assert scores.options["checkpoints"] == 2


def test_tracin_weighs_checkpoints_by_one_unless_told():
    model = tiny()
    states = others(model)
    expected = sum(oracle(with_weights(model, state), TRAIN, QUERY) for state in states)
    scores = attribute(model, TRAIN, QUERY, method="tracin", checkpoints=states)
    assert_equal(scores.values, expected)


def test_scores_are_float32_on_the_cpu():
    model = tiny(torch.float32)
    scores = gradtrail.attribute(model, TRAIN, QUERY, progress=False)
    assert scores.values.dtype == torch.float32
    assert scores.values.device.type == "cpu"
    assert_equal(scores.values, oracle(model, TRAIN, QUERY), 1e-5)


def test_training_on_a_helpful_example_lowers_the_query_loss():
    """The sign: a step along the negative gradient of an example, and the query's loss after it."""
    model = tiny().eval()
    scores = attribute(model, TRAIN, QUERY).values
    loss = resolve_loss(None, None)
    batch = gradtrail.attribution.data.pad_rows
    for example in (0, 2, 4):
        stepped = copy.deepcopy(model)
        loss(stepped, batch(TRAIN[example : example + 1], 0)).sum().backward()
        with torch.no_grad():
            before = loss(stepped, batch(QUERY, 0))
            for parameter in stepped.parameters():
                parameter -= 1e-5 * parameter.grad
            drop = (before - loss(stepped, batch(QUERY, 0))) / 1e-5
        torch.testing.assert_close(drop, scores[example], rtol=1e-2, atol=1e-2)


def test_normalize_divides_by_norms_over_all_layers():
    model = tiny()
    plain = oracle(model, TRAIN, QUERY)
    norms = oracle(model, TRAIN, TRAIN).diagonal().sqrt()
    by_train = torch.where(norms > 0, 1 / norms, 0.0).unsqueeze(1) * plain
    assert_equal(attribute(model, TRAIN, QUERY, normalize="train").values, by_train)
    both = attribute(model, TRAIN, QUERY, normalize="both").values
    assert_equal(both, attribute(model, TRAIN, QUERY, method="gradcos").values)


def test_images_and_pairs():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 4)).double()
    train = [(torch.randn(2, 4, 4).double(), label % 4) for label in range(5)]
    query = [(torch.randn(2, 4, 4).double(), 1) for _ in range(2)]
    assert_equal(attribute(model, train, query).values, oracle(model, train, query))


# ---------------------------------------------------------------- invariances


@pytest.mark.parametrize("method", ["graddot", "gradcos", "tracin"])
@pytest.mark.parametrize("size", [1, 4, 5])
def test_batch_size_does_not_matter(method, size):
    model = tiny()
    options = {"checkpoints": others(model)} if method == "tracin" else {}
    whole = attribute(model, TRAIN, QUERY, method=method, batch_size=100, **options)
    parts = attribute(model, TRAIN, QUERY, method=method, batch_size=size, **options)
    assert_equal(parts.values, whole.values)


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_query_batch_size_does_not_matter(size):
    model = tiny()
    scores = attribute(model, TRAIN, QUERY, batch_size=2, query_batch_size=size)
    assert_equal(scores.values, oracle(model, TRAIN, QUERY))


@pytest.mark.parametrize("method", ["graddot", "gradcos"])
def test_order_moves_rows_and_columns_only(method):
    model = tiny()
    plain = attribute(model, TRAIN, QUERY, method=method, batch_size=2).values
    rows, columns = [3, 0, 4, 2, 1], [2, 0, 1]
    moved = attribute(
        model, reordered(TRAIN, rows), reordered(QUERY, columns), method=method, batch_size=2
    )
    assert_equal(moved.values, plain[rows][:, columns])


@pytest.mark.parametrize("method", ["graddot", "gradcos"])
def test_padding_on_the_left(method):
    model = tiny()
    right = attribute(model, TRAIN, QUERY, method=method)
    left = attribute(model, TRAIN, QUERY, method=method, collate_fn=pad_left)
    assert_equal(left.values, right.values)
    for name in ("train_digest", "queries_digest", "model_digest"):
        assert left.options[name] == right.options[name]


@pytest.mark.parametrize("name", ["gpt2", "llama", "opt"])
def test_padding_on_the_left_of_real_models(name):
    model, rows = build(name), rows_of(name)

    def collate(rows):
        batch = pad_left(rows)
        places = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
        return batch if name == "opt" else {**batch, "position_ids": places}

    right = attribute(model, rows, rows[:2])
    left = attribute(model, rows, rows[:2], collate_fn=collate)
    assert_equal(left.values, right.values)


@pytest.mark.parametrize("options", [{}, {"projection": 4}, {"granularity": "token"}], ids=str)
def test_repetition_gives_the_same_bits(options):
    model = tiny(torch.float32)
    first, second = (
        gradtrail.attribute(model, TRAIN, QUERY, batch_size=2, progress=False, **options)
        for _ in range(2)
    )
    assert torch.equal(first.values, second.values)
    query = gradtrail.attribute(model, TRAIN, [QUERY[0], QUERY[0]], progress=False, **options)
    assert torch.equal(query.values[..., 0], query.values[..., 1])


def test_duplicate_rows_stay_two_rows():
    model = tiny()
    rows = [TRAIN[0], TRAIN[2], TRAIN[0]]
    scores = attribute(model, rows, QUERY, batch_size=2)
    assert scores.train_ids == (0, 1, 2)
    assert_equal(scores.values[2], scores.values[0])
    assert_equal(scores.values, oracle(model, rows, QUERY))


def test_layers_one_at_a_time_add_up():
    model = tiny()
    whole = attribute(model, TRAIN, QUERY)
    names = {entry.layer for entry in whole.coverage.entries}
    assert names == {"embed", "position", "mix", "norm", "up", "down"}
    parts = [attribute(model, TRAIN, QUERY, layers=name) for name in sorted(names)]
    assert_equal(sum(part.values for part in parts), whole.values)
    rest = attribute(model, TRAIN, QUERY, exclude="embed")
    embed = attribute(model, TRAIN, QUERY, layers="head")  # tied: one parameter
    assert_equal(rest.values + embed.values, whole.values)
    assert rest.coverage.share + embed.coverage.share == pytest.approx(1)


def test_two_attributors_share_nothing():
    one, other = tiny(), tiny(seed=3)
    method = InnerProductAttributor()
    expected = [attribute(model, TRAIN, QUERY, method=method).values for model in (one, other)]
    again = [attribute(model, TRAIN, QUERY, method=method).values for model in (other, one)]
    assert torch.equal(expected[0], again[1])
    assert torch.equal(expected[1], again[0])
    inner = []

    def loss(model, batch):
        if not inner:
            inner.append(attribute(other, TRAIN, QUERY, method=method).values)
        return resolve_loss(None, None)(model, batch)

    outer = attribute(one, TRAIN, QUERY, method=method, loss=loss)
    assert torch.equal(outer.values, expected[0])
    assert torch.equal(inner[0], expected[1])


# ---------------------------------------------------------------- self-influence


@pytest.mark.parametrize("normalize", [None, "train", "both"])
@pytest.mark.parametrize("projection", [None, 4], ids=str)
def test_self_influence_is_the_diagonal(normalize, projection):
    model = tiny()
    options = {"normalize": normalize, "projection": projection}
    values = self_influence(model, TRAIN, batch_size=2, **options)
    assert values.shape == (5,)
    assert (values >= 0).all()
    assert values[NO_GRADIENT] == 0
    assert_equal(values, attribute(model, TRAIN, TRAIN, **options).values.diagonal(), 1e-9)


def test_self_influence_over_checkpoints():
    model = tiny()
    options = {"method": "tracin", "checkpoints": others(model), "checkpoint_weights": [0.5, 2.0]}
    values = self_influence(model, TRAIN, batch_size=2, **options)
    assert_equal(values, attribute(model, TRAIN, TRAIN, **options).values.diagonal())


def test_self_influence_is_float32():
    values = gradtrail.self_influence(tiny(torch.float32), TRAIN, method="gradcos", progress=False)
    assert values.dtype == torch.float32
    assert values.tolist() == [1, 1, 1, 0, 1]


# ---------------------------------------------------------------- one share a token


class Positions(nn.Module):
    """Linear layers on positions, with weights that may differ by position."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(4, 2, bias=False)

    def forward(self, x_bsi, first_soi=None, bias_so=None, second_soi=None):
        if first_soi is None:
            h_bso = self.first(x_bsi)
        else:
            h_bso = torch.einsum("bsi,soi->bso", x_bsi, first_soi) + bias_so
        h_bso = torch.tanh(h_bso).cumsum(1)
        if second_soi is None:
            return self.second(h_bso)
        return torch.einsum("bsi,soi->bso", h_bso, second_soi)


def test_token_shares_equal_gradients_of_each_position():
    torch.manual_seed(0)
    model = Positions().double()
    pairs = [(torch.randn(5, 3).double(), torch.randn(5, 2).double()) for _ in range(6)]
    train, query = pairs[:4], pairs[4:]
    names = ["first.weight", "first.bias", "second.weight"]
    queries = alone(model, query, names=names)
    expected = []
    for x, y in train:
        weights = [model.get_parameter(name).detach() for name in names]
        weights = [weight.expand(5, *weight.shape).clone().requires_grad_() for weight in weights]
        (model(x.unsqueeze(0), *weights) - y).square().sum().div(2).backward()
        expected.append(
            sum(
                torch.einsum("sd,qd->sq", weight.grad.flatten(1), queries[name].flatten(1))
                for weight, name in zip(weights, names, strict=True)
            )
        )
    scores = attribute(model, train, query, granularity="token", batch_size=3)
    assert_equal(scores.values, torch.stack(expected))
    assert scores.lengths.tolist() == [5] * 4


@pytest.mark.parametrize(
    "options", [{}, {"method": "gradcos"}, {"projection": 4, "exclude": "norm"}], ids=str
)
def test_token_shares_add_up_to_the_score(options):
    model = tiny()
    scores = attribute(model, TRAIN, QUERY, granularity="token", batch_size=2, **options)
    assert scores.values.shape == (5, 7, 3)
    whole = attribute(model, TRAIN, QUERY, batch_size=2, **options)
    assert_equal(scores.values.sum(1), whole.values)
    assert_equal(scores.example_values, whole.values)


def test_token_shares_end_with_the_example():
    model = tiny()
    scores = attribute(model, TRAIN, QUERY, granularity="token", batch_size=5)
    assert scores.lengths.tolist() == [5, 3, 7, 1, 6]
    for values, length in zip(scores.values, scores.lengths.tolist(), strict=True):
        assert not values[length:].any()
        # the last token of an example predicts nothing
        assert length == 1 or values[length - 2].any()


def test_token_shares_of_left_padded_rows_are_aligned():
    model = tiny()
    right = attribute(model, TRAIN, QUERY, granularity="token", batch_size=3)
    left = attribute(model, TRAIN, QUERY, granularity="token", batch_size=3, collate_fn=pad_left)
    assert_equal(left.values, right.values)
    assert torch.equal(left.lengths, right.lengths)


def test_token_shares_over_checkpoints():
    model = tiny()
    options = {"method": "tracin", "checkpoints": others(model), "checkpoint_weights": [0.5, 2.0]}
    scores = attribute(model, TRAIN, QUERY, granularity="token", **options)
    assert_equal(scores.values.sum(1), attribute(model, TRAIN, QUERY, **options).values)


def test_token_shares_need_a_position_a_token():
    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.out = nn.Embedding(9, 4), nn.Linear(4, 2)

        def forward(self, input_ids):
            return self.out(self.embed(input_ids).mean(1))

    rows = [(torch.tensor([1, 2, 3]), 0), (torch.tensor([4, 5, 6]), 1)]
    model = Pooled().double()
    with pytest.raises(ValueError, match=r"one position a token \(3\), got \[1\] at out"):
        attribute(model, rows, rows, granularity="token")
    scores = attribute(model, rows, rows, granularity="token", exclude="out")
    assert_equal(scores.values.sum(1), attribute(model, rows, rows, exclude="out").values)


# ---------------------------------------------------------------- projections


@pytest.mark.parametrize("kind", ["factored", "dense", "mask"])
def test_projected_scores_are_near_exact_ones(kind):
    model = tiny()
    train, query = text_rows([6] * 8, seed=2), text_rows([5] * 6, seed=3)
    exact = attribute(model, train, query).values
    dim = 7 if kind == "factored" else 60
    total = torch.zeros_like(exact)
    for seed in range(4):
        scores = attribute(
            model, train, query, projection=Projection(kind=kind, dim=dim, seed=seed)
        )
        total += scores.values
    correlation = torch.corrcoef(torch.stack([exact.flatten(), total.flatten()]))[0, 1]
    assert correlation > 0.8


def test_projection_as_large_as_every_layer_is_exact():
    model = tiny()
    exact = attribute(model, TRAIN, QUERY).values
    for projection in (
        64,
        Projection(kind="mask", dim=10_000),
        Projection(kind="dense", dim=10_000),
    ):
        assert_equal(attribute(model, TRAIN, QUERY, projection=projection).values, exact)


def test_projection_by_kind_side_and_seed():
    model = tiny()

    def run(projection, **options):
        return attribute(model, TRAIN, QUERY, projection=projection, **options)

    explicit = run(Projection(kind="factored", dim=4, seed=7))
    assert torch.equal(run(4, seed=7).values, explicit.values)
    assert not torch.equal(run(4, seed=8).values, explicit.values)
    by_kind = run("mask", seed=7)
    assert by_kind.options["projection"] == {"kind": "mask", "dim": 64, "seed": 7}
    assert torch.equal(by_kind.values, run(Projection(kind="mask", seed=7)).values)
    with pytest.raises(TypeError, match="projection must be a Projection, a kind or a number, got"):
        run(2.5)
    with pytest.raises(
        ValueError, match="kind must be one of 'factored', 'dense', 'mask', got 'no'"
    ):
        run("no")
    with pytest.raises(ValueError, match="dim must be an integer of at least 1, got 0"):
        run(0)


# ---------------------------------------------------------------- nothing to score


@pytest.mark.parametrize("method", ["graddot", "gradcos", "tracin"])
def test_no_queries_and_no_training_examples(method):
    model = tiny(torch.float32)
    options = {"method": method, "progress": False}
    if method == "tracin":
        options["checkpoints"] = others(model)
    for train, query in (([], QUERY), (TRAIN, []), ([], [])):
        scores = gradtrail.attribute(model, train, query, **options)
        assert scores.values.shape == (len(train), len(query))
        tokens = gradtrail.attribute(model, train, query, granularity="token", **options)
        assert tokens.values.shape[::2] == (len(train), len(query))
        assert tokens.example_values.shape == (len(train), len(query))
    assert gradtrail.self_influence(model, [], **options).shape == (0,)


# ---------------------------------------------------------------- losses


def sums(model, batch):
    """One summed cross-entropy an example, from a model with padding."""
    logits = model(batch["input_ids"], batch["attention_mask"])["logits"][:, :-1]
    losses = F.cross_entropy(logits.transpose(1, 2), batch["labels"][:, 1:], reduction="none")
    return losses.sum(1)


@pytest.mark.parametrize("reduction", ["sum", "mean", "token_mean"])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_scalar_losses_are_undivided(reduction, size):
    """Ragged lengths, mates of other lengths and a last batch that is smaller."""

    def scalar(model, batch):
        values = sums(model, batch)
        if reduction == "sum":
            return values.sum()
        labels = (batch["labels"][:, 1:] != -100).sum()
        return values.mean() if reduction == "mean" else values.sum() / labels

    model = tiny()
    expected = oracle(model, TRAIN, QUERY)
    scores = attribute(model, TRAIN, QUERY, loss=scalar, loss_reduction=reduction, batch_size=size)
    assert_equal(scores.values, expected)
    assert reduction in scores.options["loss"]
    values = self_influence(model, TRAIN, loss=scalar, loss_reduction=reduction, batch_size=size)
    assert_equal(values, oracle(model, TRAIN, TRAIN).diagonal())


def test_queries_may_have_a_loss_of_their_own():
    def confidence(model, batch):
        return model(batch["input_ids"], batch["attention_mask"])["logits"][:, 0, 5]

    model = tiny()
    expected = reference.dot_products(alone(model, TRAIN), alone(model, QUERY, loss=confidence))
    scores = attribute(model, TRAIN, QUERY, query_loss=confidence)
    assert_equal(scores.values, expected)
    assert "confidence" in scores.options["query_loss"]
    assert "cross-entropy" in scores.options["loss"]
    negative = attribute(model, TRAIN, QUERY, query_loss=lambda *args: -confidence(*args))
    assert_equal(negative.values, -expected)


# ---------------------------------------------------------------- methods and options


def test_method_objects_are_as_good_as_names():
    model = tiny()
    by_name = attribute(model, TRAIN, QUERY, method="graddot", normalize="train")
    by_object = attribute(model, TRAIN, QUERY, method=InnerProductAttributor(normalize="train"))
    assert torch.equal(by_name.values, by_object.values)
    assert by_object.method == "InnerProductAttributor"
    assert by_name.options["normalize"] == by_object.options["normalize"] == "train"
    states = others(model)
    tracin = attribute(model, TRAIN, QUERY, method=InnerProductAttributor(), checkpoints=states)
    assert_equal(
        tracin.values, attribute(model, TRAIN, QUERY, method="tracin", checkpoints=states).values
    )


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        (
            {"method": "gradot"},
            ValueError,
            "'graddot', 'gradcos', 'tracin', 'kfac', 'ekfac', .* got 'gradot'. Near: 'graddot'",
        ),
        ({"method": 3}, TypeError, "method must be a name or an attributor, got int"),
        (
            {"damping": 0.1},
            ValueError,
            r"options of method 'graddot' must be among \['normalize'\]",
        ),
        (
            {"method": "gradcos", "normalize": None},
            ValueError,
            r"must be among \[\], got \['normalize'\]",
        ),
        (
            {"method": InnerProductAttributor(), "normalize": "both"},
            TypeError,
            "options must be given once, got",
        ),
        (
            {"normalize": "rows"},
            ValueError,
            "normalize must be one of None, 'train', 'both', got 'rows'",
        ),
        ({"granularity": "word"}, ValueError, "granularity must be one of 'example', 'token'"),
        ({"batch_size": 0}, ValueError, "batch_size must be an integer of at least 1, got 0"),
        ({"batch_size": 2.0}, ValueError, "batch_size must be an integer of at least 1, got 2.0"),
        ({"query_batch_size": 0}, ValueError, "query_batch_size must be an integer of at least 1"),
        ({"device": "cuda:3"}, ValueError, r"where the model is \(cpu\), got cuda:3"),
        ({"method": "tracin"}, ValueError, "checkpoints must be given for method 'tracin'"),
        ({"checkpoint_weights": [1.0]}, ValueError, "checkpoint_weights must go with checkpoints"),
        (
            {"checkpoints": [{}]},
            ValueError,
            "must go with a method that takes several, got method 'graddot'",
        ),
        ({"method": "tracin", "checkpoints": []}, ValueError, "at least one checkpoint, got none"),
        (
            {"method": "tracin", "checkpoints": [{}], "checkpoint_weights": [1.0, 2.0]},
            ValueError,
            r"one weight a checkpoint \(1\), got 2",
        ),
    ],
    ids=str,
)
def test_options_are_checked_before_any_work(options, error, match):
    def untouched(*_):
        raise AssertionError("the model ran")

    with pytest.raises(error, match=match):
        gradtrail.attribute(tiny(), TRAIN, QUERY, loss=untouched, progress=False, **options)


def test_model_without_a_layer_to_capture_is_refused():
    model = nn.Sequential(nn.Bilinear(2, 2, 2))
    with pytest.raises(
        ValueError, match="must have a supported layer with a trained parameter"
    ) as info:
        gradtrail.attribute(model, TRAIN, QUERY)
    assert "Bilinear has no rule" in str(info.value)


def test_a_new_method_joins_by_being_registered():
    @dataclass(frozen=True, kw_only=True)
    class Constant(AbstractAttributor):
        value: float = 1.0
        sign: int = 1

        def score(self, session, task):
            assert session.live is not None
            return torch.full((len(task.train), len(task.query)), self.sign * self.value), None

        def self_score(self, session, rows, loss, batch_size):
            assert (session.live.model, batch_size) == (session.model, 8)
            assert callable(loss)
            return torch.full((len(rows),), self.value, dtype=torch.float64)

    METHODS["constant"] = MethodEntry(Constant, {"sign": -1})
    try:
        scores = gradtrail.attribute(
            tiny(), TRAIN, QUERY, method="constant", value=2.0, progress=False
        )
        with pytest.raises(ValueError, match=r"must be among \['value'\], got \['sign'\]"):
            gradtrail.attribute(tiny(), TRAIN, QUERY, method="constant", sign=1)
        ones = gradtrail.self_influence(tiny(), TRAIN, method="constant", progress=False)
    finally:
        del METHODS["constant"]
    assert scores.values.tolist() == [[-2.0] * 3] * 5
    assert scores.method == "constant"
    assert scores.options["value"] == 2.0
    assert ones.tolist() == [1.0] * 5
    with pytest.raises(ValueError, match="method must be one of"):
        gradtrail.attribute(tiny(), TRAIN, QUERY, method="constant")


def test_what_scores_were_computed_with_is_written_down():
    model = tiny(torch.float32)
    options = gradtrail.attribute(model, TRAIN, QUERY, progress=False).options
    assert json.loads(json.dumps(dict(options))) == options
    assert options["loss"] == options["query_loss"] == "cross-entropy of tokens, shifted, summed"
    assert options["dtype"] == "float32"
    again = gradtrail.attribute(model, TRAIN[:4], QUERY, batch_size=2, progress=False).options
    assert again["queries_digest"] == options["queries_digest"]
    assert again["train_digest"] != options["train_digest"]
    assert again["model_digest"] == options["model_digest"]
    with torch.no_grad():
        model.mix.weight[0, 0] += 1
    changed = gradtrail.attribute(model, TRAIN, QUERY, progress=False).options
    assert changed["model_digest"] != options["model_digest"]
    assert changed["train_digest"] == options["train_digest"]


def test_progress_names_phases_and_can_be_off(capsys):
    model = tiny(torch.float32)
    gradtrail.attribute(model, TRAIN, QUERY, progress=False)
    assert capsys.readouterr().err == ""
    gradtrail.attribute(model, TRAIN, QUERY)
    shown = capsys.readouterr().err
    assert "queries" in shown
    assert "train" in shown
    assert "ex/s" in shown


def test_layer_that_is_never_reached_is_named():
    class SpareForCausalLM(TinyForCausalLM):
        def __init__(self):
            super().__init__()
            self.spare = nn.Linear(3, 3)

    model = SpareForCausalLM().double()
    with pytest.warns(gradtrail.GradTrailWarning, match=r"reached 1 captured layers \(spare\)"):
        scores = attribute(model, TRAIN, QUERY)
    assert_equal(scores.values, oracle(model, TRAIN, QUERY))


# ---------------------------------------------------------------- what is left as it was


class CarefulForCausalLM(TinyForCausalLM):
    """Has a bit of everything that a pass could disturb."""

    def __init__(self):
        super().__init__()
        self.stats = nn.BatchNorm1d(8)
        self.frozen = nn.Linear(8, 8)
        self.frozen.requires_grad_(False)
        self.frozen.eval()

    def forward(self, input_ids, attention_mask):
        hidden = super().forward(input_ids, attention_mask)["logits"]
        context = self.stats(self.frozen(self.embed(input_ids)).transpose(1, 2))
        return {"logits": hidden + context.mean((1, 2), keepdim=True)}


def careful():
    torch.manual_seed(0)
    model = CarefulForCausalLM().double().train()
    model.frozen.eval()
    model.register_forward_hook(lambda *_: None)
    resolve_loss(None, None)(model, gradtrail.attribution.data.pad_rows(TRAIN, 0)).sum().backward()
    return model


def snapshot(model):
    """Everything a call must leave as it was; tensors as copies."""
    modules = [
        (
            name,
            module.training,
            len(module._forward_hooks),
            len(module._forward_pre_hooks),
            len(module._backward_hooks),
            len(module._backward_pre_hooks),
            len(module._forward_hooks_with_kwargs),
            len(module._forward_hooks_always_called),
            sorted(vars(module)),
        )
        for name, module in model.named_modules()
    ]
    flags = [(name, id(p), p.requires_grad) for name, p in model.named_parameters()]
    tensors = {name: value.clone() for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            tensors[f"{name} grad"] = parameter.grad.clone()
    tensors["torch"] = torch.get_rng_state()
    return modules, flags, tensors, random.getstate(), np.random.get_state()


def assert_untouched(before, after):
    assert before[0] == after[0]
    assert before[1] == after[1]
    assert set(before[2]) == set(after[2])
    assert all(torch.equal(before[2][name], after[2][name]) for name in before[2])
    assert before[3] == after[3]
    assert all(np.array_equal(a, b) for a, b in zip(before[4], after[4], strict=True))
    assert torch.is_grad_enabled()


CALLS = {
    "graddot": lambda model, _, **options: gradtrail.attribute(model, TRAIN, QUERY, **options),
    "gradcos": lambda model, _, **options: gradtrail.attribute(
        model, TRAIN, QUERY, method="gradcos", projection=4, **options
    ),
    "token": lambda model, _, **options: gradtrail.attribute(
        model, TRAIN, QUERY, granularity="token", exclude=["stats", "embed"], **options
    ),
    "tracin": lambda model, states, **options: gradtrail.attribute(
        model, TRAIN, QUERY, method="tracin", checkpoints=states, **options
    ),
    "self": lambda model, _, **options: gradtrail.self_influence(model, TRAIN, **options),
}


@pytest.mark.parametrize("call", CALLS)
def test_everything_is_left_as_it_was(call):
    model = careful()
    states = others(model)
    before = snapshot(model)
    CALLS[call](model, states, progress=False)
    assert_untouched(before, snapshot(model))


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("calls", [1, 2, 3, 5, 7], ids=str)
def test_everything_is_left_as_it_was_after_an_error(call, calls):
    """The loss raises at the n-th call: in the probe, over the queries, over the training data."""
    model = careful()
    states = others(model)
    before = snapshot(model)
    left = [calls]

    def loss(model, batch):
        left[0] -= 1
        if not left[0]:
            torch.rand(3)
            raise RuntimeError("out of memory")
        return resolve_loss(None, None)(model, batch)

    with pytest.raises(RuntimeError, match="out of memory"):
        CALLS[call](model, states, progress=False, loss=loss, batch_size=1)
    assert_untouched(before, snapshot(model))


def test_call_after_an_error_is_clean():
    model = tiny()
    expected = attribute(model, TRAIN, QUERY).values

    def fail(_):
        raise RuntimeError("in the backward")

    def loss(model, batch):
        values = resolve_loss(None, None)(model, batch)
        if values.requires_grad:
            values.register_hook(fail)
        return values

    with pytest.raises(RuntimeError, match="in the backward"):
        attribute(model, TRAIN, QUERY, loss=loss)
    assert torch.equal(attribute(model, TRAIN, QUERY).values, expected)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_called_where_gradients_are_off(mode):
    model = tiny()
    expected = oracle(model, TRAIN, QUERY)
    with mode():
        scores = attribute(model, TRAIN, QUERY)
        assert not torch.is_grad_enabled()
    assert_equal(scores.values, expected, 1e-6)


def test_gpt2_in_default_precision():
    model, rows = build("gpt2", torch.float32), rows_of("gpt2")
    with default_dtype(torch.float32):
        scores = gradtrail.attribute(model, rows, rows[:2], batch_size=3, progress=False)
    assert_equal(scores.values, oracle(model, rows, rows[:2]), 1e-5)
