"""Modules used in the ways that models use them: right against autograd, or refused by name."""

import copy
import warnings
from dataclasses import dataclass

import pytest
import torch
from capturing import (
    F64,
    assert_live,
    assert_training,
    by_parameter,
    close,
    covered,
    language_batch,
    live_gradients,
    mlp,
    oracle,
    pair,
    tiny_gpt2,
    tiny_llama,
    train_step,
)
from models import model_class
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gradtrail import (
    CaptureError,
    GradTrailWarning,
    HookManager,
    UnsupportedLayerError,
    attribute,
    check,
    coverage,
    reference,
)
from gradtrail.hooks import select_layers

# peft asks transformers by a name that is going away
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*deprecated and will be removed in v6:FutureWarning"
)
quiet = pytest.mark.filterwarnings("ignore::gradtrail.GradTrailWarning")


def everywhere(model, batch, loss=None, *, rtol=1e-10, **choice):
    """A live pass and a training capture, both equal to autograd on every parameter."""
    names = [name for name, _ in model.named_parameters()]
    assert_live(copy.deepcopy(model), batch, loss, only=names, rtol=rtol, **choice)
    assert_training(copy.deepcopy(model), batch, loss, only=names, rtol=rtol, **choice)


class Model(nn.Module):
    """A model made of layers by name and a function for its forward."""

    def __init__(self, forward, **layers):
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer.double())
        self._forward = forward

    def forward(self, *args, **kwargs):
        return self._forward(self, *args, **kwargs)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


# ---------------------------------------------------------------- how often, how, on what


def test_layer_called_twice():
    def forward(model, x):
        return model.out(torch.tanh(model.a(torch.tanh(model.a(x)))))

    everywhere(Model(forward, a=nn.Linear(4, 4), out=nn.Linear(4, 3)), pair(4, 4))
    everywhere(Model(forward, a=nn.Linear(4, 4), out=nn.Linear(4, 3)), pair(4, 5, 4))


def test_convolution_and_norm_called_twice():
    def forward(model, x):
        x = x.unsqueeze(1)
        x = torch.tanh(model.norm(model.a(x)))
        x = torch.tanh(model.norm(model.a(x)))
        return model.out(x.squeeze(1))

    model = Model(
        forward, a=nn.Conv1d(1, 1, 3, padding=1), norm=nn.LayerNorm(6), out=nn.Linear(6, 3)
    )
    everywhere(model, pair(4, 6))


def test_layer_called_on_different_lengths():
    def forward(model, x):
        long = torch.tanh(model.a(x))
        short = torch.tanh(model.a(x[:, :2]))
        return model.out(long.mean(1) + short.sum(1))

    model = Model(forward, a=nn.Linear(4, 5), out=nn.Linear(5, 3))
    everywhere(model, (pair(4, 6, 4)[0], pair(4, 4)[1]))


def test_layer_called_with_and_without_positions():
    def forward(model, x):
        return model.out(torch.tanh(model.a(x)).mean(1) + torch.tanh(model.a(x[:, 0])))

    model = Model(forward, a=nn.Linear(4, 5), out=nn.Linear(5, 3))
    everywhere(model, (pair(4, 6, 4)[0], pair(4, 4)[1]))


def test_layer_called_by_keyword():
    def forward(model, x):
        return model.out(input=torch.tanh(model.norm(input=model.a(input=x))))

    model = Model(forward, a=nn.Linear(4, 5), norm=nn.LayerNorm(5), out=nn.Linear(5, 3))
    everywhere(model, pair(4, 4))


def test_embedding_called_by_keyword():
    def forward(model, ids):
        return model.out(model.table(input=ids)).sum(1)

    model = Model(forward, table=nn.Embedding(7, 4), out=nn.Linear(4, 3))
    everywhere(model, (torch.randint(0, 7, (4, 5)), pair(4, 4)[1]))


def test_layer_never_called():
    def forward(model, x):
        return model.out(x)

    model, batch = Model(forward, idle=nn.Linear(4, 4), out=nn.Linear(4, 3)), pair(4, 4)
    with pytest.warns(
        GradTrailWarning, match=r"No gradient ever reached 1 .*\(idle\).*never called"
    ):
        got, _ = live_gradients(model, batch)
    assert not got["idle.weight"].any()
    close(got, oracle(model, batch))
    with pytest.warns(GradTrailWarning, match=r"No gradient reached idle \(never called\)"):
        assert_training(model, batch, only=["out.weight", "out.bias"])


# ---------------------------------------------------------------- called for some rows only


def gated(model, x):
    """Sends the rows whose first entry is positive through one more layer."""
    chosen = x[:, 0] > 0
    out = model.out(x)
    return out.index_add(0, chosen.nonzero()[:, 0], model.extra(x[chosen]))


def test_layer_called_for_some_rows_is_left_out_with_a_warning():
    model, batch = Model(gated, extra=nn.Linear(4, 3), out=nn.Linear(4, 3)), pair(6, 4)
    with pytest.warns(GradTrailWarning, match=r"layers are left out \(extra: "):
        got, session = live_gradients(model, batch)
    close(got, oracle(model, batch, names=["out.weight", "out.bias"]))
    (entry,) = {e.reason for e in session.selection.coverage.with_status("unsupported")}
    assert "rows that cannot be assigned to examples" in entry


def test_layer_called_for_some_rows_is_refused_where_it_was_named():
    model, (x, y) = Model(gated, extra=nn.Linear(4, 3), out=nn.Linear(4, 3)), pair(6, 4)
    rows = list(zip(x, y, strict=True))
    with pytest.raises(CaptureError, match="layers must name layers that see one row an example"):
        attribute(model, rows, rows, layers="extra", progress=False)


