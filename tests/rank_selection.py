"""What the processes of ``test_selection_ranks`` run: data selection in a loop of several ranks."""

import contextlib
import copy

import torch
from rank_models import build, full, tied_batch, unsynchronized, wrap
from torch.nn.parallel import DistributedDataParallel
from training import make_rows

from gradtrail.callbacks import DataSelectionCallback
from gradtrail.distributed import rank, shard_of, world_size
from gradtrail.hooks import HookManager
from gradtrail.hooks.wrapped import named_parameters

ROWS = 4  # of a joined batch


def trained():
    """The model without its parameter that belongs to no module with a rule."""
    plain, kind = build("tied")
    plain.start.requires_grad_(False)
    return plain, kind


def joined(number):
    """The rows of one joined batch, and this rank's of them."""
    rows = make_rows(40)[ROWS * number : ROWS * (number + 1)]
    share = shard_of(ROWS, rank(), world_size())
    return rows[share.start : share.stop]


def fixed_target(model, seed):
    """A target gradient by parameter name."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def options_of(target, plain, validation=None, seed=5):
    if target == "fixed":
        return {"target": "fixed", "target_gradient": fixed_target(plain, seed)}
    if target == "validation":
        batches = [tied_batch(make_rows(6, seed=9)), tied_batch(make_rows(3, seed=8))]
        return {
            "target": "validation",
            "validation_loader": batches if validation is None else validation(batches),
            "validation_loss": lambda model, batch: model(**batch),
            "validation_batches_per_pass": 2,
        }
    return {"target": "batch"}


def select(
    how, per_block=False, target="batch", renormalize=False, accumulate=True, seed=5, **selection
):
    """Train a few steps; gradients before each step, and what was rejected, for the parent."""
    plain, kind = trained()
    model = wrap(copy.deepcopy(plain), kind, how, per_block)
    callback = DataSelectionCallback(
        model,
        **options_of(target, plain, seed=seed),
        renormalize=renormalize,
        selection_kwargs=selection,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    manager = HookManager(model, loss_reduction="mean", callbacks=[callback])
    steps, number = [], 0
    with manager.collect(optimizer):
        for _ in range(2):
            for micro in range(2 if accumulate else 1):
                waits = accumulate and micro == 0 and how != "plain"
                with unsynchronized(model) if waits else contextlib.nullcontext():
                    model(**tied_batch(joined(number))).mean().backward()
                steps.append(rejected_of(callback))
                number += 1
            grads = {}
            for name, parameter in named_parameters(model):
                grads[name] = whole_gradient(model, parameter)
            steps.append(grads)
            optimizer.step()
            optimizer.zero_grad()
    return steps


def whole_gradient(model, parameter):
    """A gradient as a flat list, joined where FSDP keeps slices."""
    from gradtrail.hooks.sharded import Shards

    grad = parameter.grad
    if grad is None:
        grad = torch.zeros_like(parameter)
    return full(Shards(model).wholes([(parameter, grad)])[0]).flatten().tolist()


def rejected_of(callback):
    """Scores and decisions of this rank's examples, by layer or not."""
    scores, dropped = callback.last_scores, callback.last_dropped
    if isinstance(scores, dict):
        return [
            {name: value.tolist() for name, value in scores.items()},
            {name: value.tolist() for name, value in dropped.items()},
        ]
    return [scores.tolist(), dropped.tolist()]


def refused(how):
    """What cannot work is refused when the capture starts."""
    plain, kind = trained()
    options, model = {}, plain
    if how != "plain":
        model = wrap(plain, kind, "fully_shard" if how == "factor" else "ddp", per_block=False)
    if how == "factor":
        model.set_gradient_divide_factor(1.0)
    if how == "hook":
        model.register_comm_hook(None, lambda _, bucket: _future(bucket))
    if how == "renormalize":
        options["renormalize"] = True
    if how == "group":
        alone = [torch.distributed.new_group([place]) for place in range(world_size())]
        model = DistributedDataParallel(trained()[0], process_group=alone[rank()])
    callback = DataSelectionCallback(model, **options)
    reduction = "model" if how == "renormalize" else "mean"
    manager = HookManager(model, loss_reduction=reduction, callbacks=[callback])
    with manager.collect():
        pass


def _future(bucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def other_validation_data(how):
    plain, kind = trained()
    model = wrap(plain, kind, how, per_block=False)
    options = options_of("validation", plain, lambda batches: batches[rank() :] * 2)
    callback = DataSelectionCallback(model, **options)
    with HookManager(model, loss_reduction="mean", callbacks=[callback]).collect():
        model(**tied_batch(joined(0))).mean().backward()


def spoilt():
    """Gradients that belong to no example are noticed, on every rank."""
    plain, kind = trained()
    if rank() == 1:
        plain.project.bias.register_hook(lambda gradient: gradient + 1)
    model = wrap(plain, kind, "ddp", per_block=False)
    callback = DataSelectionCallback(model)
    with HookManager(model, loss_reduction="mean", callbacks=[callback]).collect():
        model(**tied_batch(joined(0))).mean().backward()
