"""What the processes of ``test_divided_work`` run: methods whose work is divided among ranks."""

import contextlib
import dataclasses
import os
import warnings

import torch
from rank_attribution import Failing
from rank_models import build, wrap
from torch import nn
from training import collate, make_rows
from trajectories import network, positive_rows, recorded, squared, stored_queries

import gradtrail
from gradtrail import HookManager, Projection
from gradtrail.attribution import attribute_by_replay, cache_preconditioned_query, search
from gradtrail.attribution.method import AbstractAttributor
from gradtrail.attribution.scores import TopK
from gradtrail.callbacks import (
    OffloadCallback,
    OptimizerStateCallback,
    ParameterSnapshotCallback,
)
from gradtrail.distributed import RankError, barrier, rank, world_size
from gradtrail.factors import DenseGradient, GradientBlock
from gradtrail.hooks import OptimizerSnapshot
from gradtrail.hooks.sharded import Shards
from gradtrail.hooks.wrapped import named_parameters
from gradtrail.store import GradientStore, StepStore

QUIET = {"progress": False}


@contextlib.contextmanager
def quiet():
    """Position tables hold no examples, which is said each time."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*ayers are left out")
        yield


def model_of(name, how="plain", per_block=False):
    plain, kind = build(name)
    return plain if how == "plain" else wrap(plain, kind, how, per_block)


def trained(model, steps=2):
    """Some steps on rows that all ranks have, so that every mean of gradients is the same."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        model(**collate(make_rows(4, seed=20 + step))).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def lists(scores):
    """What a call gave, as plain lists."""
    if scores is None or isinstance(scores, torch.Tensor):
        return scores if scores is None else scores.tolist()
    if isinstance(scores, TopK):
        return [scores.indices.tolist(), scores.values.tolist(), scores.ids]
    return [scores.values.tolist(), list(scores.train_ids), scores.options.get("train_digest")]


def run_calls(name, model, calls, rows=make_rows):
    """Results of one call after another; checkpoints are of the plain model before its training."""
    optimizer = trained(model)
    found = []
    for call in calls:
        call = {"batch_size": 2, **call}
        n, q, alone = call.pop("n"), call.pop("q", 3), call.pop("alone", False)
        if isinstance(call.get("projection"), dict):
            call["projection"] = Projection(**call["projection"])
        if call["method"] == "less":
            times = call.get("checkpoints", 1)
            call["optimizer_states"] = _states(model, optimizer, call.pop("form", "live"), times)
        if "checkpoints" in call:
            plain = build(name)[0].state_dict()
            call["checkpoints"] = [
                {key: value * (1 + 0.1 * number) for key, value in plain.items()}
                for number in range(call["checkpoints"])
            ]
        shared = {"collate_fn": collate, **QUIET, **call}
        with quiet():
            if alone:
                scores = gradtrail.self_influence(model, rows(n), **shared)
            else:
                scores = gradtrail.attribute(model, rows(n), make_rows(q, seed=5), **shared)
        found.append(lists(scores))
    return found


def _states(model, optimizer, form, times):
    """An optimizer, its snapshot or a file of it, once a checkpoint."""
    given = optimizer
    if form != "live":
        given = OptimizerSnapshot.of(model, optimizer)
    if form not in ("live", "snapshot"):
        path = f"{form}/{rank()}.safetensors"
        given.save(path)
        given = path
    return [given] * times


def scores(name, how, per_block, calls):
    return run_calls(name, model_of(name, how, per_block), calls)


class Holding(nn.Module):
    """A model of which DDP has a part, with buffers that its forward sends."""

    def __init__(self, wrapped):
        super().__init__()
        torch.manual_seed(5)
        inner = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh()).double()
        self.inner = nn.parallel.DistributedDataParallel(inner) if wrapped else inner
        self.head = nn.Linear(4, 1).double()

    def forward(self, rows):
        return self.head(self.inner(rows))


def partly_wrapped(n, methods, wrapped=True):
    model = Holding(wrapped)
    modules = [one for one in model.modules() if hasattr(one, "require_backward_grad_sync")]
    assert len(modules) == wrapped
    shared = {"loss": squared, "collate_fn": torch.stack, "batch_size": 1, **QUIET}
    found = [
        lists(
            gradtrail.attribute(model, positive_rows(n), positive_rows(2, seed=1), **call, **shared)
        )
        for call in methods
    ]
    for one in modules:
        assert one.require_forward_param_sync
        assert one.require_backward_grad_sync
    return found


