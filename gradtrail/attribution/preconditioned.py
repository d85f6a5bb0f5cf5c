"""Queries with a curvature's inverse applied, in a store: scoring them is a plain inner product."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch

from gradtrail.attribution.curvature_queries import compact_queries
from gradtrail.attribution.kronecker import KroneckerMethod
from gradtrail.attribution.memory import query_budget
from gradtrail.attribution.method import AbstractAttributor, make_method
from gradtrail.attribution.shares import in_step, on_every
from gradtrail.attribution.stored import StoredRows
from gradtrail.attribution.stored_model import PRECONDITIONED, LayerNames, entries_of
from gradtrail.attribution.stored_session import (
    OpenStores,
    StoreReading,
    open_stores,
    stored_call,
    stored_loss,
)
from gradtrail.distributed import (
    barrier,
    broadcast_json,
    guarded,
    is_main,
    rank,
    shard_of,
    world_size,
)
from gradtrail.errors import StoreError
from gradtrail.factors import GradientBlock, LayerGradient
from gradtrail.kronecker import KroneckerFit
from gradtrail.progress import progress_bar
from gradtrail.store import BlockRecord, GradientStore, StoredBlock
from gradtrail.store.facts import check_same, make_facts, place_of
from gradtrail.store.manifest import MANIFEST

__all__ = ["cache_preconditioned_query"]


def cache_preconditioned_query(  # noqa: PLR0913  # takes what attribute_from_cache takes
    train_store: GradientStore,
    query_store: GradientStore,
    out: str | Path | GradientStore,
    *,
    method: Literal["kfac", "ekfac"] | AbstractAttributor = "ekfac",
    selected_steps: Sequence[int] | None = None,
    layers: LayerNames = None,
    exclude: LayerNames = None,
    batch_size: int | None = None,
    device: torch.device | str | None = None,
    progress: bool = True,
    seed: int = 0,
    **method_options: Any,  # noqa: ANN401
) -> GradientStore:
    """Apply the damped inverse of a curvature to stored queries and store the result.

    The plain inner products of what is stored with the gradients of ``train_store`` are the
    method's scores: ``attribute_from_cache(train_store, out)`` gives them, without a fit. Each
    layer is stored in the smaller form: K-FAC leaves factors, EK-FAC a gradient written out, which
    ``query_rank`` cuts to factors of that rank.

    In many processes of ``torch.distributed`` every rank makes the same call. They fit on their
    shares of ``train_store``, and each writes its share of the queries into the folder; into a
    store without one, which is this process's alone, all of them.

    Args:
        train_store: Gradients of training examples, which the curvature is of.
        query_store: Gradients of queries.
        out: Folder of the new store, or a store to write to. One that holds some of the queries
            already goes on behind them, and one that holds all is only read; one that was made
            with another method or other options is refused.
        method: ``"kfac"``, ``"ekfac"`` or an object of theirs.
        selected_steps: Steps of the train store that the curvature is of; None means all.
        layers: As in ``attribute_from_cache``, like all that follow.
        exclude: Stored layers to leave out.
        batch_size: Rows that small blocks are joined to.
        device: Where products are computed.
        progress: Whether bars are shown.
        seed: Seed of what a method draws.
        **method_options: Options of the method, such as ``damping``.

    Returns:
        The store of queries, flushed and open; for reading where a folder held all of them, or
        where many processes have written to it.
    """
    name, attributor, _ = make_method(method, method_options)
    _check_method(name, attributor)
    reading = StoreReading(
        selected_steps=selected_steps,
        layers=layers,
        exclude=exclude,
        batch_size=batch_size,
        device=device,
        progress=progress,
        seed=seed,
    )
    opened = open_stores(train_store, query_store, attributor, reading)
    call = stored_call(opened, attributor)
    with in_step("cache_preconditioned_query", None, call), ExitStack() as undo:
        # of temporary stores each rank has runs of its own
        facts = broadcast_json(_facts(opened, attributor))
        is_given = isinstance(out, GradientStore)
        store = out if is_given else _opened(Path(out), facts, len(opened.query))
        if not is_given:
            undo.callback(store.close)  # so that the same call can go on after an error
        if store.mode != "read":
            store.define(**facts)
        missing = _missing(store, opened.query)
        if store.facts is None or not on_every("all queries", flag=not missing):
            _write(store, missing, opened, attributor)
        found = _complete(store, is_given=is_given)
        undo.pop_all()
        return found


def _write(
    store: GradientStore,
    missing: Sequence[BlockRecord],
    opened: OpenStores,
    attributor: KroneckerMethod,
) -> None:
    """Fit the curvature, and store what this rank has to: others may have nothing to store.

    Args:
        store: The new store.
        missing: Blocks of queries that this rank stores.
        opened: The stores that are read.
        attributor: The method.
    """
    train = opened.train.share_records()
    run = attributor.run(opened.session, train, stored_loss(train.store), opened.batch_size)
    with run:
        fit = run.make_fit()
        count = sum(len(record.ids) for record in missing)
        shown = opened.session.progress and is_main()
        with progress_bar("precondition", count, enabled=shown) as bar:
            for blocks in _chunks(missing, opened):
                for one, block in _preconditioned(fit, attributor, blocks):
                    store.append(block, meta=one.meta)
                    bar.update(len(block.ids))


def _complete(store: GradientStore, *, is_given: bool) -> GradientStore:
    """Give the store with all queries in it, those that other ranks wrote too.

    Args:
        store: The store, which holds those of this rank.
        is_given: Whether it is the user's own.

    Returns:
        The same store in one process, and where it was not written to.
    """
    if store.mode == "read":
        return store
    store.flush()
    if world_size() == 1 or store.is_temporary:
        return store
    barrier("preconditioned queries")
    if not is_given:
        store.close()
    return GradientStore(store.path, mode="read")


def _missing(store: GradientStore, query: StoredRows) -> list[BlockRecord]:
    """Find the blocks of queries that this rank stores and that are not stored yet.

    Args:
        store: The new store.
        query: Queries, all of them.

    Returns:
        Blocks of this rank's share; of all blocks where the store is this process's alone.

    Raises:
        StoreError: If the rest cannot be stored in the order of the queries.
    """
    place, world = (0, 1) if store.is_temporary else (rank(), world_size())
    wrote: dict[tuple[int, tuple[int | str, ...]], list[int]] = {}
    for record, entry in zip(store.records, store.log.entries, strict=True):
        wrote.setdefault((record.step, record.ids), []).append(entry.rank)
    found = [wrote.get((record.step, record.ids), []) for record in query.records]
    writers = [ranks.pop(0) if ranks else None for ranks in found]
    shares = [shard_of(len(writers), one, world) for one in range(world)]
    if store.facts is not None and store.facts.id_scheme != "index":
        # blocks of a step lie in the order of ranks, and of a rank as they were appended
        for one, share in enumerate(shares):
            stored = [writers[number] for number in share if writers[number] is not None]
            if stored != [writers[number] for number in share[: len(stored)]] or {*stored} - {one}:
                raise StoreError(
                    f"The queries in {place_of(store.path)} must be gone on with by as many "
                    f"processes as began, got {world}. Start as many, or pass another folder."
                )
    return [query.records[number] for number in shares[place] if writers[number] is None]


def _opened(folder: Path, facts: Mapping[str, Any], num_rows: int) -> GradientStore:
    """Open a folder for reading where it holds all queries, so that several may use it at once.

    Args:
        folder: The folder.
        facts: What its store must declare.
        num_rows: How many queries there are.

    Returns:
        The store; one for writing where queries are missing.
    """
    if not broadcast_json((folder / MANIFEST).exists()):
        return GradientStore(folder)
    with guarded("reading a store"), ExitStack() as undo:  # nobody writes before all have read
        store = GradientStore(folder, mode="read")
        undo.callback(store.close)
        if store.facts is not None:
            check_same(folder, store.facts, make_facts(facts))
            if len(store) == num_rows:
                undo.pop_all()
    return store if not store.is_closed else GradientStore(folder, mode="resume")


def _check_method(name: str, attributor: AbstractAttributor) -> None:
    """Refuse a method without a curvature, and options that inner products cannot express.

    Args:
        name: The method as the user named it.
        attributor: The method.

    Raises:
        ValueError: If it is such.
    """
    if not isinstance(attributor, KroneckerMethod):
        raise ValueError(
            f"method must have a curvature ('kfac' or 'ekfac'), got {name!r}. Other queries need "
            "no preparation."
        )
    for option in ("damping_sweep", "normalize"):
        value = getattr(attributor, option)
        if value is not None:
            raise ValueError(
                f"{option} must be None for preconditioned queries, got {value!r}: one store holds "
                "one set of queries, and their inner products are not divided. Leave it out."
            )


def _facts(opened: OpenStores, attributor: KroneckerMethod) -> dict[str, Any]:
    """What the new store declares: the facts of the queries, and what was applied to them."""
    query, session = opened.query.store, opened.session
    steps = opened.train.steps
    applied = {
        "method": attributor.name,
        "options": attributor.describe_options(),
        "selected_steps": None if steps is None else list(steps),
        "model_digest": session.digests()["model_digest"],
        "train_digest": opened.train.digest,
        "query_digest": opened.query.digest,
        "layers": list(opened.stored.layers),
    }
    if query.facts.checkpoint_digest is None:  # of a training run: nothing else tells two apart
        applied["runs"] = [opened.train.store.run, query.run]
    facts = asdict(query.facts)
    capture = "materialized" if attributor.corrected else "factored"
    extra = {
        **query.facts.extra,
        PRECONDITIONED: json.dumps(applied),
        "num_rows": str(len(opened.query)),
    }
    return {**facts, "capture": capture, "extra": extra}


def _chunks(missing: Sequence[BlockRecord], opened: OpenStores) -> Iterator[list[StoredBlock]]:
    """Group blocks of queries whose results fit the memory that queries may take."""
    query = opened.query
    written = 4 * sum(entries_of(facts) for facts in opened.stored.layers.values())
    budget = query_budget(opened.session.device)
    rows = [record.number + place for record in missing for place in range(len(record.ids))]
    blocks = query.store.blocks(rows=rows, layers=query.layers, device=opened.session.device)
    chunk: list[StoredBlock] = []
    size = 0
    for record, one in zip(missing, blocks, strict=True):
        needed = max(record.num_bytes, written * len(record.ids))
        if chunk and size + needed > budget:
            yield chunk
            chunk, size = [], 0
        chunk.append(one)
        size += needed
    if chunk:
        yield chunk


def _preconditioned(
    fit: KroneckerFit, attributor: KroneckerMethod, blocks: Sequence[StoredBlock]
) -> Iterator[tuple[StoredBlock, GradientBlock]]:
    """Apply the inverse layer by layer: each layer's curvature comes to the device once."""
    found: list[dict[str, LayerGradient]] = [{} for _ in blocks]
    (damping,) = attributor.dampings
    for name in fit.records:
        reached = [number for number, one in enumerate(blocks) if name in one.block.layers]
        gradients = (blocks[number].block.layers[name] for number in reached)
        done = compact_queries(fit, name, gradients, damping, attributor.query_rank)
        for number, gradient in zip(reached, done, strict=True):
            found[number][name] = gradient
    for one, layers in zip(blocks, found, strict=True):
        yield one, GradientBlock(one.block.step, one.block.ids, layers)
