"""Adding up scores of training examples against queries, layer by layer.

Suffixes: n training example, q query, b example of a batch, s position.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gradtrail.attribution.method import Task
from gradtrail.attribution.session import Batch
from gradtrail.attribution.top_scores import TopScores
from gradtrail.factors import (
    DenseGradient,
    GramMemo,
    LayerGradient,
    cross_gram,
    position_gram,
    positions_of,
    squared_norm,
)

__all__ = ["Scorer", "divided", "normalized"]


@dataclass(eq=False)
class _Rows:
    """What is known of one batch so far."""

    place: Batch
    scores: Tensor | None = None
    squared: Tensor | None = None


class Scorer:
    """Adds up scores while layers of batches come in any order."""

    def __init__(
        self, task: Task, queries: Mapping[str, LayerGradient], num_query: int, *, norms: bool
    ) -> None:
        """Start with nothing scored.

        Args:
            task: What is scored.
            queries: The queries' gradients by layer, preconditioned where the method does that.
            num_query: Number of columns.
            norms: Whether the training examples' norms are wanted.
        """
        self._task = task
        self._queries = queries
        self._num_query = num_query
        self._norms = norms
        self._top = None if task.top_k is None else TopScores(task.top_k, num_query)
        self._memo = GramMemo()
        self._open: dict[int, _Rows] = {}
        # one table, made at the start: small tensors that stay would hold the memory of large ones
        # open that come and go between them
        rows = 0 if task.per_token or self._top is not None else len(task.train)
        self._values = torch.zeros(rows, num_query, dtype=torch.float64)
        self._squares = torch.zeros(len(task.train) if norms else 0, dtype=torch.float64)
        self._shares_of: dict[int, tuple[Tensor, Tensor]] = {}

    def add(self, place: Batch, name: str, gradient: LayerGradient) -> None:
        """Score one layer of one batch.

        Args:
            place: The batch.
            name: The layer.
            gradient: Its gradients.
        """
        rows = self._open.get(place.start)
        if rows is None:
            rows = self._open[place.start] = _Rows(place)
        query = self._queries.get(name)
        if self._norms and isinstance(query, DenseGradient) and not self._task.per_token:
            gradient = self._memo.written(gradient)  # once for the norm and the products
        if self._norms:
            squared = squared_norm(gradient)
            rows.squared = squared if rows.squared is None else rows.squared + squared
        if query is None:
            return  # no query reached this layer: its share of every score is zero
        if self._task.per_token:
            shares = self._shares(place, name, gradient, query)
        else:
            shares = cross_gram(gradient, query, memo=self._memo)
        rows.scores = shares if rows.scores is None else rows.scores.add_(shares)

    def close(self, place: Batch) -> None:
        """Move a finished batch's scores to the CPU.

        Args:
            place: The batch.
        """
        self._memo.clear()
        rows = self._open.pop(place.start, _Rows(place))
        block = rows.scores
        if block is None:
            positions = (place.tokens,) if self._task.per_token else ()
            block = torch.zeros(place.size, *positions, self._num_query)
        if self._task.per_token and place.padding_left is not None:
            block = _aligned(block, place.padding_left)
        squared = None
        if self._norms:
            squared = torch.zeros(place.size) if rows.squared is None else rows.squared.cpu()
        if squared is not None:
            self._squares[place.start : place.start + place.size] = squared
        block = block.cpu()
        if self._top is not None:
            self._top.add(place.start, normalized(block, squared, None))
        elif self._task.per_token:
            self._shares_of[place.start] = block, place.lengths
        else:
            self._values[place.start : place.start + place.size] = block

    def close_all(self) -> None:
        """Move every batch's scores to the CPU."""
        for rows in list(self._open.values()):
            self.close(rows.place)

    def result(self, query_norms: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Join the batches and divide by norms.

        Args:
            query_norms: Norms of the columns to divide by, or None. Shape ``[q]``.

        Returns:
            Scores, float64, ``[n, q]`` or ``[n, s, q]``, and lengths ``[n]``; with ``top_k`` the
            highest, ``[k, q]``, and the rows they are of.
        """
        if self._top is not None:
            values_kq, rows_kq = self._top.result()
            return normalized(values_kq, None, query_norms), rows_kq
        values, lengths = self._joined() if self._task.per_token else (self._values, None)
        squared_n = self._squares if self._norms else None
        return normalized(values, squared_n, query_norms), lengths

    def _joined(self) -> tuple[Tensor, Tensor]:
        """Join the batches' shares, padded to the longest, and their lengths."""
        parts = [self._shares_of[start] for start in sorted(self._shares_of)]
        if not parts:
            return torch.zeros(len(self._task.train), 0, self._num_query), torch.zeros(0)
        longest = max(block.shape[1] for block, _ in parts)
        blocks = [
            torch.nn.functional.pad(block, (0, 0, 0, longest - block.shape[1]))
            for block, _ in parts
        ]
        return torch.cat(blocks), torch.cat([lengths for _, lengths in parts])

    def _shares(
        self, place: Batch, name: str, gradient: LayerGradient, query: LayerGradient
    ) -> Tensor:
        if isinstance(gradient, DenseGradient):
            raise ValueError(
                f"granularity='token' needs gradients with positions, got written-out ones at "
                f"{name}. Capture factors, without a projection that writes out, or leave it out "
                "with exclude=."
            )
        if positions_of(gradient) != {place.tokens}:
            raise ValueError(
                f"granularity='token' needs layers with one position a token ({place.tokens}), "
                f"got {sorted(positions_of(gradient))} at {name}. Leave it out with exclude=."
            )
        return position_gram(gradient, query, memo=self._memo)


def _aligned(block_bsq: Tensor, leading_b: Tensor) -> Tensor:
    """Move the valid positions of left-padded rows to the front; the sum does not change."""
    s = block_bsq.shape[1]
    order = (torch.arange(s, device=block_bsq.device) + leading_b.unsqueeze(1)) % s
    return block_bsq.gather(1, order.unsqueeze(-1).expand_as(block_bsq))


def normalized(values: Tensor, squared_n: Tensor | None, query_norms: Tensor | None) -> Tensor:
    """Divide scores by norms, where these are given.

    Args:
        values: Scores on the CPU, rows first, queries last.
        squared_n: Squared norms of the training gradients, or None. Shape ``[n]``.
        query_norms: Norms of the queries' gradients, or None. Shape ``[q]``.

    Returns:
        The scores, float64.
    """
    values = values.double()
    if squared_n is not None:
        values = divided(values, squared_n.cpu().double().sqrt(), 0)
    if query_norms is not None:
        values = divided(values, query_norms.cpu().double(), -1)
    return values


def divided(values: Tensor, norms: Tensor, axis: int) -> Tensor:
    """Divide along one axis; a zero norm gives 0, one that overflowed NaN.

    Args:
        values: What to divide.
        norms: At least 0. Shape ``[values.shape[axis]]``.
        axis: Which axis.

    Returns:
        The quotients.
    """
    shape = [1] * values.dim()
    shape[axis] = -1
    inverse = torch.where(norms > 0, 1 / norms, torch.zeros_like(norms))
    inverse = torch.where(torch.isfinite(norms), inverse, torch.full_like(norms, torch.nan))
    return values * inverse.view(shape)
