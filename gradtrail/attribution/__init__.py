"""From a model and two data sets to scores."""

from gradtrail.attribution.api import attribute, coverage, self_influence
from gradtrail.attribution.inner_product import InnerProductAttributor
from gradtrail.attribution.method import METHODS, AbstractAttributor
from gradtrail.attribution.scores import AttributionScores, TopK

__all__ = [
    "METHODS",
    "AbstractAttributor",
    "AttributionScores",
    "InnerProductAttributor",
    "TopK",
    "attribute",
    "coverage",
    "self_influence",
]