def test_layer_called_for_some_rows_in_training():
    """As many rows as examples, later, do not make it right."""
    model = Model(gated, extra=nn.Linear(4, 3), out=nn.Linear(4, 3))
    x, y = pair(6, 4)
    manager = HookManager(model)
    with manager.collect():
        with pytest.warns(GradTrailWarning, match=r"left out \(extra: it sees rows"):
            train_step(model, (x, y)).backward()
        assert set(manager.last.layers) == {"out"}
        train_step(model, (x.abs(), y)).backward()
        assert set(manager.last.layers) == {"out"}
    assert manager.coverage.with_status("unsupported")[0].name == "extra.weight"
    named = HookManager(model, layers=["extra", "out"])
    with named.collect(), pytest.raises(CaptureError, match="layers must name layers that see one"):
        train_step(model, (x, y)).backward()


def routed(model, x):
    """A mixture of experts as it is often written: each takes the positions chosen for it."""
    rows = torch.tanh(model.inlet(x)).flatten(0, 1)
    weights = model.router(rows).softmax(-1)
    choice = weights.argmax(-1)
    out = torch.zeros_like(rows)
    for number, expert in enumerate(model.experts):
        place = (choice == number).nonzero()[:, 0]
        out = out.index_add(0, place, expert(rows[place]) * weights[place, number].unsqueeze(1))
    return model.out(out.view_as(x))


def mixture(experts=3):
    layers = nn.ModuleList(
        nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4)) for _ in range(experts)
    )
    return Model(
        routed,
        inlet=nn.Linear(4, 4),
        router=nn.Linear(4, experts),
        experts=layers,
        out=nn.Linear(4, 3),
    )


EXACT_OF_MIXTURE = {
    f"{name}.{role}" for name in ("inlet", "router", "out") for role in ("weight", "bias")
}


def test_experts_that_see_some_rows_are_left_out_and_the_rest_is_exact():
    model, batch = mixture(), pair(4, 5, 4)
    with pytest.warns(GradTrailWarning, match="layers are left out"):
        got, session = live_gradients(model, batch)
    assert set(got) == EXACT_OF_MIXTURE
    close(got, oracle(model, batch, names=sorted(got)))
    assert 0 < session.selection.coverage.share < 0.5


def test_experts_in_training_are_left_out_for_good():
    """Also in steps where an expert sees as many rows as there are examples."""
    torch.manual_seed(3)
    model, counts = mixture(2), []
    model.experts[0].register_forward_hook(lambda _, args, __: counts.append(len(args[0])))
    blocks = []
    manager = HookManager(model, callbacks=[blocks.append])
    with manager.collect(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for seed in range(30):
            train_step(model, pair(3, 2, 4, seed=seed)).backward()
    assert 3 in counts
    assert all("left out" in str(warning.message) for warning in caught)
    assert 1 <= len(caught) <= 4
    for seed, block in enumerate(blocks):
        got = by_parameter(model, manager._selection.units, block.layers)
        close(got, oracle(model, pair(3, 2, 4, seed=seed), names=sorted(got)))
    assert set(blocks[-1].layers) == {"inlet", "router", "out"}


def test_expert_that_sees_as_many_rows_as_examples_in_its_first_step():
    model, seen = mixture(2), []
    batches = [pair(3, 2, 4, seed=seed) for seed in range(30)]
    model.experts[0].register_forward_hook(lambda _, args, __: seen.append(len(args[0])))
    for batch in batches:
        model(batch[0])
    chosen = [batch for batch, count in zip(batches, seen, strict=True) if count == 3]
    assert chosen
    for batch in chosen:
        with pytest.warns(GradTrailWarning, match="left out"):
            assert_training(copy.deepcopy(model), batch, only=EXACT_OF_MIXTURE)


@pytest.mark.parametrize("seed", range(8))
@quiet
def test_experts_are_never_silently_wrong_on_small_batches(seed):
    """Where an expert happens to see as many rows as there are examples."""
    torch.manual_seed(seed)
    model, batch = mixture(2), pair(3, 2, 4, seed=seed)
    try:
        got, _ = live_gradients(model, batch)
    except CaptureError:
        return
    close(got, oracle(model, batch, names=sorted(got)))


@pytest.mark.parametrize(
    "pool",
    [
        lambda hidden: hidden[:, 0],
        lambda hidden: hidden.mean(1),
        lambda hidden: hidden.max(1).values,
        lambda hidden: hidden[torch.arange(len(hidden)), hidden[..., 0].argmax(1)],
        lambda hidden: hidden[(torch.arange(5) == 2).expand(len(hidden), 5)],
        lambda hidden: hidden.gather(1, torch.full((len(hidden), 1, 4), 2)).squeeze(1),
        lambda hidden: hidden.index_select(1, torch.tensor([3])).squeeze(1),
    ],
    ids=["first", "mean", "max", "one-each", "mask", "gather", "select"],
)
def test_one_row_an_example_that_was_pooled_is_no_choice_of_a_router(pool):
    def forward(model, x):
        pooled = pool(torch.tanh(model.a(x)))
        return model.out(torch.tanh(model.b(pooled)))

    model = Model(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 5), out=nn.Linear(5, 3))
    everywhere(model, (pair(4, 5, 4)[0], pair(4, 4)[1]))


def test_router_on_folded_rows_is_exact():
    def forward(model, x):
        weights = model.router(x.reshape(-1, 4)).softmax(-1)
        return model.out(x) * weights.view(*x.shape[:2], 3)

    everywhere(Model(forward, router=nn.Linear(4, 3), out=nn.Linear(4, 3)), pair(4, 5, 4))
    everywhere(Model(forward, router=nn.Linear(4, 3), out=nn.Linear(4, 3)), pair(5, 5, 4))


