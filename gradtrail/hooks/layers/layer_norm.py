"""Layer normalisation: the last axes are standardised, scaled and shifted.

Suffixes: b example, s position, d parameter entry.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradtrail.factors import DenseGradient, LinearFactors, ScaleFactors
from gradtrail.hooks.layers._base import (
    LAYERS,
    AbstractLayerRule,
    LayerCall,
    LayerCase,
    Roles,
    statistics_dtype,
)
from gradtrail.hooks.layers._features import bias_factors, feature_positions, scale_to_parameters

__all__ = ["LayerNormRule"]


class LayerNormRule(AbstractLayerRule):
    """Rule of ``nn.LayerNorm`` with any number of normalised axes."""

    def layer_gradient(
        self, module: nn.LayerNorm, call: LayerCall, output_gradient: Tensor, roles: Roles
    ) -> ScaleFactors | LinearFactors:
        """Pair the standardised inputs with the output gradients."""
        axes = len(module.normalized_shape)
        g_bsd = feature_positions(output_gradient, axes)
        if not roles.weight:
            return bias_factors(g_bsd)

        def standardised(inputs: Tensor) -> Tensor:
            wide = inputs.to(statistics_dtype(inputs.dtype))
            unit = F.layer_norm(wide, module.normalized_shape, None, None, module.eps)
            return feature_positions(unit, axes)

        key = ("layer_norm", tuple(module.normalized_shape), module.eps)
        return ScaleFactors(call.once(key, standardised), g_bsd, roles.bias)

    def to_parameters(self, module: nn.LayerNorm, dense: DenseGradient) -> dict[str, Tensor]:
        """Unfold the normalised axes."""
        return scale_to_parameters(dense, module.normalized_shape)

    def cases(self) -> Iterable[LayerCase]:
        """One to three normalised axes, inputs of two to four, with and without a bias."""
        yield _case("2d", (5,), (3, 5))
        yield _case("3d", (5,), (3, 4, 5))
        yield _case("4d", (5,), (3, 2, 4, 5))
        yield _case("two-axes", (4, 5), (3, 4, 5))
        yield _case("two-axes-4d", (4, 5), (3, 2, 4, 5))
        yield _case("three-axes", (2, 4, 5), (3, 2, 4, 5))
        yield _case("no-bias", (5,), (3, 4, 5), bias=False)
        yield _case("eps", (5,), (3, 4, 5), eps=0.5)


def _case(
    label: str,
    normalized: Sequence[int],
    shape: Sequence[int],
    *,
    bias: bool = True,
    eps: float = 1e-5,
) -> LayerCase:
    return LayerCase(
        f"layer_norm-{label}",
        lambda: nn.LayerNorm(normalized, eps=eps, bias=bias, dtype=torch.float64),
        lambda: (torch.randn(*shape, dtype=torch.float64),),
    )


LAYERS.register(nn.LayerNorm)(LayerNormRule())
