"""Data selection: scores and corrected gradients against backwards over the kept examples alone."""

import contextlib
import copy
import gc
import importlib.util
import re
import sys
import weakref
from pathlib import Path

import pytest
import torch
from capturing import close, language_batch, mlp, tiny_gpt2, tiny_llama
from models import exactly
from test_layers import BY_ROW, CASES, Holder
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from training import collate, hooks_on, make_model, make_rows, make_trainer

from gradtrail import CaptureError, GradTrailWarning, HookManager, Projection, reference
from gradtrail.callbacks import DataSelectionCallback, GradTrailCallback, TwoPassSelection
from gradtrail.callbacks.selection_losses import summed_loss
from gradtrail.errors import UnsupportedLayerError

# torch's own hint about a copy it makes, for the one case with odd total padding
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
quiet = pytest.mark.filterwarnings("ignore::gradtrail.GradTrailWarning")

HALF = {"threshold": 0.5, "threshold_mode": "bottom_fraction"}


def random_target(model, seed=5):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def gradients(model):
    return {
        name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()
    }


def assert_gradients(model, expected, rtol=1e-10, atol=1e-11):
    for name, parameter in model.named_parameters():
        wanted = expected[name]
        if wanted is None:
            assert parameter.grad is None or not parameter.grad.to_dense().any(), name
        else:
            close(parameter.grad.to_dense(), wanted.to_dense(), rtol=rtol, atol=atol)


def dots(rows, target):
    """Scores by explicit dot products of written-out gradients."""
    flat = torch.cat([rows[name].flatten(1) for name in target], 1)
    return flat.double() @ torch.cat([target[name].flatten() for name in target]).double()


def no_dropout(model):
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


# ---------------------------------------------------------------- every kind of layer


def layer_batches(label, count=2):
    rule, case = CASES[label]
    torch.manual_seed(0)
    model = Holder(case.build())
    batches = [case.inputs() for _ in range(count)]
    directions = [torch.randn_like(model(*args)) for args in batches]
    return model, batches, directions


@pytest.mark.parametrize("label", BY_ROW)
def test_every_layer_kind_loses_exactly_the_rejected(label):
    """Two micro-batches; the one before lies in ``.grad`` when the second is corrected."""
    model, batches, directions = layer_batches(label)
    target = random_target(model)
    twin = copy.deepcopy(model)
    callback = DataSelectionCallback(
        model,
        "fixed",
        target,
        selection_kwargs={"threshold": 0.4, "threshold_mode": "bottom_fraction"},
    )
    with HookManager(model, callbacks=[callback]).collect():
        for args, direction in zip(batches, directions, strict=True):
            (model(*args) * direction).sum().backward()
            rows = reference.per_example_gradients(
                twin,
                range(len(direction)),
                lambda twin, row, args=args, direction=direction: (
                    twin(*args)[row] * direction[row]
                ).sum(),
            )
            expected = dots(rows, target)
            close(callback.last_scores, expected, rtol=1e-10, atol=1e-10)
            worst = int(expected.argmin())
            assert callback.last_dropped.tolist() == [row == worst for row in range(len(direction))]
            kept = ~callback.last_dropped
            (twin(*args) * direction)[kept].sum().backward()
    assert_gradients(model, gradients(twin))


@pytest.mark.parametrize("label", BY_ROW)
def test_every_layer_kind_in_the_batch_target(label):
    """Many rejected: the kept ones' part is built anew, beside what lay in ``.grad`` before."""
    model, (first, second), directions = layer_batches(label)
    twin = copy.deepcopy(model)
    options = {"threshold": 0.7, "threshold_mode": "bottom_fraction"}
    written = {"score_mode": "materialized"}
    callback = DataSelectionCallback(model, selection_kwargs=options, scoring_kwargs=written)
    for one in (model, twin):
        (one(*first) * directions[0]).sum().backward()
    with HookManager(model, callbacks=[callback]).collect():
        (model(*second) * directions[1]).sum().backward()
    rows = reference.per_example_gradients(
        twin,
        range(len(directions[1])),
        lambda twin, row: (twin(*second)[row] * directions[1][row]).sum(),
    )
    expected = dots(rows, {name: value.sum(0) for name, value in rows.items()})
    close(callback.last_scores, expected, rtol=1e-10, atol=1e-10)
    kept = ~callback.last_dropped
    assert int(kept.sum()) == 1
    (twin(*second) * directions[1])[kept].sum().backward()
    assert_gradients(model, gradients(twin))


def hf_conv1d():
    return pytest.importorskip("transformers").pytorch_utils.Conv1D(3, 5).double()


LONG = {
    "linear": (lambda: nn.Linear(5, 3), (5, 40, 5)),
    "linear-no-bias": (lambda: nn.Linear(5, 3, bias=False), (5, 2, 20, 5)),
    "hf-conv1d": (hf_conv1d, (5, 40, 5)),
    "conv1d": (lambda: nn.Conv1d(2, 3, 4), (5, 2, 40)),
    "conv2d": (lambda: nn.Conv2d(2, 3, (2, 3)), (5, 2, 8, 9)),
    "conv2d-groups": (lambda: nn.Conv2d(2, 4, 3, groups=2), (5, 2, 8, 9)),
    "conv_transpose1d": (lambda: nn.ConvTranspose1d(2, 3, 4, stride=2), (5, 2, 40)),
}


@pytest.mark.parametrize("threshold", [0.4, 0.8], ids=["subtracted", "built-anew"])
@pytest.mark.parametrize("label", LONG)
def test_examples_of_many_positions(label, threshold):
    """Their parts are added one by one, in place, where the weight's layout allows."""
    torch.manual_seed(0)
    build, shape = LONG[label]
    model = Holder(build().double())
    twin, x = copy.deepcopy(model), torch.randn(shape, dtype=torch.float64)
    options = {"threshold": threshold, "threshold_mode": "bottom_fraction"}
    callback = DataSelectionCallback(model, "fixed", random_target(model), selection_kwargs=options)
    with HookManager(model, callbacks=[callback]).collect():
        for _ in range(2):
            model(x).square().sum().backward()
            twin(x)[~callback.last_dropped].square().sum().backward()
            assert_gradients(model, gradients(twin))


