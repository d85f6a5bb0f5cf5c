"""Weight gradients that a backward leaves to data selection are those that autograd would bring."""

import copy
from contextlib import ExitStack

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from training import Recorder, collate, make_model, make_rows

from gradtrail.callbacks import DataSelectionCallback
from gradtrail.hooks import HookManager
from gradtrail.hooks.deferred import DeferredWeights


def model_of(name, checkpointing=None):
    model = make_model(name).double()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    if checkpointing is not None:
        names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
        enable = next(getattr(model, name) for name in names if hasattr(model, name))
        enable({"use_reentrant": checkpointing == "reentrant"})
        model.enable_input_require_grads()
    return model.train()


def batches():
    rows = make_rows(12)
    return [collate(rows[start : start + 4]) for start in (0, 4, 8)]


def loss_of(model, batch):
    """Sum over the batch's positions."""
    labels = batch["labels"][:, 1:]
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return F.cross_entropy(logits[:, :-1].mT, labels, reduction="sum")


def selection_of(model, threshold):
    return DataSelectionCallback(
        model,
        "validation",
        validation_loader=[collate(make_rows(3, seed=9))],
        validation_loss=loss_of,
        selection_kwargs={"threshold": threshold},
    )


def gradients(model):
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("checkpointing", [None, "reentrant", "other"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_nothing_rejected_leaves_the_bits(name, checkpointing):
    """Over three backwards that add up; the first is autograd's own, to be checked against."""
    model = model_of(name, checkpointing)
    twin = copy.deepcopy(model)
    callback = selection_of(model, -1e9)
    with HookManager(model, callbacks=[callback]).collect():
        for batch in batches():
            loss_of(model, batch).backward()
            loss_of(twin, batch).backward()
            for (key, mine), theirs in zip(
                gradients(model).items(), gradients(twin).values(), strict=True
            ):
                assert torch.equal(mine, theirs), key
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("zeroed", [True, False])
def test_some_rejected(name, zeroed):
    """What is left is the gradient of the kept rows alone, and autograd forms none of it."""
    model = model_of(name)
    twin = copy.deepcopy(model)
    callback = selection_of(model, 0.0)
    rejected = 0
    with HookManager(model, callbacks=[callback]).collect():
        for batch in batches():
            if zeroed:
                model.zero_grad()
                twin.zero_grad()
            loss_of(model, batch).backward()
            rejected += int(callback.last_dropped.sum())
            kept = {key: value[~callback.last_dropped] for key, value in batch.items()}
            loss_of(twin, kept).backward()
            for (key, mine), theirs in zip(
                gradients(model).items(), gradients(twin).values(), strict=True
            ):
                torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9, msg=key)
    assert 0 < rejected < 12


def captured(model, run, units=None, enabled=True):
    """Run a backward whose weights may be left out; which were."""
    manager = HookManager(model)
    deferred = DeferredWeights(manager, lambda parameter: bool(parameter._backward_hooks))
    deferred.enabled = enabled
    with ExitStack() as stack, manager.collect():
        deferred.watch(manager.selection.units if units is None else units, stack)
        run(deferred)
    return deferred.left_out


@pytest.mark.filterwarnings("ignore:Layers are left out")
def test_which_layers_are_left_out():
    model = model_of("gpt2")
    batch = batches()[0]
    left = captured(model, lambda _: loss_of(model, batch).backward())
    names = {name for name, m in model.named_modules() if type(m).__name__ == "Conv1D"}
    assert left == names  # the head shares its weight with a table
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == (name.rpartition(".")[0] in names), name
    model.zero_grad()
    assert not captured(model, lambda _: loss_of(model, batch).backward(), enabled=False)
    assert all(parameter.grad is not None for parameter in model.parameters())


class Twice(nn.Module):
    """Calls a layer by position and by keyword, and one of its own kind beside it."""

    def __init__(self, keyword):
        super().__init__()
        self.keyword = keyword
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x):
        hidden = self.first(torch.tanh(self.first(x)))
        if self.keyword:
            hidden = self.first(input=hidden)
        return self.second(hidden)


