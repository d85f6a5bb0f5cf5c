"""Which layers of a training capture get Kronecker covariances."""

from __future__ import annotations

from gradtrail.errors import CurvatureError
from gradtrail.hooks import HookManager, Unit
from gradtrail.hooks.wrapped import output_embedding

__all__ = ["layers_with_covariances"]

_SHOWN = 5


def layers_with_covariances(manager: HookManager, max_side: int) -> frozenset[str]:
    """Choose the layers of a capture that get covariances, as the K-FAC family does.

    Args:
        manager: What captures.
        max_side: Longest side of a covariance.

    Returns:
        Their names.

    Raises:
        ValueError: If the captured gradients have no factors.
        CurvatureError: If a side is too long, or no layer is left.
    """
    projection, selection = manager.projection, manager.selection
    if projection is not None and projection.kind != "factored":
        raise ValueError(
            f"projection must keep both sides of a layer for its covariances, got kind="
            f"{projection.kind!r}. Choose 'factored', or leave the covariances out."
        )
    if manager.form.transform is not None:
        raise ValueError(
            "optimizer must be None for covariances, which are of gradients, got a manager that "
            "captures update directions. Leave the covariances out."
        )
    head = None if selection.explicit else output_embedding(manager.model)
    found, wide = [], []
    for unit in selection.units:
        side = _longest_side(unit)
        grouped = any(getattr(owner.module, "groups", 1) > 1 for owner in unit.owners)
        if side is None or (projection is not None and grouped):
            continue
        if any(owner.module is head for owner in unit.owners):
            continue
        side = side if projection is None else min(side, projection.dim)
        found.append(unit.name)
        if side > max_side:
            wide.append(f"{unit.name} ({side:,}, {4 * side * side / 2**30:,.1f} GiB)")
    if wide:
        more = f" and {len(wide) - _SHOWN} more" if len(wide) > _SHOWN else ""
        raise CurvatureError(
            f"Layers must have sides of at most max_factor_dim={max_side}, got "
            f"{', '.join(wide[:_SHOWN])}{more} for a covariance. Leave them out with exclude=, "
            "compress them with projection=, or raise max_factor_dim."
        )
    if not found:
        raise CurvatureError(
            "The capture must have a layer with Kronecker structure, got none. Choose other "
            "layers, or leave the covariances out."
        )
    return frozenset(found)


def _longest_side(unit: Unit) -> int | None:
    """Longest side over a layer's owners, with the bias's constant; None for another kind."""
    longest = 0
    for owner in unit.owners:
        sides = owner.rule.kronecker_sides(owner.module)
        if sides is None:
            return None
        o, i = sides
        longest = max(longest, o, (i if owner.roles.weight else 0) + int(owner.roles.bias))
    return longest
