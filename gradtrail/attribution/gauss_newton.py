r"""Refinement: the damped Gauss-Newton system solved by preconditioned conjugate gradients.

Suffixes: q query, d entry of a layer.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gradtrail.attribution.curvature_products import GaussNewtonProducts
from gradtrail.attribution.data import Rows, move_batch
from gradtrail.attribution.fisher import expects_few_outputs, fisher_loss
from gradtrail.attribution.layer_maps import map_layers
from gradtrail.attribution.losses import Loss
from gradtrail.attribution.outputs import model_outputs
from gradtrail.attribution.session import Session
from gradtrail.distributed import is_main, reduce_sum
from gradtrail.errors import GradTrailWarning
from gradtrail.factors import DenseGradient, LayerGradient, squared_norm
from gradtrail.hooks import tokens_of
from gradtrail.hooks.whole_weights import put_together
from gradtrail.kronecker.conjugate import ConjugateSolution, Vectors, conjugate_gradients
from gradtrail.options import check_positive
from gradtrail.progress import progress_bar

__all__ = [
    "MAX_ITERATIONS",
    "Preconditioner",
    "RefineOptions",
    "RefineReport",
    "gauss_newton_solve",
]

Preconditioner = Callable[[str, Tensor, float], Tensor]
MAX_ITERATIONS = 100
_SHOWN = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class RefineOptions:
    """Options of ``refine="cg"``.

    Attributes:
        damping: What is added to the Gauss-Newton matrix; None means 1.0 of its mean eigenvalue.
        relative_damping: Whether ``damping`` is a multiple of the mean eigenvalue.
        tolerance: Residual, relative to the query's gradient, at which a query stops. At 0.01
            solutions are about 1% from the exact ones, which moves no datamodeling score; in
            float32 the batch size decides which of them, as rounding does.
        max_iterations: Most iterations, a pass over the training data each.
        probes: Random directions that the mean eigenvalue is estimated from, where the model has
            too many outputs for it to be exact.
        seed: Seed of the private generator that draws them.
    """

    damping: float | None = None
    relative_damping: bool = True
    tolerance: float = 1e-2
    max_iterations: int = MAX_ITERATIONS
    probes: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            ValueError: If one is out of its range.
        """
        check_positive("cg_max_iterations", self.max_iterations)
        check_positive("probes", self.probes)
        if self.damping is None and not self.relative_damping:
            raise ValueError(
                "damping must be given with relative_damping=False, got None. The default, 1.0 of "
                "the mean eigenvalue, is relative."
            )
        if self.damping is not None and not (0 < self.damping < math.inf):
            raise ValueError(
                f'damping must be a finite number above 0 with refine="cg", got {self.damping!r}: '
                "the Gauss-Newton matrix alone cannot be inverted."
            )
        if not 0 < self.tolerance < 1:
            raise ValueError(f"cg_tolerance must be between 0 and 1, got {self.tolerance!r}.")


@dataclass(frozen=True)
class RefineReport:
    """What a refinement did.

    Attributes:
        damping: What was added to the Gauss-Newton matrix, absolute.
        mean_eigenvalue: The mean eigenvalue it was a multiple of; None for an absolute damping.
        mean_error: Its standard error relative to it: 0 where it is exact, NaN for one probe.
        iterations: Products each query took part in.
        residuals: Norm of what was left over, relative to that of the query's gradient.
        converged: Whether it is at most the tolerance, by query.
    """

    damping: float
    mean_eigenvalue: float | None
    mean_error: float
    iterations: tuple[int, ...]
    residuals: tuple[float, ...]
    converged: tuple[bool, ...]


def gauss_newton_solve(  # noqa: PLR0913  # the parts of a system have no better home
    session: Session,
    rows: Rows,
    loss: Loss,
    right: Mapping[str, DenseGradient],
    precondition: Preconditioner,
    options: RefineOptions,
    batch_size: int,
) -> tuple[dict[str, DenseGradient], RefineReport]:
    r"""Solve :math:`(\mathrm{GGN} + \lambda I) X = G` for the gradients of all queries.

    The matrix is the mean over training examples of :math:`J^T H J`, over the parameters of the
    layers in ``right``; other parameters are held fixed. No randomness but that of the probes. A
    model in parts is whole on every process meanwhile.

    Args:
        session: The open session, without a projection.
        rows: The training data.
        loss: Its loss, a built-in one.
        right: Gradients of the queries by layer, written out.
        precondition: ``(layer, values [q, d], absolute damping) -> [q, d]``, an estimate of the
            inverse that is symmetric and positive definite.
        options: Damping and when to stop.
        batch_size: Rows a batch.

    Returns:
        ``X`` in the form of ``right``, and the report. Queries that did not converge are named in
        a warning.

    Raises:
        ValueError: If the loss is the user's own, or the session's gradients are projected.
    """
    if not loss.inferred:
        raise ValueError(
            'refine="cg" must know the curvature of the loss in the outputs, got a loss of your '
            f"own ({loss.description}). Leave out loss, so that it is inferred, or refine."
        )
    if session.projection is not None:
        raise ValueError(
            'refine="cg" must solve for the parameters themselves, got a projection. Leave '
            "projection or refine out."
        )
    with put_together(session.model) as model:
        maps = map_layers(model, session.selection.units, right)
        vectors = {layer.name: right[layer.name].values_bd for layer in maps}
        products = GaussNewtonProducts(session, model, rows, loss, maps, batch_size)
        mean, error = (None, 0.0)
        if options.relative_damping:
            mean, error = _mean_eigenvalue(products, options)
        strength = 1.0 if options.damping is None else float(options.damping)
        damping = strength if mean is None else strength * mean
        solution = _solve(products, vectors, precondition, options, damping)
    _warn_unconverged(solution, options, damping)
    found = {
        name: DenseGradient(solution.values[name], gradient.shape, gradient.has_bias)
        for name, gradient in right.items()
    }
    report = RefineReport(
        damping,
        mean,
        error,
        tuple(solution.iterations.tolist()),
        tuple(solution.residuals.tolist()),
        tuple(solution.converged.tolist()),
    )
    return found, report


