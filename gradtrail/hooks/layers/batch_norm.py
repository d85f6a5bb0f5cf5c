"""Batch normalisation with running statistics, where it is a fixed scale and shift of channels.

Suffixes: b example, s position, c channel.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from gradtrail.errors import CaptureError
from gradtrail.factors import DenseGradient, LinearFactors, ScaleFactors
from gradtrail.hooks.layers._base import LAYERS, AbstractLayerRule, LayerCall, LayerCase, Roles
from gradtrail.hooks.layers._channels import (
    channel_positions,
    rank_seen,
    running_statistics,
    standardise,
    with_rank,
)
from gradtrail.hooks.layers._features import bias_factors, scale_to_parameters

__all__ = ["BatchNormRule"]

_BatchNorm: TypeAlias = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm


class BatchNormRule(AbstractLayerRule):
    """Rule of ``nn.BatchNorm1d``, ``2d``, ``3d`` and ``nn.SyncBatchNorm`` in evaluation mode.

    With the batch's own statistics one example's loss depends on all others, so that no
    per-example gradient exists: refused.
    """

    def refusal(self, module: _BatchNorm) -> str | None:
        """Without running statistics evaluation mode uses the batch's too."""
        if module.running_mean is None or module.running_var is None:
            return "without running statistics the examples of a batch depend on each other"
        return None

    def keep(
        self, module: _BatchNorm, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> LayerCall:
        """Keep the input and the running statistics."""
        if module.training:
            raise CaptureError(
                f"{type(module).__name__} must be in evaluation mode, got training mode, in which "
                "the examples of a batch depend on each other. Call eval() on it or leave it out."
            )
        inputs = super().keep(module, args, kwargs).inputs
        return with_rank(LayerCall(inputs, running_statistics(module)))

    def layer_gradient(
        self, module: _BatchNorm, call: LayerCall, output_gradient: Tensor, roles: Roles
    ) -> ScaleFactors | LinearFactors:
        """Pair the standardised inputs with the output gradients."""
        rank = rank_seen(call)
        g_bsc = channel_positions(output_gradient, rank)
        if not roles.weight:
            return bias_factors(g_bsc)
        return ScaleFactors(standardise(call, module.eps, rank), g_bsc, roles.bias)

    def to_parameters(self, module: _BatchNorm, dense: DenseGradient) -> dict[str, Tensor]:
        """One entry a channel."""
        return scale_to_parameters(dense, (module.num_features,))

    def cases(self) -> Iterable[LayerCase]:
        """No to three spatial axes."""
        yield _case("batch_norm1d", nn.BatchNorm1d, (3, 4))
        yield _case("batch_norm1d-space", nn.BatchNorm1d, (3, 4, 5))
        yield _case("batch_norm2d", nn.BatchNorm2d, (3, 4, 5, 2))
        yield _case("batch_norm3d", nn.BatchNorm3d, (3, 4, 2, 3, 2))
        yield _case("sync_batch_norm", nn.SyncBatchNorm, (3, 4, 5))
        yield _case("batch_norm1d-eps", nn.BatchNorm1d, (3, 4), eps=0.5)


def _case(
    label: str, cls: type[_BatchNorm], shape: tuple[int, ...], *, eps: float = 1e-5
) -> LayerCase:
    def build() -> nn.Module:
        layer = cls(4, eps=eps, dtype=torch.float64)
        layer.running_mean.normal_()
        layer.running_var.uniform_(0.5, 2)
        return layer.eval()

    return LayerCase(label, build, lambda: (torch.randn(shape, dtype=torch.float64),))


LAYERS.register(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)(BatchNormRule())
