"""Queries that are not rows of a data set: they bring batches, a loss and a way to join rows.

An interchange intervention is one query and two rows of the model's batch. Whoever captures it
runs the source's own batches and hands on the joined gradients, so that methods see plain queries.
"""

from __future__ import annotations

import abc
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from gradtrail.attribution.data import Collate, Rows, as_rows
from gradtrail.attribution.losses import Loss, LossReduction, resolve_loss
from gradtrail.factors import (
    DenseGradient,
    LayerGradient,
    SumGradient,
    dense_size,
    map_tensors,
    merge_uses,
    tensors_of,
    to_dense,
)

__all__ = [
    "AbstractQuerySource",
    "QueryBatch",
    "QuerySum",
    "RowJoin",
    "SourceRows",
    "as_queries",
    "head_of",
    "query_loss_of",
]

_REMEMBERED = 3  # an input, its output gradient and the constants of a bias


@dataclass(frozen=True, eq=False)
class QueryBatch:
    """Some parts of a source, ready to run.

    Attributes:
        start: Number of the first part.
        size: Number of parts.
        num_rows: Rows of the model's batch that they take together.
        tokens: Positions of one row in the model's own input.
        values: What the source's loss runs on; its tensors are brought to the model's device.
        ids: A content id each part, which does not depend on the batch.
    """

    start: int
    size: int
    num_rows: int
    tokens: int
    values: Any
    ids: tuple[str, ...]


class AbstractQuerySource(abc.ABC):
    """Queries with batches, loss and folding of their own; pass one as ``query=``.

    A source is made of parts, each of one or several rows of the model's batch. Every part is one
    query, or all parts together are one.
    """

    @property
    @abc.abstractmethod
    def num_parts(self) -> int:
        """Number of parts.

        Returns:
            At least 1.
        """

    @property
    @abc.abstractmethod
    def is_summed(self) -> bool:
        """Whether all parts are one query, whose gradient is the sum of theirs.

        Returns:
            False where every part is a query.
        """

    @property
    @abc.abstractmethod
    def description(self) -> str:
        """What is measured, as it goes into a result.

        Returns:
            A short text.
        """

    @abc.abstractmethod
    def check_model(self, model: nn.Module) -> None:
        """Refuse a model that the queries do not belong to.

        Args:
            model: The model that is attributed.
        """

    @abc.abstractmethod
    def batches(self, size: int) -> Iterator[QueryBatch]:
        """Cut the parts into batches, in order.

        Args:
            size: Parts a batch; the last may be smaller.

        Returns:
            The batches.
        """

    @abc.abstractmethod
    def loss(self, model: nn.Module, values: Any) -> Tensor:  # noqa: ANN401
        """Run the model on the values of one batch, inside ``active``.

        Args:
            model: The model.
            values: Of a ``QueryBatch``, on the model's device.

        Returns:
            One value a row of the model's batch; a part's loss is the sum over its rows.
        """

    @abc.abstractmethod
    def fold(self, gradient: LayerGradient) -> LayerGradient:
        """Join the rows of each part.

        Args:
            gradient: A layer's gradients of one batch, one example a row of the model's batch.

        Returns:
            One example a part.
        """

    @abc.abstractmethod
    def active(self) -> AbstractContextManager[None]:
        """Install what the loss needs until the backward has ended.

        Returns:
            The context in which forward and backward run.
        """

    @abc.abstractmethod
    def probe(self) -> tuple[Rows, Callable[[nn.Module, Any], Tensor]]:
        """Give plain rows, one an example, to find out with where layers hold the batch.

        Returns:
            The rows, and what runs the model on a batch of them.
        """

    @abc.abstractmethod
    def head(self, count: int) -> AbstractQuerySource:
        """Give the same queries cut to the first parts.

        Args:
            count: How many at most.

        Returns:
            A source.
        """


@dataclass(frozen=True, eq=False)
class SourceRows(Rows):
    """The queries of a source where a data set is expected: it has their number.

    Attributes:
        source: The source.
    """

    source: AbstractQuerySource


def as_queries(
    query: Any,  # noqa: ANN401  # any data set
    model: nn.Module,
    collate: Collate | None,
    pad_id: int,
) -> Rows:
    """Accept what a user passes as ``query``.

    Args:
        query: A source, or a data set as ``as_rows`` takes it.
        model: The model that is attributed.
        collate: The user's collator, or None.
        pad_id: What to pad ``input_ids`` with.

    Returns:
        The queries.
    """
    if not isinstance(query, AbstractQuerySource):
        return as_rows(query, "query", collate, pad_id)
    query.check_model(model)
    return _rows_of(query)