def test_rows_folded_position_major_are_never_assigned_to_the_wrong_example():
    def forward(model, x):
        rows = x.transpose(0, 1).reshape(-1, 4)
        weights = model.router(rows).softmax(-1)
        return model.out(x) * weights.view(x.shape[1], x.shape[0], 3).transpose(0, 1)

    model, batch = Model(forward, router=nn.Linear(4, 3), out=nn.Linear(4, 3)), pair(4, 5, 4)
    with pytest.warns(GradTrailWarning, match=r"left out \(router: "):
        got, _ = live_gradients(model, batch)
    close(got, oracle(model, batch, names=["out.weight", "out.bias"]))


def test_rows_in_another_order_are_never_assigned_to_the_wrong_example():
    def forward(model, x):
        order = x[:, 0].argsort()
        hidden = torch.tanh(model.a(x[order]))
        return model.out(hidden[order.argsort()])

    model, batch = Model(forward, a=nn.Linear(4, 5), out=nn.Linear(5, 3)), pair(4, 4)
    with pytest.warns(GradTrailWarning, match=r"left out \(a: "):
        got, _ = live_gradients(model, batch)
    close(got, oracle(model, batch, names=["out.weight", "out.bias"]))


# ---------------------------------------------------------------- where the batch is


@pytest.mark.parametrize(("b", "t"), [(4, 5), (4, 4), (1, 4), (4, 1)])
def test_time_major_encoder(b, t):
    """The batch on the second axis, also where there are as many positions as examples."""

    def forward(model, x):
        return model.out(model.encoder(x.transpose(0, 1)).mean(0))

    layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.1, batch_first=False)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    model = Model(forward, encoder=encoder, out=nn.Linear(4, 3))
    batch = (pair(b, t, 4)[0], pair(b, 4)[1])
    session = assert_live(model, batch, rtol=1e-9)
    left = session.selection.coverage.with_status("unsupported")
    assert all("self_attn" in entry.name for entry in left)
    assert len(left) == 2 * 4


