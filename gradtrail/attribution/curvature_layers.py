"""Which layers get which curvature: Kronecker-factored, dense, diagonal, or none."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from torch import nn

from gradtrail.errors import CurvatureError, GradTrailWarning
from gradtrail.factors import Projection
from gradtrail.hooks import LayerChoice, Selection, Unit, select_layers
from gradtrail.hooks.wrapped import output_embedding, whole_shape

__all__ = [
    "LayerRules",
    "Treatment",
    "choose_curvature",
    "output_layers",
    "refuse_none",
    "refuse_wide",
    "tell_direct",
]

Treatment: TypeAlias = Literal["kronecker", "dense", "diagonal"]

_SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class LayerRules:
    """What is done with layers without Kronecker structure, and with very wide ones.

    Attributes:
        non_kronecker: ``"ignore"`` leaves norms and materialised layers out, ``"direct"`` gives
            them a dense empirical Fisher.
        direct_fisher_max_params: Most entries a layer may have for a dense Fisher.
        max_factor_dim: Longest side a Kronecker-factored layer may have.
        diagonal: Layers to give the diagonal of the Fisher, as ``layers`` names them.
    """

    non_kronecker: Literal["ignore", "direct"]
    direct_fisher_max_params: int
    max_factor_dim: int
    diagonal: LayerChoice


def choose_curvature(
    model: nn.Module,
    selection: Selection,
    rules: LayerRules,
    projection: Projection | None,
    *,
    tell: bool = False,
) -> tuple[Selection, dict[str, Treatment]]:
    """Sort the captured layers by the curvature they get.

    The output embedding is left out unless layers were named.

    Args:
        model: The model.
        selection: The layers that could be captured.
        rules: What the user chose.
        projection: Compression of every gradient, or None.
        tell: Whether it is said how many layers a dense Fisher covers: once a call, when the
            layers are chosen.

    Returns:
        The layers that are captured, and the treatment of each. A side that is too long to be
        allocated, and nothing being left, raise ``CurvatureError``.
    """
    diagonal = _named(model, selection, rules.diagonal)
    output = None if selection.explicit else output_embedding(model)
    treatments: dict[str, Treatment] = {}
    dropped: dict[str, str] = {}
    wide: dict[str, int] = {}
    eligible = 0
    for unit in selection.units:
        sides = None if _is_written(unit, projection) else _sides(unit)
        if unit.name in diagonal:
            treatments[unit.name] = "diagonal"
        elif any(owner.module is output for owner in unit.owners):
            dropped[unit.name] = "the output embedding is left out of the K-FAC family by default"
        elif sides is not None:
            treatments[unit.name] = "kronecker"
            side = max(sides) if projection is None else min(max(sides), projection.dim)
            if side > rules.max_factor_dim:
                wide[unit.name] = side
        elif rules.non_kronecker == "ignore":
            dropped[unit.name] = "no Kronecker structure (non_kronecker='ignore')"
        else:
            eligible += 1
            size = _direct_size(unit, projection)
            if size > rules.direct_fisher_max_params:
                dropped[unit.name] = (
                    f"{size:,} entries are over direct_fisher_max_params="
                    f"{rules.direct_fisher_max_params}"
                )
            else:
                treatments[unit.name] = "dense"
    refuse_wide(wide, rules.max_factor_dim)
    if tell and rules.non_kronecker == "direct":
        tell_direct(treatments, eligible)
    return _without(selection, treatments, dropped), treatments


def refuse_wide(wide: Mapping[str, int], limit: int) -> None:
    """Refuse covariances of sides that are too long.

    Args:
        wide: The side by layer.
        limit: The user's ``max_factor_dim``.

    Raises:
        CurvatureError: If there is one.
    """
    if wide:
        listed = [
            f"{name} ({side:,}, {4 * side * side / 2**30:,.1f} GiB)" for name, side in wide.items()
        ]
        raise CurvatureError(
            f"Layers must have sides of at most max_factor_dim={limit}, got "
            f"{', '.join(listed[:_SHOWN])} for a covariance. Leave them out with exclude=, give "
            "them diagonal= treatment, compress them with projection=, or raise max_factor_dim."
        )


def refuse_none(treatments: Mapping[str, Treatment], dropped: Mapping[str, str]) -> None:
    """Refuse a choice that leaves no layer.

    Args:
        treatments: What is left.
        dropped: By layer, why it is not.

    Raises:
        CurvatureError: If nothing is left.
    """
    if not treatments:
        shown = "; ".join(f"{name}: {reason}" for name, reason in list(dropped.items())[:_SHOWN])
        raise CurvatureError(
            f"The model must have a layer with Kronecker structure, got none: {shown}. Choose "
            "other layers, non_kronecker='direct' or diagonal=."
        )


def _without(
    selection: Selection, treatments: dict[str, Treatment], dropped: dict[str, str]
) -> Selection:
    refuse_none(treatments, dropped)
    units = tuple(unit for unit in selection.units if unit.name in treatments)
    return replace(
        selection, units=units, coverage=selection.coverage.without_layers(dropped, "left out")
    )


def tell_direct(treatments: Mapping[str, Treatment], eligible: int) -> None:
    """Say how many of the eligible layers get a dense Fisher, or that there are none.

    Args:
        treatments: Kind of curvature by layer.
        eligible: Number of layers without Kronecker structure.

    Raises:
        CurvatureError: If there are none.
    """
    direct = sum(treatment == "dense" for treatment in treatments.values())
    if not eligible:
        raise CurvatureError(
            "non_kronecker='direct' must have layers without Kronecker structure to treat, got "
            "none. Leave it out."
        )
    if direct < eligible:
        warnings.warn(
            f"non_kronecker='direct' covers {direct} of {eligible} eligible layers; the others "
            "have more entries than direct_fisher_max_params and are left out.",
            GradTrailWarning,
            stacklevel=5,
        )


def _named(model: nn.Module, selection: Selection, choice: LayerChoice) -> set[str]:
    """Names of the captured layers that a choice takes."""
    if choice is None:
        return set()
    wanted = select_layers(model, layers=choice, include_frozen=True)  # frozen in a live pass
    names = {unit.name for unit in wanted.units} & {unit.name for unit in selection.units}
    if not names:
        raise ValueError(
            f"diagonal must name captured layers, got {choice!r}, none of which is captured. "
            "Name them with layers= too, or leave diagonal out."
        )
    return names


def output_layers(model: nn.Module, selection: Selection) -> tuple[str, ...]:
    """Name the captured layers that are the output embedding.

    Args:
        model: The model.
        selection: The captured layers.

    Returns:
        Their names, mostly one or none.
    """
    output = output_embedding(model)
    return tuple(
        unit.name
        for unit in selection.units
        if output is not None and any(owner.module is output for owner in unit.owners)
    )


def _is_written(unit: Unit, projection: Projection | None) -> bool:
    """Whether projected gradients have no sides left."""
    grouped = any(getattr(owner.module, "groups", 1) > 1 for owner in unit.owners)
    return projection is not None and (projection.kind != "factored" or grouped)


def _sides(unit: Unit) -> tuple[int, int] | None:
    """Longest sides over a layer's owners, with the bias's constant; None for another kind."""
    found = []
    for owner in unit.owners:
        sides = owner.rule.kronecker_sides(owner.module)
        if sides is None:
            return None
        o, i = sides
        found.append((o, (i if owner.roles.weight else 0) + int(owner.roles.bias)))
    return max(o for o, _ in found), max(i for _, i in found)


def _direct_size(unit: Unit, projection: Projection | None) -> int:
    """Entries of a layer's gradient once it is written out."""
    owner = unit.owners[0]
    roles = (("weight", owner.roles.weight), ("bias", owner.roles.bias))
    own = owner.module._parameters  # noqa: SLF001
    size = sum(
        whole_shape(owner.module, role).numel()
        for role, wanted in roles
        if wanted and own[role] is not None
    )
    if projection is None:
        return size
    limit = projection.dim**2 if projection.kind == "factored" else projection.dim
    return min(size, math.ceil(limit))
