"""Fitting curvature: passes over the training data, or over factors kept from the first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradtrail.attribution.curvature_layers import Treatment
from gradtrail.attribution.data import Rows
from gradtrail.attribution.fisher import FisherKind, Sampler, fisher_loss
from gradtrail.attribution.kept import KeptFactors
from gradtrail.attribution.losses import Loss
from gradtrail.attribution.pass_cache import Attached
from gradtrail.attribution.session import Batch, Session
from gradtrail.attribution.stored import StoredRows
from gradtrail.distributed import is_main, reduce_named, reduce_sum
from gradtrail.factors import LayerGradient
from gradtrail.kronecker import (
    CorrectedMoments,
    CovarianceAccumulator,
    DenseMoments,
    DiagonalMoments,
    KroneckerFactors,
    KroneckerFit,
    Scratch,
    Tensors,
    covariances_from,
    joined_covariances,
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
        batch_size: Rows a batch; None takes the blocks of a store as they are.
        corrected: Whether the eigenvalues are corrected (EK-FAC).
        fisher: Which Fisher.
        treatments: Kind of curvature by layer.
        max_factor_dim: Longest side of a covariance.
        direct_fisher_max_params: Most entries of a layer with a dense Fisher.
    """

    rows: Rows
    loss: Loss
    batch_size: int | None
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
        layers: Sequence[str] | None = None,
    ) -> None:
        """Run one pass with this Fisher's labels; another stage draws afresh.

        Args:
            session: The open session.
            stage: What the pass is for.
            sink: Receives ``(batch, layer name, gradient)``.
            done: Called after each backward, or None.
            layers: The layers that are of use, where a pass can read fewer; None: all.
        """
        loss = fisher_loss(
            self.fisher.kind,
            self.loss,
            draws=self.fisher.draws,
            seed=self.fisher.seed,
            stage=stage,
            sampler=self.fisher.sampler,
        )
        rows = self.rows
        if layers is not None and isinstance(rows, StoredRows):
            rows = rows.of_layers([name for name in layers if name in rows.layers])
        session.capture(rows, loss, batch_size=self.batch_size, phase=stage, sink=sink, done=done)


def fit_bases(
    session: Session, task: FitTask, tensors: Tensors, kept: KeptFactors | None
) -> KroneckerFit:
    """Accumulate covariances in one pass, and decompose them where eigenvalues are corrected.

    Covariances that were accumulated while the gradients were stored are taken as they are; then
    only the other layers are read, and nothing where there are none.

    Args:
        session: The open session.
        task: What is fitted.
        tensors: Where the fit's tensors go.
        kept: Keeps the factors of this pass too, or None.

    Returns:
        A fit that is whole but for corrected eigenvalues.
    """
    sums = _Sums(task, _attached(session, task))

    def add(place: Batch, name: str, gradient: LayerGradient) -> None:
        if kept is not None:
            kept.add(place, name, gradient)
        sums.add(name, gradient)

    def done(place: Batch) -> None:
        sums.covariances.end_backward()
        if kept is not None:
            kept.close(place)

    if sums.missing or kept is not None:
        task.capture(session, "covariances", add, done, sums.missing if kept is None else None)
    count, is_share = task.rows.total, task.rows.whole is not None
    fit = KroneckerFit("ekfac" if task.corrected else "kfac", tensors, session.device, count)
    for name, sum_of in sums.moments(session.device, is_share=is_share).items():
        kind = "dense" if task.treatments[name] == "dense" else "diagonal"
        fit.add_direct(name, kind, sum_of.div_(count))
    if is_share:
        own = joined_covariances(sums.covariances.sums(), count, session.device)
    else:
        own = sums.covariances.result(count)
    found = {**sums.attached, **own}
    sums.attached.clear()
    if task.corrected:
        fit.add_bases(found, progress=session.progress and is_main(), spread=is_share)
    else:
        fit.add_covariances(found)
    return fit


class _Sums:
    """What one pass adds up, beside the covariances that need none.

    Attributes:
        attached: Covariances that were accumulated before, by layer.
        covariances: Covariances of the other layers.
        direct: Second moments of layers without Kronecker structure.
    """

    attached: dict[str, KroneckerFactors]
    covariances: CovarianceAccumulator
    direct: dict[str, DenseMoments | DiagonalMoments]

    def __init__(self, task: FitTask, attached: dict[str, KroneckerFactors]) -> None:
        """Start with what is there."""
        self._task = task
        self.attached = attached
        self.covariances = CovarianceAccumulator(max_side=task.max_factor_dim)
        self.direct = {}

    @property
    def missing(self) -> list[str]:
        """Layers that must be read."""
        return [name for name in self._task.treatments if name not in self.attached]

    def moments(self, device: torch.device, *, is_share: bool) -> dict[str, Tensor]:
        """Sums of layers without Kronecker structure, over all ranks where each has a share."""
        found = {
            name: one.sum_dd if isinstance(one, DenseMoments) else one.sum_d
            for name, one in self.direct.items()
        }
        return reduce_named(found, device, "dense Fishers") if is_share else found

    def add(self, name: str, gradient: LayerGradient) -> None:
        """Take one layer of one batch."""
        if name in self.attached:
            return
        treatment = self._task.treatments[name]
        if treatment == "kronecker":
            self.covariances.add(name, gradient)
            return
        if name not in self.direct:
            self.direct[name] = (
                DiagonalMoments()
                if treatment == "diagonal"
                else DenseMoments(name, max_params=self._task.direct_fisher_max_params)
            )
        self.direct[name].add(gradient)


def _attached(session: Session, task: FitTask) -> dict[str, KroneckerFactors]:
    """Covariances that need no pass, of the layers that are to have some."""
    if task.fisher.kind != "empirical":
        return {}  # those were accumulated at the data's labels
    attached = session.covariances(task.rows, task.loss)
    return {} if attached is None else _chosen(attached, task.treatments, session.device)


def _chosen(
    attached: Attached, treatments: Mapping[str, Treatment], device: torch.device
) -> dict[str, KroneckerFactors]:
    """The covariances of some layers; a shared input goes by its first layer among these."""
    first: dict[str, tuple[str, Tensor]] = {}
    chosen = {}
    for name, factors in covariances_from(*attached).items():
        if treatments.get(name) != "kronecker":
            continue
        if factors.input_of not in first:
            first[factors.input_of] = name, factors.activation_cov_gii.to(device)
        input_of, activation_cov_gii = first[factors.input_of]
        chosen[name] = replace(
            factors,
            activation_cov_gii=activation_cov_gii,
            gradient_cov_goo=factors.gradient_cov_goo.to(device),
            input_of=input_of,
        )
    return chosen


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
    count, scratch = task.rows.total, Scratch()
    is_share = task.rows.whole is not None
    if kept is not None and kept.is_whole:
        for name in names:
            bases = fit.bases(name)
            moments = CorrectedMoments.like(bases)
            for _, gradient in kept.pieces(name):
                moments.add(bases, gradient, scratch)
            del bases  # before the next layer comes to the device
            if is_share:
                reduce_sum([moments.sum_goj], f"eigenvalues of {name}")
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

    task.capture(session, "eigenvalues", add, None, names)
    for name in names:
        # zero for a layer that fresh draws, or this rank, did not reach
        moments = sums.pop(name, None) or CorrectedMoments.like(fit.bases(name))
        if is_share:
            reduce_sum([moments.sum_goj], f"eigenvalues of {name}")
        fit.add_eigenvalues(name, moments.sum_goj.div_(count))
