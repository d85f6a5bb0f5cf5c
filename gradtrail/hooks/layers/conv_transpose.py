"""Transposed convolutions, as plain ones of a zero-stuffed input with the flipped kernel.

Dumoulin & Visin, 2016, section 4, https://arxiv.org/abs/1603.07285.

Suffixes: b example, n row of the layer's own input, s output position, c channel, o output
channel, k entry of a patch, x any number of spatial axes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

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

__all__ = ["ConvTransposeRule"]

_ConvTranspose: TypeAlias = nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d


class ConvTransposeRule(AbstractLayerRule):
    """Rule of ``nn.ConvTranspose1d``, ``2d`` and ``3d`` in every configuration.

    The output's size is read from its gradient, so an ``output_size`` in the call is honoured.
    """

    def keep(
        self, module: _ConvTranspose, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> LayerCall:
        """Keep the input; without a batch axis its examples could not be told from channels."""
        return require_batch(module, super().keep(module, args, kwargs), _rank(module))

    def kronecker_sides(self, module: _ConvTranspose) -> tuple[int, int]:
        """Output channels of a group, and the entries of a patch."""
        cin, cout, *kernel = whole_shape(module, "weight")
        return cout, cin // module.groups * math.prod(kernel)

    def layer_gradient(
        self, module: _ConvTranspose, call: LayerCall, output_gradient: Tensor, roles: Roles
    ) -> LinearFactors:
        """Pair the patches of the stuffed input with the output gradients."""
        g_bso = channel_positions(output_gradient, _rank(module))
        if not roles.weight:
            return bias_factors(g_bso)
        size = tuple(output_gradient.shape[-len(module.kernel_size) :])
        options = (module.kernel_size, module.stride, module.padding, module.dilation)
        key = ("conv_transpose", *options, size)
        a_bsk = call.once(key, lambda inputs: _stuffed_patches(module, inputs, size))
        return LinearFactors(a_bsk, g_bso, roles.bias, module.groups)

    def to_parameters(self, module: _ConvTranspose, dense: DenseGradient) -> dict[str, Tensor]:
        """Flip the kernels back and bring the input channels to the front."""
        weight, bias = split_linear(dense)
        if weight.shape[-1]:
            cin, cout, *kernel = whole_shape(module, "weight")
            grouped = (module.groups, cout, cin // module.groups, *kernel)
            weight = weight.reshape(-1, *grouped).transpose(2, 3).flatten(1, 2)
            weight = weight.flip(tuple(range(3, weight.dim())))
        return named(weight, bias)

    def cases(self) -> Iterable[LayerCase]:
        """Every option on one axis or more, and a call that asks for an output size."""
        every = {
            "plain": {},
            "no-bias": {"bias": False},
            "stride": {"stride": 2},
            "padding": {"padding": 1},
            "wide-padding": {"stride": 2, "padding": 3},
            "output-padding": {"stride": 3, "output_padding": 2, "padding": 1},
            "dilation": {"dilation": 2, "padding": 1},
            "groups": {"groups": 2},
            "depthwise": {"in_channels": 3, "out_channels": 6, "groups": 3},
            "pointwise": {"kernel_size": 1, "stride": 2, "output_padding": 1},
            "all": {"groups": 2, "stride": 3, "dilation": 2, "padding": 1, "output_padding": 1},
        }
        classes = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
        for axes, cls in enumerate(classes, 1):
            for label, options in every.items():
                yield _case(f"conv_transpose{axes}d-{label}", cls, axes, options)
        size = [10, 8]
        yield _case("conv_transpose2d-output_size", nn.ConvTranspose2d, 2, {"stride": 2}, (size,))
        uneven = {"kernel_size": (3, 2), "stride": (1, 2), "padding": (2, 1), "dilation": (2, 1)}
        yield _case("conv_transpose2d-uneven", nn.ConvTranspose2d, 2, uneven)


def _case(
    label: str,
    cls: type[_ConvTranspose],
    axes: int,
    options: Mapping[str, Any],
    more: tuple[Any, ...] = (),
) -> LayerCase:
    options = {"in_channels": 4, "out_channels": 6, "kernel_size": 3, **options}
    shape = (3, options["in_channels"], *(4, 3, 5)[:axes])
    return LayerCase(
        label,
        lambda: cls(**options, dtype=torch.float64),
        lambda: (torch.randn(shape, dtype=torch.float64), *more),
    )


def _rank(module: _ConvTranspose) -> int:
    return len(module.kernel_size) + 2


def _stuffed_patches(module: _ConvTranspose, inputs: Tensor, size: tuple[int, ...]) -> Tensor:
    """Put zeros between the entries, pad to the output's size, cut: ``[b, s, k]``."""
    seen_ncx = as_seen(inputs, _rank(module))
    space = seen_ncx.shape[2:]
    wide = [(length - 1) * step + 1 for length, step in zip(space, module.stride, strict=True)]
    stuffed_ncx = seen_ncx.new_zeros(*seen_ncx.shape[:2], *wide)
    stuffed_ncx[(..., *(slice(None, None, step) for step in module.stride))] = seen_ncx
    amounts: list[int] = []
    for axis in reversed(range(len(size))):
        span = module.dilation[axis] * (module.kernel_size[axis] - 1)
        before = span - module.padding[axis]
        amounts += [before, size[axis] + span - wide[axis] - before]
    padded_ncx = F.pad(stuffed_ncx, amounts)
    a_nsk = patches(padded_ncx, module.kernel_size, (1,) * len(size), module.dilation)
    return example_positions(a_nsk, inputs, _rank(module))


LAYERS.register(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)(ConvTransposeRule())
