"""From a model and two data sets to scores."""

from gradtrail.attribution.adamw import AdamWMethod
from gradtrail.attribution.api import attribute, coverage, self_influence
from gradtrail.attribution.bound import AbstractBoundAttributor, Attributor
from gradtrail.attribution.cached import CachedGradients, cache
from gradtrail.attribution.check import CheckReport, check
from gradtrail.attribution.dvemb import DVEmbMethod
from gradtrail.attribution.from_cache import attribute_from_cache, self_influence_from_cache
from gradtrail.attribution.inner_product import InnerProductAttributor
from gradtrail.attribution.kronecker import KroneckerMethod
from gradtrail.attribution.kronecker_api import (
    EKFACAttributor,
    KFACAttributor,
    KroneckerAttributor,
)
from gradtrail.attribution.less import LESSMethod
from gradtrail.attribution.method import METHODS, AbstractAttributor
from gradtrail.attribution.plan import Plan, plan
from gradtrail.attribution.preconditioned import cache_preconditioned_query
from gradtrail.attribution.scores import AttributionScores, TopK
from gradtrail.attribution.search import search
from gradtrail.attribution.trajectory_replay import attribute_by_replay
from gradtrail.attribution.trak import TRAKAttributor

__all__ = [
    "METHODS",
    "AdamWMethod",
    "DVEmbMethod",
    "TRAKAttributor",
    "AbstractAttributor",
    "AbstractBoundAttributor",
    "AttributionScores",
    "Attributor",
    "CachedGradients",
    "CheckReport",
    "EKFACAttributor",
    "InnerProductAttributor",
    "KFACAttributor",
    "KroneckerAttributor",
    "KroneckerMethod",
    "LESSMethod",
    "Plan",
    "TopK",
    "attribute",
    "attribute_by_replay",
    "attribute_from_cache",
    "cache",
    "cache_preconditioned_query",
    "check",
    "coverage",
    "plan",
    "search",
    "self_influence",
    "self_influence_from_cache",
]
