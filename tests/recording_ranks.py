"""What each process does in the tests of callbacks that record."""

import warnings

import torch
from rank_models import build, wrap
from torch import nn
from training import collate, make_rows

import gradtrail
from gradtrail import GradientStore, HookManager, StepStore
from gradtrail.callbacks import (
    KroneckerCovarianceCallback,
    OffloadCallback,
    OptimizerStateCallback,
    ParameterSnapshotCallback,
)
from gradtrail.distributed import rank, world_size
from gradtrail.errors import StoreError


def capture(path, mode, backwards):
    """Store the gradients of some backwards, other rows in each process; steps of this one."""
    model = nn.Sequential(nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with GradientStore(path, mode=mode) as store:
        manager = HookManager(model, callbacks=[OffloadCallback(store)])
        with manager.collect(optimizer):
            for number in range(backwards):
                torch.manual_seed(10 * number + rank())
                model(torch.randn(2, 3)).sum().backward()
                optimizer.step()
        own = [e for e in store.log.entries if e.rank == store.log.manifest.rank]
        return len({entry.facts["step"] for entry in own})


def rows_of(step, place):
    """The rows of one step on one rank, of which the first has one more than the others."""
    return make_rows(40)[10 * step + 3 * place :][: 3 if place == 0 else 2]


def train(path, form, steps, mode="create", how="ddp", parts=None):
    """Capture a training with covariances beside its gradients."""
    with GradientStore(path, mode=mode) as store, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "A capture must add records")
        callbacks = [OffloadCallback(store), KroneckerCovarianceCallback(store)]
        loop(callbacks, steps, how, parts, capture=form)


def follow(path, steps, how="ddp", parts=None, mode="create"):
    """Record the optimizer and the batches of a training."""
    with (
        StepStore(f"{path}/states", mode=mode) as states,
        StepStore(f"{path}/parameters", mode=mode) as parameters,
    ):
        callbacks = [
            OptimizerStateCallback(states, moments="both"),
            ParameterSnapshotCallback(parameters),
        ]
        loop(callbacks, steps, how, parts)


def loop(callbacks, steps, how, parts, **options):
    """Train; with ``parts`` one process does what so many ranks would, gradients averaged."""
    plain, kind = build("llama")
    model = plain if parts else wrap(plain, kind, how, per_block=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    manager = HookManager(model, loss_reduction="model", callbacks=callbacks, **options)
    with manager.collect(optimizer):
        for step in range(steps):
            for place in range(parts) if parts else [rank()]:
                model(**collate(rows_of(step, place))).loss.backward()
            for parameter in model.parameters() if parts else ():
                parameter.grad /= parts
            optimizer.step()
            optimizer.zero_grad()


def append(path, mode, steps, missing=()):
    """Append this rank's part of some steps; what reading one of them here says."""
    with StepStore(path, mode=mode) as store:
        for step in steps:
            store.discard(step)
            if [rank(), step] in missing:
                continue
            tensors = {"both": torch.tensor([step, rank()]), f"of {rank()}": torch.tensor([step])}
            store.append(step, tensors, {"rank": rank(), "of": world_size()})
        try:
            store.read(steps[0])
        except StoreError as error:
            return [list(store.steps), str(error)]
        return [list(store.steps), None]


def scores(path, calls):
    """Every stored gradient against every other, by every rank together."""
    with GradientStore(path, mode="read") as store:
        return [
            gradtrail.attribute_from_cache(store, store, progress=False, **call).values.tolist()
            for call in calls
        ]
