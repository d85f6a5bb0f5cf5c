"""Convolutions: the kernel meets every patch of the padded input.

Suffixes: b example, n row of the layer's own input, s output position, c channel, o output
channel, k entry of a patch, x any number of spatial axes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradtrail.errors import UnsupportedLayerError
from gradtrail.factors import DenseGradient, LinearFactors
from gradtrail.hooks.layers._base import (
    LAYERS,
    AbstractLayerRule,
    LayerCall,
    LayerCase,
    Roles,
    named,
    split_linear,
)
from gradtrail.hooks.layers._channels import (
    as_seen,
    channel_positions,
    example_positions,
    patches,
    require_batch,
)
from gradtrail.hooks.layers._features import bias_factors
from gradtrail.hooks.wrapped import whole_shape

__all__ = ["ConvRule"]

_Conv: TypeAlias = nn.Conv1d | nn.Conv2d | nn.Conv3d


class ConvRule(AbstractLayerRule):
    """Rule of ``nn.Conv1d``, ``nn.Conv2d`` and ``nn.Conv3d`` in every configuration."""

    def keep(self, module: _Conv, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> LayerCall:
        """Keep the input; without a batch axis its examples could not be told from channels."""
        return require_batch(module, super().keep(module, args, kwargs), _rank(module))

    def kronecker_sides(self, module: _Conv) -> tuple[int, int]:
        """Output channels of a group, and the entries of a patch."""
        return module.out_channels // module.groups, whole_shape(module, "weight")[1:].numel()

    def layer_gradient(
        self, module: _Conv, call: LayerCall, output_gradient: Tensor, roles: Roles
    ) -> LinearFactors:
        """Pair the patches with the output gradients."""
        g_bso = channel_positions(output_gradient, _rank(module))
        if not roles.weight:
            return bias_factors(g_bso)
        options = (module.kernel_size, module.stride, module.padding, module.dilation)
        key = ("conv", *options, module.padding_mode)
        a_bsk = call.once(key, lambda inputs: _input_patches(module, inputs))
        if a_bsk.shape[1] != g_bso.shape[1]:
            raise UnsupportedLayerError(
                f"{type(module).__name__} must convolve with its own stride, padding and dilation: "
                f"{a_bsk.shape[1]} positions, got {g_bso.shape[1]}. Leave it out."
            )
        return LinearFactors(a_bsk, g_bso, roles.bias, module.groups)

    def to_parameters(self, module: _Conv, dense: DenseGradient) -> dict[str, Tensor]:
        """Cut rows of patches into kernels."""
        weight, bias = split_linear(dense)
        if weight.shape[-1]:
            weight = weight.reshape(weight.shape[0], *whole_shape(module, "weight"))
        return named(weight, bias)

    def cases(self) -> Iterable[LayerCase]:
        """Every option on one axis or more; sizes differ by axis so that none can be swapped."""
        every = {
            "plain": {},
            "no-bias": {"bias": False},
            "stride": {"stride": 2},
            "padding": {"padding": 1},
            "dilation": {"dilation": 2, "padding": 2},
            "groups": {"groups": 2, "padding": 1},
            "groups-no-bias": {"groups": 2, "bias": False},
            "depthwise": {"in_channels": 3, "out_channels": 6, "groups": 3},
            "pointwise": {"kernel_size": 1},
            "pointwise-stride": {"kernel_size": 1, "stride": 2},
            "same": {"padding": "same"},
            "same-dilation": {"padding": "same", "kernel_size": 2, "dilation": 3},
            "valid": {"padding": "valid"},
            "all": {"groups": 2, "stride": 2, "dilation": 2, "padding": 3},
        }
        for mode in ("circular", "reflect", "replicate"):
            every[mode] = {"padding": 1, "padding_mode": mode}
            every[f"{mode}-same"] = {"padding": "same", "kernel_size": 2, "padding_mode": mode}
            every[f"{mode}-stride"] = {"padding": 2, "stride": 2, "padding_mode": mode}
        for axes, cls in enumerate((nn.Conv1d, nn.Conv2d, nn.Conv3d), 1):
            for label, options in every.items():
                yield _case(f"conv{axes}d-{label}", cls, axes, options)
        uneven = {"kernel_size": (3, 2), "stride": (1, 2), "padding": (2, 1), "dilation": (2, 1)}
        yield _case("conv2d-uneven", nn.Conv2d, 2, uneven)
        uneven = {"kernel_size": (1, 3, 2), "stride": (2, 1, 3), "padding": (0, 2, 1)}
        yield _case("conv3d-uneven", nn.Conv3d, 3, uneven)


def _case(label: str, cls: type[_Conv], axes: int, options: Mapping[str, Any]) -> LayerCase:
    options = {"in_channels": 4, "out_channels": 6, "kernel_size": 3, **options}
    shape = (3, options["in_channels"], *(7, 6, 5)[:axes])
    return LayerCase(
        label,
        lambda: cls(**options, dtype=torch.float64),
        lambda: (torch.randn(shape, dtype=torch.float64),),
    )


def _rank(module: _Conv) -> int:
    return len(module.kernel_size) + 2


def _input_patches(module: _Conv, inputs: Tensor) -> Tensor:
    """Pad and cut: ``[b, s, cin * prod(kernel)]``, channels (and so groups) side by side."""
    seen_ncx = as_seen(inputs, _rank(module))
    amounts = _padding(module)
    if any(amounts):
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        seen_ncx = F.pad(seen_ncx, amounts, mode=mode)
    a_nsk = patches(seen_ncx, module.kernel_size, module.stride, module.dilation)
    return example_positions(a_nsk, inputs, _rank(module))


def _padding(module: _Conv) -> list[int]:
    """Padding before and after every spatial axis, last axis first, as ``F.pad`` wants it."""
    amounts: list[int] = []
    for axis in reversed(range(len(module.kernel_size))):
        if module.padding == "valid":
            amounts += [0, 0]
        elif module.padding == "same":
            total = module.dilation[axis] * (module.kernel_size[axis] - 1)
            amounts += [total // 2, total - total // 2]
        else:
            amounts += [module.padding[axis]] * 2
    return amounts


LAYERS.register(nn.Conv1d, nn.Conv2d, nn.Conv3d)(ConvRule())
