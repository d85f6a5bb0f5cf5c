"""Training-data attribution for PyTorch: which training examples made a model behave this way?"""

from gradtrail.attribution import (
    AttributionScores,
    InnerProductAttributor,
    attribute,
    coverage,
    self_influence,
)
from gradtrail.errors import CaptureError, GradTrailWarning, UnsupportedLayerError
from gradtrail.factors import Projection
from gradtrail.hooks import Coverage, example_id

__version__ = "0.1.0"

__all__ = [
    "AttributionScores",
    "CaptureError",
    "Coverage",
    "GradTrailWarning",
    "InnerProductAttributor",
    "Projection",
    "UnsupportedLayerError",
    "attribute",
    "coverage",
    "example_id",
    "self_influence",
]
