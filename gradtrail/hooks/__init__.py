"""From a live model to per-example gradients."""

from gradtrail.hooks.batch import batch_length, first_tensor, take_rows, tokens_of
from gradtrail.hooks.coverage import Coverage, ParameterCoverage
from gradtrail.hooks.directions import DIRECTIONS, ParameterState, update_direction
from gradtrail.hooks.fixed import marked_fixed
from gradtrail.hooks.identity import batch_ids, call_fields, example_id
from gradtrail.hooks.labels import counted_labels, model_kind
from gradtrail.hooks.layers import LAYERS, AbstractLayerRule, LayerCall, LayerCase, Roles
from gradtrail.hooks.listeners import OptimizerStep, StepCallback, checked_callbacks
from gradtrail.hooks.live import LivePass
from gradtrail.hooks.manager import HookManager
from gradtrail.hooks.optimizer_state import OptimizerSnapshot, innermost_optimizer
from gradtrail.hooks.parameter_rows import LayerParameters, layer_parameters
from gradtrail.hooks.reduction import LossReduction, LossScale
from gradtrail.hooks.selection import LayerChoice, Owner, Selection, Unit, select_layers
from gradtrail.hooks.step import check_projection
from gradtrail.hooks.update_directions import LayerState, UpdateDirections, layer_states

__all__ = [
    "DIRECTIONS",
    "LAYERS",
    "AbstractLayerRule",
    "Coverage",
    "HookManager",
    "LayerCall",
    "LayerCase",
    "LayerChoice",
    "LayerParameters",
    "LayerState",
    "LivePass",
    "LossReduction",
    "LossScale",
    "OptimizerSnapshot",
    "OptimizerStep",
    "Owner",
    "ParameterCoverage",
    "ParameterState",
    "Roles",
    "Selection",
    "StepCallback",
    "Unit",
    "UpdateDirections",
    "batch_ids",
    "batch_length",
    "call_fields",
    "check_projection",
    "checked_callbacks",
    "counted_labels",
    "example_id",
    "first_tensor",
    "innermost_optimizer",
    "layer_parameters",
    "layer_states",
    "marked_fixed",
    "model_kind",
    "select_layers",
    "take_rows",
    "tokens_of",
    "update_direction",
]
