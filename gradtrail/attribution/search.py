"""Nearest neighbours between two stores: the best inner products, found block by block.

Suffixes: q query, k kept example.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import torch

from gradtrail.attribution.inner_product import InnerProductAttributor
from gradtrail.attribution.memory import query_budget
from gradtrail.attribution.method import Task
from gradtrail.attribution.queries import QuerySide
from gradtrail.attribution.scores import TopK
from gradtrail.attribution.scoring import Scorer
from gradtrail.attribution.stored import StoredRows
from gradtrail.attribution.stored_model import LayerNames, tell_directions
from gradtrail.attribution.stored_session import (
    OpenStores,
    StoreReading,
    open_stores,
    stored_loss,
)
from gradtrail.options import check_positive
from gradtrail.progress import progress_bar
from gradtrail.store import GradientStore

__all__ = ["search"]

_JOINED = 256  # rows that a query's best are looked for in at once


def search(  # noqa: PLR0913  # a public entry point
    train_store: GradientStore,
    query_store: GradientStore,
    k: int,
    *,
    normalize: Literal["train", "both"] | None = None,
    selected_steps: Sequence[int] | None = None,
    layers: LayerNames = None,
    exclude: LayerNames = None,
    batch_size: int | None = None,
    budget: int | None = None,
    device: torch.device | str | None = None,
    progress: bool = True,
) -> TopK:
    r"""Find the training examples with the highest :math:`\langle G_n, G_q \rangle` of each query.

    The search is exact and goes block by block: a block of queries is held, the train store is read
    once beside it, and of every query only the best ``k`` so far are kept. Memory is that of the
    queries in a block, one block of the train store and the result, whatever the number of
    examples; queries that do not fit ``budget`` at once cost one more reading of the train store a
    block. With queries from ``cache_preconditioned_query`` it is a search under K-FAC or EK-FAC.

    Args:
        train_store: Gradients of training examples.
        query_store: Gradients of queries.
        k: How many are wanted; more than there are gives all.
        normalize: As in ``attribute``; ``"both"`` searches by cosine.
        selected_steps: Steps of the train store to read; None reads all.
        layers: Glob patterns on names of stored layers; None means all, which both must have.
        exclude: Layers to leave out, likewise.
        batch_size: Rows that small blocks are joined to; None chooses.
        budget: Bytes of queries held at a time; None means a quarter of the free memory.
        device: Where products are computed; None means the CPU.
        progress: Whether a bar is shown.

    Returns:
        Rows of the train store, their scores and ids, best first; a list of ``k`` a query.
    """
    check_positive("k", k)
    if budget is not None:
        check_positive("budget", budget)
    attributor = InnerProductAttributor(normalize=normalize)
    reading = StoreReading(
        selected_steps=selected_steps,
        layers=layers,
        exclude=exclude,
        batch_size=batch_size,
        device=device,
        progress=False,
    )
    opened = open_stores(train_store, query_store, attributor, reading)
    tell_directions(train_store, "search")
    size = batch_size or _joined_rows(opened.train)
    limit = query_budget(opened.session.device) // 2 if budget is None else budget
    parts = list(_parts(opened.query, limit))
    found = []
    with progress_bar("search", len(opened.train) * len(parts), enabled=progress) as bar:
        for part in parts:
            found.append(_best(opened, part, (k, size, limit), attributor))
            bar.update(len(opened.train))
    return _joined(found, opened)


def _best(
    opened: OpenStores,
    part: range,
    sizes: tuple[int, int | None, int],
    attributor: InnerProductAttributor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Score one block of queries against the whole train store.

    Args:
        opened: The stores.
        part: Rows of the query store.
        sizes: How many are wanted, rows a batch, and bytes that queries may take.
        attributor: The method.

    Returns:
        Scores and rows, best first. Shape ``[k, q]`` each.
    """
    k, batch_size, limit = sizes
    session, train = opened.session, opened.train
    both = attributor.normalize == "both"
    side = QuerySide(len(part), len(train), budget=limit, norms=both)
    query = opened.query
    for stored in query.store.blocks(rows=part, layers=query.layers, device=session.device):
        for name, gradient in stored.block.layers.items():
            side.add(stored.row - part.start, name, query.in_form(name, gradient))
    side.finish()
    loss = stored_loss(train.store)
    task = Task(
        train=train,
        query=query,
        loss=loss,
        query_loss=loss,
        batch_size=batch_size,
        query_batch_size=None,
        top_k=k,
    )
    scorer = Scorer(task, side.layers, len(part), norms=attributor.normalize is not None)
    session.capture(
        train,
        loss,
        batch_size=batch_size,
        phase="train",
        sink=scorer.add,
        done=scorer.close,
    )
    return scorer.result(side.norms)


def _parts(query: StoredRows, limit: int) -> Iterator[range]:
    """Cut the queries into runs of blocks whose gradients fit; a block is never split."""
    start = stop = taken = 0
    for record in query.records:
        if stop > start and taken + record.num_bytes > limit:
            yield range(start, stop)
            start, taken = stop, 0
        stop += len(record.ids)
        taken += record.num_bytes
    if stop > start:
        yield range(start, stop)


def _joined_rows(train: StoredRows) -> int | None:
    """Join small blocks of written-out gradients, so that a batch is worth looking through."""
    layers = train.store.layers
    written = all(layers[name].kinds == ("dense",) for name in train.layers)
    return _JOINED if written else None


def _joined(found: list[tuple[torch.Tensor, torch.Tensor]], opened: OpenStores) -> TopK:
    """Put the blocks of queries side by side."""
    if not found:
        empty = torch.zeros(0, 0)
        return TopK(empty.long(), empty, [])
    values = torch.cat([one for one, _ in found], 1).t().float().contiguous()
    indices = torch.cat([rows for _, rows in found], 1).t().contiguous()
    ids = opened.train.ids
    return TopK(indices, values, [[ids[row] for row in line] for line in indices.tolist()])
