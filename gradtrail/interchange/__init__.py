"""Causal variables: find the subspace that carries one, and ask who taught the model."""

from gradtrail.interchange.controls import (
    arbitrary_targets,
    mean_difference_basis,
    placebo_accuracy,
    random_basis,
    reinitialized,
)
from gradtrail.interchange.fit import DASResult, fit_das
from gradtrail.interchange.passes import (
    collect_activations,
    interchange_accuracy,
    interchange_logits,
)
from gradtrail.interchange.projection import ProjectionQuery
from gradtrail.interchange.query import InterchangeQuery
from gradtrail.interchange.site import Site
from gradtrail.interchange.subspace import LearnedSubspace, interchange

__all__ = [
    "DASResult",
    "InterchangeQuery",
    "LearnedSubspace",
    "ProjectionQuery",
    "Site",
    "arbitrary_targets",
    "collect_activations",
    "fit_das",
    "interchange",
    "interchange_accuracy",
    "interchange_logits",
    "mean_difference_basis",
    "placebo_accuracy",
    "random_basis",
    "reinitialized",
]
