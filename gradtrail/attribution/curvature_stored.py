"""Which stored layers get which curvature: the kinds of their gradients say what a model would."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gradtrail.attribution.curvature_layers import (
    LayerRules,
    Treatment,
    refuse_none,
    refuse_wide,
    tell_direct,
)
from gradtrail.attribution.stored import StoredRows, attached_covariances
from gradtrail.attribution.stored_model import StoredModel, entries_of, matching_names
from gradtrail.errors import CurvatureError
from gradtrail.kronecker import covariances_from
from gradtrail.store import LayerFacts

__all__ = ["choose_stored_curvature", "with_covariances"]

_OUTPUT = "the output embedding is left out of the K-FAC family by default"


def with_covariances(stored: StoredModel, rows: StoredRows) -> StoredModel:
    """Note for which layers covariances were accumulated over all rows that are read.

    Args:
        stored: The layers.
        rows: The training examples.

    Returns:
        The same layers.
    """
    attached = attached_covariances(rows.store, rows.records)
    if attached is None:
        return stored
    covered = {
        name: (factors.gradient_cov_goo.shape[1], factors.activation_cov_gii.shape[1])
        for name, factors in covariances_from(*attached).items()
    }
    return replace(stored, covered=covered)


def choose_stored_curvature(
    stored: StoredModel, rules: LayerRules, *, tell: bool = False
) -> tuple[StoredModel, dict[str, Treatment]]:
    """Sort stored layers by the curvature they get, as the layers of a model are.

    Factors have Kronecker structure; a written-out gradient has it where covariances were
    accumulated while it was stored.

    Args:
        stored: The layers that could be read.
        rules: What the user chose.
        tell: Whether it is said how many layers a dense Fisher covers.

    Returns:
        The layers that are read, and the treatment of each. A side that is too long, and nothing
        being left, raise ``CurvatureError``.
    """
    diagonal = _diagonal(stored, rules)
    treatments: dict[str, Treatment] = {}
    dropped: dict[str, str] = {}
    wide: dict[str, int] = {}
    eligible = 0
    for name, facts in stored.layers.items():
        known = name not in stored.without_kronecker
        sides = (stored.covered.get(name) or _sides(facts)) if known else None
        if name in diagonal:
            treatments[name] = "diagonal"
        elif name in stored.output_layers and not stored.explicit:
            dropped[name] = _OUTPUT
        elif sides is not None:
            treatments[name] = "kronecker"
            if max(sides) > rules.max_factor_dim:
                wide[name] = max(sides)
        elif rules.non_kronecker == "ignore":
            dropped[name] = "no Kronecker structure (non_kronecker='ignore')"
        else:
            eligible += 1
            size = entries_of(facts)
            if size > rules.direct_fisher_max_params:
                dropped[name] = (
                    f"{size:,} entries are over direct_fisher_max_params="
                    f"{rules.direct_fisher_max_params}"
                )
            else:
                treatments[name] = "dense"
    refuse_wide(wide, rules.max_factor_dim)
    if not stored.covered and (stored.projection is None or not treatments):
        # of projected layers some are written out whatever they are: only none at all tells
        _refuse_written([name for name in dropped if _may_be_linear(stored.layers[name])])
    refuse_none(treatments, dropped)
    if tell and rules.non_kronecker == "direct":
        tell_direct(treatments, eligible)
    return stored.without(dropped), treatments


def _diagonal(stored: StoredModel, rules: LayerRules) -> set[str]:
    """Layers that get the diagonal of the Fisher."""
    if rules.diagonal is None:
        return set()
    return matching_names(rules.diagonal, stored.layers, "diagonal")


def _sides(facts: LayerFacts) -> tuple[int, int] | None:
    """Sides of a layer's covariances where every gradient of it is stored as factors."""
    if facts.sides is None or not set(facts.kinds) <= {"linear", "sum"}:
        return None
    o, i = facts.sides
    return o // facts.groups, i // facts.groups + int(facts.has_bias)


def _may_be_linear(facts: LayerFacts) -> bool:
    """Whether a layer's written-out gradients may be those of an affine layer."""
    return "dense" in facts.kinds and (facts.sides is not None or len(facts.shape) > 1)


def _refuse_written(names: Sequence[str]) -> None:
    """Refuse matrices of which it is not known how they came about."""
    if names:
        raise CurvatureError(
            f"Layers of a store must hold factors, or covariances that cover every row that is "
            f"read, got gradients written out and none for {', '.join(names[:5])}. Read all steps "
            "of a store that was captured with covariances: cache(method='ekfac') keeps them, and "
            "so does KroneckerCovarianceCallback beside OffloadCallback. Or capture with "
            "capture='factored', or leave these layers out with exclude=."
        )