# ---------------------------------------------------------------- stores of a fixed model


def write(name, folder, n, **options):
    with quiet():
        gradtrail.cache(
            model_of(name), make_rows(n), make_rows(3, seed=5), cache_dir=folder,
            collate_fn=collate, batch_size=2, **QUIET, **options,
        )  # fmt: skip


def opened(folder):
    return [GradientStore(f"{folder}/{side}", mode="read") for side in ("train", "query")]


def read(folder, calls):
    train, query = opened(folder)
    found = []
    for call in calls:
        call = dict(call)
        if call.pop("alone", False):
            found.append(lists(gradtrail.self_influence_from_cache(train, **QUIET, **call)))
        else:
            found.append(lists(gradtrail.attribute_from_cache(train, query, **QUIET, **call)))
    return found


# ---------------------------------------------------------------- preconditioned queries


def precondition(folder, out, method, fails_at=None, **options):
    """Store preconditioned queries, and score with them."""
    train, query = opened(folder)
    if fails_at is not None:
        _break(query, fails_at)
    if out == "memory":
        out = GradientStore(residency="memory")
    elif options.pop("given", False):
        out = GradientStore(out)
    reads = _count(train)
    with quiet():
        ready = cache_preconditioned_query(train, query, out, method=method, **QUIET, **options)
    rows = sum(reads)
    found = gradtrail.attribute_from_cache(train, ready, **QUIET)
    best = search(train, ready, 2, **QUIET)
    return [ready.mode, list(ready.ids), found.values.tolist(), best.indices.tolist(), rows]


def _count(store):
    """Note how many rows each block has that is read from now on."""
    blocks, reads = store.blocks, []

    def counting(**options):
        for one in blocks(**options):
            reads.append(len(one.block.ids))
            yield one

    store.blocks = counting
    return reads


def _break(query, row):
    """Have a store fail where this row is read, as a disk does."""
    blocks = query.blocks

    def failing(**options):
        for one in blocks(**options):
            if one.row <= row < one.row + len(one.block.ids):
                raise OSError(f"row {row} cannot be read")
            yield one

    query.blocks = failing


def precondition_again(folder, out, method, fails_at):
    """The same call after an error that somebody still holds."""
    train, query = opened(folder)
    blocks = query.blocks
    _break(query, fails_at)
    with quiet():
        try:
            cache_preconditioned_query(train, query, out, method=method, **QUIET)
        except (OSError, RankError) as error:
            kept = error
        query.blocks = blocks
        ready = cache_preconditioned_query(train, query, out, method=method, **QUIET)
    scores = gradtrail.attribute_from_cache(train, ready, **QUIET)
    return [str(kept), list(ready.ids), scores.values.tolist()]


def of_training(folder, out, method):
    """Queries whose ids are no numbers of rows, of which the first block was stored before."""
    train, query = opened(folder)
    unnumbered = copied(query)
    ready = cache_preconditioned_query(train, unnumbered, f"{out}/whole", method=method, **QUIET)
    part = GradientStore(f"{out}/part")
    if len(part) == 0 and rank() == 0:
        part.define(**dataclasses.asdict(ready.facts))
        first = next(iter(ready.blocks()))
        part.append(first.block, meta=first.meta)
    part.close()
    assert ready.ids == unnumbered.ids
    return ready.mode


def go_on(folder, out, method):
    train, query = opened(folder)
    ready = cache_preconditioned_query(train, copied(query), f"{out}/part", method=method, **QUIET)
    return [list(ready.ids), gradtrail.attribute_from_cache(train, ready, **QUIET).values.tolist()]


def copied(store):
    """The same blocks in memory, each a row, under ids that are texts."""
    found = GradientStore(residency="memory")
    found.define(**{**dataclasses.asdict(store.facts), "id_scheme": "content", "extra": {}})
    for row in range(len(store)):
        block = store.get([row])
        found.append(dataclasses.replace(block, step=0, ids=(f"row {row}",)))
    return found


# ---------------------------------------------------------------- search


