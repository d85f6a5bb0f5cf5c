"""Forwards and backwards as training loops make them: failed, doubled, missing, recomputed."""

import contextlib
import copy
import gc
import random
import weakref

import numpy as np
import pytest
import torch
from capturing import (
    F64,
    assert_live,
    assert_training,
    by_parameter,
    close,
    language_batch,
    mlp,
    oracle,
    pair,
    tiny_gpt2,
    tiny_llama,
    train_step,
)
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from gradtrail import (
    CaptureError,
    GradTrailWarning,
    HookManager,
    Projection,
    attribute,
    reference,
    self_influence,
)
from gradtrail.factors import to_dense

BOTH_KINDS = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
quiet = pytest.mark.filterwarnings("ignore::gradtrail.GradTrailWarning")


class Failing(torch.autograd.Function):
    """Passes everything on, and fails in the backward while its switch says so."""

    @staticmethod
    def forward(ctx, x, switch):
        ctx.switch = switch
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.switch["on"]:
            raise RuntimeError("CUDA out of memory (pretended)")
        return gradient, None


class Fragile(nn.Module):
    """Two linears, the first called twice, with a failure between them on demand."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4, dtype=F64)
        self.second = nn.Linear(4, 3, dtype=F64)
        self.switch = {"on": False}

    def forward(self, x):
        x = torch.tanh(self.first(x))
        x = Failing.apply(x, self.switch)
        return self.second(torch.tanh(self.first(x)))


class Blocks(nn.Module):
    """Residual blocks, each run under checkpointing where asked."""

    def __init__(self, width=6, depth=3, *, reentrant=None, dropout=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.inlet = nn.Linear(4, width, dtype=F64)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width, dtype=F64),
                nn.Linear(width, 2 * width, dtype=F64),
                nn.Tanh(),
                nn.Dropout(dropout),
                nn.Linear(2 * width, width, dtype=F64),
            )
            for _ in range(depth)
        )
        self.outlet = nn.Linear(width, 3, dtype=F64)
        self.reentrant = reentrant

    def forward(self, x):
        x = self.inlet(x)
        for block in self.blocks:
            if self.reentrant is None:
                x = x + block(x)
            else:
                x = x + checkpoint(block, x, use_reentrant=self.reentrant)
        return self.outlet(x)


def block_of(manager):
    return by_parameter(manager.model, manager._selection.units, manager.last.layers)


def assert_block(manager, model, batch, loss=None, *, rtol=1e-10):
    got = block_of(manager)
    close(got, oracle(model, batch, loss, sorted(got)), rtol=rtol)
    return got


# ---------------------------------------------------------------- failed, doubled, missing


def test_backward_raises_and_the_next_capture_is_clean():
    model, batch, other = Fragile(), pair(4, 4), pair(3, 4, seed=1)
    manager = HookManager(model)
    with manager.collect():
        model.switch["on"] = True
        with pytest.raises(RuntimeError, match="out of memory"):
            train_step(model, batch).backward()
        assert manager.steps == 0
        assert manager.last is None
        model.switch["on"] = False
        train_step(model, other).backward()
    assert manager.steps == 1
    assert_block(manager, model, other)


def test_backward_raises_and_is_repeated_on_the_same_graph():
    """What the failed one brought for a layer that is called twice must not count again."""
    model, batch = Fragile(), pair(4, 4)
    manager = HookManager(model)
    with manager.collect():
        loss = train_step(model, batch)
        model.switch["on"] = True
        with pytest.raises(RuntimeError, match="out of memory"):
            loss.backward(retain_graph=True)
        model.switch["on"] = False
        loss.backward(retain_graph=True)
        first = block_of(manager)
        loss.backward()
    assert manager.steps == 2
    close(first, oracle(model, batch, None, sorted(first)))
    assert_block(manager, model, batch)


def captures_of(manager):
    """Weak references to every capture that a manager makes from now on."""
    captures = []
    enter = manager._enter

    def noting(*args):
        enter(*args)
        captures.append(weakref.ref(manager._taps.current))

    manager._enter = noting
    return captures


@pytest.mark.parametrize("reentrant", [None, True, False], ids=["plain", "reentrant", "non"])
def test_failed_and_missing_backwards_hold_nothing_once_their_loss_is_gone(reentrant):
    model, batch = Blocks(reentrant=reentrant), pair(4, 4)
    switch = {"on": False}
    model.blocks[1][1].weight.register_hook(lambda _: 1 / 0 if switch["on"] else None)
    manager = HookManager(model)
    captures = captures_of(manager)
    with manager.collect():
        loss = train_step(model, batch)
        switch["on"] = True
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        switch["on"] = False
        loss = train_step(model, batch)
        del loss
        torch.zeros(1, requires_grad=True).sum().backward()  # the engine lets go of the failed one
        gc.collect()
        assert [reference() for reference in captures] == [None, None]


def test_forward_raises_and_the_next_capture_is_clean():
    model, batch = Fragile(), pair(4, 4)
    manager = HookManager(model)
    with manager.collect():
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(torch.zeros(4, 5, dtype=F64))
        train_step(model, batch).backward()
    assert_block(manager, model, batch)


def test_live_pass_after_one_that_raised():
    model, (x, y) = Fragile(), pair(4, 4)
    rows = list(zip(x, y, strict=True))
    model.train()
    model.switch["on"] = True
    flags = [parameter.requires_grad for parameter in model.parameters()]
    with pytest.raises(RuntimeError, match="out of memory"):
        attribute(model, rows, rows, progress=False)
    assert [parameter.requires_grad for parameter in model.parameters()] == flags
    assert all(module.training for module in model.modules())
    assert all(not module._forward_hooks for module in model.modules())
    assert all(not module._forward_pre_hooks for module in model.modules())
    model.switch["on"] = False
    assert_live(model, (x, y))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["first-first", "last-first"])
def test_two_forwards_then_two_backwards(order):
    model, batches = Fragile(), (pair(4, 4), pair(3, 4, seed=1))
    manager = HookManager(model)
    with manager.collect():
        losses = [train_step(model, batch) for batch in batches]
        for number in order:
            losses[number].backward()
            assert_block(manager, model, batches[number])
    assert manager.steps == 2


def test_two_forwards_under_one_backward_make_two_blocks():
    model, batches = Blocks(reentrant=False), (pair(4, 4), pair(3, 4, seed=1))
    blocks = []
    manager = HookManager(model, callbacks=[blocks.append])
    with manager.collect():
        sum(train_step(model, batch) for batch in batches).backward()
    assert [len(block.ids) for block in blocks] in ([4, 3], [3, 4])
    for block in blocks:
        batch = batches[0] if len(block.ids) == 4 else batches[1]
        got = by_parameter(model, manager._selection.units, block.layers)
        close(got, oracle(model, batch, None, sorted(got)))


def test_forward_without_backward():
    model, batch = Fragile(), pair(4, 4)
    manager = HookManager(model)
    with manager.collect():
        train_step(model, pair(5, 4, seed=3))
        train_step(model, batch).backward()
    assert manager.steps == 1
    assert_block(manager, model, batch)


@pytest.mark.parametrize("reentrant", [None, False], ids=["plain", "non-reentrant"])
def test_backward_twice_over_a_retained_graph_gives_the_block_twice(reentrant):
    model, batch = Blocks(reentrant=reentrant), pair(4, 4)
    blocks = []
    manager = HookManager(model, callbacks=[blocks.append])
    with manager.collect():
        loss = train_step(model, batch)
        loss.backward(retain_graph=True)
        loss.backward()
    assert [block.step for block in blocks] == [0, 1]
    for name, layer in blocks[0].layers.items():
        other = blocks[1].layers[name]
        assert torch.equal(to_dense(layer).values_bd, to_dense(other).values_bd)
    assert_block(manager, model, batch)


def test_second_backward_without_retained_graph_is_refused():
    model, (x, _) = mlp(4, 3), pair(4, 4)
    manager = HookManager(model)
    with manager.collect():
        loss = model(x).sum()
        loss.backward()
        with pytest.raises(RuntimeError, match="second time|must meet one backward"):
            loss.backward()
    assert manager.steps == 1


class Shifted(nn.Module):
    """Of a frozen weight and a trained bias autograd saves nothing that it could miss."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3, dtype=F64)
        self.linear.weight.requires_grad_(False)

    def forward(self, x):
        return self.linear(x)