# ---------------------------------------------------------------- losses of models

MODELS = {"gpt2": tiny_gpt2, "llama": tiny_llama}
LENGTHS = (6, 4, 5, 1, 6)


def language_loss(model, batch, reduction):
    """Loss of a causal model taken outside it, reduced as asked."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    values = F.cross_entropy(
        logits[:, :-1].transpose(1, 2), batch["labels"][:, 1:], reduction="none"
    ).sum(1)
    return values.sum() if reduction == "sum" else values.mean()


def step_loss(model, batch, reduction):
    if reduction in ("sum", "mean"):
        return language_loss(model, batch, reduction)
    return model(**batch).loss


@quiet
@pytest.mark.parametrize("target", ["batch", "validation"])
@pytest.mark.parametrize("reduction", ["sum", "mean", "token_mean", "model"])
@pytest.mark.parametrize("name", MODELS)
def test_losses_become_those_of_the_kept_rows(name, reduction, target):
    with exactly():
        model = no_dropout(MODELS[name]()).train()
        twin = copy.deepcopy(model)
        validation = [language_batch((5, 3), seed=8), language_batch((6,), seed=9)]
        more = {"validation_loader": validation} if target == "validation" else {}
        callback = DataSelectionCallback(
            model, target, renormalize=reduction != "sum", selection_kwargs=HALF, **more
        )
        manager = HookManager(model, loss_reduction=reduction, callbacks=[callback])
        state = torch.get_rng_state()
        with manager.collect():
            for step in range(2):
                model.zero_grad(set_to_none=bool(step))
                twin.zero_grad(set_to_none=bool(step))
                batch = language_batch(LENGTHS, seed=step)
                step_loss(model, batch, reduction).backward()
                assert model.training
                kept = ~callback.last_dropped
                assert int(kept.sum()) == 3
                step_loss(twin, {k: v[kept] for k, v in batch.items()}, reduction).backward()
                assert_gradients(model, gradients(twin))
        assert torch.equal(torch.get_rng_state(), state)
        assert manager.steps == 2
        assert [record.kept_share for record in callback.history] == [0.6, 0.6]


def own_rows(model, batch):
    """Per-example gradients of a causal model's summed loss."""
    singles = [{k: v[row : row + 1] for k, v in batch.items()} for row in range(len(LENGTHS))]
    return reference.per_example_gradients(
        model, singles, lambda model, one: language_loss(model, one, "sum")
    )


@quiet
@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize("mode", ["ghost", "materialized"])
@pytest.mark.parametrize("name", MODELS)
def test_validation_scores_are_dot_products(name, mode, batches):
    with exactly():
        model = no_dropout(MODELS[name]())
        loader = [language_batch((5, 3), seed=8), language_batch((6,), seed=9)]
        callback = DataSelectionCallback(
            model,
            "validation",
            validation_loader=loader,
            validation_batches_per_pass=batches,
            scoring_kwargs={"score_mode": mode},
        )
        target = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        for batch in loader[:batches]:
            model.zero_grad()
            language_loss(model, batch, "sum").backward()
            target = {
                name: value + model.get_parameter(name).grad for name, value in target.items()
            }
        model.zero_grad()
        batch = language_batch(LENGTHS)
        rows = own_rows(model, batch)
        with HookManager(model, loss_reduction="token_mean", callbacks=[callback]).collect():
            model(**batch).loss.backward()
        close(callback.last_scores, dots(rows, target), rtol=1e-10)
        assert callback.last_dropped.tolist() == (callback.last_scores < 0).tolist()


@quiet
@pytest.mark.parametrize("mode", ["ghost", "materialized"])
@pytest.mark.parametrize("name", MODELS)
def test_batch_scores_are_dot_products(name, mode):
    with exactly():
        model = no_dropout(MODELS[name]())
        callback = DataSelectionCallback(model, scoring_kwargs={"score_mode": mode})
        batch = language_batch(LENGTHS)
        rows = own_rows(model, batch)
        target = {name: value.sum(0) for name, value in rows.items()}
        with HookManager(model, loss_reduction="token_mean", callbacks=[callback]).collect():
            for _ in range(2):  # the second time beside an earlier gradient
                model(**batch).loss.backward()
                close(callback.last_scores, dots(rows, target), rtol=1e-10)


# ---------------------------------------------------------------- loops


def classes_loss(model, batch, reduction="sum"):
    return F.cross_entropy(model(batch[0]), batch[1], reduction=reduction)


def classes_batch(seed=0, b=5, width=4):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(b, width, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 3, (b,), generator=generator)


@pytest.mark.parametrize("set_to_none", [True, False], ids=["none", "zeros"])
@pytest.mark.parametrize("capture", ["factored", "materialized"])
@pytest.mark.parametrize("renormalize", [False, True])
def test_accumulation_keeps_what_earlier_backwards_left(renormalize, capture, set_to_none):
    model = mlp(4, 6, 3)
    twin = copy.deepcopy(model)
    callback = DataSelectionCallback(model, renormalize=renormalize, selection_kwargs=HALF)
    manager = HookManager(
        model, loss_reduction="mean", loss_scale=1 / 3, callbacks=[callback], capture=capture
    )
    with manager.collect():
        for step in range(2):
            for one in (model, twin):
                one.zero_grad(set_to_none=set_to_none)
            for micro in range(3):
                batch = classes_batch(3 * step + micro)
                (classes_loss(model, batch, "mean") / 3).backward()
                kept = ~callback.last_dropped
                part = tuple(value[kept] for value in batch)
                size = len(part[0]) if renormalize else len(batch[0])
                (classes_loss(twin, part) / size / 3).backward()
            assert_gradients(model, gradients(twin))


