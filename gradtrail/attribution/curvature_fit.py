"""Fitting curvature: passes over the training data, or over factors kept from the first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from gradtrail.attribution.curvature_layers import Treatment
from gradtrail.attribution.data import Rows
from gradtrail.attribution.fisher import FisherKind, Sampler, fisher_loss
from gradtrail.attribution.kept import KeptFactors
from gradtrail.attribution.losses import Loss
from gradtrail.attribution.session import Batch, Session
from gradtrail.factors import LayerGradient
from gradtrail.kronecker import (
    CorrectedMoments,
    CovarianceAccumulator,
    DenseMoments,
    DiagonalMoments,
    KroneckerFit,
    Scratch,
    Tensors,
)

__all__ = ["FisherOptions", "FitTask", "fit_bases", "fit_eigenvalues", "sampler_name"]


@dataclass(frozen=True, kw_only=True)
class FisherOptions:
    """Which Fisher a curvature is of.

    Attributes:
        kind: Whose labels: the data's, every class's, or drawn ones.
        draws: Draws a position where labels are drawn.
        sampler: Draws labels instead of the model, or None.
        seed: Seed of the draws.
    """

    kind: FisherKind
    draws: int
    sampler: Sampler | None
    seed: int


def sampler_name(sampler: Sampler | None) -> str | None:
    """Name a sampler as another process would, or None."""
    return None if sampler is None else getattr(sampler, "__qualname__", type(sampler).__name__)


@dataclass(frozen=True, kw_only=True, eq=False)
class FitTask:
    """What is fitted.

    Attributes:
        rows: The training data.
        loss: Its loss.
        batch_size: Rows a batch.
        corrected: Whether the eigenvalues are corrected (EK-FAC).
        fisher: Which Fisher.
        treatments: Kind of curvature by layer.
        max_factor_dim: Longest side of a covariance.
        direct_fisher_max_params: Most entries of a layer with a dense Fisher.
    """

    rows: Rows
    loss: Loss
    batch_size: int
    corrected: bool
    fisher: FisherOptions
    treatments: Mapping[str, Treatment]
    max_factor_dim: int
    direct_fisher_max_params: int

    def capture(
        self,
        session: Session,
        stage: str,
        sink: Callable[[Batch, str, LayerGradient], None],
        done: Callable[[Batch], None] | None,
    ) -> None:
        """Run one pass with this Fisher's labels; another stage draws afresh."""
        loss = fisher_loss(
            self.fisher.kind,
            self.loss,
            draws=self.fisher.draws,
            seed=self.fisher.seed,
            stage=stage,
            sampler=self.fisher.sampler,
        )
        session.capture(
            self.rows, loss, batch_size=self.batch_size, phase=stage, sink=sink, done=done
        )


def fit_bases(
    session: Session, task: FitTask, tensors: Tensors, kept: KeptFactors | None
) -> KroneckerFit:
    """Accumulate covariances in one pass, and decompose them where eigenvalues are corrected.

    Args:
        session: The open session.
        task: What is fitted.
        tensors: Where the fit's tensors go.
        kept: Keeps the factors of this pass too, or None.

    Returns:
        A fit that is whole but for corrected eigenvalues.
    """
    covariances = CovarianceAccumulator(max_side=task.max_factor_dim)
    direct: dict[str, DenseMoments | DiagonalMoments] = {}

    def add(place: Batch, name: str, gradient: LayerGradient) -> None:
        if kept is not None:
            kept.add(place, name, gradient)
        treatment = task.treatments[name]
        if treatment == "kronecker":
            covariances.add(name, gradient)
            return
        if name not in direct:
            direct[name] = (
                DiagonalMoments()
                if treatment == "diagonal"
                else DenseMoments(name, max_params=task.direct_fisher_max_params)
            )
        direct[name].add(gradient)

    def done(place: Batch) -> None:
        covariances.end_backward()
        if kept is not None:
            kept.close(place)

    task.capture(session, "covariances", add, done)
    count = len(task.rows)
    fit = KroneckerFit("ekfac" if task.corrected else "kfac", tensors, session.device, count)
    for name, moments in direct.items():
        if isinstance(moments, DenseMoments):
            fit.add_direct(name, "dense", moments.sum_dd.div_(count))
        else:
            fit.add_direct(name, "diagonal", moments.sum_d.div_(count))
    found = covariances.result(count)
    if task.corrected:
        fit.add_bases(found, progress=session.progress)
    else:
        fit.add_covariances(found)
    return fit


def fit_eigenvalues(
    session: Session, task: FitTask, fit: KroneckerFit, kept: KeptFactors | None
) -> None:
    """Correct the eigenvalues with full per-example gradients.

    Args:
        session: The open session.
        task: What is fitted.
        fit: The fit, completed here.
        kept: Factors of the whole training data, or None for another pass over it.
    """
    names = [name for name, record in fit.records.items() if record.kind == "ekfac"]
    count, scratch = len(task.rows), Scratch()
    if kept is not None and kept.is_whole:
        for name in names:
            bases = fit.bases(name)
            moments = CorrectedMoments.like(bases)
            for _, gradient in kept.pieces(name):
                moments.add(bases, gradient, scratch)
            del bases  # before the next layer comes to the device
            fit.add_eigenvalues(name, moments.sum_goj.div_(count))
        return
    sums: dict[str, CorrectedMoments] = {}

    def add(place: Batch, name: str, gradient: LayerGradient) -> None:
        del place
        if task.treatments[name] != "kronecker":
            return
        bases = fit.bases(name)
        if name not in sums:
            sums[name] = CorrectedMoments.like(bases)
        sums[name].add(bases, gradient, scratch)

    task.capture(session, "eigenvalues", add, None)
    for name in names:
        fit.add_eigenvalues(name, _mean(sums.pop(name, None), fit, name, count))


def _mean(moments: CorrectedMoments | None, fit: KroneckerFit, name: str, count: int) -> Tensor:
    """Mean of the squares; zero for a layer that fresh draws did not reach."""
    if moments is None:
        return CorrectedMoments.like(fit.bases(name)).sum_goj
    return moments.sum_goj.div_(count)