def test_second_backward_is_refused_also_where_autograd_takes_it():
    model, (x, _) = Shifted(), pair(4, 4)
    manager = HookManager(model)
    with manager.collect():
        loss = model(x).sum()
        loss.backward()
        with pytest.raises(CaptureError, match="linear must meet one backward a forward"):
            loss.backward()
    assert manager.steps == 1


def test_backward_that_builds_a_graph_of_itself_is_refused():
    model, batch = mlp(4, 5, 3), pair(4, 4)
    manager = HookManager(model)
    with manager.collect():
        loss = train_step(model, batch)
        with pytest.raises(CaptureError, match="create_graph=True"):
            torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        train_step(model, batch).backward()
    assert_block(manager, model, batch)


def test_backward_after_the_capture_has_ended_is_none_of_its():
    model, batch = mlp(4, 5, 3), pair(4, 4)
    manager = HookManager(model)
    with manager.collect():
        loss = train_step(model, batch)
    loss.backward()
    assert manager.steps == 0
    assert model[0].weight.grad is not None


def test_gradients_taken_with_autograd_grad_are_a_step():
    model, batch = mlp(4, 5, 3), pair(4, 4)
    manager = HookManager(model)
    with manager.collect():
        torch.autograd.grad(train_step(model, batch), list(model.parameters()))
    assert_block(manager, model, batch)