@pytest.mark.parametrize(("b", "t"), [(4, 5), (4, 4)])
def test_batches_that_a_collator_makes_time_major(b, t):
    def forward(model, x):
        return model.out(model.encoder(x).mean(0))

    layer = nn.TransformerEncoderLayer(4, 2, 6, batch_first=False)
    encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    model = Model(forward, encoder=encoder, out=nn.Linear(4, 3)).eval()
    x, y = pair(b, t, 4)[0], pair(b, 4)[1]
    rows = list(zip(x, y, strict=True))

    def collate(rows):
        return torch.stack([row[0] for row in rows], 1), torch.stack([row[1] for row in rows])

    def loss(model, batch):
        return (model(batch[0]) - batch[1]).square().sum(1)

    names = covered(select_layers(model))
    alone = [collate([row]) for row in rows]
    expected = reference.per_example_gradients(model, alone, loss, names)
    wanted = reference.dot_products(expected, expected)
    for batch_size in (1, 3, b):
        scores = attribute(
            model, rows, rows, loss=loss, collate_fn=collate, batch_size=batch_size, progress=False
        )
        close(scores.values.double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("nested", [False, True])
def test_encoder_with_a_padding_mask(nested):
    """torch's fused path would pass over the layers and drop the padded positions."""

    def forward(model, x):
        mask = torch.zeros(x.shape[:2], dtype=torch.bool)
        mask[:, 3:] = True
        hidden = model.encoder(x, src_key_padding_mask=mask)
        return model.out(hidden[:, :3].mean(1))

    layer = nn.TransformerEncoderLayer(4, 2, 6, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested)
    model = Model(forward, encoder=encoder, out=nn.Linear(4, 3))
    assert_live(model.eval(), (pair(4, 5, 4)[0], pair(4, 4)[1]), rtol=1e-9)


def positional(model, ids):
    positions = torch.arange(ids.shape[1])
    return model.out(torch.tanh(model.table(ids) + model.place(positions)))


@pytest.mark.parametrize(("b", "t"), [(4, 6), (5, 5)])
def test_positions_in_one_axis_are_left_out_in_a_live_pass(b, t):
    """One index serves the whole batch, and there is no axis to expand."""
    model = Model(
        positional, table=nn.Embedding(7, 4), place=nn.Embedding(8, 4), out=nn.Linear(4, 3)
    )
    batch = (torch.randint(0, 7, (b, t)), pair(b, t, 4)[1])
    with pytest.warns(
        GradTrailWarning, match=r"left out \(place: one value serves the whole batch"
    ):
        got, _ = live_gradients(model, batch)
    close(got, oracle(model, batch, names=sorted(got)))
    assert len(got) == 3


@pytest.mark.parametrize(("b", "t"), [(4, 6), (5, 5)])
def test_positions_in_one_axis_are_left_out_in_training(b, t):
    model = Model(
        positional, table=nn.Embedding(7, 4), place=nn.Embedding(8, 4), out=nn.Linear(4, 3)
    )
    batch = (torch.randint(0, 7, (b, t)), pair(b, t, 4)[1])
    with pytest.warns(
        GradTrailWarning, match=r"left out \(place: one value serves the whole batch"
    ):
        assert_training(model, batch, only=["table.weight", "out.weight", "out.bias"])


def test_positions_with_a_batch_axis_of_one():
    """GPT-2's way: expanded in a live pass, reported as shared in training."""

    def forward(model, ids):
        positions = torch.arange(ids.shape[1]).unsqueeze(0)
        return model.out(torch.tanh(model.table(ids) + model.place(positions)))

    for b, t in ((4, 6), (5, 5)):
        model = Model(
            forward, table=nn.Embedding(7, 4), place=nn.Embedding(8, 4), out=nn.Linear(4, 3)
        )
        batch = (torch.randint(0, 7, (b, t)), pair(b, t, 4)[1])
        names = [name for name, _ in model.named_parameters()]
        assert_live(model, batch, only=names)
        match = r"left out \(place: one value serves the whole batch"
        with pytest.warns(GradTrailWarning, match=match):
            assert_training(model, batch, only=["table.weight", "out.weight", "out.bias"])


def test_linear_on_four_axes():
    everywhere(mlp(4, 5, 3), pair(4, 2, 3, 4))


def test_unbatched_input_is_refused():
    model, (x, y) = mlp(4, 3), pair(2, 4)
    manager = HookManager(model)
    with (
        manager.collect(),
        pytest.warns(GradTrailWarning, match=r"left out \(0: it must see one row"),
        pytest.raises(CaptureError, match="got none at 0: it must see one row or axis entry for"),
    ):
        model(x[0]).sum().backward()
    with manager.collect(), pytest.raises(CaptureError, match="batch axis, got"):
        model(torch.tensor(1.0))

    def unbatched(model, batch):
        return model(batch[0][0]).sum().reshape(1)

    rows = list(zip(x, y, strict=True))
    with pytest.raises(CaptureError, match="must have a layer that holds examples|one row"):
        attribute(model, rows, rows, loss=unbatched, batch_size=1, progress=False)


# ---------------------------------------------------------------- shared parameters


def test_embedding_tied_to_a_linear_by_its_parameter():
    def forward(model, ids):
        return model.head(torch.tanh(model.table(ids)))

    model = Model(forward, table=nn.Embedding(7, 4), head=nn.Linear(4, 7, bias=False))
    model.head.weight = model.table.weight
    batch = (torch.randint(0, 7, (4, 5)), pair(4, 5, 4, out=7)[1])
    everywhere(model, batch)


@pytest.mark.parametrize("bias", ["shared", "own", "one"])
def test_two_linears_that_share_a_parameter(bias):
    def forward(model, x):
        return model.out(torch.tanh(model.b(torch.tanh(model.a(x)))))

    model = Model(
        forward,
        a=nn.Linear(4, 4),
        b=nn.Linear(4, 4, bias=bias != "one"),
        out=nn.Linear(4, 3),
    )
    model.b.weight = model.a.weight
    if bias == "shared":
        model.b.bias = model.a.bias
    everywhere(model, pair(4, 4))
    everywhere(model, pair(4, 5, 4))


def test_one_module_under_two_names():
    layer = nn.Linear(4, 4, dtype=F64)

    def forward(model, x):
        return model.out(torch.tanh(model.b(torch.tanh(model.a(x)))))

    everywhere(Model(forward, a=layer, b=layer, out=nn.Linear(4, 3)), pair(4, 4))


def test_norms_that_share_a_weight():
    def forward(model, x):
        return model.out(torch.tanh(model.b(torch.tanh(model.a(x)))))

    model = Model(forward, a=nn.LayerNorm(4), b=nn.LayerNorm(4), out=nn.Linear(4, 3))
    model.b.weight = model.a.weight
    everywhere(model, pair(4, 4))


@pytest.mark.parametrize("make", [tiny_gpt2, tiny_llama], ids=["gpt2", "llama"])
def test_tied_head_of_a_language_model(make):
    options = {} if make is tiny_gpt2 else {"tie_word_embeddings": True}
    model = make(**options)
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert_live(model, language_batch(), rtol=1e-6)


# ---------------------------------------------------------------- GPT-2's own linear


@pytest.mark.parametrize(("rows", "columns"), [(4, 4), (4, 6)], ids=["square", "oblong"])
def test_linear_that_stores_its_weight_transposed(rows, columns):
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D

    def forward(model, x):
        return model.out(torch.tanh(model.a(x)))

    everywhere(Model(forward, a=conv1d(columns, rows), out=nn.Linear(columns, 3)), pair(4, 5, rows))


def test_default_selection_on_gpt2_covers_its_blocks():
    model = tiny_gpt2()
    found = coverage(model)
    assert found.share == 1.0
    layers = {entry.layer for entry in found.entries}
    for block in range(2):
        for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj", "ln_1", "ln_2"):
            assert f"transformer.h.{block}.{name}" in layers
    assert_live(model, language_batch(), rtol=1e-6)


# ---------------------------------------------------------------- subclasses


class ScaledLinear(nn.Linear):
    """Does something to its output."""

    def forward(self, x):
        return 3 * super().forward(x)


class CenteredLinear(nn.Linear):
    """Does something to its input."""

    def forward(self, x):
        return F.linear(x - x.mean(-1, keepdim=True), self.weight, self.bias)


class PlainLinear(nn.Linear):
    """Brings nothing of its own."""


class ScaledEmbedding(nn.Embedding):
    """As in Gemma."""

    def forward(self, ids):
        return super().forward(ids) * 2.5


class OffsetEmbedding(nn.Embedding):
    """As OPT's and BART's learned positions."""

    def forward(self, ids):
        return super().forward(ids + 2)


class Float32LayerNorm(nn.LayerNorm):
    """As many models compute it."""

    def forward(self, x):
        return super().forward(x.double()).to(x.dtype)


class SquaredWeightLinear(nn.Linear):
    """Reads its weight in a way of its own."""

    def forward(self, x):
        return F.linear(x, self.weight**2, self.bias)


class DoubledLayerNorm(nn.LayerNorm):
    """Does something to its output."""

    def forward(self, x):
        return super().forward(x) * 2


@pytest.mark.parametrize("cls", [ScaledLinear, CenteredLinear, PlainLinear])
def test_subclass_of_linear(cls):
    def forward(model, x):
        return model.out(torch.tanh(model.a(x)))

    everywhere(Model(forward, a=cls(4, 5), out=nn.Linear(5, 3)), pair(4, 5, 4))


@pytest.mark.parametrize("cls", [ScaledEmbedding, OffsetEmbedding])
def test_subclass_of_embedding(cls):
    def forward(model, ids):
        return model.out(torch.tanh(model.a(ids)))

    model = Model(forward, a=cls(9, 5), out=nn.Linear(5, 3))
    everywhere(model, (torch.randint(0, 7, (4, 5)), pair(4, 5, 4)[1]))


@pytest.mark.parametrize("cls", [Float32LayerNorm, DoubledLayerNorm])
def test_subclass_of_layer_norm(cls):
    def forward(model, x):
        return model.out(torch.tanh(model.a(x)))

    everywhere(Model(forward, a=cls(4), out=nn.Linear(4, 3)), pair(4, 5, 4))


def test_subclass_with_another_gradient_is_refused_by_name():
    def forward(model, x):
        return model.out(torch.tanh(model.a(x)))

    model, (x, y) = Model(forward, a=SquaredWeightLinear(4, 4), out=nn.Linear(4, 3)), pair(4, 5, 4)
    rows = list(zip(x, y, strict=True))
    with pytest.raises(UnsupportedLayerError, match="a must .* SquaredWeightLinear whose own"):
        attribute(model, rows, rows, progress=False)
    manager = HookManager(model)
    with manager.collect(), pytest.raises(UnsupportedLayerError, match="whose own forward differs"):
        train_step(model, (x, y)).backward()
    assert_live(model, (x, y), exclude="a")


def test_output_projection_of_multihead_attention_is_reported():
    def forward(model, x):
        return model.out(model.attention(x, x, x, need_weights=False)[0])

    model = Model(
        forward, attention=nn.MultiheadAttention(4, 2, batch_first=True), out=nn.Linear(4, 3)
    )
    session = assert_live(model, pair(4, 5, 4), only=["out.weight", "out.bias"])
    reasons = {e.name: e.reason for e in session.selection.coverage.with_status("unsupported")}
    assert "uses its weight without calling it" in reasons["attention.out_proj.weight"]
    assert "no rule for 'in_proj_weight'" in reasons["attention.in_proj_weight"]
    with pytest.raises(UnsupportedLayerError, match="attention.out_proj"):
        HookManager(model, layers="attention.out_proj")


# ---------------------------------------------------------------- weights read elsewhere


def test_weight_that_is_only_read_functionally_is_reported():
    def forward(model, x):
        return model.out(torch.tanh(F.linear(x, model.a.weight, model.a.bias)))

    model, batch = Model(forward, a=nn.Linear(4, 4), out=nn.Linear(4, 3)), pair(4, 4)
    with pytest.warns(GradTrailWarning, match="hooked but never called"):
        got, _ = live_gradients(model, batch)
    got = {name: value for name, value in got.items() if name.startswith("out")}
    close(got, oracle(model, batch, names=sorted(got)))
    with pytest.warns(GradTrailWarning, match=r"never called"):
        assert_training(model, batch, only=["out.weight", "out.bias"])


def tied_by_function(model, ids):
    hidden = torch.tanh(model.inner(model.table(ids)))
    return hidden @ model.table.weight.t()


def test_weight_that_is_also_read_functionally_is_never_silently_wrong():
    """A head tied to the embedding by an expression: half of the gradient passes the hooks by."""
    model = Model(tied_by_function, table=nn.Embedding(7, 4), inner=nn.Linear(4, 4))
    batch = (torch.randint(0, 7, (4, 5)), pair(4, 5, 4, out=7)[1])
    match = r"left out \(table: .* read outside"
    with pytest.warns(GradTrailWarning, match=match):
        got, _ = live_gradients(model, batch)
    assert set(got) == {"inner.weight", "inner.bias"}
    close(got, oracle(model, batch, names=sorted(got)))
    with pytest.warns(GradTrailWarning, match=match):
        assert_training(model, batch, only=["inner.weight", "inner.bias"])
    rows = list(zip(*batch, strict=True))
    with pytest.raises(CaptureError, match="table: .* read outside"):
        attribute(model, rows, rows, layers="table", progress=False)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_weight_that_is_read_functionally_under_checkpointing(reentrant):
    """Looking for it leaves what checkpointing saves, and random numbers, as they are."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(7, 4, dtype=F64)
            self.inner = nn.Linear(4, 4, dtype=F64)
            self.reentrant = reentrant

        def block(self, hidden):
            weight = self.table.weight + 0 * F.dropout(self.table.weight, 0.5)
            return torch.tanh(self.inner(hidden)) @ weight.t()

        def forward(self, ids):
            hidden = self.table(ids)
            if self.reentrant is None:
                return self.block(hidden)
            return checkpoint(self.block, hidden, use_reentrant=self.reentrant)

    batch = (torch.randint(0, 7, (4, 5)), pair(4, 5, 4, out=7)[1])
    with pytest.warns(GradTrailWarning, match=r"left out \(table: .* read outside"):
        assert_training(Tied(), batch, only=["inner.weight", "inner.bias"])
    with pytest.warns(GradTrailWarning, match=r"left out \(table: .* read outside"):
        assert_live(Tied(), batch)


def test_looking_at_a_weight_is_no_use_of_it():
    def forward(model, x):
        x = x.to(model.a.weight.dtype) * model.a.weight.detach().norm()
        assert model.a.weight.data.shape[0] == 5
        return model.out(torch.tanh(model.a(x)))

    everywhere(Model(forward, a=nn.Linear(4, 5), out=nn.Linear(5, 3)), pair(4, 4))


def test_penalty_on_the_weights_in_a_loss_is_never_silently_wrong():
    """Weight decay written into the loss belongs to no example; the hooks do not see it."""
    model, (x, y) = mlp(4, 5, 3), pair(4, 4)
    rows = list(zip(x, y, strict=True))

    def penalised(model, batch):
        errors = (model(batch[0]) - batch[1]).square().sum(1)
        return errors + 0.1 * sum(p.square().sum() for p in model.parameters())

    with pytest.raises(CaptureError, match="got 0: its parameter is also read outside its own"):
        attribute(model, rows, rows, loss=penalised, progress=False)


def test_measurement_that_reads_a_weight_is_never_silently_wrong():
    """As the query, a logit written out with the head's own rows; the training loss calls it."""
    model, (x, y) = mlp(4, 5, 3), pair(4, 4)
    rows = list(zip(x, y, strict=True))

    def logit(model, batch):
        return (model[:2](batch[0]) * model[2].weight[1]).sum(1)

    with pytest.warns(GradTrailWarning, match=r"left out \(2: its parameter is also read outside"):
        scores = attribute(model, rows, rows, query_loss=logit, progress=False)
    names = ["0.weight", "0.bias"]
    wanted = reference.dot_products(
        oracle(model, (x, y), None, names), oracle(model, (x, y), logit, names)
    )
    close(scores.values.double(), wanted, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------- convolutions


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(4, 6, 3, groups=2),
        nn.Conv2d(4, 4, 3, groups=4, padding=1),
        nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular"),
        nn.Conv2d(4, 6, 3, padding=(2, 1), padding_mode="reflect"),
        nn.Conv2d(4, 6, 3, padding="same"),
        nn.Conv2d(4, 6, 3, stride=2, dilation=2, bias=False),
        nn.ConvTranspose2d(4, 6, 3, groups=2, stride=2, output_padding=1),
    ],
    ids=["groups", "depthwise", "circular", "reflect", "same", "dilated", "transposed"],
)
def test_convolution(layer):
    def forward(model, x):
        return model.out(torch.tanh(model.conv(x)).mean((2, 3)))

    width = layer.out_channels
    model = Model(forward, conv=copy.deepcopy(layer), out=nn.Linear(width, 3))
    everywhere(model, (pair(3, 4, 7, 6)[0], pair(3, 4)[1]))


