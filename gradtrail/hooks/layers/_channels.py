"""Layers whose channels are the second axis: convolutions and the norms over channels.

Such a layer sees ``[n, c, *space]``; where the capture unfolded the rows of a folded batch its
tensors arrive as ``[b, n / b, c, *space]``, one axis more than the layer saw.

Suffixes: b example, n row of the layer's own input, s position, c channel, o layer output,
k entry of a patch, x any number of spatial axes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gradtrail.errors import CaptureError
from gradtrail.hooks.layers._base import LayerCall, statistics_dtype, to_positions

__all__ = [
    "as_seen",
    "channel_positions",
    "example_positions",
    "patches",
    "rank_seen",
    "require_batch",
    "running_statistics",
    "standardise",
    "with_rank",
]


def require_batch(module: nn.Module, call: LayerCall, rank: int) -> LayerCall:
    """Refuse a call without a batch axis.

    Args:
        module: The layer.
        call: What is kept of the call, as the layer saw it.
        rank: Number of axes of a batched input.

    Returns:
        The call.

    Raises:
        CaptureError: If the input has another number of axes.
    """
    if call.inputs.dim() != rank:
        raise CaptureError(
            f"{type(module).__name__} must see a batch, an input of {rank} axes, got shape "
            f"{tuple(call.inputs.shape)}. Add the batch axis (input.unsqueeze(0)) in the model."
        )
    return call


def with_rank(call: LayerCall) -> LayerCall:
    """Note the number of axes the layer saw, in an empty tensor that costs nothing to keep."""
    inputs = call.inputs
    marker = inputs.new_empty((0,) * inputs.dim())
    return LayerCall(inputs, {**call.extras, "rank": marker})


def rank_seen(call: LayerCall) -> int:
    """Number of axes of the input as the layer saw it."""
    return call.extras.get("rank", call.inputs).dim()


def as_seen(tensor: Tensor, rank: int) -> Tensor:
    """Fold unfolded rows again: ``[n, c, *space]``."""
    return tensor.flatten(0, tensor.dim() - rank)


def channel_positions(tensor: Tensor, rank: int) -> Tensor:
    """Bring the channels to the end and fold all axes before them: a view ``[b, s, c]``."""
    return to_positions(tensor.movedim(tensor.dim() - rank + 1, -1))


def example_positions(a_nsk: Tensor, inputs: Tensor, rank: int) -> Tensor:
    """Give every example the positions of all its rows: ``[n, s, k]`` to ``[b, s, k]``."""
    if inputs.dim() == rank:
        return a_nsk
    return a_nsk.unflatten(0, inputs.shape[:2]).flatten(1, 2)


def running_statistics(module: nn.Module) -> dict[str, Tensor]:
    """Name a normalisation layer's running statistics as extras of a call."""
    return {"mean": module.running_mean, "var": module.running_var}


def standardise(call: LayerCall, eps: float, rank: int) -> Tensor:
    """Standardise channels by the running statistics kept with a call.

    Args:
        call: Input, with the extras ``mean`` and ``var``. Shape ``[b, ..., c, *space]``.
        eps: What is added to the variance.
        rank: Number of axes of the input as the layer saw it.

    Returns:
        In float32 or wider. Shape ``[b, s, c]``.
    """
    dtype = statistics_dtype(call.inputs.dtype)
    mean_c, var_c = call.extras["mean"].to(dtype), call.extras["var"].to(dtype)
    x_bsc = channel_positions(call.inputs, rank).to(dtype)
    return (x_bsc - mean_c) * torch.rsqrt(var_c + eps)


def patches(
    padded_ncx: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> Tensor:
    """Cut the patches out of a padded input that a convolution multiplies by its kernel.

    Args:
        padded_ncx: Input with its padding. Shape ``[n, c, *space]``.
        kernel: Kernel size an axis.
        stride: Stride an axis.
        dilation: Dilation an axis.

    Returns:
        One patch an output position, channel by channel. Shape ``[n, s, c * prod(kernel)]``;
        a view of the input for kernels of size 1.
    """
    axes = len(kernel)
    view = padded_ncx
    for axis in range(axes):
        span = dilation[axis] * (kernel[axis] - 1) + 1
        view = view.unfold(axis + 2, span, stride[axis])[..., :: dilation[axis]]
    space, offsets = range(2, 2 + axes), range(2 + axes, 2 + 2 * axes)
    # copied with the positions innermost, the order in which the input lies in memory
    view = view.permute(0, 1, *offsets, *space)
    return view.flatten(1, 1 + axes).flatten(2).transpose(1, 2)