def numbered(sizes, seed, *, first=0, whole=True):
    """A store of small whole numbers, whose products are exact and often equal, or of others."""
    store = GradientStore(residency="memory")
    store.define(id_scheme="index")
    generator = torch.Generator().manual_seed(seed)
    for step, size in enumerate(sizes):
        values = torch.randint(-1, 2, (size, 6), generator=generator).float()
        if not whole:
            values = torch.randn(size, 6, generator=generator)
        ids = tuple(range(first, first + size))
        store.append(GradientBlock(step, ids, {"layer": DenseGradient(values, (2, 3))}))
        first += size
    return store


def searched(train, query, calls, whole=True):
    found = []
    for call in calls:
        options = {"batch_size": 4, **call}
        sides = [(train, 1), (query or [1], 2)]
        one, other = (numbered(sizes, seed, whole=whole) for sizes, seed in sides)
        with one, other:
            if not query:
                other.discard(0)
            found.append(lists(search(one, other, **QUIET, **options)))
    return found


def search_other_rows():
    """Stores in memory that are not the same on every rank."""
    with numbered([4, 4 + rank()], 1) as train, numbered([2], 2) as query:
        return lists(search(train, query, 2, **QUIET))


# ---------------------------------------------------------------- records of a training

ROWS, STEPS = positive_rows(13), 5


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def loop_loss(output, fields):
    """The loss of the recorded loop, from what replay gives."""
    return (output.squeeze(1) - fields["0"].sum(1).sin()).square().mean()


def followed(folder, calls, queries=3, wrapped=False):
    """Train alike on every rank, record in memory, and score the steps."""
    snapshots = StepStore(residency="memory")
    model, gradients, states = recorded(
        network, squared, ROWS, adamw, steps=STEPS, more=[ParameterSnapshotCallback(snapshots)]
    )
    query = stored_queries(model, squared, positive_rows(queries, seed=1), folder=folder)
    found = []
    for call in calls:
        call = {"optimizer_states": states, **QUIET, **call}
        if call.pop("replay", False):
            inner = network()
            if wrapped:
                inner = nn.parallel.DistributedDataParallel(inner)
            manager = HookManager(inner, loss_reduction="mean")
            scored = attribute_by_replay(manager, snapshots, query, loss=loop_loss, **call)
        else:
            scored = gradtrail.attribute_from_cache(gradients, query, **call)
        found.append(lists(scored)[:2])
    return found


def followed_of_another_run(folder, method):
    """The last step's optimizer is that of other examples, which one rank alone finds out."""
    model, gradients, states = recorded(network, squared, ROWS, adamw, steps=STEPS)
    query = stored_queries(model, squared, positive_rows(2, seed=1), folder=folder)
    values = dict(states.values(STEPS - 1))
    tensors = states.read(STEPS - 1)
    states.discard(STEPS - 1)
    states.append(STEPS - 1, tensors, {**values, "ids": ["another"] * len(values["ids"])})
    gradtrail.attribute_from_cache(
        gradients, query, method=method, optimizer_states=states, **QUIET
    )


def trained_together(folder, how, accumulation, methods):
    """Each rank takes its part of every batch and records it; then all score the training."""
    model = network() if how == "plain" else wrap(network(), nn.Linear, how, per_block=True)
    optimizer = adamw(model)
    gradients, states = GradientStore(f"{folder}/gradients"), StepStore(f"{folder}/states")
    manager = HookManager(
        model, loss_reduction="mean", loss_scale=1 / accumulation,
        callbacks=[OffloadCallback(gradients), OptimizerStateCallback(states, moments="both")],
    )  # fmt: skip
    count = 8 // accumulation // world_size()  # rows of a backward
    with gradients, states, manager.collect(optimizer):
        for step in range(4):
            optimizer.zero_grad()
            for part in range(accumulation):
                # rows of one rank follow each other, as they will in the store
                start = 8 * step + count * (accumulation * rank() + part)
                rows = ROWS[[number % len(ROWS) for number in range(start, start + count)]]
                (squared(model, rows).mean() / accumulation).backward()
            optimizer.step()
            for entry in optimizer.param_groups:
                entry["lr"] *= 0.97
    barrier("a recorded training")
    whole = network()
    whole.load_state_dict(whole_state(model))
    query = stored_queries(whole, squared, positive_rows(3, seed=1), folder=f"{folder}/query")
    gradients = GradientStore(f"{folder}/gradients", mode="read")
    states = StepStore(f"{folder}/states", mode="read")
    return [
        lists(
            gradtrail.attribute_from_cache(
                gradients, query, method=method, optimizer_states=states, **QUIET
            )
        )[:2]
        for method in methods
    ]