def test_accumulated_gradients_are_one_step_a_backward():
    model, batches = mlp(4, 5, 3), [pair(3, 4, seed=seed) for seed in range(3)]
    blocks = []
    manager = HookManager(model, callbacks=[blocks.append])
    with manager.collect():
        for batch in batches:
            train_step(model, batch).backward()
    assert [block.step for block in blocks] == [0, 1, 2]
    for block, batch in zip(blocks, batches, strict=True):
        got = by_parameter(model, manager._selection.units, block.layers)
        close(got, oracle(model, batch, None, sorted(got)))


# ---------------------------------------------------------------- checkpointing


def live_tensors():
    gc.collect()
    # by type: isinstance would ask lazy modules for attributes
    return sum(issubclass(type(entry), torch.Tensor) for entry in gc.get_objects())


@BOTH_KINDS
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_checkpointing_in_a_live_pass(reentrant, dropout):
    assert_live(Blocks(reentrant=reentrant, dropout=dropout), pair(4, 4), rtol=1e-9)
    assert_live(Blocks(reentrant=reentrant, dropout=dropout), pair(4, 5, 4), rtol=1e-9)


@BOTH_KINDS
def test_checkpointing_in_a_live_pass_with_no_captured_layer_below(reentrant):
    """Reentrant checkpointing makes no graph where nothing that enters it has one."""
    model = Blocks(reentrant=reentrant)
    only = [name for name, _ in model.blocks.named_parameters(prefix="blocks")]
    assert_live(model, pair(4, 5, 4), only=only, layers="blocks.*", rtol=1e-9)
    model.inlet.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    only = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert_live(model, pair(4, 5, 4), only=only, rtol=1e-9)


@BOTH_KINDS
def test_checkpointing_in_training(reentrant):
    manager = assert_training(Blocks(reentrant=reentrant), pair(4, 5, 4))
    assert len(manager.last.layers) == 2 + 3 * 3


@BOTH_KINDS
def test_checkpointing_in_training_with_dropout_equals_no_checkpointing(reentrant):
    """Dropout is part of what a training step computes: recomputing must draw it again."""
    blocks = []
    for kind in (None, reentrant):
        model = Blocks(reentrant=kind, dropout=0.5)
        manager = HookManager(model)
        torch.manual_seed(3)
        with manager.collect():
            train_step(model, pair(4, 5, 4)).backward()
        blocks.append(block_of(manager))
    close(blocks[1], blocks[0], rtol=0, atol=0)


@BOTH_KINDS
@pytest.mark.parametrize("depth", ["blocks", "lower"])
def test_checkpointing_with_frozen_layers(reentrant, depth):
    """Frozen layers below, between and above trained ones."""
    model = Blocks(reentrant=reentrant)
    frozen = model.blocks if depth == "blocks" else model.blocks[:2]
    frozen.requires_grad_(False)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert_training(copy.deepcopy(model), pair(4, 5, 4), only=trained)
    assert_live(model, pair(4, 5, 4), only=trained, rtol=1e-9)