@pytest.mark.parametrize("start", [1, 0], ids=["shifted", "as-they-are"])
def test_a_divisor_of_the_whole_optimizer_step(start):
    """Labels counted over all micro-batches: rejections add up, what is there is rescaled."""
    with exactly():
        model = no_dropout(tiny_llama()).train()
        twin = copy.deepcopy(model)
        batches = [language_batch(LENGTHS, seed=seed) for seed in range(3)]
        items = sum(count_labels(batch, start) for batch in batches)
        callback = DataSelectionCallback(model, renormalize=True, selection_kwargs=HALF)
        manager = HookManager(model, loss_reduction="model", callbacks=[callback])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with manager.collect(optimizer):
            for _ in range(2):
                optimizer.zero_grad()
                twin.zero_grad()
                kept = []
                for batch in batches:
                    model(**batch, num_items_in_batch=torch.tensor(items)).loss.backward()
                    rows = ~callback.last_dropped
                    kept.append({name: value[rows] for name, value in batch.items()})
                left = sum(count_labels(batch, start) for batch in kept)
                assert left < items
                for batch in kept:
                    (language_loss(twin, batch, "sum") / left).backward()
                assert_gradients(model, gradients(twin))
                optimizer.step()
        manager = HookManager(model, loss_reduction="model", callbacks=[callback])
        with manager.collect(), pytest.raises(CaptureError, match="Pass it to collect"):
            model(**batches[0], num_items_in_batch=torch.tensor(items)).loss.backward()
        with manager.collect(optimizer):
            model(**batches[0], num_items_in_batch=torch.tensor(items)).loss.backward()
            with pytest.raises(CaptureError, match="must see all labels that the loss of an opt"):
                optimizer.step()


class Everything(nn.Module):
    """A tied table and head, a layer called twice, one shared by two modules, a position table."""

    def __init__(self, checkpointing=None):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 6, padding_idx=0)
        self.place = nn.Embedding(7, 6)
        self.twice = nn.Linear(6, 6)
        self.one, self.other = nn.Linear(6, 6, bias=False), nn.Linear(6, 6)
        self.other.weight = self.one.weight
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.checkpointing = checkpointing
        self.double()

    def body(self, x):
        x = self.twice(torch.tanh(self.twice(x)))
        return self.norm(x + self.other(torch.relu(self.one(x))))

    def forward(self, index):
        x = self.embed(index) + self.place(torch.arange(index.shape[1]).unsqueeze(0))
        if self.checkpointing is None:
            return self.head(self.body(x))
        return self.head(checkpoint(self.body, x, use_reentrant=self.checkpointing))


def index_batch(seed=0, b=4):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 11, (b, 5), generator=generator)


def index_loss(model, index, rows=slice(None)):
    return F.cross_entropy(model(index)[rows].transpose(1, 2), index[rows], reduction="sum")


@pytest.mark.parametrize("mode", ["ghost", "materialized"])
@pytest.mark.parametrize("target", ["batch", "fixed", "validation"])
@pytest.mark.parametrize("checkpointing", [None, True, False], ids=["plain", "reentrant", "non"])
def test_shared_parameters_and_checkpointing(checkpointing, target, mode):
    model, twin = Everything(checkpointing), Everything()
    validation = index_batch(9, 3)
    index_loss(twin, validation).backward()
    wanted = {name: value.clone() for name, value in gradients(twin).items()}
    more = {"target_gradient": wanted} if target == "fixed" else {}
    if target == "validation":
        more = {"validation_loader": [validation], "validation_loss": index_loss}
    callback = DataSelectionCallback(
        model, target, selection_kwargs=HALF, scoring_kwargs={"score_mode": mode}, **more
    )
    twin.zero_grad()
    manager = HookManager(model, callbacks=[callback])
    with manager.collect():
        for seed in range(2):
            index = index_batch(seed)
            rows = reference.per_example_gradients(
                twin,
                range(len(index)),
                lambda twin, row, index=index: index_loss(twin, index[[row]]),
            )
            if target == "batch":
                wanted = {name: value.sum(0) for name, value in rows.items()}
            index_loss(model, index).backward()
            close(callback.last_scores, dots(rows, wanted), rtol=1e-10)
            assert int(callback.last_dropped.sum()) == 2
            index_loss(twin, index, ~callback.last_dropped).backward()
            assert_gradients(model, gradients(twin))
    assert manager.coverage.share == 1.0


def test_two_forwards_then_two_backwards():
    model = mlp(4, 6, 3)
    twin = copy.deepcopy(model)
    callback = DataSelectionCallback(model, selection_kwargs=HALF)
    batches = [classes_batch(0), classes_batch(1, b=4)]
    kept = []
    with HookManager(model, callbacks=[callback]).collect():
        for value in [classes_loss(model, batch) for batch in batches]:
            value.backward()
            kept.append(~callback.last_dropped)
    for batch, rows in zip(batches, kept, strict=True):
        classes_loss(twin, tuple(value[rows] for value in batch)).backward()
    assert_gradients(model, gradients(twin))


def test_a_backward_that_raises_leaves_nothing_behind():
    model = mlp(4, 6, 3)
    callback = DataSelectionCallback(model, selection_kwargs=HALF)
    switch = [True]
    model[0].weight.register_hook(lambda _: 1 / 0 if switch[0] else None)
    twin = mlp(4, 6, 3)
    with HookManager(model, callbacks=[callback]).collect():
        for part in (0, 1):
            value = classes_loss(model, classes_batch(part))
            if part == 0:
                with pytest.raises(ZeroDivisionError):
                    value.backward(retain_graph=True)
                assert callback.last_scores is None
                switch[0] = False
                # whatever the failed one left in .grad is the loop's to deal with
                classes_loss(twin, classes_batch(0)).backward()
                before = {name: torch.randn_like(p) for name, p in model.named_parameters()}
                for one in (model, twin):
                    for name, parameter in one.named_parameters():
                        parameter.grad = before[name].clone()
            value.backward()
            rows = ~callback.last_dropped
            classes_loss(twin, tuple(v[rows] for v in classes_batch(part))).backward()
            assert_gradients(model, gradients(twin))