def small(keyword=False):
    torch.manual_seed(0)
    return Twice(keyword).double()


def small_batch(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(6, 5, generator=generator, dtype=torch.float64)


def small_selection(model, threshold):
    return DataSelectionCallback(
        model,
        "validation",
        validation_loader=[(small_batch(9), torch.ones(6, 3, dtype=torch.float64))],
        selection_kwargs={"threshold": threshold},
    )


@pytest.mark.parametrize("threshold", [0.0, -1e9, 1e9])
@pytest.mark.parametrize("keyword", [True, False])
def test_calls_of_which_some_are_left_out(keyword, threshold):
    """A call by keyword is autograd's, its neighbours are not; the sum is that of the kept."""
    model = small(keyword)
    twin = copy.deepcopy(model)
    callback = small_selection(model, threshold)
    with HookManager(model, callbacks=[callback]).collect():
        for number in range(4):
            if number == 2:
                model.zero_grad()
                twin.zero_grad()
            x = small_batch(number)
            model(x).square().sum().backward()
            (twin(x).square().sum(1) * ~callback.last_dropped).sum().backward()
            for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
                torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", ["hook", "after", "frozen bias", "own forward", "autocast"])
def test_what_autograd_keeps(kind):
    model = small()
    seen = []
    if kind == "hook":
        model.second.weight.register_hook(seen.append)
    elif kind == "after":
        model.second.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad))
    elif kind == "frozen bias":
        model.second.bias.requires_grad_(False)
    elif kind == "own forward":
        second = model.second
        second.forward = lambda x: F.linear(x, second.weight, second.bias)
    elif kind == "autocast":
        model = model.float()
    twin = copy.deepcopy(model)
    twin.second.weight._backward_hooks = None
    vars(twin.second).pop("forward", None)
    callback = small_selection(model, -1e9)
    dtype = next(model.parameters()).dtype
    callback._target._loader = [
        tuple(one.to(dtype) for one in batch) for batch in callback._target._loader
    ]
    with (
        torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"),
        HookManager(model, callbacks=[callback]).collect(),
    ):
        for number in range(2):
            for one in (model, twin):
                one.zero_grad()
                one(small_batch(number).to(dtype)).float().square().sum().backward()
    mine, theirs = model.second.weight.grad, twin.second.weight.grad
    assert torch.equal(mine, theirs)
    torch.testing.assert_close(model.first.weight.grad, twin.first.weight.grad)
    assert len(seen) == (2 if kind in ("hook", "after") else 0)


def test_callbacks_before_a_selection_see_the_gradients():
    model, seen = small(), []

    class Reads(Recorder):
        def on_step(self, block):
            super().on_step(block)
            seen.append(model.second.weight.grad is not None)

    callbacks = [Reads(), small_selection(model, 0.0)]
    with HookManager(model, callbacks=callbacks).collect():
        for number in range(3):
            model.zero_grad()
            model(small_batch(number)).square().sum().backward()
    assert seen == [True] * 3


def test_a_backward_after_the_capture_and_a_copy_within():
    """Neither loses anything: a copy runs on its own weights, a late backward is autograd's."""
    model, x = small(), small_batch(1)
    twin = copy.deepcopy(model)
    later = []

    def run(_):
        copied = copy.deepcopy(model)
        with torch.no_grad():
            copied.second.weight.zero_()
        assert torch.equal(copied(x), model.second.bias.expand(6, 3))
        later.append(model(x).square().sum())

    assert not captured(model, run)
    later[0].backward()
    twin(x).square().sum().backward()
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


