"""What one run of a curvature method needs to know of the method."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gradtrail.attribution.curvature_fit import FisherOptions
from gradtrail.attribution.curvature_layers import Treatment
from gradtrail.attribution.curvature_queries import QueryOptions
from gradtrail.attribution.fit_memory import FitMemory
from gradtrail.kronecker import Damping

__all__ = ["RunOptions"]


@dataclass(frozen=True, kw_only=True, eq=False)
class RunOptions:
    """What a run needs to know of its method.

    Attributes:
        corrected: Whether the eigenvalues are corrected (EK-FAC).
        dampings: Dampings to score with.
        strengths: The same as they were given, None for the default, and whether relative.
        fisher: Which Fisher.
        treatments: Kind of curvature by captured layer.
        limits: ``max_factor_dim`` and ``direct_fisher_max_params``.
        queries: What is done with the queries.
        normalize: Which norms scores are divided by.
        gradient_budget: Bytes of training factors that may be kept, or None.
        residency: Where the fit's tensors rest.
        fisher_dir: Folder of a persisted fit, or None.
        memory: Keeps the last fit, or None.
    """

    corrected: bool
    dampings: tuple[Damping, ...]
    strengths: tuple[tuple[float | None, bool], ...]
    fisher: FisherOptions
    treatments: Mapping[str, Treatment]
    limits: tuple[int, int]
    queries: QueryOptions
    normalize: Literal["train", "both"] | None
    gradient_budget: int | None
    residency: Literal["memory", "disk", "tiered"] | None
    fisher_dir: str | Path | None
    memory: FitMemory | None
