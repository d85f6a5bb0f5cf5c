"""The query side: gradients of all queries, layer by layer, in the form that scores cheapest.

Suffixes: d gradient entry, q query.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradtrail.factors import (
    DenseGradient,
    JoinMemo,
    LayerGradient,
    accumulation_dtype,
    concatenate,
    dense_size,
    map_tensors,
    prefers_dense,
    squared_norm,
    to_dense,
)

__all__ = ["QuerySide"]


@dataclass(eq=False)
class _Table:
    """Written-out gradients of one layer, stored entry-major: ``[d, q]``.

    The score is a product over ``d`` of a few examples with all queries; read in this order the
    queries stream through the cache once.
    """

    entries_dq: Tensor
    shape: tuple[int, ...]
    has_bias: bool


class QuerySide:
    """Collects the gradients of ``num_query`` queries while they are captured."""

    def __init__(self, num_query: int, num_train: int, *, budget: int, norms: bool) -> None:
        """Start empty.

        Args:
            num_query: Number of queries.
            num_train: Number of training examples that will meet them.
            budget: Bytes that written-out gradients may take in all; beyond it layers stay
                factored, which is as exact.
            norms: Whether the queries' norms are wanted.
        """
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
        dense = to_dense(gradient)
        stop = start + dense.num_examples
        self._tables[name].entries_dq[:, start:stop] = dense.values_bd.t()

    def finish(self) -> None:
        """Join what was collected."""
        for name, table in self._tables.items():
            self.layers[name] = DenseGradient(table.entries_dq.t(), table.shape, table.has_bias)
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
        seen: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
            return tensor

        for gradient in self.layers.values():
            map_tensors(gradient, note)
        return sum(seen.values())

    def _open(self, name: str, gradient: LayerGradient) -> None:
        """Choose a layer's form by the cost rule and what is left of the budget."""
        size = dense_size(gradient)
        probe = _any_tensor(gradient)
        dtype = accumulation_dtype(probe.dtype)
        nbytes = size * self._num_query * dtype.itemsize
        written = prefers_dense(gradient, num_train=self._num_train, num_query=self._num_query)
        if not isinstance(gradient, DenseGradient) and (not written or nbytes > self._left):
            self._pieces[name] = []
            return
        self._left -= nbytes
        dense = to_dense(gradient)
        entries_dq = torch.zeros(size, self._num_query, dtype=dtype, device=probe.device)
        self._tables[name] = _Table(entries_dq, dense.shape, dense.has_bias)

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


def _any_tensor(gradient: LayerGradient) -> Tensor:
    """A floating tensor of a layer gradient, for its dtype and device."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            found.append(tensor)
        return tensor

    map_tensors(gradient, note)
    return found[0]


def _zeros(gradient: LayerGradient, rows: int) -> LayerGradient:
    """Zero gradients of a number of examples in the form of another's."""
    return map_tensors(gradient, lambda tensor: tensor.new_zeros(rows, *tensor.shape[1:]))