@pytest.mark.filterwarnings("ignore:No gradient reached")
def test_gradients_that_are_asked_for():
    """``autograd.grad`` gives the weights' gradients, and leaves nothing in ``.grad``."""
    model, x = small(), small_batch(1)
    expected = torch.autograd.grad(model(x).square().sum(), model.second.weight)
    found = []

    def run(_):
        found.extend(torch.autograd.grad(model(x).square().sum(), model.second.weight))

    assert not captured(model, run)
    assert torch.equal(*found, *expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision(dtype):
    """Kept rows are summed in float32 and rounded once."""
    model = small().to(dtype)
    callback = small_selection(model, 0.0)
    callback._target._loader = [
        tuple(one.to(dtype) for one in batch) for batch in callback._target._loader
    ]
    exact = copy.deepcopy(model).double()
    with HookManager(model, callbacks=[callback]).collect():
        for number in range(3):
            model.zero_grad()
            exact.zero_grad()
            x = small_batch(number).to(dtype)
            model(x).square().sum().backward()
            (exact(x.double()).square().sum(1) * ~callback.last_dropped).sum().backward()
            for mine, theirs in zip(model.parameters(), exact.parameters(), strict=True):
                scale = float(theirs.grad.abs().max()) + 1e-3
                assert float((mine.grad.double() - theirs.grad).abs().max()) <= 0.05 * scale


# ---------------------------------------------------------------- backwards of other kinds


def fixed_selection(threshold):
    """Two linear layers, what they would be without a selection, and a selection."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    target = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    options = {"threshold": threshold}
    callback = DataSelectionCallback(model, "fixed", target, selection_kwargs=options)
    manager = HookManager(model, callbacks=[callback], loss_reduction="sum")
    inputs = [torch.randn(5, 6, dtype=torch.float64) for _ in range(4)]
    return copy.deepcopy(model), manager, callback, inputs


def squares(model, inputs):
    return model(inputs).square().sum()


def same_gradients(model, twin):
    for (name, mine), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), name
        if mine.grad is not None:
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-12, atol=1e-12, msg=name)


@pytest.mark.parametrize("together", [True, False])
def test_two_forwards_before_a_backward(together):
    """In one backward or in two, nothing of either is lost, and later ones leave out again."""
    twin, manager, callback, inputs = fixed_selection(-1e9)
    model = manager.model
    with manager.collect():
        squares(model, inputs[0]).backward()
        squares(twin, inputs[0]).backward()
        for one in (model, twin):
            losses = [squares(one, inputs[1]), squares(one, inputs[2])]
            for loss in [sum(losses)] if together else losses:
                loss.backward()
        same_gradients(model, twin)
        seen = watched(callback)
        squares(model, inputs[3]).backward()
        squares(twin, inputs[3]).backward()
        assert seen == [{"0", "2"}]
    same_gradients(model, twin)


def watched(callback):
    """What each backward from here on leaves out, as its step begins."""
    seen, score = [], callback._score

    def first_of_a_step(name, *others):
        if name == "0":
            seen.append(set(callback._deferred.left_out))
        return score(name, *others)

    callback._score = first_of_a_step
    return seen


def test_an_error_of_a_selection_leaves_the_gradients_whole():
    twin, manager, callback, inputs = fixed_selection(0.0)
    model = manager.model
    with manager.collect():
        squares(model, inputs[0]).backward()
        model.zero_grad()

        def failing(*_):
            raise ArithmeticError("no score")

        score, callback._score = callback._score, failing
        with pytest.raises(ArithmeticError, match="no score"):
            squares(model, inputs[1]).backward()
        squares(twin, inputs[1]).backward()
        same_gradients(model, twin)
        callback._score = score
        model.zero_grad()
        twin.zero_grad()
        squares(model, inputs[2]).backward()
        squares(twin, inputs[2][~callback.last_dropped]).backward()
        assert callback.last_dropped.any()
    same_gradients(model, twin)


def test_a_backward_that_asks_for_some_parameters():
    twin, manager, _, inputs = fixed_selection(-1e9)
    model = manager.model
    with manager.collect():
        squares(model, inputs[0]).backward()
        model.zero_grad()
        for one in (model, twin):
            squares(one, inputs[1]).backward(inputs=[one[0].weight])
        same_gradients(model, twin)
