"""The ``Conv1D`` of ``transformers`` (GPT-2): ``y = x W + c`` with ``W`` stored as ``[i, o]``.

Suffixes: b example, s position, i layer input, o layer output.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from gradtrail.factors import DenseGradient, LinearFactors
from gradtrail.hooks.layers._base import (
    LAYERS,
    AbstractLayerRule,
    LayerCall,
    LayerCase,
    Roles,
    activation_positions,
    named,
    split_linear,
    to_positions,
)
from gradtrail.hooks.wrapped import whole_shape

__all__ = ["HFConv1DRule"]


class HFConv1DRule(AbstractLayerRule):
    """Rule of the transposed linear layer; its orientation comes from the class alone."""

    def kronecker_sides(self, module: nn.Module) -> tuple[int, int]:
        """The weight is stored as ``[i, o]``."""
        i, o = whole_shape(module, "weight")
        return o, i

    def layer_gradient(
        self, module: nn.Module, call: LayerCall, output_gradient: Tensor, roles: Roles
    ) -> LinearFactors:
        """Pair the inputs with the output gradients."""
        del module
        a_bsi = activation_positions(call, roles)
        return LinearFactors(a_bsi, to_positions(output_gradient), roles.bias)

    def to_parameters(self, module: nn.Module, dense: DenseGradient) -> dict[str, Tensor]:
        """Weights are stored as ``[i, o]``: transpose."""
        del module
        weight, bias = split_linear(dense)
        return named(weight.transpose(1, 2), bias)

    def cases(self) -> Iterable[LayerCase]:
        """None here: the class lives in ``transformers``; the model tests run it."""
        return ()


def _is_hf_conv1d(module: nn.Module) -> bool:
    """Tell the class by where it is defined, without importing ``transformers``."""
    return any(
        cls.__name__ == "Conv1D" and cls.__module__ == "transformers.pytorch_utils"
        for cls in type(module).__mro__
    )


LAYERS.register_if(_is_hf_conv1d)(HFConv1DRule())