def test_bilinear_is_refused():
    def forward(model, x):
        return model.mix(x, x)

    model, (x, y) = Model(forward, mix=nn.Bilinear(4, 4, 3)), pair(4, 4)
    rows = list(zip(x, y, strict=True))
    with pytest.raises(UnsupportedLayerError, match="Bilinear has no rule"):
        attribute(model, rows, rows, layers="mix", progress=False)
    with pytest.raises(ValueError, match="Bilinear has no rule"):
        attribute(model, rows, rows, progress=False)


# ---------------------------------------------------------------- in place


def test_activation_in_place_after_a_layer():
    def forward(model, x):
        x = F.relu(model.a(x), inplace=True)
        x = model.norm(x)
        x += 1
        return model.out(x)

    model = Model(forward, a=nn.Linear(4, 5), norm=nn.LayerNorm(5), out=nn.Linear(5, 3))
    everywhere(model, pair(4, 4))
    everywhere(
        nn.Sequential(nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, 3)).double(), pair(4, 4)
    )


@pytest.mark.parametrize("frozen", [False, True])
def test_input_changed_in_place_after_the_layer_read_it_is_refused(frozen):
    """Also where autograd would not notice, because the weight is frozen."""

    def forward(model, x):
        x = torch.tanh(model.first(x))
        y = model.a(x)
        x.mul_(2)
        return model.out(y + x)

    model = Model(forward, first=nn.Linear(4, 4), a=nn.Linear(4, 4), out=nn.Linear(4, 3))
    x, y = pair(4, 4)
    rows = list(zip(x, y, strict=True))
    with pytest.raises(CaptureError, match="input of a must stay as the layer read it"):
        attribute(model, rows, rows, layers=["a", "out"], progress=False)
    model.a.requires_grad_(not frozen)
    manager = HookManager(model, include_frozen=True)
    with (
        manager.collect(),
        pytest.raises(RuntimeError, match="input of a must stay|modified by an inplace operation"),
    ):
        train_step(model, (x, y)).backward()


