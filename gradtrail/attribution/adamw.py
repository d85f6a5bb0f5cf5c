r"""AdamW-influence: a perturbed weight carried through the linearised AdamW steps that followed.

The method of https://arxiv.org/abs/2605.18814. In a step the moments and parameters change by

.. math::

    m' = \beta_1 m + (1 - \beta_1) g, \quad v' = \beta_2 v + (1 - \beta_2) g^2, \quad
    \theta' = (1 - \eta \lambda) \theta
        - \eta \frac{m' / (1 - \beta_1^t)}{\sqrt{v' / (1 - \beta_2^t)} + \epsilon},

and a perturbation, with :math:`dg = H d\theta` (and the example's own share in its step), by

.. math::

    dm' = \beta_1 dm + (1 - \beta_1) dg, \quad dv' = \beta_2 dv + 2 (1 - \beta_2) g\, dg, \quad
    d\theta' = (1 - \eta \lambda) d\theta
        - \eta \left( D \frac{dm'}{1 - \beta_1^t} - S \frac{dv'}{1 - \beta_2^t} \right),

:math:`D = 1 / (\sqrt{\hat v} + \epsilon)` and
:math:`S = \hat m / (2 \sqrt{\hat v} (\sqrt{\hat v} + \epsilon)^2)`, which is 0 where
:math:`\hat v = 0`. The score is what this takes off the query's loss.

Suffixes: m mask, r row, n training row, q query, d followed entry.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gradtrail.attribution.method import METHODS, MethodEntry
from gradtrail.attribution.trajectory import AbstractLayerStep, State, TrajectoryStep
from gradtrail.attribution.trajectory_checks import (
    check_records,
    recorded_sizes,
    refused_projection,
)
from gradtrail.attribution.trajectory_masks import Cut, drawn_cuts, kept_cuts, whole_cuts
from gradtrail.attribution.trajectory_method import StoredTask
from gradtrail.attribution.trajectory_records import LayerRecord, TrainingRecords
from gradtrail.attribution.trajectory_run import (
    AbstractSweepMethod,
    CurvatureKind,
    Direction,
    check_sweep,
    sweep_scores,
)
from gradtrail.factors import Projection
from gradtrail.options import check_positive

__all__ = ["AdamWLayerStep", "AdamWMethod", "as_clipped", "linearise_adamw", "step_gradient"]

_MASK_DIM = 1024
_MOST_MISSED = 0.25  # moments and gradients of low precision miss a few percent


@dataclass(frozen=True, eq=False)
class AdamWLayerStep(AbstractLayerStep):
    r"""One AdamW step of one layer: the state is ``(theta, m, v)``, each ``[m, r, d]``.

    Attributes:
        gradient: The step's gradient as the optimizer saw it. Shape ``[m, 1, d]``.
        beta1: Decay of the first moment, as ``gradient`` or broadcast to it.
        beta2: Decay of the second.
        gain1: What a change of the gradient adds to the first moment, ``1 - beta1``.
        gain2: What it adds to the second, ``2 (1 - beta2)`` times the gradient.
        decay: What weight decay leaves of a parameter, :math:`1 - \eta \lambda`.
        first: Move of a parameter against its first moment, :math:`\eta D / (1 - \beta_1^t)`.
        second: Move with its second moment, :math:`\eta S / (1 - \beta_2^t)`.
    """

    gradient: Tensor
    beta1: Tensor
    beta2: Tensor
    gain1: Tensor
    gain2: Tensor
    decay: Tensor
    first: Tensor
    second: Tensor

    def start(self, theta: Tensor) -> State:
        """A change of the parameters, and none of the moments."""
        return theta, torch.zeros_like(theta), torch.zeros_like(theta)

    def zeros(self, rows: int) -> Tensor:
        """No change. Shape ``[m, r, d]``."""
        m, _, d = self.gradient.shape
        return self.gradient.new_zeros(m, rows, d)

    def push(self, state: State, change: Tensor) -> State:
        """Carry a perturbation through the step.

        Args:
            state: The perturbation before it, which is overwritten.
            change: What it changes in the step's gradient. Shape ``[m, r, d]``.

        Returns:
            The perturbation after it.
        """
        theta, m, v = state
        m.mul_(self.beta1).addcmul_(self.gain1, change)
        v.mul_(self.beta2).addcmul_(self.gain2, change)
        theta.mul_(self.decay).addcmul_(self.first, m, value=-1).addcmul_(self.second, v)
        return theta, m, v

    @property
    def multiple(self) -> None:
        """None: the gradient reaches the parameters through the moments."""
        return

    def pull(self, state: State, covector: Tensor | None) -> State:
        """Apply the transpose of ``push``.

        Args:
            state: Derivatives with respect to the state after the step, which are overwritten.
            covector: Where derivatives with respect to the step's gradient are written.

        Returns:
            Derivatives with respect to the state before the step.
        """
        theta, m, v = state
        m.addcmul_(self.first, theta, value=-1)
        v.addcmul_(self.second, theta)
        torch.mul(m, self.gain1, out=covector)
        covector.addcmul_(self.gain2, v)
        return theta.mul_(self.decay), m.mul_(self.beta1), v.mul_(self.beta2)

    def where(self, moved: Tensor) -> AdamWLayerStep:
        """The same step with nothing done to the entries that are not ``moved``."""
        return AdamWLayerStep(
            gradient=torch.where(moved, self.gradient, 0.0),
            beta1=torch.where(moved, self.beta1, 1.0),
            beta2=torch.where(moved, self.beta2, 1.0),
            gain1=torch.where(moved, self.gain1, 0.0),
            gain2=torch.where(moved, self.gain2, 0.0),
            decay=torch.where(moved, self.decay, 1.0),
            first=torch.where(moved, self.first, 0.0),
            second=torch.where(moved, self.second, 0.0),
        )


def step_gradient(first_before: Tensor, first_after: Tensor, beta1: Tensor | float) -> Tensor:
    """Recover the gradient that the optimizer saw from its first moment.

    Args:
        first_before: The moment before the step.
        first_after: The moment after it.
        beta1: Its decay; a tensor in float64.

    Returns:
        The gradient, weight decay left out, clipped as it was. Shape of the moments.
    """
    wide = torch.as_tensor(beta1, dtype=torch.float64)
    kept = wide.to(first_after) * first_before
    return (first_after - kept) / (1 - wide).to(first_after)


def linearise_adamw(
    first_before: Tensor, first_after: Tensor, second_after: Tensor, options: Mapping[str, Any]
) -> AdamWLayerStep:
    """Linearise one AdamW step of one layer.

    Args:
        first_before: First moment before the step. Shape ``[m, 1, d]``.
        first_after: First moment after the step.
        second_after: Second moment after the step.
        options: ``lr``, ``beta1``, ``beta2``, ``eps``, ``weight_decay`` and ``step``, the number of
            steps the optimizer had then made: numbers, or tensors that broadcast to the moments.

    Returns:
        The linearised step.
    """
    names = ("lr", "beta1", "beta2", "eps", "weight_decay", "step")
    wide = {name: torch.as_tensor(options[name], dtype=torch.float64) for name in names}
    correction1 = (1 - wide["beta1"] ** wide["step"]).to(first_after)
    correction2 = (1 - wide["beta2"] ** wide["step"]).to(first_after)
    # taken in float64: that of 0.9999 in float32 is 0.02% off, and what scores are made of cancels
    rest1 = (1 - wide["beta1"]).to(first_after)
    rest2 = (1 - wide["beta2"]).to(first_after)
    lr, beta1, beta2, eps, weight_decay, _ = (value.to(first_after) for value in wide.values())
    gradient = step_gradient(first_before, first_after, wide["beta1"])
    mean = first_after / correction1
    root = (second_after / correction2).sqrt()
    scale = 1 / (root + eps)
    slope = torch.where(root > 0, mean * scale.square() / (2 * root), 0.0)
    return AdamWLayerStep(
        gradient=gradient,
        beta1=beta1,
        beta2=beta2,
        gain1=rest1,
        gain2=2 * rest2 * gradient,
        decay=1 - lr * weight_decay,
        first=lr * scale / correction1,
        second=lr * slope / correction2,
    )


@dataclass(frozen=True, kw_only=True)
class AdamWMethod(AbstractSweepMethod):
    """Options of ``"adamw"``.

    Attributes:
        masks: How many random draws of entries are followed, averaged; None: every entry.
        mask_dim: Entries of a layer in a draw; a layer with no more is followed whole.
        mask_seed: Seed of the draws.
        curvature: ``"full"``, or ``"block_diagonal"`` without products of different layers.
        direction: ``"query"`` carries the queries back through the steps, ``"train"`` the examples
            forward: the same scores, at the cost of what is carried.
    """

    masks: int | None = None
    mask_dim: int | None = None
    mask_seed: int | None = None
    curvature: CurvatureKind = "full"
    direction: Direction = "query"

    def __post_init__(self) -> None:
        """Check the options, and that each has an effect.

        Raises:
            ValueError: If an option of masks goes without masks, or two entries cannot meet.
        """
        check_sweep(self.curvature, self.direction)
        if self.masks is None:
            for option in ("mask_dim", "mask_seed"):
                if getattr(self, option) is not None:
                    raise ValueError(
                        f"{option} must go with masks, got masks=None. Pass the number of masks."
                    )
            return
        check_positive("masks", self.masks)
        if self.mask_dim is not None:
            check_positive("mask_dim", self.mask_dim)
            if self.mask_dim < 2:
                raise ValueError(
                    "mask_dim must be at least 2, so that different entries meet, got "
                    f"{self.mask_dim}."
                )

    @property
    def name(self) -> str:
        """The registered name."""
        return "adamw"

    def score_stored(self, task: StoredTask) -> Tensor:
        """Score the examples of the selected steps against every query.

        Args:
            task: The records of the training run and the queries at its end.

        Returns:
            Rows in the order of the store, on the CPU. Shape ``[n, q]``.
        """
        check_records(self.name, task, ("before", "after"))
        refused_projection(self.name, task.train, masks=self.masks is None)
        records = TrainingRecords(task, self._cuts(task), moments=True)
        return sweep_scores(
            records,
            _linearised,
            curvature=self.curvature,
            direction=self.direction,
            num_states=3,
            adjust=as_clipped,
        )

    def _cuts(self, task: StoredTask) -> dict[str, Cut]:
        sizes = recorded_sizes(task)
        projection = task.train.facts.projection
        if projection is not None:
            return kept_cuts(sizes, Projection(**projection))
        if self.masks is None:
            return whole_cuts(sizes)
        dim = _MASK_DIM if self.mask_dim is None else self.mask_dim
        return drawn_cuts(sizes, self.masks, dim, self.mask_seed or 0)


def as_clipped(step: TrajectoryStep) -> TrajectoryStep:
    """Scale the examples' shares to the gradient that the optimizer saw.

    Gradient clipping (and a loss scale that is undone before the step) multiplies them with one
    number. It is measured: the multiple of the sum of the shares that comes closest to the
    gradient which the first moment was moved by.

    Args:
        step: The step, its maps of AdamW.

    Returns:
        The step with the shares as they were in that gradient.

    Raises:
        ValueError: If the sum of the shares is another vector altogether.
    """
    along = squared = seen = 0.0
    for name, layer in step.maps.items():
        total = layer.zeros(1)
        for block in step.blocks:
            if name in block.layers:
                total += (block.weights_b @ block.layers[name]).unsqueeze(1)
        coupling = step.couplings.get(name)
        if coupling is not None:  # followed entries are scaled, so that their products are unbiased
            total *= (coupling.kept / coupling.size) ** 0.5
        along += float((layer.gradient * total).double().sum())
        squared += float(total.double().square().sum())
        seen += float(layer.gradient.double().square().sum())
    if seen == 0 or squared == 0:
        return step
    missed = max(0.0, seen - along**2 / squared) ** 0.5
    if along <= 0 or missed > _MOST_MISSED * seen**0.5:
        raise ValueError(
            f"train_store must hold what the gradient of step {step.step} was the sum of, got "
            f"gradients that miss {missed / seen**0.5:.0%} of it. Capture all its examples, in the "
            "training whose optimizer is recorded, with nothing else added to its gradients."
        )
    factor = along / squared
    blocks = tuple(replace(block, weights_b=block.weights_b * factor) for block in step.blocks)
    return replace(step, blocks=blocks)


def _linearised(record: LayerRecord) -> AbstractLayerStep:
    """Read one layer's step off its record.

    Args:
        record: The record.

    Returns:
        The linearised step; an optimizer that does something else than AdamW is refused.
    """
    _check_kind(record)
    betas = record.options("betas")
    options = {
        "lr": record.spread(record.options("lr")),
        "beta1": record.spread([pair[0] for pair in betas]),
        "beta2": record.spread([pair[1] for pair in betas]),
        "eps": record.spread(record.options("eps")),
        "weight_decay": record.spread(record.options("weight_decay")),
        "step": record.spread([made + 1 for made in record.steps_made("before")]),
    }
    step = linearise_adamw(
        record.moment("before", "exp_avg"),
        record.moment("after", "exp_avg"),
        record.moment("after", "exp_avg_sq"),
        options,
    )
    made = zip(record.steps_made("before"), record.steps_made("after"), strict=True)
    moved = [before < after for before, after in made]
    # a parameter without a gradient is left alone by the optimizer, moments and all
    return step if all(moved) else step.where(record.spread(moved).to(step.gradient.device) > 0)


def _check_kind(record: LayerRecord) -> None:
    """Refuse what is not AdamW.

    Args:
        record: One layer's record.

    Raises:
        ValueError: If the optimizer is another, or AdamW with an option that changes its map.
    """
    decays = any(record.options("weight_decay")) and not all(
        record.options("decoupled_weight_decay")
    )
    if record.kind not in ("AdamW", "Adam") or (record.kind == "Adam" and decays):
        coupled = " with coupled weight decay" if record.kind == "Adam" else ""
        raise ValueError(
            "optimizer_states must be of AdamW (or Adam without weight decay) for method 'adamw', "
            f"got {record.kind}{coupled}. Use method='dvemb'."
        )
    for option in ("amsgrad", "maximize"):
        if any(record.options(option)):
            raise ValueError(
                f"optimizer_states must be of AdamW with {option}=False for method 'adamw', got "
                "True. Use method='dvemb'."
            )


METHODS["adamw"] = MethodEntry(AdamWMethod, {})