def test_evaluation_in_between_and_an_abandoned_forward():
    model = mlp(4, 6, 3)
    twin = copy.deepcopy(model)
    callback = DataSelectionCallback(
        model, "validation", validation_loader=[classes_batch(5)], selection_kwargs=HALF
    )
    with HookManager(model, callbacks=[callback]).collect():
        with torch.no_grad():
            classes_loss(model, classes_batch(3))
        classes_loss(model, classes_batch(4))
        classes_loss(model, classes_batch(0)).backward()
    assert len(callback.history) == 1
    classes_loss(twin, tuple(v[~callback.last_dropped] for v in classes_batch(0))).backward()
    assert_gradients(model, gradients(twin))


def test_nothing_rejected_leaves_the_bits_and_the_model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.ReLU(), nn.Linear(6, 3)).double()
    twin = copy.deepcopy(model)
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    callback = DataSelectionCallback(
        model,
        "validation",
        validation_loader=torch.utils.data.DataLoader(
            list(zip(*classes_batch(7, b=9), strict=True)), batch_size=2, shuffle=True
        ),
        selection_kwargs={"threshold": -1e9},
    )
    states = []
    for one, manager in ((twin, None), (model, HookManager(model, callbacks=[callback]))):
        torch.manual_seed(3)
        with contextlib.nullcontext() if manager is None else manager.collect():
            for step in range(3):
                classes_loss(one, classes_batch(step)).backward()
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)
        assert not mine._backward_hooks
    assert [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()] == hooks
    assert callback.history[-1].kept_share == 1.0


def test_the_model_is_let_go():
    model = mlp(4, 6, 3)
    callback = DataSelectionCallback(model, selection_kwargs=HALF)
    with HookManager(model, callbacks=[callback]).collect():
        classes_loss(model, classes_batch()).backward()
    alive = weakref.ref(model[0].weight)
    gc.disable()
    try:
        del model, callback
        gc.collect()
        assert alive() is None
    finally:
        gc.enable()


# ---------------------------------------------------------------- choices