def test_input_that_was_changed_between_two_layers_that_read_it():
    """They share a capture only while it is the same tensor, unchanged."""
    kept = []

    def forward(model, x):
        x = x * 1
        kept.append(model.a(x))  # of no consequence, so that autograd does not mind
        x.mul_(2)
        return model.b(x)

    model, batch = Model(forward, a=nn.Linear(4, 3), b=nn.Linear(4, 3)), pair(4, 4)
    with pytest.warns(GradTrailWarning, match=r"No gradient reached a \(no gradient flows to it"):
        assert_training(copy.deepcopy(model), batch, only=["b.weight", "b.bias"])
    with pytest.warns(GradTrailWarning, match=r"No gradient ever reached 1 .*\(a\)"):
        assert_live(model, batch)


# ---------------------------------------------------------------- hooks of the user's own


def test_hooks_that_change_what_a_module_returns_or_the_gradient_there():
    """The gradient of a weight is that at the module's own output, after every tensor hook."""

    def turned(_module, _args, output):
        output = output.clone()
        if output.requires_grad:
            output.register_hook(lambda gradient: -2 * gradient)
        return output

    def forward(model, x):
        hidden = model.a(x)
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: 3 * gradient)
        return model.out(torch.tanh(model.b(hidden)))

    for late in (False, True):
        model = Model(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4), out=nn.Linear(4, 3))
        if not late:
            model.b.register_forward_hook(lambda _, __, output: 5 * output)
            model.a.register_forward_hook(turned)
            model.out.register_forward_pre_hook(lambda _, args: (args[0] / 2,))
        everywhere(model, pair(4, 5, 4))


