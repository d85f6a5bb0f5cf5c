"""Applying a projection to one layer's gradients."""

from __future__ import annotations

from gradtrail.factors.projection.dense import project_dense
from gradtrail.factors.projection.factored import project_factored
from gradtrail.factors.projection.mask import project_mask
from gradtrail.factors.projection.options import Projection
from gradtrail.factors.types import LayerGradient

__all__ = ["project"]

_KINDS = {"factored": project_factored, "dense": project_dense, "mask": project_mask}


def project(name: str, gradient: LayerGradient, projection: Projection) -> LayerGradient:
    """Project one layer's per-example gradients.

    Args:
        name: The layer's name, which with the seed decides the random numbers.
        gradient: Gradients of any kind.
        projection: What to do.

    Returns:
        Smaller gradients with the same inner products in expectation, in float32 or wider.
    """
    return _KINDS[projection.kind](name, gradient, projection)