@BOTH_KINDS
def test_checkpointing_with_frozen_layers_included(reentrant):
    model = Blocks(reentrant=reentrant)
    model.blocks.requires_grad_(False)
    every = [name for name, _ in model.named_parameters()]
    assert_training(model, pair(4, 5, 4), only=every, include_frozen=True)


def test_checkpointing_with_frozen_layers_that_no_gradient_reaches():
    """Below the lowest trained parameter nothing flows: reported, and never a wrong number."""
    model = Blocks(reentrant=False)
    model.inlet.requires_grad_(False)
    model.blocks[:2].requires_grad_(False)
    with pytest.warns(GradTrailWarning, match="No trained parameter comes before 7 frozen layers"):
        manager = HookManager(model, include_frozen=True)
    batch = pair(4, 5, 4)
    with manager.collect():
        with pytest.warns(GradTrailWarning, match=r"No gradient reached .*no gradient flows to it"):
            train_step(model, batch).backward()
        train_step(model, batch).backward()
    assert manager.steps == 2
    got = assert_block(manager, model, batch)
    assert all(name.startswith(("blocks.2", "outlet")) for name in got)


def test_checkpointing_frozen_layers_completes_every_step_with_empty_buffers():
    model = Blocks(reentrant=False)
    model.blocks.requires_grad_(False)
    manager = HookManager(model, include_frozen=True)
    captures = captures_of(manager)
    with manager.collect():
        for step in range(5):
            loss = train_step(model, pair(4, 5, 4, seed=step))
            loss.backward()
            assert manager.steps == step + 1
            assert len(manager.last.layers) == 11
            capture = captures[-1]()
            assert capture is not None
            assert not capture._saved
            assert not capture._parts
            assert not capture._arrived
            assert all(reference() is None for reference in capture._recent)
            assert not manager._open
            assert loss is not None


@BOTH_KINDS
def test_checkpointing_around_the_model_itself(reentrant):
    """The root forward then runs inside the backward, with checkpoints of its own in it."""
    for inner in (None, False):
        model, batch = Blocks(reentrant=inner), pair(4, 5, 4)
        manager = HookManager(model)

        def loss(x, y, model=model):
            return train_step(model, (x, y))

        with manager.collect():
            x = batch[0].requires_grad_()
            checkpoint(loss, x, batch[1], use_reentrant=reentrant).backward()
        assert manager.steps == 1
        assert_block(manager, model, batch)


class Nest(nn.Module):
    """A checkpoint inside a checkpoint, and a layer outside the inner one that is called twice."""

    def __init__(self, reentrant):
        super().__init__()
        torch.manual_seed(0)
        self.inlet = nn.Linear(4, 6, dtype=F64)
        self.a, self.b = mlp(6, 7, 6), mlp(6, 5, 6)
        self.outlet = nn.Linear(6, 3, dtype=F64)
        self.reentrant = reentrant

    def inner(self, x):
        return self.b(x) if self.reentrant is None else checkpoint(self.b, x, use_reentrant=False)

    def middle(self, x):
        return self.inner(self.a(x)) + self.a(x)

    def forward(self, x):
        x = self.inlet(x)
        if self.reentrant is None:
            return self.outlet(self.middle(x))
        return self.outlet(checkpoint(self.middle, x, use_reentrant=self.reentrant))


@BOTH_KINDS
def test_checkpointing_inside_checkpointing(reentrant):
    assert_live(Nest(reentrant), pair(4, 5, 4))
    assert_training(Nest(reentrant), pair(4, 5, 4))


def test_activations_that_autograd_keeps_elsewhere():
    """Inputs are saved as autograd saves its own, so offloading them goes for both."""
    model, batch, packed = mlp(4, 5, 3), pair(4, 5, 4), []

    def pack(tensor):
        packed.append(tuple(tensor.shape))
        return tensor.numpy().copy()

    manager = HookManager(model)
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, torch.from_numpy)
    with manager.collect(), hooks:
        train_step(model, batch).backward()
    assert packed.count((4, 5, 4)) == 1  # autograd's own copy of the first input is folded
    assert_block(manager, model, batch)


