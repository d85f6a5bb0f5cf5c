"""From a model and two data sets to scores."""

from gradtrail.attribution.api import attribute, coverage, self_influence
from gradtrail.attribution.check import CheckReport, check
from gradtrail.attribution.inner_product import InnerProductAttributor
from gradtrail.attribution.kronecker import KroneckerMethod
from gradtrail.attribution.kronecker_api import (
    EKFACAttributor,
    KFACAttributor,
    KroneckerAttributor,
)
from gradtrail.attribution.method import METHODS, AbstractAttributor
from gradtrail.attribution.plan import Plan, plan
from gradtrail.attribution.scores import AttributionScores, TopK

__all__ = [
    "METHODS",
    "AbstractAttributor",
    "AttributionScores",
    "CheckReport",
    "EKFACAttributor",
    "InnerProductAttributor",
    "KFACAttributor",
    "KroneckerAttributor",
    "KroneckerMethod",
    "Plan",
    "TopK",
    "attribute",
    "check",
    "coverage",
    "plan",
    "self_influence",
]
