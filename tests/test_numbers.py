"""Numbers that go wrong elsewhere: padding, means, low precision, what is not finite."""

import warnings

import pytest
import torch
from capturing import (
    F64,
    assert_live,
    by_parameter,
    close,
    language_batch,
    live_gradients,
    mlp,
    oracle,
    pair,
    take_one,
    tiny_gpt2,
    tiny_llama,
    train_step,
)
from torch import nn

from gradtrail import (
    GradTrailWarning,
    HookManager,
    attribute,
    example_id,
    reference,
    self_influence,
)
from gradtrail.attribution.losses import resolve_loss
from gradtrail.factors import LinearFactors, cross_gram, materialize, squared_norm
from gradtrail.hooks import batch_ids


def scores(model, train, query, **options):
    return attribute(model, train, query, progress=False, **options).values


def rows_of(batch):
    count = len(batch["labels"] if isinstance(batch, dict) else batch[0])
    return [take_one(batch, row) for row in range(count)]


# ---------------------------------------------------------------- mean losses


def test_mean_over_examples_with_a_ragged_last_batch():
    model, batch = mlp(4, 5, 3), pair(7, 4)
    rows = rows_of(batch)
    expected = reference.dot_products(*[oracle(model, batch)] * 2)

    def mean(model, batch):
        return resolve_loss(None, None)(model, batch).mean()

    for batch_size in (1, 3, 7):
        got = scores(model, rows, rows, loss=mean, loss_reduction="mean", batch_size=batch_size)
        close(got.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("lengths", [(6, 6, 6, 6), (6, 2, 4, 3)])
def test_mean_over_tokens_with_mates_of_other_lengths(lengths):
    model, batch = tiny_gpt2().eval(), language_batch(lengths)
    rows = [
        {name: value[row, :length] for name, value in batch.items()}
        for row, length in enumerate(lengths)
    ]
    whole = scores(model, rows, rows)

    def mean(model, batch):
        return model(**batch).loss

    for batch_size in (1, 2, 3, 4):
        got = scores(
            model, rows, rows, loss=mean, loss_reduction="token_mean", batch_size=batch_size
        )
        close(got, whole, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------- nothing to learn from


@pytest.mark.parametrize("make", [tiny_gpt2, tiny_llama], ids=["gpt2", "llama"])
@pytest.mark.parametrize("method", ["graddot", "gradcos"])
def test_examples_without_a_label_or_a_token_have_a_zero_gradient(make, method):
    """All labels -100, one token (nothing to predict), among others and alone."""
    model = make().eval()
    batch = language_batch((6, 4, 5))
    rows = rows_of(batch)
    silent = {**rows[0], "labels": torch.full_like(rows[0]["labels"], -100)}
    single = {name: value[:1] for name, value in rows[1].items()}
    train = [rows[0], silent, rows[1], single, rows[2]]
    plain = scores(model, rows, rows, method=method)
    for batch_size in (1, 2, 5):
        got = scores(model, train, rows, method=method, batch_size=batch_size)
        assert torch.isfinite(got).all()
        assert torch.equal(got[[1, 3]], torch.zeros(2, 3))
        close(got[[0, 2, 4]], plain, rtol=1e-4, atol=1e-5)
        got = scores(model, rows, train, method=method, batch_size=batch_size)
        assert torch.equal(got[:, [1, 3]], torch.zeros(3, 2))
    selfs = self_influence(model, train, method=method, progress=False)
    assert torch.equal(selfs[[1, 3]], torch.zeros(2))
    assert (selfs[[0, 2, 4]] > 0).all()


@pytest.mark.filterwarnings("ignore:No gradient ever reached:gradtrail.GradTrailWarning")
@pytest.mark.parametrize("method", ["graddot", "gradcos"])
def test_only_examples_with_a_zero_gradient(method):
    model = tiny_gpt2().eval()
    row = rows_of(language_batch((4,)))[0]
    silent = {**row, "labels": torch.full_like(row["labels"], -100)}
    got = scores(model, [silent, silent], [row], method=method)
    assert torch.equal(got, torch.zeros(2, 1))


@pytest.mark.parametrize("method", ["graddot", "gradcos"])
def test_examples_without_any_token(method):
    """As a text that a tokenizer makes nothing of: right beside others, and never NaN."""
    model = tiny_llama().float().eval()  # in float64 its softmax makes NaN of a row without tokens
    rows = rows_of(language_batch((6, 4)))
    nothing = {name: value[:0] for name, value in rows[0].items()}
    plain = scores(model, rows, rows, method=method)
    got = scores(model, [rows[0], nothing, rows[1]], rows, method=method, batch_size=3)
    assert torch.equal(got[1], torch.zeros(2))
    close(got[[0, 2]], plain, rtol=1e-4, atol=1e-5)


def test_mean_over_no_tokens_is_a_zero_gradient_in_a_training_capture():
    model, batch = tiny_llama().eval(), language_batch((5, 5))
    batch["labels"][:] = -100
    manager = HookManager(model, loss_reduction="token_mean")
    with manager.collect():
        model(**batch).loss.backward()
    got = by_parameter(model, manager._selection.units, manager.last.layers)
    bare = {name: p.grad for name, p in model.named_parameters()}
    # the loop's own loss is 0 / 0 there; the capture must not look better than it is
    for name, value in got.items():
        assert torch.isnan(bare[name]).any() == torch.isnan(value).any(), name


def test_zero_gradient_under_a_cosine_scores_zero():
    model, (x, y) = mlp(4, 3), pair(4, 4)
    y[1] = model(x)[1].detach()  # no error, no gradient
    rows = rows_of((x, y))
    for normalize in ("train", "both"):
        got = scores(model, rows, rows, normalize=normalize)
        assert torch.equal(got[1], torch.zeros(4))
        assert torch.isfinite(got).all()
    got = scores(model, rows, rows, method="gradcos")
    assert torch.equal(got[:, 1], torch.zeros(4))
    close(got.diagonal()[[0, 2, 3]], torch.ones(3), rtol=1e-6)
    selfs = self_influence(model, rows, method="gradcos", progress=False)
    assert torch.equal(selfs, torch.tensor([1.0, 0.0, 1.0, 1.0]))


class Dead(nn.Module):
    """A layer whose outputs the activation behind it throws away."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.alive = nn.Linear(4, 3, dtype=F64)
        self.dead = nn.Linear(4, 5, dtype=F64)
        self.after = nn.Linear(5, 3, dtype=F64)
        with torch.no_grad():
            self.dead.bias.fill_(-100)

    def forward(self, x):
        return self.alive(x) + self.after(torch.relu(self.dead(x)))


@pytest.mark.parametrize("method", ["graddot", "gradcos"])
def test_dead_layer_scores_zero_and_harms_nothing(method):
    model, batch = Dead(), pair(4, 4)
    rows = rows_of(batch)
    got = scores(model, rows, rows, layers="dead", method=method)
    assert torch.equal(got, torch.zeros(4, 4))
    whole = scores(model, rows, rows, method=method)
    close(whole, scores(model, rows, rows, layers=["alive", "after"], method=method))
    assert_live(model, batch)


# ---------------------------------------------------------------- padding


@pytest.mark.parametrize("make", [tiny_gpt2, tiny_llama], ids=["gpt2", "llama"])
def test_padding_left_right_and_none(make):
    """Same scores, same ids."""
    model, lengths = make().eval(), (6, 4, 5)
    if make is tiny_llama:
        model.float()  # in float64 its softmax makes NaN of positions that see no token
    batches = [language_batch(lengths), language_batch(lengths, left=True)]
    if make is tiny_gpt2:  # it counts positions from the left end unless it is told
        for batch in batches:
            batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    alone = [
        {name: value[row : row + 1, :length] for name, value in batches[0].items()}
        for row, length in enumerate(lengths)
    ]
    loss = resolve_loss(None, None)
    expected = reference.per_example_gradients(model, alone, loss)
    wanted = reference.dot_products(expected, expected)
    ids = {batch_ids(batch, 3) for batch in batches}
    ids.add(tuple(example_id({k: v[0] for k, v in one.items()}) for one in alone))
    assert len(ids) == 1
    unpadded = [{name: value[0] for name, value in one.items()} for one in alone]
    for rows in (rows_of(batches[0]), rows_of(batches[1]), unpadded):
        for batch_size in (1, 3):
            got = scores(model, rows, rows, batch_size=batch_size)
            close(got.double(), wanted, rtol=1e-4, atol=1e-4 * float(wanted.max()))


# ---------------------------------------------------------------- low precision


def test_low_precision_products_are_summed_in_float32():
    """4,096 products of ones and tiny terms, which bfloat16 would lose."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(2, 512, 8, generator=generator).bfloat16()
    g = torch.randn(2, 512, 8, generator=generator).bfloat16()
    factors, wide = LinearFactors(a, g), LinearFactors(a.double(), g.double())
    for route in ("factored", "materialized"):
        got = cross_gram(factors, factors, route=route)
        assert got.dtype == torch.float32
        close(got.double(), cross_gram(wide, wide), rtol=1e-5, atol=1e-3)
        close(squared_norm(factors, route=route).double(), squared_norm(wide), rtol=1e-5)
    close(materialize(factors).double(), materialize(wide), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("method", ["graddot", "gradcos"])
def test_low_precision_model_scores_like_its_own_gradients(dtype, method):
    """Equal to float64 products of the gradients that the low-precision model itself has."""
    model, (x, y) = mlp(8, 16, 3).to(dtype), pair(6, 40, 8)
    batch = (x.to(dtype), y.to(dtype))
    got, _ = live_gradients(model, batch)
    assert all(value.dtype == torch.float32 for value in got.values())
    wide = {name: value.double() for name, value in got.items()}
    expected = reference.dot_products(wide, wide, normalize=method == "gradcos")
    rows = rows_of(batch)
    found = scores(model, rows, rows, method=method)
    assert found.dtype == torch.float32
    close(found.double(), expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))
    exact = oracle(mlp(8, 16, 3), (x, y))
    close(
        found.double(),
        reference.dot_products(exact, exact, normalize=method == "gradcos"),
        rtol=0.05,
        atol=0.02 * float(expected.abs().max()),
    )


def test_low_precision_language_model():
    model, batch = tiny_llama().bfloat16().eval(), language_batch((6, 6, 6))
    exact = tiny_llama()
    with torch.no_grad():  # the same weights
        for wide, narrow in zip(exact.parameters(), model.parameters(), strict=True):
            wide.copy_(narrow.double())
    expected = oracle(exact.eval(), batch)
    rows = rows_of(batch)
    found = scores(model, rows, rows, method="gradcos").double()
    wanted = reference.dot_products(expected, expected, normalize=True)
    close(found, wanted, rtol=0, atol=0.02)


# ---------------------------------------------------------------- what is not finite


def caught(function):
    with warnings.catch_warnings(record=True) as records:
        warnings.simplefilter("always", GradTrailWarning)
        result = function()
    return result, [str(record.message) for record in records]


@pytest.mark.parametrize("method", ["graddot", "gradcos"])
@pytest.mark.parametrize("granularity", ["example", "token"])
def test_one_nan_weight_is_said_with_the_layer(method, granularity):
    model, batch = mlp(4, 5, 5, 3), pair(4, 6, 4)
    with torch.no_grad():
        model[2].weight[0, 0] = torch.nan
    rows = rows_of(batch)
    found, messages = caught(
        lambda: attribute(
            model, rows, rows[:2], method=method, granularity=granularity, progress=False
        )
    )
    assert torch.isnan(found.values).all()
    assert len(messages) == 1
    assert "queries 0, 1 are not finite" in messages[0]
    assert "the loss of 0 is nan, and 4 is the first layer to read an input" in messages[0]


@pytest.mark.parametrize("normalize", [None, "train", "both"])
def test_one_bad_row_is_named_and_the_others_are_right(normalize):
    model, (x, y) = mlp(4, 5, 3), pair(5, 4)
    rows = rows_of((x, y))
    plain = scores(model, rows, rows[:2], normalize=normalize)
    x[3, 0] = torch.inf
    bad = rows_of((x, y))
    found, messages = caught(lambda: scores(model, bad, bad[:2], normalize=normalize))
    assert len(messages) == 1
    assert "The scores of training examples 3 are not finite" in messages[0]
    assert not torch.isfinite(found[3]).any()
    keep = [0, 1, 2, 4]
    close(found[keep], plain[keep])
    found, messages = caught(lambda: scores(model, bad[:2], bad, normalize=normalize))
    assert len(messages) == 1
    assert not torch.isfinite(found[:, 3]).any()
    assert "queries 3" in messages[0]
    assert torch.isfinite(found[:, [0, 1, 2, 4]]).all()


@pytest.mark.parametrize("method", ["graddot", "gradcos"])
def test_self_influence_of_a_bad_row_is_said(method):
    model, (x, y) = mlp(4, 5, 3), pair(4, 4)
    x[2, 1] = torch.nan
    found, messages = caught(
        lambda: self_influence(model, rows_of((x, y)), method=method, progress=False)
    )
    assert torch.isnan(found[2])
    assert torch.isfinite(found[[0, 1, 3]]).all()
    assert len(messages) == 1
    assert "training examples 2 are not finite" in messages[0]


def test_float16_gradient_that_overflows_is_said_with_the_layer():
    """The forward is fine; on the way down a product leaves float16's range."""

    class Steep(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.below = nn.Linear(4, 4)
            self.above = nn.Linear(4, 4)

        def forward(self, x):
            hidden = torch.tanh(self.below(x))
            return (self.above(hidden * 300) * 200).float() * 2.0

    model, (x, y) = Steep().half(), pair(4, 4, out=4)
    batch = (x.half(), y.float())
    rows = rows_of(batch)

    def loss(model, batch):
        return (model(batch[0]) - batch[1]).square().sum(1) * 10

    found, messages = caught(lambda: scores(model, rows, rows, loss=loss))
    assert not torch.isfinite(found).any()
    assert len(messages) == 1
    assert "from the loss of 0 down the gradient of above is the first" in messages[0]


def test_products_that_overflow_float32_are_said():
    model, (x, y) = mlp(4, 3).float(), pair(4, 4)
    rows = rows_of((x.float() * 1e3, y.float() * 1e17))
    for options in ({}, {"method": "gradcos"}):
        found, messages = caught(lambda options=options: scores(model, rows, rows, **options))
        assert len(messages) == 1
        assert "their gradients are, but the products of these are not" in messages[0]
        assert not torch.isfinite(found).all()


def test_norm_that_overflows_does_not_turn_a_cosine_into_zero():
    """A finite product over an infinite norm is no cosine of 0."""
    model, (x, y) = mlp(4, 5, 3).float(), pair(4, 4)
    x, y = x.float(), y.float()
    y[1] *= 1e25
    rows = rows_of((x, y))
    found, messages = caught(lambda: scores(model, rows, [rows[0]], normalize="train"))
    assert torch.isnan(found[1]).all()
    assert "training examples 1" in messages[0]
    assert torch.isfinite(found[[0, 2, 3]]).all()


def test_ranking_puts_what_is_no_number_last():
    model, (x, y) = mlp(4, 5, 3), pair(4, 4)
    x[0, 0] = torch.nan
    rows = rows_of((x, y))
    found, _ = caught(lambda: attribute(model, rows, rows[1:3], progress=False))
    for top in (found.topk(4), found.bottomk(4)):
        assert top.indices[:, -1].tolist() == [0, 0]
        assert torch.isnan(top.values[:, -1]).all()


def test_finite_scores_say_nothing_and_run_nothing_twice():
    model, batch = mlp(4, 5, 3), pair(4, 4)
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    rows = rows_of(batch)
    scores(model, rows, rows, batch_size=4)
    finite = len(calls)
    calls.clear()
    batch[0][0, 0] = torch.nan
    caught(lambda: scores(model, rows_of(batch), rows, batch_size=4))
    assert len(calls) == finite + 1


# ---------------------------------------------------------------- the same again


def test_scoring_the_same_query_twice_gives_the_same_bits():
    model, batch = tiny_llama().float().eval(), language_batch((6, 4, 5))
    rows = rows_of(batch)
    first = scores(model, rows, rows)
    again = scores(model, rows, rows)
    assert torch.equal(first, again)
    doubled = scores(model, rows, [rows[0], rows[1], rows[0]], query_batch_size=1)
    assert torch.equal(doubled[:, 0], doubled[:, 2])


def test_two_attributions_in_one_process_share_nothing():
    one, two = mlp(4, 5, 3), mlp(4, 5, 3, seed=1)
    batch = pair(4, 4)
    rows = rows_of(batch)
    alone = scores(one, rows, rows, projection=2), scores(two, rows, rows, projection=2)
    nested = []

    def loss(model, batch):
        if model is one and not nested:
            nested.append(None)  # another attribution in the middle of this one
            nested.append(scores(two, rows, rows, projection=2))
        return resolve_loss(None, None)(model, batch)

    inside = scores(one, rows, rows, loss=loss, projection=2)
    assert torch.equal(inside, alone[0])
    assert torch.equal(nested[1], alone[1])


@pytest.mark.parametrize("make", [tiny_gpt2, tiny_llama], ids=["gpt2", "llama"])
def test_scores_do_not_depend_on_batch_size_or_order(make):
    model, batch = make().eval(), language_batch((6, 4, 5, 2, 6, 3, 5))
    rows = rows_of(batch)
    whole = scores(model, rows, rows[:3], batch_size=7)
    for batch_size in (1, 4, 5):
        got = scores(model, rows, rows[:3], batch_size=batch_size, query_batch_size=2)
        close(got, whole, rtol=1e-4, atol=1e-4)
    order = [3, 0, 6, 2, 5, 1, 4]
    got = scores(model, [rows[place] for place in order], rows[:3], batch_size=4)
    close(got, whole[order], rtol=1e-4, atol=1e-4)


def test_training_capture_in_low_precision():
    model, (x, y) = mlp(4, 16, 3).bfloat16(), pair(4, 30, 4)
    manager = HookManager(model, capture="materialized", loss_reduction="mean")
    with manager.collect():
        (train_step(model, (x.bfloat16(), y.bfloat16())) / 4).backward()
    got = by_parameter(model, manager._selection.units, manager.last.layers)
    assert all(value.dtype == torch.float32 for value in got.values())
    exact = oracle(mlp(4, 16, 3), (x, y))
    for name, value in exact.items():
        assert float((got[name] - value).abs().max()) < 0.05 * float(value.abs().max())
    assert len(set(manager.last.ids)) == 4