def test_output_changed_in_place_by_the_loop():
    def loss(model, batch):
        scores = model(batch[0])
        scores /= 3
        return (scores - batch[1]).square().sum(-1)

    everywhere(mlp(4, 5, 3), pair(4, 4), loss)


def test_reparametrised_weight_is_reported_and_its_bias_is_exact():
    model = mlp(4, 5, 3)
    nn.utils.parametrizations.weight_norm(model[0])
    only = ["0.bias", "2.weight", "2.bias"]
    assert_training(copy.deepcopy(model), pair(4, 5, 4), only=only)
    session = assert_live(model, pair(4, 5, 4), only=only)
    left = {entry.name for entry in session.selection.coverage.with_status("unsupported")}
    assert left == {f"0.parametrizations.weight.original{place}" for place in (0, 1)}


# ---------------------------------------------------------------- outputs of any kind


@dataclass
class Output:
    scores: torch.Tensor
    note: str = "said"


class Opaque:
    """An output of a class that nobody knows how to look into."""

    def __init__(self, scores):
        self.scores = scores


@pytest.mark.parametrize(
    ("wrap", "unwrap"),
    [
        (lambda y: (y, None), lambda out: out[0]),
        (lambda y: {"a": {"scores": y}, "n": 3}, lambda out: out["a"]["scores"]),
        (Output, lambda out: out.scores),
        (lambda y: [(Output(y),)], lambda out: out[0][0].scores),
        (Opaque, lambda out: out.scores),
    ],
    ids=["tuple", "dict", "dataclass", "nested", "opaque"],
)
def test_outputs_of_any_kind(wrap, unwrap):
    def forward(model, x):
        return wrap(model.out(torch.tanh(model.a(x))))

    def loss(model, batch):
        return (unwrap(model(batch[0])) - batch[1]).square().sum(-1)

    everywhere(Model(forward, a=nn.Linear(4, 5), out=nn.Linear(5, 3)), pair(4, 4), loss)


