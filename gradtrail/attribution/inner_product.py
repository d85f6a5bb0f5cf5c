"""Inner products of gradients: GradDot and GradCos, and TracIn over checkpoints.

Pruthi et al., 2020, https://arxiv.org/abs/2002.08484: the score of a training example is the sum
over checkpoints of the learning rate times the inner product of its gradient with the query's.

Suffixes: n training example, q query, b example of a batch, s position.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gradtrail.attribution.data import Rows
from gradtrail.attribution.losses import Loss
from gradtrail.attribution.memory import query_budget
from gradtrail.attribution.method import METHODS, AbstractAttributor, MethodEntry, Task
from gradtrail.attribution.queries import QuerySide
from gradtrail.attribution.session import Batch, Session
from gradtrail.factors import (
    DenseGradient,
    GramMemo,
    LayerGradient,
    cross_gram,
    position_gram,
    positions_of,
    squared_norm,
)
from gradtrail.options import check_choice

__all__ = ["InnerProductAttributor"]


@dataclass(frozen=True, kw_only=True)
class InnerProductAttributor(AbstractAttributor):
    r"""Scores :math:`\langle G_n, G_q \rangle`, summed over layers.

    Attributes:
        normalize: ``"train"`` divides by the norm of the training gradient over all layers
            together, ``"both"`` by both norms (a cosine; a zero gradient scores 0), None by
            nothing.
    """

    normalize: Literal["train", "both"] | None = None

    def __post_init__(self) -> None:
        """Check the options."""
        check_choice("normalize", self.normalize, (None, "train", "both"))

    def score(self, session: Session, task: Task) -> tuple[Tensor, Tensor | None]:
        """Score every training example against every query.

        Args:
            session: The open session.
            task: Data, losses and batch sizes.

        Returns:
            Scores ``[n, q]`` or ``[n, s, q]`` on the CPU, and lengths ``[n]`` for the latter.
        """
        queries = collect_queries(session, task, norms=self.normalize == "both")
        scorer = _Scorer(task, queries, norms=self.normalize is not None)
        session.capture(
            task.train,
            task.loss,
            batch_size=task.batch_size,
            phase="train",
            sink=scorer.add,
            done=scorer.close,
        )
        return scorer.result(queries.norms)

    def self_score(self, session: Session, rows: Rows, loss: Loss, batch_size: int) -> Tensor:
        """Score every training example against itself.

        Args:
            session: The open session.
            rows: The training data.
            loss: Its loss.
            batch_size: Rows a batch.

        Returns:
            Squared norms divided as ``normalize`` says. Shape ``[n]``.
        """
        wide = torch.float32 if session.device.type == "mps" else torch.float64
        squared_n = torch.zeros(len(rows), dtype=wide, device=session.device)

        def add(place: Batch, name: str, gradient: LayerGradient) -> None:
            del name
            values = squared_norm(gradient).to(squared_n)
            squared_n[place.start : place.start + place.size] += values

        session.capture(rows, loss, batch_size=batch_size, phase="train", sink=add)
        if self.normalize == "train":
            return squared_n.sqrt()
        if self.normalize == "both":
            ones = (squared_n > 0).to(squared_n)
            return torch.where(torch.isfinite(squared_n), ones, torch.nan)
        return squared_n


def collect_queries(session: Session, task: Task, *, norms: bool) -> QuerySide:
    """Capture the gradients of all queries.

    Args:
        session: The open session.
        task: Data, losses and batch sizes.
        norms: Whether their norms are wanted.

    Returns:
        The finished query side.
    """
    budget = query_budget(session.device)
    side = QuerySide(len(task.query), len(task.train), budget=budget, norms=norms)
    session.capture(
        task.query,
        task.query_loss,
        batch_size=task.query_batch_size,
        phase="queries",
        sink=lambda place, name, gradient: side.add(place.start, name, gradient),
    )
    side.finish()
    return side


class _Scorer:
    """Adds up scores of the training examples, layer by layer inside each backward."""

    def __init__(self, task: Task, queries: QuerySide, *, norms: bool) -> None:
        self._task = task
        self._queries = queries
        self._norms = norms
        self._memo = GramMemo()
        self._block: Tensor | None = None
        self._squared: Tensor | None = None
        self._blocks: list[Tensor] = []
        self._squares: list[Tensor] = []
        self._lengths: list[Tensor] = []

    def add(self, place: Batch, name: str, gradient: LayerGradient) -> None:
        """Score one layer of one batch."""
        query = self._queries.layers.get(name)
        if self._norms and isinstance(query, DenseGradient) and not self._task.per_token:
            gradient = self._memo.written(gradient)  # once for the norm and the products
        if self._norms:
            squared = squared_norm(gradient)
            self._squared = squared if self._squared is None else self._squared + squared
        if query is None:
            return  # no query reached this layer: its share of every score is zero
        if self._task.per_token:
            shares = self._shares(place, name, gradient, query)
        else:
            shares = cross_gram(gradient, query, memo=self._memo)
        self._block = shares if self._block is None else self._block.add_(shares)

    def close(self, place: Batch) -> None:
        """Move a finished batch's scores to the CPU."""
        self._memo.clear()
        block = self._block
        if block is None:
            positions = (place.tokens,) if self._task.per_token else ()
            block = torch.zeros(place.size, *positions, len(self._task.query))
        if self._task.per_token and place.padding_left is not None:
            block = _aligned(block, place.padding_left)
        self._blocks.append(block.cpu())
        self._lengths.append(place.lengths)
        if self._norms:
            squared = self._squared
            self._squares.append(torch.zeros(place.size) if squared is None else squared.cpu())
        self._block = self._squared = None

    def result(self, query_norms: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Join the batches and divide by norms."""
        n, q = len(self._task.train), len(self._task.query)
        if not self._blocks:
            return torch.zeros((n, 0, q) if self._task.per_token else (n, q)), torch.zeros(0)
        if self._task.per_token:
            longest = max(block.shape[1] for block in self._blocks)
            padded = [
                torch.nn.functional.pad(block, (0, 0, 0, longest - block.shape[1]))
                for block in self._blocks
            ]
            values = torch.cat(padded)
        else:
            values = torch.cat(self._blocks)
        values = values.double()
        if self._norms:
            values = _divided(values, torch.cat(self._squares).double().sqrt(), 0)
        if query_norms is not None:
            values = _divided(values, query_norms.cpu().double(), -1)
        return values, torch.cat(self._lengths)

    def _shares(
        self, place: Batch, name: str, gradient: LayerGradient, query: LayerGradient
    ) -> Tensor:
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


def _divided(values: Tensor, norms: Tensor, axis: int) -> Tensor:
    """Divide along one axis; a zero norm gives 0, one that overflowed NaN."""
    shape = [1] * values.dim()
    shape[axis] = -1
    inverse = torch.where(norms > 0, 1 / norms, torch.zeros_like(norms))
    inverse = torch.where(torch.isfinite(norms), inverse, torch.full_like(norms, torch.nan))
    return values * inverse.view(shape)


METHODS["graddot"] = MethodEntry(InnerProductAttributor, {})
METHODS["gradcos"] = MethodEntry(InnerProductAttributor, {"normalize": "both"})
METHODS["tracin"] = MethodEntry(InnerProductAttributor, {}, checkpoints=True)
