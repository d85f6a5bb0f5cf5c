"""From a live model to per-example gradients."""

from gradtrail.hooks.batch import batch_length, first_tensor, take_rows, tokens_of
from gradtrail.hooks.coverage import Coverage, ParameterCoverage
from gradtrail.hooks.identity import batch_ids, example_id
from gradtrail.hooks.labels import counted_labels, model_kind
from gradtrail.hooks.layers import LAYERS, AbstractLayerRule, LayerCall, LayerCase, Roles
from gradtrail.hooks.live import LivePass
from gradtrail.hooks.manager import HookManager
from gradtrail.hooks.selection import LayerChoice, Owner, Selection, Unit, select_layers

__all__ = [
    "LAYERS",
    "AbstractLayerRule",
    "Coverage",
    "HookManager",
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
    "batch_length",
    "counted_labels",
    "example_id",
    "first_tensor",
    "model_kind",
    "select_layers",
    "take_rows",
    "tokens_of",
]