def test_output_that_is_a_parameter_of_the_model_gathers_no_hooks():
    """As models that return their temperature do."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 3, dtype=F64)
            self.scale = nn.Parameter(torch.ones((), dtype=F64))

        def forward(self, x):
            return self.a(x), self.scale

    def loss(model, batch):
        out, scale = model(batch[0])
        return (out * scale - batch[1]).square().sum(1)

    model = Scaled()
    with HookManager(model).collect():
        for _ in range(3):
            train_step(model, pair(4, 4), loss).backward()
    assert not model.scale._backward_hooks
    model.zero_grad()
    assert_training(model, pair(4, 4), loss)


# ---------------------------------------------------------------- classes of language models


@pytest.mark.parametrize("model", ["llama", "qwen3", "gemma2", "t5"])
def test_norms_of_language_models(model):
    name = {"llama": "LlamaRMSNorm", "qwen3": "Qwen3RMSNorm", "gemma2": "Gemma2RMSNorm"}
    norm = model_class(model, name.get(model, "T5LayerNorm"))(4)

    def forward(model, x):
        return model.out(torch.tanh(model.norm(x)))

    made = Model(forward, norm=norm, out=nn.Linear(4, 3))
    exact = model != "gemma2"  # it computes in float32 whatever its dtype
    everywhere(made, pair(4, 5, 4), rtol=1e-10 if exact else 1e-5)


def test_scaled_embedding_of_gemma():
    table = model_class("gemma3", "Gemma3TextScaledWordEmbedding")(9, 4, 0, embed_scale=2.0)

    def forward(model, ids):
        return model.out(torch.tanh(model.table(ids)))

    model = Model(forward, table=table, out=nn.Linear(4, 3))
    everywhere(model, (torch.randint(0, 9, (4, 5)), pair(4, 5, 4)[1]))


def test_learned_positions_of_opt():
    table = model_class("opt", "OPTLearnedPositionalEmbedding")(8, 4)

    def forward(model, ids):
        mask = torch.ones_like(ids)
        return model.out(torch.tanh(model.words(ids) + model.table(mask, 0)))

    model = Model(forward, words=nn.Embedding(9, 4), table=table, out=nn.Linear(4, 3))
    everywhere(model, (torch.randint(0, 9, (4, 5)), pair(4, 5, 4)[1]))


def test_learned_positions_of_bart():
    """It expands its own index over the batch before it looks it up."""
    table = model_class("bart", "BartLearnedPositionalEmbedding")(8, 4)

    def forward(model, ids):
        return model.out(torch.tanh(model.words(ids) + model.table(ids)))

    model = Model(forward, words=nn.Embedding(9, 4), table=table, out=nn.Linear(4, 3))
    everywhere(model, (torch.randint(0, 9, (4, 5)), pair(4, 5, 4)[1]))


def test_positions_of_gpt2_are_exact_in_a_live_pass_and_reported_in_training():
    model, batch = tiny_gpt2(), language_batch((5, 5, 5))
    got, _ = live_gradients(model, batch)
    assert "transformer.wpe.weight" in got
    expected = oracle(model.eval(), batch, names=["transformer.wpe.weight"])
    close({"transformer.wpe.weight": got["transformer.wpe.weight"]}, expected, rtol=1e-6)
    match = r"transformer.wpe: one value serves the whole batch"
    with pytest.warns(GradTrailWarning, match=match):
        manager = assert_training(model.eval(), batch, rtol=1e-6)
    assert "transformer.wpe" not in manager.last.layers
    assert "transformer.wte" in manager.last.layers
    (entry,) = manager.coverage.with_status("unsupported")
    assert entry.name == "transformer.wpe.weight"
    named = HookManager(model, layers="*wpe")
    with named.collect(), pytest.raises(CaptureError, match="one value serves the whole batch"):
        train_step(model, batch).backward()


def test_one_example_a_batch_is_exact_for_shared_positions_too():
    model, batch = tiny_gpt2(), language_batch((5,))
    manager = assert_training(model.eval(), batch, rtol=1e-6)
    assert "transformer.wpe" in manager.last.layers


def test_mixture_of_experts_says_what_share_is_left_out():
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=17,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=4,
        attn_implementation="eager",
    )
    model = transformers.MixtralForCausalLM(config).double()
    if callable(getattr(model, "set_experts_implementation", None)):
        model.set_experts_implementation("eager")  # the default one has no float64 on the CPU
    found = coverage(model)
    experts = sum(p.numel() for name, p in model.named_parameters() if "experts" in name)
    total = sum(p.numel() for p in model.parameters())
    assert experts > 0
    left = found.with_status("unsupported")
    assert sum(entry.numel for entry in left if "experts" in entry.name) == experts
    assert found.share == pytest.approx(1 - sum(e.numel for e in left) / total)
    assert "covered share" in str(found)
    session = assert_live(model, language_batch((6, 6, 6)), rtol=1e-5)
    assert session.selection.coverage.share < 0.7


# ---------------------------------------------------------------- what is hooked


def test_only_some_linears_have_a_bias():
    def forward(model, x):
        return model.out(torch.tanh(model.b(torch.tanh(model.a(x)))))

    model = Model(
        forward, a=nn.Linear(4, 5), b=nn.Linear(5, 5, bias=False), out=nn.Linear(5, 3, bias=False)
    )
    everywhere(model, pair(4, 5, 4))


def test_some_parameters_of_a_layer_are_frozen():
    model = mlp(4, 5, 3)
    model[0].weight.requires_grad_(False)
    model[2].bias.requires_grad_(False)
    only = ["0.bias", "2.weight"]
    assert_live(copy.deepcopy(model), pair(4, 5, 4), only=only)
    assert_training(model, pair(4, 5, 4), only=only)


def test_layers_without_parameters_are_not_hooked():
    model = nn.Sequential(
        nn.Linear(4, 5), nn.LayerNorm(5, elementwise_affine=False), nn.Linear(5, 3)
    ).double()
    assert HookManager(model).layers == ("0", "2")
    everywhere(model, pair(4, 5, 4))


# ---------------------------------------------------------------- adapters and frozen bases


def with_adapters(model, **options):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, lora_alpha=4, lora_dropout=0.0, **options)
    adapted = peft.get_peft_model(model, config).double()
    generator = torch.Generator().manual_seed(0)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            with torch.no_grad():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
    return adapted


@pytest.mark.parametrize("checkpointing", [False, True])
def test_adapters_are_hooked_and_the_frozen_base_passes_gradients_through(checkpointing):
    model = with_adapters(tiny_llama(), target_modules=["q_proj", "v_proj", "down_proj"])
    if checkpointing:
        model.enable_input_require_grads()
        enable = getattr(model.base_model.model, "activation_checkpointing_enable", None)
        (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
    model.train()
    batch = language_batch((6, 6, 6))
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert len(trained) == 2 * 3 * 2
    assert all("lora_" in name for name in trained)
    assert_live(model, batch, only=trained, rtol=1e-6)
    assert_training(model, batch, only=trained, rtol=1e-6)


def test_adapters_with_their_frozen_base_included():
    model = with_adapters(tiny_llama(), target_modules=["q_proj", "v_proj"])
    batch = language_batch((6, 6, 6))
    with pytest.warns(GradTrailWarning, match="No trained parameter comes before"):
        manager = HookManager(model, include_frozen=True)
    with manager.collect(), pytest.warns(GradTrailWarning, match="No gradient reached"):
        train_step(model, batch).backward()
    got = by_parameter(model, manager._selection.units, manager.last.layers)
    assert any("base_layer" in name for name in got)
    assert any("mlp.down_proj" in name for name in got)
    close(got, oracle(model, batch, names=sorted(got)), rtol=1e-6, atol=1e-9)


class Int8Linear(nn.Module):
    """A linear whose weight is stored in 8 bits and never trained."""

    def __init__(self, i, o):
        super().__init__()
        codes = torch.randint(-127, 127, (o, i), dtype=torch.int8)
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.register_buffer("scale", torch.tensor(0.01, dtype=F64))

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype) * self.scale)


def test_quantised_frozen_weights_pass_gradients_through():
    def forward(model, x):
        return model.out(torch.tanh(model.base(torch.tanh(model.a(x))) + model.adapter(x)))

    model = Model(
        forward, a=nn.Linear(4, 5), base=nn.Identity(), adapter=nn.Linear(4, 5), out=nn.Linear(5, 3)
    )
    model.base = Int8Linear(5, 5)
    only = [name for name, p in model.named_parameters() if p.requires_grad]
    assert_live(copy.deepcopy(model), pair(4, 5, 4), only=only)
    assert_training(copy.deepcopy(model), pair(4, 5, 4), only=only)
    (entry,) = [e for e in coverage(model).entries if e.name == "base.weight"]
    assert entry.status == "left out"
    included = HookManager(model, include_frozen=True)
    (entry,) = [e for e in included.coverage.entries if e.name == "base.weight"]
    assert entry.status == "unsupported"


def test_check_agrees_on_everything_above():
    model = with_adapters(tiny_gpt2(), target_modules=["c_attn"], fan_in_fan_out=True)
    report = check(model, language_batch((6, 4, 5)))
    assert report.ok
    assert len(report.layers) == 4