def test_every_layer_may_reject_on_its_own():
    model = mlp(4, 6, 3)
    twin = copy.deepcopy(model)
    target = random_target(model)
    callback = DataSelectionCallback(
        model, "fixed", target, renormalize=True, selection_kwargs={**HALF, "layer_wise": True}
    )
    batch = classes_batch()
    with HookManager(model, loss_reduction="mean", callbacks=[callback]).collect():
        classes_loss(model, batch, "mean").backward()
    rows = reference.per_example_gradients(
        twin, range(5), lambda twin, row: classes_loss(twin, tuple(v[[row]] for v in batch))
    )
    assert set(callback.last_scores) == set(callback.last_dropped) == {"0", "2"}
    assert not torch.equal(*callback.last_dropped.values())
    for layer, scores in callback.last_scores.items():
        names = [f"{layer}.weight", f"{layer}.bias"]
        close(scores, dots(rows, {name: target[name] for name in names}), rtol=1e-10)
        kept = ~callback.last_dropped[layer]
        assert torch.equal(kept, scores >= scores.sort().values[2])
        for name in names:
            close(model.get_parameter(name).grad, rows[name][kept].mean(0), rtol=1e-10)
    assert callback.history[0].kept_share == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [1, 4]),
        ({"threshold": 2.0}, [0, 1, 4]),
        ({"threshold": 0.4, "threshold_mode": "bottom_fraction"}, [1, 4]),
        ({"threshold": 0.65, "threshold_mode": "bottom_fraction"}, [0, 1, 4]),
        ({"threshold": 0.9, "threshold_mode": "bottom_fraction"}, [0, 1, 3, 4]),
        ({"threshold": 0.8, "threshold_mode": "negative_bottom_fraction"}, [1, 4]),
        ({"threshold": 0.2, "threshold_mode": "negative_bottom_fraction"}, [4]),
        ({"threshold": 1, "threshold_mode": "negative_bottom_fraction"}, [1, 4]),
    ],
)
def test_thresholds(options, expected):
    """Scores 1, -2, 5, 2, -3 by a target that picks the input itself out."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False, dtype=torch.float64))
    target = {"0.weight": torch.ones(1, 1, dtype=torch.float64)}
    callback = DataSelectionCallback(model, "fixed", target, selection_kwargs=options)
    x = torch.tensor([[1.0], [-2.0], [5.0], [2.0], [-3.0]], dtype=torch.float64)
    with HookManager(model, callbacks=[callback]).collect():
        model(x).sum().backward()
    assert callback.last_scores.tolist() == x.flatten().tolist()
    assert callback.last_dropped.nonzero().flatten().tolist() == expected
    kept = [row for row in range(5) if row not in expected]
    close(model[0].weight.grad, x[kept].sum(0, keepdim=True), rtol=1e-12)
    record = callback.history[0]
    assert record.kept_share == len(kept) / 5
    assert (record.score_min, record.score_median, record.score_max) == (-3, 1, 5)


def test_equal_scores_keep_the_later_rows():
    model = nn.Sequential(nn.Linear(1, 1, bias=False))
    callback = DataSelectionCallback(model, selection_kwargs=HALF)
    with HookManager(model, callbacks=[callback]).collect():
        model(torch.ones(4, 1)).sum().backward()
    assert callback.last_dropped.tolist() == [True, True, False, False]


def test_all_rejected_is_exactly_nothing():
    model = mlp(4, 6, 3)
    callback = DataSelectionCallback(
        model, renormalize=True, selection_kwargs={"threshold": float(10**9)}
    )
    with HookManager(model, loss_reduction="mean", callbacks=[callback]).collect():
        classes_loss(model, classes_batch(), "mean").backward()
        assert not any(p.grad.any() for p in model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        classes_loss(model, classes_batch(), "mean").backward()
        for parameter in model.parameters():
            close(parameter.grad, torch.ones_like(parameter), rtol=1e-12)
    assert callback.logs() == {
        "selection_kept_share": 0.0,
        **{
            f"selection_{name}": sum(getattr(r, name) for r in callback.history) / 2
            for name in ("score_min", "score_q25", "score_median", "score_q75", "score_max")
        },
    }
    assert callback.logs() == {}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"target": "mean"}, ValueError, "target must be one of 'batch', 'fixed', 'validation'"),
        ({"target": "fixed"}, ValueError, "'fixed' must come with target_gradient, got None"),
        ({"target": "validation"}, ValueError, "must come with validation_loader, got None"),
        ({"target_gradient": {}}, ValueError, "target_gradient must go with target='fixed'"),
        ({"validation_loader": []}, ValueError, "validation_loader must go with target='valid"),
        ({"validation_loss": len}, ValueError, "validation_loss must go with target='validation'"),
        ({"validation_batches_per_pass": 2}, ValueError, "batches_per_pass must go with target="),
        ({"validation_batches_per_pass": 0}, ValueError, "must be an integer of at least 1"),
        ({"renormalize": 1}, TypeError, "renormalize must be True or False, got 1"),
        ({"scoring_kwargs": 3}, TypeError, "scoring_kwargs must be a mapping, got int"),
        ({"scoring_kwargs": {"mode": "ghost"}}, ValueError, "other keys than 'score_mode', got 'm"),
        ({"scoring_kwargs": {"score_mode": "fast"}}, ValueError, "score_mode must be one of 'ghos"),
        (
            {"selection_kwargs": {"thresholds": 1}},
            ValueError,
            "got 'thresholds'. Near names: 'thresh",
        ),
        (
            {"selection_kwargs": {"threshold": None}},
            ValueError,
            "must be a finite number, got None",
        ),
        ({"selection_kwargs": {"threshold": float("nan")}}, ValueError, "a finite number, got nan"),
        ({"selection_kwargs": {"threshold": True}}, ValueError, "a finite number, got True"),
        ({"selection_kwargs": {"threshold_mode": "top"}}, ValueError, "threshold_mode must be one"),
        ({"selection_kwargs": {"layer_wise": 1}}, TypeError, "layer_wise must be True or False"),
        (
            {"selection_kwargs": {"threshold_mode": "bottom_fraction"}},
            ValueError,
            "above 0 and below 1 with threshold_mode='bottom_fraction', got 0.0. A share of 0 rej",
        ),
        (
            {"selection_kwargs": {"threshold": 1.0, "threshold_mode": "bottom_fraction"}},
            ValueError,
            "above 0 and below 1",
        ),
        (
            {"selection_kwargs": {"threshold": 1.1, "threshold_mode": "negative_bottom_fraction"}},
            ValueError,
            "above 0 and at most 1",
        ),
        (
            {"target": "validation", "validation_loader": iter([])},
            TypeError,
            "that can be gone through again, got list_iterator",
        ),
        (
            {"target": "validation", "validation_loader": [], "validation_loss": 3},
            TypeError,
            "validation_loss must be a callable",
        ),
        ({"target": "fixed", "target_gradient": [1]}, TypeError, "must be a mapping of parameter"),
        ({"target": "fixed", "target_gradient": {}}, ValueError, "got less: 0.bias, 0.weight, 2"),
    ],
)
def test_options_are_refused(options, error, message):
    model = mlp(4, 6, 3)
    with pytest.raises(error, match=message):
        DataSelectionCallback(model, **options)
    if "renormalize" not in options:
        with pytest.raises(error, match=message):
            TwoPassSelection(model, **options)


def test_target_gradients_are_checked():
    model = mlp(4, 6, 3)
    good = random_target(model)
    for change, message in (
        ({"extra": torch.ones(1)}, "got more: extra. Give zeros"),
        ({"0.bias": torch.ones(5)}, r"\['0.bias'\] must be of shape \(6,\) and finite, got \(5,\)"),
        ({"0.bias": torch.full((6,), float("inf"))}, "got an entry that is not"),
    ):
        with pytest.raises(ValueError, match=message):
            DataSelectionCallback(model, "fixed", {**good, **change})


class Functional(nn.Module):
    """Reads a weight without calling the layer that owns it."""

    def __init__(self, scale=False):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.other = nn.Linear(4, 3), nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.ones(1)) if scale else 1.0

    def forward(self, x):
        return self.scale * (F.linear(x, self.layer.weight) + self.other(x))


def test_uncovered_parameters_are_refused_and_named():
    model = Functional(scale=True)
    with pytest.raises(
        UnsupportedLayerError, match=r"scale \(Functional has no rule for 'scale'\)"
    ):
        DataSelectionCallback(model)
    with pytest.raises(UnsupportedLayerError, match="Freeze them"):
        TwoPassSelection(model)
    model.scale.requires_grad_(False)
    callback = DataSelectionCallback(model)
    left_out = HookManager(model, exclude="other", callbacks=[callback])
    with pytest.raises(UnsupportedLayerError, match=r"other.weight \(excluded\)"):
        left_out.collect().__enter__()
    manager = HookManager(model, callbacks=[callback])
    with manager.collect(), pytest.raises(UnsupportedLayerError, match="layer.weight"):
        model(torch.randn(3, 4))
    with pytest.raises(UnsupportedLayerError, match="layer.weight"):
        TwoPassSelection(model).select((torch.randn(3, 4), torch.randn(3, 3)))
    model.layer.requires_grad_(False)
    with pytest.raises(ValueError, match="trained parameters only, got frozen ones: layer.weight"):
        manager.collect().__enter__()
    with HookManager(model, callbacks=[callback]).collect():
        model(torch.randn(3, 4)).sum().backward()
        assert len(callback.history) == 1
        model.scale.requires_grad_(True)
        with pytest.raises(UnsupportedLayerError, match="scale"):
            model(torch.randn(3, 4)).sum().backward()


def test_frozen_layers_are_left_alone():
    model = mlp(4, 6, 5, 3)
    model[2].requires_grad_(False)
    model[4].bias.requires_grad_(False)
    twin = copy.deepcopy(model)
    callback = DataSelectionCallback(model, selection_kwargs=HALF)
    with HookManager(model, callbacks=[callback]).collect():
        classes_loss(model, classes_batch()).backward()
    classes_loss(twin, tuple(v[~callback.last_dropped] for v in classes_batch())).backward()
    assert_gradients(model, gradients(twin))
    assert model[2].weight.grad is None


def test_what_a_manager_must_not_do():
    model = mlp(4, 6, 3)
    callback = DataSelectionCallback(model, renormalize=True)

    def enter(**options):
        options = {"loss_reduction": "mean", "callbacks": [callback], **options}
        HookManager(options.pop("model", model), **options).collect().__enter__()

    with pytest.raises(ValueError, match="must have whole gradients, got a projection"):
        enter(projection=Projection(dim=2))
    with pytest.raises(ValueError, match="renormalize must go with a mean loss, got loss_reduc"):
        enter(loss_reduction="sum")
    with pytest.raises(ValueError, match="model must be the one that is captured, got a Seq"):
        enter(model=nn.Linear(2, 2))
    attached = HookManager(model, loss_reduction="mean", callbacks=[callback]).collect()
    with attached, pytest.raises(RuntimeError, match="must be attached once"):
        enter()


@pytest.mark.parametrize("spoil", ["penalty", "hook"])
def test_a_gradient_that_is_not_its_examples_sum_is_refused(spoil):
    model = mlp(4, 6, 3)
    callback = DataSelectionCallback(model, selection_kwargs=HALF)
    if spoil == "hook":
        model[0].weight.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
    with HookManager(model, callbacks=[callback]).collect():
        value = classes_loss(model, classes_batch())
        if spoil == "penalty":
            value = value + 1e-2 * model[0].weight.square().sum()
        with pytest.raises(CaptureError, match="0.weight must be the sum of its examples' grad"):
            value.backward()


def test_an_optimizer_inside_the_backward_is_refused():
    model = mlp(4, 6, 3)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    callback = DataSelectionCallback(model, selection_kwargs=HALF)
    manager = HookManager(model, callbacks=[callback])
    with manager.collect(), pytest.raises(CaptureError, match="Step the optimizer after the backw"):
        classes_loss(model, classes_batch()).backward()


def test_a_score_that_is_not_finite_leaves_the_batch_as_it_is():
    model = mlp(4, 6, 3)
    twin = copy.deepcopy(model)
    callback = DataSelectionCallback(model, selection_kwargs=HALF)
    x, y = classes_batch()
    x[1, 2] = float("nan")
    with HookManager(model, callbacks=[callback]).collect():
        with pytest.warns(GradTrailWarning, match="A score is not finite"):
            classes_loss(model, (x, y)).backward()
        assert not callback.last_dropped.any()
        classes_loss(twin, (x, y)).backward()
        for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(mine.grad.isnan(), theirs.grad.isnan())
        model.zero_grad()
        classes_loss(model, classes_batch()).backward()
        assert callback.last_dropped.any()
    with pytest.raises(CaptureError, match="Scores must be finite"):
        TwoPassSelection(model).select((x, y))


def test_a_share_of_no_example_is_said_once():
    model = mlp(4, 6, 3)
    options = {"threshold": 0.3, "threshold_mode": "bottom_fraction"}
    callback = DataSelectionCallback(model, selection_kwargs=options)
    with HookManager(model, callbacks=[callback]).collect():
        with pytest.warns(GradTrailWarning, match="of a batch of 3 comes to no example"):
            classes_loss(model, classes_batch(b=3)).backward()
        classes_loss(model, classes_batch(b=3)).backward()


# ---------------------------------------------------------------- dtypes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_low_precision_sums_in_float32(dtype):
    model = mlp(4, 16, 3).to(dtype)
    wide = copy.deepcopy(model).double()
    callback = DataSelectionCallback(
        model, "fixed", random_target(model), renormalize=True, selection_kwargs=HALF
    )
    x, y = classes_batch(b=64)
    with HookManager(model, loss_reduction="mean", callbacks=[callback]).collect():
        for step in range(2):
            model.zero_grad()
            F.cross_entropy(model(x.to(dtype)).float(), y).backward()
            kept = ~callback.last_dropped
            wide.zero_grad()
            F.cross_entropy(wide(x.to(dtype).double()[kept]), y[kept]).backward()
            tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
            for mine, theirs in zip(model.parameters(), wide.parameters(), strict=True):
                assert mine.grad.dtype == dtype
                gap = (mine.grad.double() - theirs.grad).norm() / theirs.grad.norm()
                assert float(gap) < tolerance, (step, float(gap))


def test_autocast():
    model = mlp(4, 16, 3).float()
    callback = DataSelectionCallback(model, renormalize=True, selection_kwargs=HALF)
    x, y = classes_batch(b=64)
    with HookManager(model, loss_reduction="mean", callbacks=[callback]).collect():
        with torch.autocast("cpu", torch.bfloat16):
            value = F.cross_entropy(model(x.float()), y)
        value.backward()
    twin = mlp(4, 16, 3).float()
    kept = ~callback.last_dropped
    with torch.autocast("cpu", torch.bfloat16):
        value = F.cross_entropy(twin(x.float()[kept]), y[kept])
    value.backward()
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert float((mine.grad - theirs.grad).norm() / theirs.grad.norm()) < 2e-2


def test_sparse_gradients():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 4, sparse=True), nn.Flatten(), nn.Linear(12, 3)).double()
    twin = copy.deepcopy(model)
    index, y = torch.randint(0, 7, (6, 3)), torch.randint(0, 3, (6,))
    for threshold in (0.4, 0.7):
        callback = DataSelectionCallback(
            model,
            renormalize=True,
            selection_kwargs={"threshold": threshold, "threshold_mode": "bottom_fraction"},
        )
        with HookManager(model, loss_reduction="mean", callbacks=[callback]).collect():
            for _ in range(2):
                classes_loss(model, (index, y), "mean").backward()
                kept = ~callback.last_dropped
                classes_loss(twin, (index[kept], y[kept]), "mean").backward()
                assert model[0].weight.grad.is_sparse
                assert_gradients(model, gradients(twin))


# ---------------------------------------------------------------- Trainer


def count_labels(batch, start):
    return int((batch["labels"][:, start:] != -100).sum())


class StepGradients:
    """Keeps what the optimizer is about to use, and what the batches of the step were."""

    def __init__(self, model):
        self.model, self.batches, self.steps = model, [], []
        model.register_forward_pre_hook(self.on_call, with_kwargs=True)

    def on_call(self, module, _args, kwargs):
        if module is self.model and torch.is_grad_enabled() and module.training:
            self.batches.append(kwargs)

    def watch(self, optimizer):
        optimizer.register_step_pre_hook(self.on_optimizer)

    def on_optimizer(self, *_):
        state = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.steps.append((state, gradients(self.model), self.batches))
        self.batches = []


@pytest.mark.filterwarnings("ignore:.*loss_type=None.*")
@pytest.mark.parametrize(
    ("name", "target", "checkpointing"),
    [
        ("gpt2", "batch", False),
        ("gpt2", "validation", True),
        ("llama", "batch", True),
        ("llama", "validation", False),
    ],
)
def test_trainer(name, target, checkpointing, tmp_path):
    """With accumulation: gradients are those of the mean over all kept labels of the step."""
    model = no_dropout(make_model(name))
    rows = make_rows(24)
    validation = torch.utils.data.DataLoader(make_rows(6, seed=9), batch_size=2, collate_fn=collate)
    more = {"validation_loader": validation} if target == "validation" else {}
    options = {"threshold": 0.4, "threshold_mode": "bottom_fraction"}
    selection = DataSelectionCallback(
        model, target, renormalize=True, selection_kwargs=options, **more
    )
    callback = GradTrailCallback(callbacks=[selection])
    trainer = make_trainer(
        model,
        tmp_path,
        [callback],
        rows=rows,
        checkpointing=checkpointing,
        gradient_accumulation_steps=2,
        max_steps=3,
        max_grad_norm=0,
        eval_strategy="steps",
        eval_steps=1,
    )
    seen, dropped = StepGradients(model), []
    on_step = selection.on_step
    selection.on_step = lambda block: (on_step(block), dropped.append(selection.last_dropped))
    trainer.create_optimizer_and_scheduler(3)
    seen.watch(trainer.optimizer)
    trainer.train()
    assert hooks_on(model) == 1 + checkpointing  # the test's own, and one that it leaves
    assert not any(parameter._backward_hooks for parameter in model.parameters())
    assert len(dropped) == 6
    assert all(int(mask.sum()) == 1 for mask in dropped)
    twin = copy.deepcopy(model).train()
    twin._forward_pre_hooks.clear()
    for state, found, batches in seen.steps:
        twin.load_state_dict(state)
        twin.zero_grad()
        masks, dropped = dropped[: len(batches)], dropped[len(batches) :]
        kept = [
            {n: v[~mask] for n, v in batch.items() if v.dim()}
            for batch, mask in zip(batches, masks, strict=True)
        ]
        # this Trainer counts labels shifted or not, by the kind of the model's loss
        items = int(batches[0]["num_items_in_batch"])
        counts = [sum(count_labels(b, start) for b in batches) for start in (0, 1)]
        labels = sum(count_labels(batch, counts.index(items)) for batch in kept)
        for batch in kept:
            (language_loss(twin, batch, "sum") / labels).backward()
        assert_gradients(twin, found, rtol=2e-4, atol=2e-6)
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logs) == 3
    assert [entry["selection_kept_share"] for entry in logs] == [pytest.approx(2 / 3)] * 3
    assert logs[0]["selection_score_min"] <= logs[0]["selection_score_median"]
    assert len(selection.history) == 6


# ---------------------------------------------------------------- position tables


def test_position_tables_are_read_by_example_and_the_forward_keeps_its_bits():
    model = tiny_gpt2().train()
    twin = copy.deepcopy(model)
    callback = DataSelectionCallback(model, selection_kwargs={"threshold": -1e9})
    batch = language_batch(LENGTHS)
    manager = HookManager(model, loss_reduction="token_mean", callbacks=[callback])
    torch.manual_seed(1)
    with manager.collect():
        mine = model(**batch).loss
        mine.backward()
    assert manager.coverage.share == 1.0
    torch.manual_seed(1)
    theirs = twin(**batch).loss
    theirs.backward()
    assert torch.equal(mine, theirs)
    assert_gradients(model, gradients(twin), rtol=1e-12, atol=1e-14)
    assert not manager.layouts


# ---------------------------------------------------------------- two passes


@pytest.mark.parametrize("mode", ["ghost", "materialized"])
@pytest.mark.parametrize("target", ["batch", "fixed", "validation"])
@pytest.mark.parametrize("checkpointing", [None, True, False], ids=["plain", "reentrant", "non"])
def test_two_passes(checkpointing, target, mode):
    model, twin = Everything(checkpointing), Everything()
    validation = index_batch(9, 3)
    index_loss(twin, validation).backward()
    wanted = {name: value.clone() for name, value in gradients(twin).items()}
    more = {"target_gradient": wanted} if target == "fixed" else {}
    if target == "validation":
        more = {"validation_loader": [validation], "validation_loss": index_loss}
    selector = TwoPassSelection(
        model,
        target,
        loss=index_loss,
        selection_kwargs=HALF,
        scoring_kwargs={"score_mode": mode},
        **more,
    )
    state = torch.get_rng_state()
    for seed in range(2):
        index = index_batch(seed, 5)
        kept = selector.select(index)
        rows = reference.per_example_gradients(
            twin, range(5), lambda twin, row, index=index: index_loss(twin, index[[row]])
        )
        if target == "batch":
            wanted = {name: value.sum(0) for name, value in rows.items()}
        close(selector.last_scores, dots(rows, wanted), rtol=1e-10)
        lowest = selector.last_scores.argsort()[:2]
        assert selector.last_dropped.nonzero().flatten().tolist() == sorted(lowest.tolist())
        assert torch.equal(kept, index[~selector.last_dropped])
        assert selector.history[seed].kept_share == 0.6
        assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training


def test_two_passes_train_like_one():
    """Without dropout both strategies leave the same gradients."""
    for reduction in ("sum", "mean"):
        one, two = mlp(4, 6, 3), mlp(4, 6, 3)
        options = {"validation_loader": [classes_batch(7)]}
        callback = DataSelectionCallback(
            one, "validation", renormalize=reduction == "mean", **options
        )
        selector = TwoPassSelection(two, "validation", **options)
        with HookManager(one, loss_reduction=reduction, callbacks=[callback]).collect():
            classes_loss(one, classes_batch(), reduction).backward()
        kept = selector.select(classes_batch())
        assert 0 < len(kept[0]) < 5
        classes_loss(two, kept, reduction).backward()
        assert_gradients(one, gradients(two))


def test_two_passes_of_language_models():
    with exactly():
        model = tiny_gpt2().train()
        selector = TwoPassSelection(model, selection_kwargs=HALF)
        batch = {**language_batch(LENGTHS), "name": list("abcde")}
        kept = selector.select(batch)
        rows = own_rows(copy.deepcopy(model).eval(), language_batch(LENGTHS))
        target = {name: value.sum(0) for name, value in rows.items()}
        close(selector.last_scores, dots(rows, target), rtol=1e-10)
        names = [n for n, gone in zip("abcde", selector.last_dropped, strict=True) if not gone]
        assert kept["name"] == names
        assert torch.equal(kept["labels"], batch["labels"][~selector.last_dropped])


def test_what_two_passes_refuse():
    model = mlp(4, 6, 3)
    with pytest.raises(ValueError, match="layer_wise must be False for two passes, got True"):
        TwoPassSelection(model, selection_kwargs={"layer_wise": True})
    with pytest.raises(TypeError, match="loss must be a callable"):
        TwoPassSelection(model, loss=3)
    with pytest.raises(
        ValueError, match="A batch must hold a tensor with a row an example, got di"
    ):
        TwoPassSelection(model).select({"text": "a"})
    with pytest.raises(ValueError, match=r"batch with 'labels' nor .* got \['x'\]"):
        TwoPassSelection(model).select({"x": torch.ones(2, 4)})
    selector = TwoPassSelection(model, loss=lambda model, batch: model(batch[0]))
    with pytest.raises(ValueError, match=r"one value an example, shape \(5,\), or their sum, got"):
        selector.select(classes_batch())
    selector = TwoPassSelection(model, selection_kwargs={"threshold": 1e9})
    assert selector.select(classes_batch()) is None
    selector = TwoPassSelection(model, "validation", validation_loader=[])
    with pytest.raises(ValueError, match="validation_loader must give at least one batch"):
        selector.select(classes_batch())


def test_losses_that_are_inferred():
    model = mlp(4, 6, 2)
    x, _ = classes_batch()
    wanted = torch.randn(5, 2, dtype=torch.float64)
    close(summed_loss(model, (x, wanted)), (model(x) - wanted).square().sum() / 2, rtol=1e-12)
    close(
        summed_loss(lambda a, b: model(a + b), ((x, x), wanted)),
        (model(2 * x) - wanted).square().sum() / 2,
        rtol=1e-12,
    )
    model = tiny_llama()
    nothing = {**language_batch((3, 2)), "labels": torch.full((2, 3), -100)}
    assert summed_loss(model, nothing).item() == 0
    selector = TwoPassSelection(model, selection_kwargs=HALF)
    assert selector.select(nothing)["labels"].shape == (1, 3)
    assert not selector.last_scores.any()


class WithLogProbs(nn.Module):
    """Returns its labels' log-probabilities, of which the loop makes the loss."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3, dtype=torch.float64)

    def forward(self, x, labels):
        log_probs = self.layer(x).log_softmax(-1).gather(1, labels.unsqueeze(1))
        return {"loss": -log_probs.mean(), "log_probs": log_probs}


