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
from gradtrail.attribution.scoring import Scorer, normalized
from gradtrail.attribution.shares import in_step, most_of
from gradtrail.attribution.stored import StoredRows
from gradtrail.attribution.stored_model import LayerNames, tell_directions
from gradtrail.attribution.stored_session import (
    OpenStores,
    StoreReading,
    open_stores,
    stored_call,
    stored_loss,
)
from gradtrail.distributed import is_main, merge_topk
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

    Of equal scores the lowest row comes first. In many processes of ``torch.distributed`` every
    rank makes the same call; each looks through its share of the train store, and every one returns
    what one process would.

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
    call = {**stored_call(opened, attributor), "k": k, "batch_size": batch_size, "budget": budget}
    with in_step("search", None, call):
        return _found(opened, attributor, k, batch_size, budget, progress=progress)


def _found(
    opened: OpenStores,
    attributor: InnerProductAttributor,
    k: int,
    batch_size: int | None,
    budget: int | None,
    *,
    progress: bool,
) -> TopK:
    """Look through the train store, on each rank through its share of it."""
    size = batch_size or _joined_rows(opened.train)
    own = opened.train.share_records(size)
    # the least of all ranks, so that queries are in one form on all of them
    limit = query_budget(opened.session.device) // 2 if budget is None else budget
    limit = -most_of("bytes of queries", -limit)
    parts = list(_parts(opened.query, limit))
    found = []
    with progress_bar("search", len(own) * len(parts), enabled=progress and is_main()) as bar:
        for part in parts:
            found.append(_best(opened, own, part, (k, size, limit), attributor))
            bar.update(len(own))
    if not found:
        return _named(torch.zeros(0, 0), torch.zeros(0, 0, dtype=torch.int64), opened)
    values, rows, norms = zip(*found, strict=True)
    values_kq, rows_kq = torch.cat(values, 1), torch.cat(rows, 1)
    if own.whole is not None:
        values_kq, rows_kq = merge_topk(values_kq, rows_kq + own.first, k)
    norms_q = torch.cat(norms) if attributor.normalize == "both" else None
    return _named(normalized(values_kq, None, norms_q), rows_kq, opened)


def _best(
    opened: OpenStores,
    train: StoredRows,
    part: range,
    sizes: tuple[int, int | None, int],
    attributor: InnerProductAttributor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Score one block of queries against the train store.

    Args:
        opened: The stores.
        train: Rows of the train store that are looked through.
        part: Rows of the query store.
        sizes: How many are wanted, rows a batch, and bytes that queries may take.
        attributor: The method.

    Returns:
        Scores and rows, best first, ``[k, q]`` each; and the queries' norms ``[q]``, by which the
        scores are still to be divided, or None.
    """
    k, batch_size, limit = sizes
    session = opened.session
    both = attributor.normalize == "both"
    side = QuerySide(len(part), train.total, budget=limit, norms=both)
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
    return (*scorer.result(None), side.norms)


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


def _named(values_kq: torch.Tensor, rows_kq: torch.Tensor, opened: OpenStores) -> TopK:
    """Give the best scores with the ids of their rows."""
    values, indices = values_kq.t().float().contiguous(), rows_kq.t().contiguous()
    ids = opened.train.ids
    return TopK(indices, values, [[ids[row] for row in line] for line in indices.tolist()])