def _solve(
    products: GaussNewtonProducts,
    vectors: Vectors,
    precondition: Preconditioner,
    options: RefineOptions,
    damping: float,
) -> ConjugateSolution:
    """Solve with an absolute damping; 0 where nothing has curvature, NaN where it is not finite."""
    if not 0 < damping < math.inf:
        rest = 1.0 if damping == 0 else math.nan
        first = next(iter(vectors.values()))
        residuals = first.new_full((first.shape[0],), rest)
        fill = 0.0 if damping == 0 else math.nan
        values = {name: torch.full_like(value, fill) for name, value in vectors.items()}
        return ConjugateSolution(values, torch.zeros_like(residuals), residuals, residuals < 1)

    def apply(directions: Vectors) -> Vectors:
        multiplied = products.multiply(directions)
        return {
            name: value.add_(directions[name], alpha=damping) for name, value in multiplied.items()
        }

    def turn(residual: Vectors) -> Vectors:
        return {name: precondition(name, value, damping) for name, value in residual.items()}

    with products.opened():
        return conjugate_gradients(
            apply,
            vectors,
            turn,
            tolerance=options.tolerance,
            max_iterations=options.max_iterations,
        )


def _mean_eigenvalue(products: GaussNewtonProducts, options: RefineOptions) -> tuple[float, float]:
    """Trace of the matrix over its side, with its relative standard error."""
    size = sum(layer.size for layer in products.maps)
    rows = products.rows.whole or products.rows
    batch = move_batch(rows.batch([0]), products.session.device)
    with torch.no_grad():
        few = expects_few_outputs(model_outputs(products.model, batch))
    if few:
        return _exact_trace(products) / size, 0.0
    generator = torch.Generator().manual_seed(options.seed)
    probes = {
        layer.name: _signs(options.probes, layer.size, generator).to(products.session.device)
        for layer in products.maps
    }
    with products.opened():
        traces = products.quadratic(probes)
    mean = float(traces.mean())
    spread = float(traces.std()) if len(traces) > 1 else math.nan
    return mean / size, spread / math.sqrt(len(traces)) / mean if mean else 0.0


def _exact_trace(products: GaussNewtonProducts) -> float:
    """Squared gradients at every class or output: their weighted sum is the trace."""
    session, rows = products.session, products.rows
    loss = fisher_loss("expected", products.loss)
    names = {layer.name for layer in products.maps}
    total = torch.zeros((), dtype=torch.float64)

    def add(name: str, gradient: LayerGradient) -> None:
        if name in names:
            total.add_(squared_norm(gradient).sum().cpu().double())

    enabled = session.progress and is_main()
    with progress_bar("mean curvature", len(rows), enabled=enabled) as bar:
        for start, size, raw in rows.batches(products.batch_size):
            values = move_batch(raw, session.device)
            for losses in loss.rounds(products.model, values, rows.first + start):
                session.live.run(
                    losses, batch=size, tokens=tokens_of(values), sink=add, several=loss.several
                )
            bar.update(size)
    if rows.whole is not None:
        reduce_sum([total], "mean curvature")
    return float(total) / rows.total


def _signs(count: int, size: int, generator: torch.Generator) -> Tensor:
    """Rademacher probes. Shape ``[count, size]``."""
    bits = torch.randint(0, 2, (count, size), generator=generator, dtype=torch.int8)
    return bits.float().mul_(2).sub_(1)


def _warn_unconverged(solution: ConjugateSolution, options: RefineOptions, damping: float) -> None:
    """Name the queries whose residual is above the tolerance."""
    if bool(solution.converged.all()):
        return
    places = (~solution.converged).nonzero()[:, 0].tolist()
    named = ", ".join(map(str, places[:_SHOWN])) + (", ..." if places[_SHOWN:] else "")
    if damping == 0:
        why = "the Gauss-Newton matrix of the training data is 0. Their scores are 0"
    else:
        worst = float(solution.residuals[places].max())
        why = (
            f"{options.max_iterations} iterations left a relative residual of up to {worst:.1e}. "
            "Raise cg_max_iterations, cg_tolerance or damping"
        )
    warnings.warn(
        f'refine="cg" did not reach cg_tolerance={options.tolerance:g} for {len(places)} of '
        f"{len(solution.converged)} queries ({named}): {why}.",
        GradTrailWarning,
        stacklevel=4,
    )
