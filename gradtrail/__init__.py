"""Training-data attribution for PyTorch: which training examples made a model behave this way?"""

from gradtrail.attribution import (
    AttributionScores,
    CheckReport,
    EKFACAttributor,
    InnerProductAttributor,
    KFACAttributor,
    Plan,
    attribute,
    check,
    coverage,
    plan,
    self_influence,
)
from gradtrail.callbacks import AbstractStepCallback, GradTrailCallback, MergedSteps
from gradtrail.errors import (
    CaptureError,
    CurvatureError,
    GradTrailWarning,
    StoreError,
    UnsupportedLayerError,
)
from gradtrail.factors import Projection
from gradtrail.hooks import Coverage, HookManager, example_id

__version__ = "0.1.0"

__all__ = [
    "AbstractStepCallback",
    "AttributionScores",
    "CaptureError",
    "CheckReport",
    "Coverage",
    "CurvatureError",
    "EKFACAttributor",
    "GradTrailCallback",
    "GradTrailWarning",
    "HookManager",
    "InnerProductAttributor",
    "KFACAttributor",
    "MergedSteps",
    "Plan",
    "Projection",
    "StoreError",
    "UnsupportedLayerError",
    "attribute",
    "check",
    "coverage",
    "example_id",
    "plan",
    "self_influence",
]
