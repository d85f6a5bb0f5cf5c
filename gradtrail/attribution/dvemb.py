r"""Data value embeddings: a perturbed weight carried through the gradient steps that followed.

The method of https://arxiv.org/abs/2412.09538. An example ``z`` of step ``s`` scores

.. math:: \eta_s\, g_q^T \Big[ \prod_{k > s} (I - \eta_k H_k) \Big] w_z g_z, \quad
    H_k = \sum_{z \in B_k} w_z g_z g_z^T,

with :math:`g_z` the gradient of the example's own loss and :math:`w_z g_z` its share of the step's
gradient: :math:`w_z` is 1 for a loss summed over the batch and 1 over the batch size for its mean.
In terms of the shares :math:`\tilde g = w g` this is :math:`H_k = c \sum \tilde g \tilde g^T`
with ``c`` the batch size for a mean and 1 for a sum.

Suffixes: m mask, r row, d followed entry.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradtrail.attribution.method import METHODS, MethodEntry
from gradtrail.attribution.trajectory import AbstractLayerStep, State
from gradtrail.attribution.trajectory_checks import check_records
from gradtrail.attribution.trajectory_method import StoredTask
from gradtrail.attribution.trajectory_records import (
    LayerRecord,
    TrainingRecords,
    stored_cuts,
)
from gradtrail.attribution.trajectory_run import (
    AbstractSweepMethod,
    CurvatureKind,
    Direction,
    check_sweep,
    sweep_scores,
)

__all__ = ["DVEmbMethod", "GradientLayerStep"]


@dataclass(frozen=True, eq=False)
class GradientLayerStep(AbstractLayerStep):
    r"""One step along the gradient of one layer: the state is ``(theta,)``, ``[m, r, d]``.

    Attributes:
        rate: Learning rate :math:`\eta`. Shape ``[m, 1, d]``.
        decay: What weight decay leaves of a parameter, broadcast to ``rate``; None: all of it.
    """

    rate: Tensor
    decay: Tensor | None

    def start(self, theta: Tensor) -> State:
        """A change of the parameters."""
        return (theta,)

    def zeros(self, rows: int) -> Tensor:
        """No change. Shape ``[m, r, d]``."""
        m, _, d = self.rate.shape
        return self.rate.new_zeros(m, rows, d)

    def push(self, state: State, change: Tensor) -> State:
        """Carry a perturbation through the step.

        Args:
            state: The perturbation before it, which is overwritten.
            change: What it changes in the step's gradient. Shape ``[m, r, d]``.

        Returns:
            The perturbation after it.
        """
        (theta,) = state
        return (self._kept(theta).addcmul_(self.rate, change, value=-1),)

    @property
    def multiple(self) -> float | None:
        """Minus the rate, where all entries have one and nothing shrinks them meanwhile."""
        alone = self.decay is None and self.rate.stride() == (0, 0, 0)
        return -float(self.rate[0, 0, 0]) if alone and self.rate.numel() else None

    def pull(self, state: State, covector: Tensor | None) -> State:
        """Apply the transpose of ``push``.

        Args:
            state: Derivatives with respect to the parameters after the step, overwritten.
            covector: Where derivatives with respect to the step's gradient are written, or None.

        Returns:
            Derivatives with respect to the parameters before the step.
        """
        (theta,) = state
        if covector is not None:
            torch.mul(theta, -self.rate, out=covector)
        return (self._kept(theta),)

    def _kept(self, theta: Tensor) -> Tensor:
        return theta if self.decay is None else theta.mul_(self.decay)


@dataclass(frozen=True, kw_only=True)
class DVEmbMethod(AbstractSweepMethod):
    """Options of ``"dvemb"``.

    Attributes:
        curvature: ``"full"``, or ``"block_diagonal"`` without products of different layers.
        weight_decay: Whether the recorded weight decay shrinks a perturbation in each later step,
            as plain SGD with weight decay does; the paper's formula has none.
        direction: ``"query"`` carries the queries back through the steps, ``"train"`` the examples
            forward, as embeddings: the same scores, at the cost of what is carried.
    """

    curvature: CurvatureKind = "full"
    weight_decay: bool = False
    direction: Direction = "query"

    def __post_init__(self) -> None:
        """Check the options."""
        check_sweep(self.curvature, self.direction)

    @property
    def name(self) -> str:
        """The registered name."""
        return "dvemb"

    def score_stored(self, task: StoredTask) -> Tensor:
        """Score the examples of the selected steps against every query.

        Args:
            task: The records of the training run and the queries at its end.

        Returns:
            Rows in the order of the store, on the CPU. Shape ``[n, q]``.
        """
        check_records(self.name, task, ())
        records = TrainingRecords(task, stored_cuts(task), moments=False)
        return sweep_scores(
            records,
            self._linearised,
            curvature=self.curvature,
            direction=self.direction,
            num_states=1,
        )

    def _linearised(self, record: LayerRecord) -> AbstractLayerStep:
        """Read one layer's step off its record.

        Args:
            record: The record.

        Returns:
            The step.

        Raises:
            ValueError: If the optimizer goes up the gradient.
        """
        if any(record.options("maximize")):
            raise ValueError(
                "optimizer_states must be of an optimizer with maximize=False for method 'dvemb', "
                "got True. Negate the loss in place of it."
            )
        rate = record.spread(record.options("lr"))
        decay = None
        if self.weight_decay and record.is_reached:  # others are left alone by the optimizer
            left = 1 - rate * record.spread(record.options("weight_decay"))
            decay = left.to(record.like)
        return GradientLayerStep(record.filled(rate), decay)


METHODS["dvemb"] = MethodEntry(DVEmbMethod, {})
