"""Training-data attribution for PyTorch: which training examples made a model behave this way?"""

from gradtrail.attribution import (
    AttributionScores,
    Attributor,
    CachedGradients,
    CheckReport,
    EKFACAttributor,
    InnerProductAttributor,
    KFACAttributor,
    Plan,
    attribute,
    attribute_by_replay,
    attribute_from_cache,
    cache,
    cache_preconditioned_query,
    check,
    coverage,
    plan,
    search,
    self_influence,
    self_influence_from_cache,
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
from gradtrail.hooks import Coverage, HookManager, OptimizerSnapshot, example_id
from gradtrail.store import GradientStore, StepStore

__version__ = "0.1.0"

__all__ = [
    "AbstractStepCallback",
    "AttributionScores",
    "Attributor",
    "CachedGradients",
    "CaptureError",
    "CheckReport",
    "Coverage",
    "CurvatureError",
    "EKFACAttributor",
    "GradTrailCallback",
    "GradTrailWarning",
    "GradientStore",
    "HookManager",
    "InnerProductAttributor",
    "KFACAttributor",
    "MergedSteps",
    "OptimizerSnapshot",
    "Plan",
    "Projection",
    "StepStore",
    "StoreError",
    "UnsupportedLayerError",
    "attribute",
    "attribute_by_replay",
    "attribute_from_cache",
    "cache",
    "cache_preconditioned_query",
    "check",
    "coverage",
    "example_id",
    "plan",
    "search",
    "self_influence",
    "self_influence_from_cache",
]
