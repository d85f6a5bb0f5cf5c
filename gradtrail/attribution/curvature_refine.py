"""Queries under the full damped Gauss-Newton matrix, EK-FAC being the preconditioner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gradtrail.attribution.curvature_fit import FitTask
from gradtrail.attribution.curvature_queries import QueryOptions
from gradtrail.attribution.gauss_newton import RefineOptions, gauss_newton_solve
from gradtrail.attribution.session import Session
from gradtrail.distributed import broadcast_tensor
from gradtrail.factors import DenseGradient, LayerGradient, concatenate, to_dense
from gradtrail.kronecker import Damping, KroneckerFit

__all__ = ["refined_queries"]


def refined_queries(
    session: Session,
    task: FitTask,
    fit: KroneckerFit,
    layers: Mapping[str, LayerGradient],
    dampings: Sequence[tuple[float | None, bool]],
    options: QueryOptions,
) -> dict[str, LayerGradient]:
    """Solve the damped Gauss-Newton system for every query and damping.

    Args:
        session: The open session.
        task: The training data and their loss.
        fit: The fit whose inverse preconditions.
        layers: The queries' raw gradients by layer.
        dampings: Strength (None: 1.0 of the mean eigenvalue) and whether it is relative, by set.
        options: Tolerance and number of iterations.

    Returns:
        The solutions by layer, one set a damping, set after set.
    """
    right = {name: to_dense(one) for name, one in layers.items() if name in fit.records}
    if not right:
        return {}
    if task.rows.whole is not None:  # all ranks solve one system and stop at one iteration
        for gradient in right.values():
            broadcast_tensor(gradient.values_bd, 0)

    def precondition(name: str, values_qd: Tensor, damping: float) -> Tensor:
        gradient = DenseGradient(values_qd, right[name].shape, right[name].has_bias)
        absolute = Damping(damping, relative=False)
        return to_dense(fit.curvature(name).precondition(gradient, absolute)).values_bd

    given = {"tolerance": options.tolerance, "max_iterations": options.max_iterations}
    sets: list[dict[str, DenseGradient]] = []
    reports = []
    for strength, relative in dampings:
        chosen = RefineOptions(
            damping=strength,
            relative_damping=relative,
            seed=session.seed,
            **{name: value for name, value in given.items() if value is not None},
        )
        solved, report = gauss_newton_solve(
            session, task.rows, task.loss, right, precondition, chosen, task.batch_size
        )
        sets.append(solved)
        reports.append(report)
    session.notes["refine"] = [
        {
            "iterations": report.iterations,
            "damping": report.damping,
            "largest_residual": float(torch.as_tensor(report.residuals).max()),
        }
        for report in reports
    ]
    return {name: concatenate([solved[name] for solved in sets]) for name in right}
