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
    Vectors,
    gauss_newton,
    pull_back,
    push_forward,
)
from gradtrail.attribution.trajectory_checks import refuse_live
from gradtrail.attribution.trajectory_method import AbstractStoredMethod
from gradtrail.attribution.trajectory_records import Linearise, TrainingRecords
from gradtrail.distributed import gather_rows, shard_of
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

    Of many processes each carries its share of the queries or of the examples: both follow the
    steps without meeting each other.

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
    num_query = next(iter(records.queries.values())).shape[1]
    if not records.num_rows or not num_query:
        return torch.zeros(records.num_rows, num_query)
    backward, (place, world) = direction == "query", records.place
    own = shard_of(num_query, place, world) if backward else range(place, records.num_rows, world)
    if backward:
        records.keep_queries(own)
    _check_fits(records, direction, len(own), num_states)
    # who has nothing to carry reads nothing
    steps = records.sweep(linearise, reverse=backward) if len(own) else ()
    if adjust is not None:
        steps = map(adjust, steps)
    product = gauss_newton(by_layer=curvature == "block_diagonal")
    if backward:
        values_nq = pull_back(steps, records.queries, records.num_rows, product).cpu()
        if world == 1:
            return values_nq
        return gather_rows(values_nq.t(), what="scores").t().contiguous()
    values_rq = _products(push_forward(steps, product, (place, world)), records.queries)
    return values_rq if world == 1 else _in_order(gather_rows(values_rq, what="scores"), world)


def _products(ends: Vectors, queries: Vectors) -> Tensor:
    """What carried examples take off the queries' losses, on the CPU. Shape ``[r, q]``."""
    like = next(iter(queries.values()))
    if not ends:
        return like.new_zeros(0, like.shape[1]).cpu()
    return -sum((ends[name] @ queries[name].transpose(1, 2)).mean(0) for name in queries).cpu()


def _in_order(values_nq: Tensor, world: int) -> Tensor:
    """Bring rows that were dealt out one by one back into their order."""
    count = len(values_nq)
    dealt = [torch.arange(place, count, world) for place in range(world)]
    return values_nq[torch.cat(dealt).argsort()]


def _check_fits(
    records: TrainingRecords, direction: Direction, carried: int, num_states: int
) -> None:
    """Refuse perturbations that do not fit the memory.

    Args:
        records: The records.
        direction: What is carried.
        carried: How many of it.
        num_states: Numbers an entry.

    Raises:
        ValueError: If they do not.
    """
    one = next(iter(records.queries.values()))
    entries = sum(len(values) * values.shape[2] for values in records.queries.values())
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
