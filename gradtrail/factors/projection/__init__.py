"""Seeded random projections of per-example gradients."""

from gradtrail.factors.projection.api import project
from gradtrail.factors.projection.mask import mask_coordinates
from gradtrail.factors.projection.options import Projection

__all__ = ["Projection", "mask_coordinates", "project"]
