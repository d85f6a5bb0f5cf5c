"""From a live model to per-example gradients."""

from gradtrail.hooks.coverage import Coverage, ParameterCoverage
from gradtrail.hooks.identity import batch_ids, example_id
from gradtrail.hooks.layers import LAYERS, AbstractLayerRule, LayerCall, LayerCase, Roles
from gradtrail.hooks.live import LivePass
from gradtrail.hooks.selection import LayerChoice, Owner, Selection, Unit, select_layers

__all__ = [
    "LAYERS",
    "AbstractLayerRule",
    "Coverage",
    "LayerCall",
    "LayerCase",
    "LayerChoice",
    "LivePass",
    "Owner",
    "ParameterCoverage",
    "Roles",
    "Selection",
    "Unit",
    "batch_ids",
    "example_id",
    "select_layers",
]