def test_selective_checkpointing_recomputes_what_it_would_without_a_capture():
    """The check of a class with its own forward must not shift what was kept of an operation."""

    class Scaled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.block = nn.Sequential(
                Scaled(4, 6, dtype=F64), nn.Tanh(), nn.Linear(6, 4, dtype=F64), nn.Tanh()
            )
            self.outlet = nn.Linear(4, 3, dtype=F64)

        def forward(self, x):
            kept = [torch.ops.aten.addmm.default]
            x = checkpoint(
                self.block,
                x,
                use_reentrant=False,
                context_fn=lambda: create_selective_checkpoint_contexts(kept),
            )
            return self.outlet(x)

    assert_training(Model(), pair(4, 4))


def test_two_checkpointed_models_in_one_backward():
    """Each recomputation reports to the capture of its own model and forward."""
    one, two = Blocks(reentrant=True), Blocks(width=5, reentrant=False)
    batch = pair(4, 5, 4)
    managers = [HookManager(one), HookManager(two)]
    with managers[0].collect(), managers[1].collect():
        (train_step(one, batch) + train_step(two, batch) + train_step(one, batch)).backward()
    assert [manager.steps for manager in managers] == [2, 1]
    for manager in managers:
        assert_block(manager, manager.model, batch)


def activation_bytes(model, batch, options):
    """Bytes that one step allocates: held at the end of its forward, and at its peak."""
    manager = HookManager(model, **(options or {}))

    def step():
        with contextlib.nullcontext() if options is None else manager.collect():
            loss = train_step(model, batch)
            with torch.profiler.record_function("forward is over"):
                pass
            loss.backward()

    step()
    model.zero_grad()
    manager.last = None
    gc.collect()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        step()
    total = peak = held = 0
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            total += event.nbytes()
            peak = max(peak, total)
        elif event.name() == "forward is over":
            held = total
    return held, peak


@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])
@BOTH_KINDS
def test_checkpointing_keeps_its_memory(reentrant, frozen):
    """Activations are recomputed, not held: neither until the backward nor through it."""
    options = {"projection": Projection(dim=2), "include_frozen": frozen}
    batch = pair(16, 32, 4)

    def measured(kind, options):
        model = Blocks(64, 6, reentrant=kind)
        model.blocks.requires_grad_(not frozen)
        return activation_bytes(model, batch, options)

    plain_held, plain_peak = measured(None, options)
    bare_held, bare_peak = measured(reentrant, None)
    held, peak = measured(reentrant, options)
    assert bare_held < plain_held / 2
    assert held <= bare_held + 10_000
    layer = 16 * 32 * 128 * 8
    assert peak <= bare_peak + 3 * layer
    assert peak <= plain_peak - 6 * layer


# ---------------------------------------------------------------- no gradient, some gradient


class Branches(nn.Module):
    """Two branches of which a flag, or the data, takes one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inlet = nn.Linear(4, 4, dtype=F64)
        self.left = nn.Linear(4, 3, dtype=F64)
        self.right = nn.Linear(4, 3, dtype=F64)
        self.use_left = True

    def forward(self, x):
        x = torch.tanh(self.inlet(x))
        return self.left(x) if self.use_left else self.right(x)


class Deciding(Branches):
    """Takes a branch by what the batch holds."""

    def forward(self, x):
        self.use_left = bool(x.sum() > 0)
        return super().forward(x)


def test_no_gradient_reaches_any_layer_in_training():
    model, (x, y) = Branches(), pair(4, 4)
    outside = nn.Parameter(torch.ones(3, dtype=F64))
    manager = HookManager(model, layers=["inlet", "right"])

    with manager.collect():
        loss = ((model(x).detach() * outside - y) ** 2).sum()
        loss.backward()
        assert manager.steps == 0
        with pytest.raises(CaptureError) as error:
            ((x.mean() + 0 * model.left(x).sum()) * 0 + model_without_inlet(model, x)).backward()
    assert "got none at inlet (no gradient flows to it), right (never called)" in str(error.value)


def model_without_inlet(model, x):
    """A backward that reaches the model's output and stops above its captured layers."""
    hook = model.left.register_forward_pre_hook(lambda _, args: (args[0].detach(),))
    try:
        return model(x).sum()
    finally:
        hook.remove()


