"""Inner products of gradients: GradDot and GradCos, and TracIn over checkpoints.

Pruthi et al., 2020, https://arxiv.org/abs/2002.08484: the score of a training example is the sum
over checkpoints of the learning rate times the inner product of its gradient with the query's.

Suffixes: n training example, b example of a batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from gradtrail.attribution.data import Rows
from gradtrail.attribution.losses import Loss
from gradtrail.attribution.memory import query_budget
from gradtrail.attribution.method import (
    METHODS,
    AbstractAttributor,
    MethodEntry,
    Task,
    refuse_preconditioned,
)
from gradtrail.attribution.queries import QueryForm, QuerySide
from gradtrail.attribution.scoring import Scorer
from gradtrail.attribution.session import Batch, Session
from gradtrail.attribution.stored import StoredRows
from gradtrail.attribution.stored_model import StoredModel
from gradtrail.factors import LayerGradient, squared_norm
from gradtrail.options import check_choice

__all__ = ["InnerProductAttributor"]


@dataclass(frozen=True, kw_only=True)
class InnerProductAttributor(AbstractAttributor):
    r"""Scores :math:`\langle G_n, G_q \rangle`, summed over layers.

    Attributes:
        shares_rows: True: each of many processes scores its share.
        normalize: ``"train"`` divides by the norm of the training gradient over all layers
            together, ``"both"`` by both norms (a cosine; a zero gradient scores 0), None by
            nothing.
    """

    shares_rows: ClassVar[bool] = True

    normalize: Literal["train", "both"] | None = None

    def __post_init__(self) -> None:
        """Check the options."""
        check_choice("normalize", self.normalize, (None, "train", "both"))

    def choose_stored(self, stored: StoredModel, rows: StoredRows) -> StoredModel:
        """Take every layer; of preconditioned queries the norm is not known.

        Args:
            stored: The layers that could be read.
            rows: The training examples that are read.

        Returns:
            The layers to read.
        """
        del rows
        if self.normalize == "both":
            refuse_preconditioned(stored, "normalize='both' (gradcos)")
        return stored

    def score(self, session: Session, task: Task) -> tuple[Tensor, Tensor | None]:
        """Score every training example against every query.

        Args:
            session: The open session.
            task: Data, losses and batch sizes.

        Returns:
            Scores ``[n, q]`` or ``[n, s, q]`` on the CPU, and lengths ``[n]`` for the latter; with
            ``top_k`` the highest, ``[k, q]``, and their rows.
        """
        queries = collect_queries(session, task, norms=self.normalize == "both")
        norms = self.normalize is not None
        scorer = Scorer(task, queries.layers, len(task.query), norms=norms)
        session.capture(
            task.train,
            task.loss,
            batch_size=task.batch_size,
            phase="train",
            sink=scorer.add,
            done=scorer.close,
        )
        return scorer.result(queries.norms)

    def self_score(
        self, session: Session, rows: Rows, loss: Loss, batch_size: int | None
    ) -> Tensor:
        """Score every training example against itself.

        Args:
            session: The open session.
            rows: The training data.
            loss: Its loss.
            batch_size: Rows a batch; None takes the blocks of a store as they are.

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


def collect_queries(
    session: Session, task: Task, *, norms: bool, form: QueryForm | None = None
) -> QuerySide:
    """Capture the gradients of all queries.

    Args:
        session: The open session.
        task: Data, losses and batch sizes.
        norms: Whether their norms are wanted.
        form: Chooses the form of each layer; None takes the one that scores cheapest.

    Returns:
        The finished query side.
    """
    budget = query_budget(session.device)
    side = QuerySide(len(task.query), len(task.train), budget=budget, norms=norms, form=form)
    session.capture(
        task.query,
        task.query_loss,
        batch_size=task.query_batch_size,
        phase="queries",
        sink=lambda place, name, gradient: side.add(place.start, name, gradient),
    )
    side.finish()
    return side


METHODS["graddot"] = MethodEntry(InnerProductAttributor, {})
METHODS["gradcos"] = MethodEntry(InnerProductAttributor, {"normalize": "both"})
METHODS["tracin"] = MethodEntry(InnerProductAttributor, {}, checkpoints=True)