def whole_state(model):
    """A wrapped model's parameters, put together, by the names of the plain model."""
    named = dict(named_parameters(model))
    wholes = Shards(model).wholes([(value, value.detach()) for value in named.values()])
    return dict(zip(named, wholes, strict=True))


def replayed_together(folder, how, methods):
    """Each rank takes its part of every batch and records it; then all of them are run again."""
    model = network() if how == "plain" else wrap(network(), nn.Linear, how, per_block=True)
    snapshots, states = StepStore(f"{folder}/parameters"), StepStore(f"{folder}/states")
    optimizer = adamw(model)
    callbacks = [
        ParameterSnapshotCallback(snapshots),
        OptimizerStateCallback(states, moments="both"),
    ]
    manager = HookManager(model, loss_reduction="mean", callbacks=callbacks)
    count = 8 // world_size()
    with snapshots, states, manager.collect(optimizer):
        for step in range(3):
            optimizer.zero_grad()
            start = 8 * step + count * rank()
            rows = ROWS[[number % len(ROWS) for number in range(start, start + count)]]
            squared(model, rows).mean().backward()
            optimizer.step()
    barrier("a recorded training")
    query = stored_queries(network(), squared, positive_rows(2, seed=1), folder=f"{folder}/query")
    snapshots = StepStore(f"{folder}/parameters", mode="read")
    given = {"optimizer_states": StepStore(f"{folder}/states", mode="read"), "loss": loop_loss}
    again = HookManager(network(), loss_reduction="mean")
    return [
        lists(attribute_by_replay(again, snapshots, query, method=method, **given, **QUIET))[:2]
        for method in methods
    ]


def two_optimizers(folder):
    """Processes that do not train together record into one folder."""
    model = network()
    gradients, states = GradientStore(f"{folder}/gradients"), StepStore(f"{folder}/states")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * (1 + rank()))
    callbacks = [OffloadCallback(gradients), OptimizerStateCallback(states)]
    manager = HookManager(model, loss_reduction="mean", callbacks=callbacks)
    with gradients, states, manager.collect(optimizer):
        squared(model, ROWS[2 * rank() : 2 * rank() + 2]).mean().backward()
        optimizer.step()
    barrier("a recorded training")
    query = stored_queries(network(), squared, positive_rows(2, seed=1), folder=f"{folder}/query")
    gradients = GradientStore(f"{folder}/gradients", mode="read")
    states = StepStore(f"{folder}/states", mode="read")
    given = {"method": "dvemb", "optimizer_states": states, **QUIET}
    gradtrail.attribute_from_cache(gradients, query, **given)


# ---------------------------------------------------------------- errors


class Alone(AbstractAttributor):
    """A method of a user, whose scores need all rows."""

    def score(self, *_):
        raise AssertionError("not reached")

    def self_score(self, *_):
        raise AssertionError("not reached")


def refused():
    gradtrail.attribute(
        model_of("gpt2"), make_rows(4), make_rows(2), method=Alone(), collate_fn=collate, **QUIET
    )


def other_optimizers():
    """One rank has made one step more."""
    model = model_of("gpt2")
    other = model_of("gpt2")
    optimizer = trained(other, steps=1 + rank())
    snapshot = OptimizerSnapshot.of(other, optimizer)
    gradtrail.attribute(
        model, make_rows(4), make_rows(2), method="less", optimizer_states=snapshot,
        collate_fn=collate, **QUIET,
    )  # fmt: skip


def failing(name, how, call, at):
    """A rank fails in the middle of its share."""
    model = model_of(name, how, per_block=True)
    return run_calls(name, model, [{"n": 16, **call}], lambda n: Failing(make_rows(n), at))


def failing_and_exit(**arguments):
    """The same, in a process that ends as one does that nobody catches the error of."""
    try:
        failing(**arguments)
    except OSError:
        os._exit(1)
