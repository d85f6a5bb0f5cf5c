"""Linear layers: ``y = x W^T + c``.

Suffixes: b example, s position, i layer input, o layer output.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

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

__all__ = ["LinearRule"]


class LinearRule(AbstractLayerRule):
    """Rule of ``nn.Linear`` on inputs of any number of axes."""

    def refusal(self, module: nn.Module) -> str | None:
        """``nn.MultiheadAttention`` reads its output projection's weight functionally."""
        if isinstance(module, NonDynamicallyQuantizableLinear):
            return "nn.MultiheadAttention uses its weight without calling it"
        return None

    def kronecker_sides(self, module: nn.Module) -> tuple[int, int]:
        """The weight's own."""
        o, i = whole_shape(module, "weight")
        return o, i

    def layer_gradient(
        self, module: nn.Module, call: LayerCall, output_gradient: Tensor, roles: Roles
    ) -> LinearFactors:
        """Pair the inputs with the output gradients."""
        del module
        a_bsi = activation_positions(call, roles)
        return LinearFactors(a_bsi, to_positions(output_gradient), roles.bias)

    def to_parameters(self, module: nn.Module, dense: DenseGradient) -> dict[str, Tensor]:
        """Weights are ``[o, i]`` as they stand."""
        del module
        return named(*split_linear(dense))

    def cases(self) -> Iterable[LayerCase]:
        """Two to four axes, with and without a bias."""

        def linear(bias: bool) -> nn.Module:  # noqa: FBT001
            return nn.Linear(5, 3, bias=bias, dtype=torch.float64)

        for bias in (True, False):
            for shape in ((3, 5), (3, 4, 5), (3, 2, 4, 5)):
                yield LayerCase(
                    f"linear-bias={bias}-{len(shape)}d",
                    lambda bias=bias: linear(bias),
                    lambda shape=shape: (torch.randn(shape, dtype=torch.float64),),
                )


LAYERS.register(nn.Linear)(LinearRule())