def test_a_loss_divided_outside_the_model():
    x, labels = classes_batch()
    model, twin = WithLogProbs(), WithLogProbs()
    callback = DataSelectionCallback(model, selection_kwargs=HALF)
    with HookManager(model, loss_reduction="model", callbacks=[callback]).collect():
        (-model(x=x, labels=labels)["log_probs"].sum() / 7).backward()
    kept = ~callback.last_dropped
    (-twin(x[kept], labels[kept])["log_probs"].sum() / 7).backward()
    assert_gradients(model, gradients(twin))
    callback = DataSelectionCallback(model, renormalize=True, selection_kwargs=HALF)
    manager = HookManager(model, loss_reduction="model", callbacks=[callback])
    with manager.collect(), pytest.raises(CaptureError, match="got one reduced outside the model"):
        (-model(x=x, labels=labels)["log_probs"].sum() / 7).backward()


# ---------------------------------------------------------------- the example


@pytest.fixture(scope="module")
def example():
    pytest.importorskip("sklearn")
    path = Path(__file__).resolve().parent.parent / "examples" / "select_data.py"
    spec = importlib.util.spec_from_file_location("select_data", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["select_data"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["select_data"]


def test_the_example_drops_what_is_mislabelled(example):
    run = example.train(example.load(2, 512), 2, 4, select=True)
    assert min(run.precision[1:]) >= 0.9
    assert min(run.recall[1:]) >= 0.5


def test_the_example_prints_and_draws(example, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "picture.png"
    options = ["--seeds", "1", "--epochs", "2", "--train", "192", "--output", str(picture)]
    assert example.main(options) == 0
    printed = capsys.readouterr().out
    assert "epoch  plain  selected   kept  precision  recall" in printed
    assert re.search(r"Selection ends [+-]\d+\.\d points from plain training, mean of 1", printed)
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.slow
def test_the_example_in_full(example):
    gains, precisions = [], []
    for seed in range(3):
        data = example.load(seed, None)
        plain, selected = (example.train(data, seed, 30, select=flag) for flag in (False, True))
        gains.append(selected.accuracy[-1] - plain.accuracy[-1])
        precisions.append(selected.precision)
    assert sum(gains) / 3 >= 0.05
    assert min(sum(epoch) / 3 for epoch in zip(*precisions, strict=True)) >= 0.9
