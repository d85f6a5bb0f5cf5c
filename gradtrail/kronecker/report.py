"""What a fit looks like: spectra in a few numbers, and what a damping does to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gradtrail.kronecker.curvature import Spectrum
from gradtrail.kronecker.damping import Damping

__all__ = ["FitReport", "LayerReport", "report_layer"]


@dataclass(frozen=True)
class LayerReport:
    """One spectrum of one layer.

    Attributes:
        layer: The layer.
        what: ``"A"``, ``"S"``, ``"corrected"``, ``"dense"`` or ``"diagonal"``.
        width: Number of eigenvalues.
        trace: Their sum.
        effective_rank: Exponential of the entropy of the eigenvalues over their sum, between 1
            and ``width``: how many directions carry the trace.
        condition: Largest over smallest eigenvalue; infinite where the data miss a direction.
        damping: What is added to every eigenvalue, absolute.
        damped: Share of the eigenvalues that are smaller than the damping, which decides there.
    """

    layer: str
    what: str
    width: int
    trace: float
    effective_rank: float
    condition: float
    damping: float
    damped: float


@dataclass(frozen=True)
class FitReport:
    """Every spectrum of a fit; prints as a table.

    Attributes:
        method: ``"kfac"`` or ``"ekfac"``.
        num_examples: Examples the fit is a mean over.
        layers: One entry a spectrum.
    """

    method: str
    num_examples: int
    layers: tuple[LayerReport, ...]

    def __str__(self) -> str:
        """A table."""
        rows = [
            ("layer", "spectrum", "width", "trace", "eff. rank", "condition", "damping", "below")
        ]
        rows += [
            (
                row.layer,
                row.what,
                f"{row.width:,}",
                f"{row.trace:.3g}",
                f"{row.effective_rank:,.1f}",
                f"{row.condition:.2g}",
                f"{row.damping:.3g}",
                f"{row.damped:.0%}",
            )
            for row in self.layers
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = [
            "  ".join(
                f"{cell:<{width}}" if place < 2 else f"{cell:>{width}}"
                for place, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        head = f"{self.method} fit on {self.num_examples:,} examples"
        return "\n".join([head, *lines])


def report_layer(layer: str, spectra: Sequence[Spectrum], damping: Damping) -> list[LayerReport]:
    """Describe one layer's spectra.

    Args:
        layer: The layer.
        spectra: Its spectra.
        damping: The damping whose effect is shown.

    Returns:
        One entry a spectrum.
    """
    rows = []
    for spectrum in spectra:
        values = spectrum.eigenvalues.double().clamp(min=0)
        trace = float(values.sum()) if values.numel() else 0.0
        added = damping.absolute(spectrum.mean)
        rows.append(
            LayerReport(
                layer=layer,
                what=spectrum.what,
                width=values.numel(),
                trace=trace,
                effective_rank=_effective_rank(values, trace),
                condition=_condition(values, spectrum),
                damping=added,
                damped=float((values < added).double().mean()) if values.numel() else 0.0,
            )
        )
    return rows


def _effective_rank(values: torch.Tensor, trace: float) -> float:
    if trace <= 0:
        return 0.0
    shares = values / trace
    return float(torch.exp(-torch.special.xlogy(shares, shares).sum()))


def _condition(values: torch.Tensor, spectrum: Spectrum) -> float:
    if not values.numel() or spectrum.unseen:
        return float("inf")
    return float(values.max() / values.min())
