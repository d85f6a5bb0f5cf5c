"""Layer rules: every file of this folder registers its own."""

from gradtrail.hooks.layers import _scan
from gradtrail.hooks.layers._base import LAYERS, AbstractLayerRule, LayerCall, LayerCase, Roles

__all__ = ["LAYERS", "AbstractLayerRule", "LayerCall", "LayerCase", "Roles", "_scan"]
