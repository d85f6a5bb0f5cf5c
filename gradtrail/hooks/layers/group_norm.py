"""Group normalisation: groups of channels are standardised, channels scaled and shifted.

Suffixes: b example, s position, c channel.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

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
from gradtrail.hooks.layers._channels import as_seen, channel_positions, rank_seen, with_rank
from gradtrail.hooks.layers._features import bias_factors, scale_to_parameters

__all__ = ["GroupNormRule"]


class GroupNormRule(AbstractLayerRule):
    """Rule of ``nn.GroupNorm`` on inputs with any number of spatial axes."""

    elementwise = True

    def keep(
        self, module: nn.GroupNorm, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> LayerCall:
        """Keep the input and its number of axes."""
        return with_rank(super().keep(module, args, kwargs))

    def layer_gradient(
        self, module: nn.GroupNorm, call: LayerCall, output_gradient: Tensor, roles: Roles
    ) -> ScaleFactors | LinearFactors:
        """Pair the standardised inputs with the output gradients."""
        rank = rank_seen(call)
        g_bsc = channel_positions(output_gradient, rank)
        if not roles.weight:
            return bias_factors(g_bsc)

        def standardised(inputs: Tensor) -> Tensor:
            wide = as_seen(inputs, rank).to(statistics_dtype(inputs.dtype))
            unit = F.group_norm(wide, module.num_groups, None, None, module.eps)
            return channel_positions(unit.view(inputs.shape), rank)

        key = ("group_norm", module.num_groups, module.eps)
        return ScaleFactors(call.once(key, standardised), g_bsc, roles.bias)

    def to_parameters(self, module: nn.GroupNorm, dense: DenseGradient) -> dict[str, Tensor]:
        """One entry a channel."""
        return scale_to_parameters(dense, (module.num_channels,))

    def cases(self) -> Iterable[LayerCase]:
        """One group, several, one a channel; no to three spatial axes."""
        for groups, shape in ((2, (3, 4)), (1, (3, 4, 5)), (2, (3, 4, 5, 2)), (4, (3, 4, 2, 3, 2))):
            yield LayerCase(
                f"group_norm-{groups}-{len(shape)}d",
                lambda groups=groups: nn.GroupNorm(groups, 4, dtype=torch.float64),
                lambda shape=shape: (torch.randn(shape, dtype=torch.float64),),
            )
        yield LayerCase(
            "group_norm-eps",
            lambda: nn.GroupNorm(2, 4, eps=0.5, dtype=torch.float64),
            lambda: (torch.randn(3, 4, 5, dtype=torch.float64),),
        )


LAYERS.register(nn.GroupNorm)(GroupNormRule())
