"""Scores from the records of a training run, in either direction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NoReturn, TypeAlias

import torch
from torch import Tensor

from gradtrail.attribution.data import Rows
from gradtrail.attribution.losses import Loss
from gradtrail.attribution.measures import Measures
from gradtrail.attribution.memory import free_bytes
from gradtrail.attribution.method import Task
from gradtrail.attribution.session import Session
from gradtrail.attribution.trajectory import (
    TrajectoryStep,
    gauss_newton,
    pull_back,
    push_forward,
)
from gradtrail.attribution.trajectory_checks import refuse_live
from gradtrail.attribution.trajectory_method import AbstractStoredMethod
from gradtrail.attribution.trajectory_records import Linearise, TrainingRecords
from gradtrail.options import check_choice

__all__ = ["AbstractSweepMethod", "CurvatureKind", "Direction", "check_sweep", "sweep_scores"]

CurvatureKind: TypeAlias = Literal["full", "block_diagonal"]
Direction: TypeAlias = Literal["query", "train"]


class AbstractSweepMethod(AbstractStoredMethod):
    """A method that scores the steps of a training run, and no fixed model."""

    def demands(self, measures: Measures, session: Session) -> NoReturn:
        """Refuse a fixed model."""
        del measures, session
        refuse_live(self.name)

    def score(self, session: Session, task: Task) -> NoReturn:
        """Refuse a fixed model."""
        del session, task
        refuse_live(self.name)

    def self_score(self, session: Session, rows: Rows, loss: Loss, batch_size: int) -> NoReturn:
        """Refuse a fixed model."""
        del session, rows, loss, batch_size
        refuse_live(self.name)


def check_sweep(curvature: str, direction: str) -> None:
    """Check the options that the trajectory methods share."""
    check_choice("curvature", curvature, ("full", "block_diagonal"))
    check_choice("direction", direction, ("query", "train"))


def sweep_scores(
    records: TrainingRecords,
    linearise: Linearise,
    *,
    curvature: CurvatureKind,
    direction: Direction,
    num_states: int,
    adjust: Callable[[TrajectoryStep], TrajectoryStep] | None = None,
) -> Tensor:
    """Score every selected example, reading each step once.

    Args:
        records: The records.
        linearise: Makes what the optimizer did with a layer in a step.
        curvature: Whether products of different layers count.
        direction: ``"query"`` carries the queries back, ``"train"`` the examples forward.
        num_states: Numbers that a perturbation has for each entry.
        adjust: Changes each step before it is used, or None.

    Returns:
        The mean over masks, on the CPU. Shape ``[n, q]``.
    """
    queries = records.queries
    num_query = next(iter(queries.values())).shape[1]
    if not records.num_rows or not num_query:
        return torch.zeros(records.num_rows, num_query)
    _check_fits(records, direction, num_states)
    steps = records.sweep(linearise, reverse=direction == "query")
    if adjust is not None:
        steps = map(adjust, steps)
    product = gauss_newton(by_layer=curvature == "block_diagonal")
    if direction == "query":
        return pull_back(steps, queries, records.num_rows, product).cpu()
    ends = push_forward(steps, product)
    parts = [(ends[name] @ values.transpose(1, 2)).mean(0) for name, values in queries.items()]
    return -sum(parts).cpu()


def _check_fits(records: TrainingRecords, direction: Direction, num_states: int) -> None:
    """Refuse perturbations that do not fit the memory.

    Args:
        records: The records.
        direction: What is carried.
        num_states: Numbers an entry.

    Raises:
        ValueError: If they do not.
    """
    one = next(iter(records.queries.values()))
    entries = sum(values[:, :1].numel() for values in records.queries.values())
    carried = one.shape[1] if direction == "query" else records.num_rows
    # a gradient and what the curvature makes of it come on top; a forward sweep grows by copying
    needed = carried * entries * one.element_size() * (num_states + 2)
    free = free_bytes(one.device)
    if needed > free:
        what = "queries" if direction == "query" else "training examples"
        way_out = "" if direction == "query" else " Pass direction='query'."
        raise ValueError(
            f"direction={direction!r} must fit the memory ({free / 1e9:.1f} GB free), got "
            f"{carried} {what} of {entries} entries, {needed / 1e9:.1f} GB.{way_out} "
            "Follow fewer entries (a projection, masks) or score fewer at once."
        )
