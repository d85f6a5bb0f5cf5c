"""Opening stores for a run: a session without a model, and the rows of both sides."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from gradtrail.attribution.losses import Loss
from gradtrail.attribution.method import AbstractAttributor
from gradtrail.attribution.session import Session
from gradtrail.attribution.stored import StoredRows, stored_rows
from gradtrail.attribution.stored_model import (
    LayerNames,
    StoredModel,
    check_pair,
    check_readable,
    stored_model,
)
from gradtrail.distributed import world_size
from gradtrail.options import check_positive
from gradtrail.store import GradientStore, records_digest

__all__ = ["OpenStores", "StoreReading", "open_stores", "stored_call", "stored_loss"]

_FEW = 32  # rows that keep a processor's units busy while it reads written-out queries
_MANY_QUERIES = 64


@dataclass(frozen=True, kw_only=True, eq=False)
class StoreReading:
    """What of stores is read, and how.

    Attributes:
        selected_steps: Steps of the train store, or None for all.
        layers: Glob patterns on names of stored layers, or None for all.
        exclude: Layers to leave out, likewise.
        batch_size: Rows that small blocks are joined to, or None to join where that pays.
        device: Where products are computed; None means the CPU.
        progress: Whether bars are shown.
        seed: Seed of what a method draws.
    """

    selected_steps: Sequence[int] | None = None
    layers: LayerNames = None
    exclude: LayerNames = None
    batch_size: int | None = None
    device: torch.device | str | None = None
    progress: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            TypeError: If the steps are not several numbers.
        """
        steps = self.selected_steps
        if steps is not None and (isinstance(steps, str) or not isinstance(steps, Iterable)):
            raise TypeError(
                f"selected_steps must be step numbers in a list, got {steps!r}. Pass [{steps!r}]."
            )
        if self.batch_size is not None:
            check_positive("batch_size", self.batch_size)


@dataclass(frozen=True, eq=False)
class OpenStores:
    """Stores that are ready to be read.

    Attributes:
        session: A session without a model.
        stored: The layers that are read.
        train: Rows of the train store.
        query: Rows of the query store; those of the train store where there is none.
        batch_size: Rows that blocks of the train store are joined to, or None.
    """

    session: Session
    stored: StoredModel
    train: StoredRows
    query: StoredRows
    batch_size: int | None


def open_stores(
    train_store: GradientStore,
    query_store: GradientStore | None,
    attributor: AbstractAttributor,
    reading: StoreReading,
) -> OpenStores:
    """Check that stores fit each other and the method, and choose what is read of them.

    Args:
        train_store: Gradients of training examples.
        query_store: Gradients of queries, or None where train meets itself.
        attributor: The method.
        reading: What is read.

    Returns:
        The stores.
    """
    if query_store is None:
        check_readable(train_store, "train_store")
    else:
        check_pair(train_store, query_store)
    train = stored_rows(train_store, "train_store", steps=reading.selected_steps)
    stored = stored_model(train_store, query_store, layers=reading.layers, exclude=reading.exclude)
    stored = attributor.choose_stored(stored, train)
    train = train.of_layers([name for name in train_store.layers if name in stored.layers])
    query = train if query_store is None else _query_rows(query_store, train, stored)
    device = torch.device("cpu" if reading.device is None else reading.device)
    session = Session(
        None, None, device, stored.projection, reading.progress, reading.seed, stored=stored
    )
    batch_size = reading.batch_size or _paying_batch_size(train, len(query))
    return OpenStores(session, stored, train, query, batch_size)


def stored_call(opened: OpenStores, attributor: AbstractAttributor) -> dict[str, Any]:
    """Give what of a call must be the same on every rank, by the name of the argument."""
    if world_size() == 1:
        return {}
    steps = opened.train.steps
    return {
        "train_store": _told_apart(opened.train),
        "query_store": _told_apart(opened.query),
        "selected_steps": None if steps is None else list(steps),
        "method": attributor.name,
        "method_options": attributor.describe_options(),
        "layers": list(opened.stored.layers),
    }


def _told_apart(rows: StoredRows) -> list[Any]:
    """What tells the rows of a store from others; each rank makes a temporary one of its own."""
    store = rows.store
    return [records_digest(store.records) if store.is_temporary else store.run, len(rows)]


def stored_loss(store: GradientStore) -> Loss:
    """Stand in for the loss that stored gradients are of; it cannot be run."""

    def refuse(model: nn.Module, batch: Any) -> Tensor:  # noqa: ANN401
        del model, batch
        raise TypeError("A stored gradient must be read, got a request to run its loss.")

    loss = Loss(refuse)
    facts = store.facts
    loss.description = facts.extra.get("loss_description") or facts.loss or "not recorded"
    return loss


def _query_rows(store: GradientStore, train: StoredRows, stored: StoredModel) -> StoredRows:
    """All queries; written out at once where the training gradients are."""
    names = [name for name in store.layers if name in stored.layers]
    ours = train.store.layers
    written = {name for name in names if name in ours and ours[name].kinds == ("dense",)}
    return replace(stored_rows(store, "query_store", layers=names), written=frozenset(written))


def _paying_batch_size(train: StoredRows, num_query: int) -> int | None:
    """Say whether it pays to join blocks.

    Written-out queries are read again for every batch: ``q`` numbers for each of a block's ``b``.
    Joining moves each of these twice more. Factors bring many positions each, so that blocks of
    theirs are large enough as they are.

    Args:
        train: Rows of the train store.
        num_query: Number of queries.

    Returns:
        Rows to join blocks to, or None where it does not pay.
    """
    size = len(train) / max(1, len(train.records))
    layers = train.store.layers
    written = all(layers[name].kinds == ("dense",) for name in train.layers)
    pays = written and num_query >= max(_MANY_QUERIES, 4 * size) and size < _FEW
    return _FEW if pays else None
