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
from gradtrail.attribution.stored import StoredRows
from gradtrail.attribution.stored_model import PRECONDITIONED, LayerNames, entries_of
from gradtrail.attribution.stored_session import (
    OpenStores,
    StoreReading,
    open_stores,
    stored_loss,
)
from gradtrail.distributed import world_size
from gradtrail.factors import GradientBlock, LayerGradient
from gradtrail.kronecker import KroneckerFit
from gradtrail.progress import progress_bar
from gradtrail.store import GradientStore, StoredBlock
from gradtrail.store.facts import check_same, make_facts

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
        The store of queries, flushed and open; for reading where a folder held all of them.

    Raises:
        ValueError: If there are many processes.
    """
    name, attributor, _ = make_method(method, method_options)
    _check_method(name, attributor)
    if world_size() > 1:
        raise ValueError(
            f"cache_preconditioned_query must be called in one process, got {world_size()}. What "
            "it writes can be read by any number of them."
        )
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
    facts = _facts(opened, attributor)
    store = out if isinstance(out, GradientStore) else _opened(Path(out), facts, len(opened.query))
    if store.mode != "read":
        store.define(**facts)
    if store.facts is not None and len(store) == len(opened.query):
        return store
    run = attributor.run(opened.session, opened.train, stored_loss(train_store), opened.batch_size)
    with run:
        fit = run.make_fit()
        query = opened.query
        with progress_bar("precondition", len(query), enabled=progress) as bar:
            for blocks in _chunks(query, opened, len(store.records)):
                for one, block in _preconditioned(fit, attributor, blocks):
                    store.append(block, meta=one.meta)
                    bar.update(len(block.ids))
    store.flush()
    return store


def _opened(folder: Path, facts: Mapping[str, Any], num_rows: int) -> GradientStore:
    """Open a folder for reading where it holds all queries, so that several may use it at once.

    Args:
        folder: The folder.
        facts: What its store must declare.
        num_rows: How many queries there are.

    Returns:
        The store; one for writing where queries are missing.
    """
    if not (folder / "manifest.json").exists():
        return GradientStore(folder)
    with ExitStack() as undo:
        store = GradientStore(folder, mode="read")
        undo.callback(store.close)
        if store.facts is not None:
            check_same(folder, store.facts, make_facts(facts))
            if len(store) == num_rows:
                undo.pop_all()
                return store
    return GradientStore(folder, mode="resume")


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


def _chunks(query: StoredRows, opened: OpenStores, skipped: int) -> Iterator[list[StoredBlock]]:
    """Group blocks of queries whose results fit the memory that queries may take."""
    written = 4 * sum(entries_of(facts) for facts in opened.stored.layers.values())
    budget = query_budget(opened.session.device)
    blocks = query.store.blocks(layers=query.layers, device=opened.session.device)
    chunk: list[StoredBlock] = []
    size = 0
    for number, (record, one) in enumerate(zip(query.records, blocks, strict=True)):
        if number < skipped:
            continue
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
