"""What a curvature method needs, from what one batch shows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gradtrail.attribution.curvature_layers import Treatment
from gradtrail.attribution.curvature_queries import num_parts
from gradtrail.attribution.kept import kept_budget
from gradtrail.attribution.measures import Demands, LayerMeasure, Measures
from gradtrail.attribution.session import Session

__all__ = ["PlanOptions", "curvature_demands"]

_ITEM = 4  # bytes: curvature is float32 unless the model is float64
_RESTS = {None: "device", "memory": "host", "tiered": "host", "disk": "disk"}


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options that decide a run's cost.

    Attributes:
        corrected: Whether the eigenvalues are corrected (EK-FAC).
        sets: Number of dampings.
        keeps: Whether training factors may be kept.
        gradient_budget: Bytes they may take, or None.
        query_rank: Rank the queries are cut to, or None.
        residency: Where the fit's tensors rest.
        writes: Whether the fit is written to a folder.
        refine_passes: Most passes of a refinement, for each damping.
    """

    corrected: bool
    sets: int
    keeps: bool
    gradient_budget: int | None
    query_rank: int | None
    residency: str | None
    writes: bool
    refine_passes: int = 0


def curvature_demands(
    measures: Measures,
    session: Session,
    treatments: Mapping[str, Treatment],
    options: PlanOptions,
) -> Demands:
    """Count bytes and passes of a fit and its scores.

    Args:
        measures: What one batch of each side showed.
        session: The session that measured.
        treatments: Kind of curvature by layer.
        options: What decides.

    Returns:
        The demands; a fit that is already in ``fisher_dir`` makes them smaller.
    """
    curvature, seen, queries = 0, set(), 0
    for name, layer in measures.layers.items():
        treatment = treatments.get(name)
        if treatment is None:
            continue
        curvature += _curvature_entries(layer, treatment, seen, corrected=options.corrected)
        rank = options.query_rank if layer.groups == 1 else None
        queries += layer.entries if rank is None else rank * sum(layer.sides)
    query_bytes = _ITEM * queries * measures.num_query * options.sets
    if not options.corrected and options.query_rank is None:
        query_bytes = measures.query_bytes * options.sets
    chunks = 1
    if options.corrected or options.query_rank is not None:
        chunks = num_parts(query_bytes, measures.num_query, measures.budget)
    caches = measures.kept is not None
    keeps = options.keeps and not caches
    budget = kept_budget(options.gradient_budget, session.device) if keeps else 0
    kept = measures.train_bytes if measures.train_bytes <= budget else 0
    return Demands(
        query_bytes=query_bytes // chunks,
        curvature_bytes=_ITEM * curvature,
        curvature_on=_RESTS[options.residency],
        kept_bytes=kept,
        disk_bytes=_ITEM * curvature if options.writes else 0,
        train_passes=1 if kept else _train_passes(options, chunks, caches=caches),
        refine_passes=options.refine_passes * options.sets,
    )


def _train_passes(options: PlanOptions, chunks: int, *, caches: bool) -> int:
    """Passes of the model over train: a cache serves all that read the data's own gradients."""
    fit_passes = 2 if options.corrected else 1
    if caches:
        return 1 if options.keeps else fit_passes + 1
    return fit_passes + chunks


def _curvature_entries(
    layer: LayerMeasure, treatment: Treatment, seen: set[int], *, corrected: bool
) -> int:
    """Entries of one layer's curvature; an input that several layers read counts once."""
    if treatment == "dense":
        return layer.entries**2
    if treatment == "diagonal":
        return layer.entries
    o, j = layer.sides
    count = layer.groups * (o * o + (o * j if corrected else 0))
    if layer.reads not in seen:
        seen.add(layer.reads)
        count += layer.groups * j * j
    return count