def test_no_gradient_reaches_any_layer_in_a_live_pass():
    model, (x, y) = Branches(), pair(4, 4)
    rows = list(zip(x, y, strict=True))

    def blind(model, batch):
        model(batch[0])
        return (batch[0] * torch.ones(4, dtype=F64, requires_grad=True)).sum(1)

    with pytest.raises(CaptureError, match=r"got no gradient at any of 3 \(inlet, left, right, "):
        attribute(model, rows, rows, loss=blind, progress=False)
    with pytest.raises(CaptureError, match="none was called"):
        attribute(model, rows, rows, layers="right", progress=False)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_unused_parameter_is_reported_once_and_the_rest_is_right():
    model, batch = Branches(), pair(4, 4)
    manager = HookManager(model)
    with manager.collect():
        with pytest.warns(GradTrailWarning, match=r"No gradient reached right \(never called\); "):
            train_step(model, batch).backward()
        train_step(model, batch).backward()  # a second warning would be an error
    assert set(manager.last.layers) == {"inlet", "left"}
    assert_block(manager, model, batch)
    with pytest.warns(GradTrailWarning, match=r"No gradient ever reached 1 .*\(right\).*score 0"):
        assert_live(model, batch)


def test_branch_taken_only_sometimes_is_reported_once_per_set():
    model, batch = Branches(), pair(4, 4)
    manager = HookManager(model)
    with manager.collect():
        with pytest.warns(GradTrailWarning, match=r"reached right"):
            train_step(model, batch).backward()
        model.use_left = False
        with pytest.warns(GradTrailWarning, match=r"reached left"):
            train_step(model, batch).backward()
        assert_block(manager, model, batch)
        model.use_left = True
        train_step(model, batch).backward()
        assert_block(manager, model, batch)
    assert manager.steps == 3


def test_branch_that_the_data_takes_in_a_live_pass():
    """Batches that took it and batches that did not, in one pass; zero where it was not taken."""
    model, (x, y) = Deciding(), pair(6, 4)
    x = x.abs() * torch.tensor([1, -1, 1, -1, -1, 1], dtype=F64).unsqueeze(1)
    rows = list(zip(x, y, strict=True))
    expected = oracle(model, (x, y))
    scores = attribute(model, rows, rows, batch_size=1, progress=False)
    wanted = reference.dot_products(expected, expected)
    close(scores.values.double(), wanted, rtol=1e-5, atol=1e-5)
    selfs = self_influence(model, rows, batch_size=1, progress=False)
    close(selfs.double(), wanted.diagonal(), rtol=1e-5, atol=1e-5)


def test_layer_that_the_first_row_does_not_call_is_right_in_a_live_pass():
    model, (x, y) = Deciding(), pair(6, 4)
    x = x.abs()
    x[0] *= -1
    rows = list(zip(x, y, strict=True))
    assert_live(model, (x[1:], y[1:]), layers=["inlet", "left"])
    scores = attribute(model, rows[:1], rows, batch_size=1, query_batch_size=3, progress=False)
    assert scores.values.shape == (1, 6)


# ---------------------------------------------------------------- torch.compile


class Plain(nn.Module):
    """A forward of its own, which the compiler takes (it leaves torch's own modules alone)."""

    def __init__(self):
        super().__init__()
        self.inner = mlp(4, 5, 3)

    def forward(self, x):
        return 2 * self.inner(x)


def compiled(model, how, backend):
    if how == "wrapped":
        return torch.compile(model, backend=backend)
    model.compile(backend=backend)
    return model


@pytest.fixture
def fresh_compiler():
    import torch._dynamo

    torch._dynamo.reset()
    # a training that failed elsewhere may have left its capture on, which stops compilation
    with torch.compiler.set_stance("default"):
        yield
    torch._dynamo.reset()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("how", ["wrapped", "in-place"])