def query_loss_of(
    query: Any,  # noqa: ANN401
    query_loss: Callable[[nn.Module, Any], Tensor] | None,
    reduction: LossReduction | None,
    trained: Loss,
) -> Loss:
    """Choose the loss of the queries.

    Args:
        query: What the user passed as ``query``.
        query_loss: The user's loss of a query, or None.
        reduction: How it was reduced.
        trained: The loss of a training example.

    Returns:
        The source's own loss, the user's, or that of a training example.

    Raises:
        ValueError: If a source meets a loss beside its own.
    """
    if isinstance(query, AbstractQuerySource):
        if query_loss is not None:
            raise ValueError(
                f"query_loss must be None where query brings its own loss, got one beside "
                f"{type(query).__name__}. Leave it out."
            )
        own = Loss(query.loss)
        own.description = query.description
        return own
    return trained if query_loss is None else resolve_loss(query_loss, reduction)


def head_of(rows: Rows, count: int) -> Rows:
    """Keep the first rows, or the first parts of a source."""
    if isinstance(rows, SourceRows):
        return _rows_of(rows.source.head(count))
    return Rows(range(min(count, len(rows))), rows.batch)


class RowJoin:
    """Joins row ``i`` of a batch with row ``parts + i``, ``2 parts + i`` and so on.

    Layers that read one input keep sharing it: the last few tensors are remembered.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._recent: deque[tuple[Tensor, Tensor]] = deque(maxlen=_REMEMBERED)

    def __call__(self, gradient: LayerGradient, parts: int) -> LayerGradient:
        """Join the rows of a layer's gradients.

        Args:
            gradient: Gradients of a multiple of ``parts`` rows, of any kind.
            parts: Number of examples that remain.

        Returns:
            The sum of the gradients of joined rows. Factors stand side by side on the position
            axis, written-out gradients are added.
        """
        return _along_positions(gradient, lambda tensor: self._joined(tensor, parts))

    def clear(self) -> None:
        """Let go of what is remembered."""
        self._recent.clear()

    def _joined(self, tensor: Tensor, parts: int) -> Tensor:
        for known, joined in self._recent:
            if known is tensor:
                return joined
        joined = torch.cat(tensor.split(parts), 1)
        self._recent.append((tensor, joined))
        return joined


class QuerySum:
    """Adds up the gradients of the parts of one query, layer by layer."""

    def __init__(self) -> None:
        """Start empty."""
        self.layers: dict[str, LayerGradient] = {}

    def add(self, name: str, gradient: LayerGradient) -> None:
        """Add a layer's gradients of some parts.

        Args:
            name: The layer.
            gradient: One example a part.
        """
        one = _along_positions(merge_uses(gradient), lambda tensor: torch.cat(tensor.split(1), 1))
        held = self.layers.get(name)
        self.layers[name] = one if held is None else _added(held, one)


def _rows_of(source: AbstractQuerySource) -> SourceRows:
    def refuse(_: Sequence[Any]) -> Any:  # noqa: ANN401
        raise TypeError(
            f"{type(source).__name__} must be read by its own batches, got a request for rows."
        )

    return SourceRows(range(1 if source.is_summed else source.num_parts), refuse, source)


def _along_positions(gradient: LayerGradient, join: Callable[[Tensor], Tensor]) -> LayerGradient:
    """Join examples along the position axis; written-out gradients have one place for the sum."""
    if isinstance(gradient, SumGradient):
        return SumGradient(tuple(_along_positions(part, join) for part in gradient.parts))
    if isinstance(gradient, DenseGradient):
        width = gradient.values_bd.shape[1]
        stacked = join(gradient.values_bd.unsqueeze(1))
        return replace(gradient, values_bd=stacked.view(-1, stacked.shape[1], width).sum(1))
    return map_tensors(gradient, join)


def _added(left: LayerGradient, right: LayerGradient) -> LayerGradient:
    """Add two gradients of one example, as factors where these take less room."""
    if isinstance(left, SumGradient) and isinstance(right, SumGradient):
        pairs = list(zip(left.parts, right.parts, strict=False))
        if len(left.parts) == len(right.parts) and all(type(a) is type(b) for a, b in pairs):
            return SumGradient(tuple(_added(a, b) for a, b in pairs))
    size = sum(tensor.numel() for one in (left, right) for tensor in tensors_of(one))
    dense = isinstance(left, (DenseGradient, SumGradient)) or type(left) is not type(right)
    if dense or size > dense_size(left):
        total = to_dense(left)
        return replace(total, values_bd=total.values_bd + to_dense(right).values_bd)
    merged = merge_uses(SumGradient((left, right)))
    if not isinstance(merged, SumGradient):
        return merged
    rights = iter(tensors_of(right))
    return map_tensors(left, lambda tensor: torch.cat([tensor, next(rights)], 1))
