r"""Preconditioned conjugate gradients for many right-hand sides at once.

Hestenes & Stiefel, 1952, https://doi.org/10.6028/jres.049.044: every query is a system of its own,
with its own step sizes, that shares the matrix products of all. A query that has arrived stops
moving, and is no longer multiplied.

Suffixes: q query, d entry of a layer, a query that is still active.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

__all__ = ["ConjugateSolution", "Vectors", "conjugate_gradients"]

Vectors: TypeAlias = Mapping[str, Tensor]


@dataclass(frozen=True, eq=False)
class ConjugateSolution:
    """What conjugate gradients arrived at.

    Attributes:
        values: The solutions by layer. Shape ``[q, d]``; NaN where a system is not finite.
        iterations: Products each query took part in. Shape ``[q]``.
        residuals: Norm of what is left over, relative to the right-hand side's, by the method's
            own recurrence. Shape ``[q]``.
        converged: Whether it is at most the tolerance. Shape ``[q]``.
    """

    values: dict[str, Tensor]
    iterations: Tensor
    residuals: Tensor
    converged: Tensor


@dataclass(eq=False)
class _State:
    """The systems that still move."""

    places: Tensor
    solution: dict[str, Tensor]
    residual: dict[str, Tensor]
    direction: dict[str, Tensor]
    norms_a: Tensor
    inner_a: Tensor

    def keep(self, rows: Tensor) -> None:
        """Let go of all systems but some."""
        for vectors in (self.solution, self.residual, self.direction):
            for name, value in vectors.items():
                vectors[name] = value[rows]
        self.places, self.norms_a = self.places[rows], self.norms_a[rows]
        self.inner_a = self.inner_a[rows]


def conjugate_gradients(
    apply: Callable[[Vectors], Vectors],
    right: Vectors,
    precondition: Callable[[Vectors], Vectors],
    *,
    tolerance: float,
    max_iterations: int,
) -> ConjugateSolution:
    r"""Solve :math:`A x_q = b_q` for every query, starting from zero.

    Args:
        apply: Multiplies by the symmetric positive definite matrix ``A``.
        right: Right-hand sides ``b`` by layer. Shape ``[q, d]``.
        precondition: Multiplies by a symmetric positive definite estimate of the inverse.
        tolerance: Relative residual at which a query stops.
        max_iterations: Most products with ``A``.

    Returns:
        The solution. A query whose direction meets no positive curvature, by rounding or because
        ``A`` is not positive definite, stops where it is, not converged.
    """
    norms_q = _inner(right, right).sqrt()
    values = {name: torch.zeros_like(value) for name, value in right.items()}
    iterations = torch.zeros(norms_q.shape, dtype=torch.long, device=norms_q.device)
    residuals = torch.where(norms_q == 0, 0.0, norms_q / norms_q)  # NaN where not finite
    state = _start(right, norms_q, precondition)
    for number in range(1, max_iterations + 1):
        if not len(state.places):
            break
        moved_a = _step(state, apply)
        left_a = _inner(state.residual, state.residual).sqrt() / state.norms_a
        iterations[state.places] = number
        residuals[state.places] = left_a
        stopped_a = ~moved_a | ~(left_a > tolerance)
        if bool(stopped_a.any()):
            for name, value in state.solution.items():
                values[name][state.places[stopped_a]] = value[stopped_a]
            state.keep((~stopped_a).nonzero()[:, 0])
        if len(state.places) and number < max_iterations:
            _turn(state, precondition)
    for name, value in state.solution.items():
        values[name][state.places] = value
    broken_q = ~residuals.isfinite()
    if bool(broken_q.any()):
        for value in values.values():
            value[broken_q] = torch.nan
    return ConjugateSolution(values, iterations, residuals, residuals <= tolerance)


def _start(right: Vectors, norms_q: Tensor, precondition: Callable[[Vectors], Vectors]) -> _State:
    """Start the systems that have something to solve at zero."""
    places = ((norms_q > 0) & norms_q.isfinite()).nonzero()[:, 0]
    residual = {name: value[places] for name, value in right.items()}
    direction = dict(precondition(residual)) if len(places) else residual
    return _State(
        places,
        {name: torch.zeros_like(value) for name, value in residual.items()},
        residual,
        {name: value.clone() for name, value in direction.items()},
        norms_q[places],
        _inner(residual, direction),
    )


def _step(state: _State, apply: Callable[[Vectors], Vectors]) -> Tensor:
    """Go along the directions to where the residual is orthogonal to them.

    Args:
        state: The systems; solution and residual move.
        apply: Multiplies by the matrix.

    Returns:
        Which systems moved. Shape ``[a]``.
    """
    products = apply(state.direction)
    curvature_a = _inner(state.direction, products)
    moved_a = ~(curvature_a <= 0) & ~(state.inner_a <= 0)  # true for NaN, which is to be seen
    sizes_a = torch.where(moved_a, state.inner_a / curvature_a, 0.0)
    for name, value in state.solution.items():
        size_a1 = sizes_a.to(value).unsqueeze(1)
        value.addcmul_(size_a1, state.direction[name])
        state.residual[name].addcmul_(size_a1, products[name], value=-1)
    return moved_a


def _turn(state: _State, precondition: Callable[[Vectors], Vectors]) -> None:
    """Make the preconditioned residuals conjugate to the directions so far."""
    turned = precondition(state.residual)
    inner_a = _inner(state.residual, turned)
    ratio_a = inner_a / state.inner_a
    for name, value in state.direction.items():
        value.mul_(ratio_a.to(value).unsqueeze(1)).add_(turned[name])
    state.inner_a = inner_a


def _inner(left: Vectors, right: Vectors) -> Tensor:
    """Inner products over all layers, added up in float64 where there is one. Shape ``[q]``."""
    shares = [torch.linalg.vecdot(left[name], right[name]) for name in left]
    wide = torch.float32 if shares[0].device.type == "mps" else torch.float64
    return torch.stack([share.to(wide) for share in shares]).sum(0)
