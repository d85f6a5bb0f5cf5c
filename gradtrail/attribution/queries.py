"""The query side: gradients of all queries, layer by layer, in the form that scores cheapest.

Suffixes: d gradient entry, q query.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from gradtrail.attribution.memory import large_zeros
from gradtrail.factors import (
    DenseGradient,
    JoinMemo,
    LayerGradient,
    LinearFactors,
    SumGradient,
    accumulation_dtype,
    concatenate,
    dense_size,
    map_tensors,
    prefers_dense,
    select,
    squared_norm,
    tensors_of,
    to_dense,
    write_dense,
)

__all__ = ["QueryForm", "QuerySide", "compact_form", "query_form"]

QueryForm: TypeAlias = Callable[[LayerGradient, int, int, int], tuple[bool, int]]


@dataclass(eq=False)
class _Table:
    """Written-out gradients of one layer, being filled query by query."""

    values_qd: Tensor
    shape: tuple[int, ...]
    has_bias: bool


class QuerySide:
    """Collects the gradients of ``num_query`` queries while they are captured."""

    def __init__(
        self,
        num_query: int,
        num_train: int,
        *,
        budget: int,
        norms: bool,
        form: QueryForm | None = None,
    ) -> None:
        """Start empty.

        Args:
            num_query: Number of queries.
            num_train: Number of training examples that will meet them.
            budget: Bytes that written-out gradients may take in all; beyond it layers stay
                factored, which is as exact.
            norms: Whether the queries' norms are wanted.
            form: Chooses the form of each layer; None takes the one that scores cheapest.
        """
        self._form = form or query_form
        self._num_query = num_query
        self._num_train = num_train
        self._left = budget
        self._norms = norms
        self._tables: dict[str, _Table] = {}
        self._pieces: dict[str, list[tuple[int, LayerGradient]]] = {}
        self._squared: Tensor | None = None
        self.layers: dict[str, LayerGradient] = {}

    def add(self, start: int, name: str, gradient: LayerGradient) -> None:
        """Take one layer's gradients of some queries.

        Args:
            start: Number of the first query.
            name: The layer.
            gradient: Gradients of queries ``start`` and on.
        """
        if self._norms:
            self._add_norms(start, gradient)
        if name not in self._tables and name not in self._pieces:
            self._open(name, gradient)
        if name in self._pieces:
            self._pieces[name].append((start, gradient))
            return
        write_dense(gradient, self._tables[name].values_qd[start : start + gradient.num_examples])

    def finish(self) -> None:
        """Join what was collected."""
        for name, table in self._tables.items():
            self.layers[name] = DenseGradient(table.values_qd, table.shape, table.has_bias)
        memo = JoinMemo()
        for name, pieces in self._pieces.items():
            self.layers[name] = concatenate(self._filled(pieces), memo)
        self._tables.clear()
        self._pieces.clear()

    @property
    def norms(self) -> Tensor | None:
        """Norm of every query's gradient over all layers. Shape ``[q]``."""
        return None if self._squared is None else self._squared.sqrt()

    @property
    def nbytes(self) -> int:
        """Bytes that the collected gradients take; a shared input counts once."""
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for gradient in self.layers.values()
            for tensor in tensors_of(gradient)
        }
        return sum(storages.values())

    def _open(self, name: str, gradient: LayerGradient) -> None:
        """Choose a layer's form and make room for it."""
        written, size = self._form(gradient, self._num_train, self._num_query, self._left)
        if not written:
            self._pieces[name] = []
            return
        self._left -= size
        dense = to_dense(select(gradient, slice(0, 1)))
        rows = large_zeros((self._num_query, dense.values_bd.shape[1]), like=dense.values_bd)
        self._tables[name] = _Table(rows, dense.shape, dense.has_bias)

    def _add_norms(self, start: int, gradient: LayerGradient) -> None:
        squared = squared_norm(gradient)
        if self._squared is None:
            self._squared = squared.new_zeros(self._num_query)
        self._squared[start : start + squared.shape[0]] += squared

    def _filled(self, pieces: list[tuple[int, LayerGradient]]) -> list[LayerGradient]:
        """Put zero gradients where a batch of queries did not reach the layer."""
        filled, reached = [], 0
        for start, gradient in [*pieces, (self._num_query, None)]:
            if start > reached:
                filled.append(_zeros(pieces[0][1], start - reached))
            if gradient is not None:
                filled.append(gradient)
                reached = start + gradient.num_examples
        return filled


def query_form(
    gradient: LayerGradient, num_train: int, num_query: int, left: int
) -> tuple[bool, int]:
    """Choose how the queries' gradients of one layer are kept.

    Args:
        gradient: Some queries' gradients.
        num_train: Training examples that will meet them.
        num_query: Queries in all.
        left: Bytes that are left for written-out gradients.

    Returns:
        Whether they are written out (where that is cheaper and fits), and the bytes of all.
    """
    dtype = accumulation_dtype(*(tensor.dtype for tensor in tensors_of(gradient)))
    size = dense_size(gradient) * num_query * dtype.itemsize
    written = prefers_dense(gradient, num_train=num_train, num_query=num_query)
    if isinstance(gradient, DenseGradient) or (written and size <= left):
        return True, size
    batch = max(1, gradient.num_examples)
    return False, sum(tensor.nbytes for tensor in tensors_of(gradient)) * num_query // batch


def compact_form(
    gradient: LayerGradient, num_train: int, num_query: int, left: int
) -> tuple[bool, int]:
    """Choose the smaller form, for gradients that will be turned before they score.

    Args:
        gradient: Some queries' gradients.
        num_train: Training examples that will meet them; without effect.
        num_query: Queries in all.
        left: Bytes that are left; without effect, nothing is smaller than this form.

    Returns:
        Whether they are written out, and the bytes of all.
    """
    del num_train, left
    tensors = tensors_of(gradient)
    size = dense_size(gradient) * accumulation_dtype(*(t.dtype for t in tensors)).itemsize
    factored = sum(tensor.nbytes for tensor in tensors) // max(1, gradient.num_examples)
    parts = gradient.parts if isinstance(gradient, SumGradient) else (gradient,)
    linear = all(isinstance(part, LinearFactors) for part in parts)
    written = not linear or size < factored
    return written, num_query * (size if written else factored)


def _zeros(gradient: LayerGradient, rows: int) -> LayerGradient:
    """Zero gradients of a number of examples in the form of another's."""
    return map_tensors(gradient, lambda tensor: tensor.new_zeros(rows, *tensor.shape[1:]))