@pytest.mark.parametrize("warm", [False, True], ids=["never-run", "run-before"])
@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_model_in_a_live_pass(how, backend, warm):
    model, (x, y) = Plain(), pair(4, 4)
    rows = list(zip(x, y, strict=True))
    plain = attribute(model, rows, rows, progress=False)
    called = compiled(model, how, backend)
    if warm:
        train_step(called, (x, y)).backward()
    scores = attribute(called, rows, rows, progress=False)
    close(scores.values, plain.values, rtol=0, atol=0)
    counted = torch._dynamo.utils.counters["stats"]
    graphs = counted["unique_graphs"]
    train_step(called, (x, y)).backward()
    # what was compiled before is still in use, and compiling works as before
    assert counted["unique_graphs"] == graphs if warm else counted["unique_graphs"] > graphs


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("how", ["wrapped", "in-place"])
@pytest.mark.parametrize("hooked", ["outer", "inner"])
@pytest.mark.parametrize("warm", [False, True], ids=["attached-before", "attached-after"])
@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_model_in_training(how, hooked, backend, warm):
    """Compiled code passes over hooks, so a capture runs the model as it was written."""
    model, batch = Plain(), pair(4, 4)
    called = compiled(model, how, backend)
    if warm:
        train_step(called, batch).backward()
    manager = HookManager(called if hooked == "outer" else model)
    with manager.collect():
        train_step(called, batch).backward()
        train_step(called, batch).backward()
    assert manager.steps == 2
    got = {name.removeprefix("_orig_mod."): value for name, value in block_of(manager).items()}
    close(got, oracle(Plain(), batch))
    train_step(called, batch).backward()
    assert manager.steps == 2


@pytest.mark.parametrize("how", ["wrapped", "in-place"])
@pytest.mark.usefixtures("fresh_compiler")
def test_model_compiled_inside_a_capture(how):
    model, batch = Plain(), pair(4, 4)
    manager = HookManager(model)
    with manager.collect():
        called = compiled(model, how, "eager")
        train_step(called, batch).backward()
    assert_block(manager, Plain(), batch)
    train_step(called, batch).backward()
    assert manager.steps == 1


@pytest.mark.usefixtures("fresh_compiler")
def test_compiler_that_is_forced_on_inside_a_capture_is_refused():
    model, batch = Plain(), pair(4, 4)
    with HookManager(model).collect(), torch.compiler.set_stance("default"):
        for hooked in (model, model.inner):
            whole = torch.compile(hooked, backend="eager", fullgraph=True)
            with pytest.raises(Exception, match="must run uncompiled while it is captured"):
                whole(batch[0])


# ---------------------------------------------------------------- evaluation, modes, randomness


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=lambda m: m.__name__)
@pytest.mark.parametrize("reentrant", [None, False], ids=["plain", "non-reentrant"])
def test_evaluation_inside_training(mode, reentrant):
    model, batch, held_out = Blocks(reentrant=reentrant), pair(4, 4), pair(7, 4, seed=5)
    manager = HookManager(model)
    captures = []
    with manager.collect():
        for _ in range(2):
            model.eval()
            with mode():
                model(held_out[0])
                assert manager._taps.current is None
            model.train()
            loss = train_step(model, batch)
            with mode():  # between a forward and its backward
                model(held_out[0])
            loss.backward()
            captures.append(block_of(manager))
    assert manager.steps == 2
    for got in captures:
        close(got, oracle(model, batch, None, sorted(got)))


def test_evaluation_that_raises_inside_training():
    model, batch = mlp(4, 5, 3), pair(4, 4)
    manager = HookManager(model)
    with manager.collect():
        with torch.no_grad(), pytest.raises(RuntimeError, match="shapes"):
            model(torch.zeros(2, 9, dtype=F64))
        train_step(model, batch).backward()
    assert_block(manager, model, batch)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=lambda m: m.__name__)
def test_live_pass_called_without_gradients(mode):
    """Also with rows that were made there."""
    model, (x, y) = mlp(4, 5, 3), pair(4, 4)
    rows = list(zip(x, y, strict=True))
    expected = attribute(model, rows, rows, progress=False)
    tokens = tiny_gpt2()
    with mode():
        inner = list(zip(x.clone(), y.clone(), strict=True))
        scores = attribute(model, inner, inner, progress=False)
        batch = language_batch()
        texts = [{key: value[row].clone() for key, value in batch.items()} for row in range(4)]
        scored = attribute(tokens, texts, texts, layers="*.attn.*", progress=False)
    close(scores.values, expected.values, rtol=0, atol=0)
    again = attribute(tokens, texts, texts, layers="*.attn.*", progress=False)
    close(scored.values, again.values, rtol=0, atol=0)


def test_dropout_left_on_is_off_in_a_live_pass_and_modes_are_restored_per_module():
    model, batch = Blocks(dropout=0.5), pair(4, 5, 4)
    model.train()
    model.blocks[1].eval()
    modes = {name: module.training for name, module in model.named_modules()}
    assert set(modes.values()) == {True, False}
    assert_live(model, batch)
    assert {name: module.training for name, module in model.named_modules()} == modes


