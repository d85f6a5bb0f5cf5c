"""Instance normalisation: every channel of every example is standardised on its own.

Suffixes: b example, s position, c channel.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

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
from gradtrail.hooks.layers._channels import (
    as_seen,
    channel_positions,
    require_batch,
    running_statistics,
    standardise,
)
from gradtrail.hooks.layers._features import bias_factors, scale_to_parameters

__all__ = ["InstanceNormRule"]

_InstanceNorm: TypeAlias = nn.InstanceNorm1d | nn.InstanceNorm2d | nn.InstanceNorm3d
_RANKS = {nn.InstanceNorm1d: 3, nn.InstanceNorm2d: 4, nn.InstanceNorm3d: 5}


class InstanceNormRule(AbstractLayerRule):
    """Rule of affine ``nn.InstanceNorm1d``, ``2d`` and ``3d``, with either kind of statistics."""

    def keep(
        self, module: _InstanceNorm, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> LayerCall:
        """Keep the input, and the running statistics where this call used them."""
        call = require_batch(module, super().keep(module, args, kwargs), _rank(module))
        if module.training or module.running_mean is None:
            return call
        return LayerCall(call.inputs, running_statistics(module))

    def layer_gradient(
        self, module: _InstanceNorm, call: LayerCall, output_gradient: Tensor, roles: Roles
    ) -> ScaleFactors | LinearFactors:
        """Pair the standardised inputs with the output gradients."""
        rank = _rank(module)
        g_bsc = channel_positions(output_gradient, rank)
        if not roles.weight:
            return bias_factors(g_bsc)
        if "mean" in call.extras:
            return ScaleFactors(standardise(call, module.eps, rank), g_bsc, roles.bias)

        def standardised(inputs: Tensor) -> Tensor:
            wide = as_seen(inputs, rank).to(statistics_dtype(inputs.dtype))
            unit = F.instance_norm(wide, eps=module.eps)
            return channel_positions(unit.view(inputs.shape), rank)

        key = ("instance_norm", module.eps)
        return ScaleFactors(call.once(key, standardised), g_bsc, roles.bias)

    def to_parameters(self, module: _InstanceNorm, dense: DenseGradient) -> dict[str, Tensor]:
        """One entry a channel."""
        return scale_to_parameters(dense, (module.num_features,))

    def cases(self) -> Iterable[LayerCase]:
        """One to three spatial axes; statistics of the example, or running ones."""
        for axes, cls in enumerate(_RANKS, 1):
            yield _case(f"instance_norm{axes}d", cls, axes)
            yield _case(f"instance_norm{axes}d-training", cls, axes, track=True)
            yield _case(f"instance_norm{axes}d-running", cls, axes, track=True, evaluate=True)


def _case(
    label: str,
    cls: type[_InstanceNorm],
    axes: int,
    *,
    track: bool = False,
    evaluate: bool = False,
) -> LayerCase:
    def build() -> nn.Module:
        layer = cls(4, affine=True, track_running_stats=track, dtype=torch.float64)
        if track:
            layer.running_mean.normal_()
            layer.running_var.uniform_(0.5, 2)
        return layer.train(not evaluate)

    shape = (3, 4, *(5, 3, 2)[:axes])
    return LayerCase(label, build, lambda: (torch.randn(shape, dtype=torch.float64),))


def _rank(module: _InstanceNorm) -> int:
    return next(rank for cls, rank in _RANKS.items() if isinstance(module, cls))


LAYERS.register(*_RANKS)(InstanceNormRule())