def test_dropout_of_a_recurrent_module_is_off_in_a_live_pass():
    """It stays in training mode there, for cuDNN, but drops nothing; both are restored."""

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.inlet = nn.Linear(4, 6, dtype=F64)
            self.memory = nn.LSTM(6, 5, 2, dropout=0.5, batch_first=True, dtype=F64)
            self.head = nn.Linear(5, 3, dtype=F64)

        def forward(self, x):
            return self.head(self.memory(torch.tanh(self.inlet(x)))[0])

    for training in (True, False):
        model = Recurrent().train(training)
        assert_live(model, pair(4, 5, 4))
        assert model.memory.dropout == 0.5
        assert model.memory.training == training


def test_batch_norm_evaluates_in_a_live_pass_and_keeps_its_statistics():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)).double()
    model(pair(8, 4, seed=2)[0])
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    assert_live(model, pair(4, 4))
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name])
    assert model.training


def test_batch_norm_in_training_mode_is_refused_in_a_training_capture():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
    manager = HookManager(model)
    with (
        manager.collect(),
        pytest.warns(GradTrailWarning, match="BatchNorm in training mode"),
        pytest.raises(CaptureError, match="must be in evaluation mode"),
    ):
        train_step(model, pair(4, 4)).backward()


class Noisy(nn.Module):
    """Draws numbers also when it evaluates."""

    def __init__(self):
        super().__init__()
        self.inner = mlp(4, 3)

    def forward(self, x):
        return self.inner(x + torch.randn_like(x))


def test_global_random_state_is_untouched_by_live_passes():
    model, (x, y) = Blocks(dropout=0.5), pair(4, 5, 4)
    rows = list(zip(x, y, strict=True))

    def states():
        return torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()

    noisy = Noisy()
    before = states()
    attribute(model, rows, rows, projection="dense", progress=False)
    attribute(model, rows, rows, projection=2, progress=False)
    self_influence(model, rows, progress=False)
    attribute(noisy, rows, rows, progress=False)
    after = states()
    assert torch.equal(after[0], before[0])
    assert after[1] == before[1]
    assert (after[2] == before[2]).all()


def test_live_pass_leaves_gradients_flags_and_hooks_alone():
    model, batch = Blocks(), pair(4, 5, 4)
    model.inlet.weight.requires_grad_(False)
    train_step(model, batch).backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    copies = {name: None if g is None else g.clone() for name, g in grads.items()}
    versions = {name: p._version for name, p in model.named_parameters()}
    flags = {name: p.requires_grad for name, p in model.named_parameters()}
    fused = torch.backends.mha.get_fastpath_enabled()
    assert_live(model, batch)
    for name, parameter in model.named_parameters():
        assert parameter.grad is grads[name]
        assert copies[name] is None or torch.equal(parameter.grad, copies[name])
        assert parameter._version == versions[name]
        assert parameter.requires_grad == flags[name]
    assert torch.backends.mha.get_fastpath_enabled() == fused
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


# ---------------------------------------------------------------- language models


def checkpointed(model, reentrant):
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)({"use_reentrant": reentrant})
    assert any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    return model


def without_dropout(model):
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


@quiet
@pytest.mark.parametrize("make", [tiny_gpt2, tiny_llama], ids=["gpt2", "llama"])
@pytest.mark.parametrize("reentrant", [None, True, False], ids=["plain", "reentrant", "non"])
def test_language_model_with_its_own_checkpointing_in_training(make, reentrant):
    model = make()
    if reentrant is not None:
        checkpointed(model, reentrant)
    without_dropout(model.train())
    batch = language_batch((6, 6, 6))
    manager = HookManager(model, exclude="*wpe" if make is tiny_gpt2 else None)
    with manager.collect():
        train_step(model, batch).backward()
    got = block_of(manager)
    twin = without_dropout(make().train())
    close(got, oracle(twin, batch, None, sorted(got)), rtol=1e-6, atol=1e-9)


@quiet
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non"])
def test_language_model_with_its_own_checkpointing_in_a_live_pass(reentrant):
    model = checkpointed(tiny_llama(), reentrant)
    model.train()
    assert_live(model, language_batch((6, 4, 5)), rtol=1e-6)
