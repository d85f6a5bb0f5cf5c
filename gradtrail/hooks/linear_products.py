"""Linear layers whose products a live pass sends to oneDNN, where that is faster.

The forward and the output gradients of a live pass are matrix products with weights that are
frozen; no weight gradient is asked for. Where this package's own products go to oneDNN, see
``gradtrail.factors.products``, these do as well; the result differs by rounding alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gradtrail.factors import has_no_gaps, linear, suits_onednn

__all__ = ["linear_forward"]


def linear_forward(module: nn.Module) -> Callable[..., Tensor] | None:
    """Give a linear layer's forward with its products exchanged.

    Args:
        module: Any module.

    Returns:
        The forward, or None where the module is no plain linear layer.
    """
    cls = type(module)
    is_conv1d = cls.__name__ == "Conv1D" and cls.__module__ == "transformers.pytorch_utils"
    if cls is not nn.Linear and not is_conv1d:
        return None
    own = cls.forward.__get__(module)

    def forward(*args: Any, **kwargs: Any) -> Tensor:  # noqa: ANN401
        weight, bias = module.weight, module.bias  # FSDP puts others in their place for a pass
        if len(args) == 1 and not kwargs and _suits(args[0], weight, bias):
            return _Linear.apply(args[0], weight.t() if is_conv1d else weight, bias)
        return own(*args, **kwargs)

    return forward


def _suits(x: object, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether a call is a product of plain matrices of which only the input may want a gradient."""
    if type(x) is not Tensor or not x.dim() or torch.is_autocast_enabled("cpu"):
        return False
    fixed = [weight] if bias is None else [weight, bias]
    if any(tensor.requires_grad for tensor in fixed):
        return False
    count = x.numel() * (weight.numel() // max(1, x.shape[-1]))
    return suits_onednn(count, x.detach(), *fixed) and has_no_gaps(weight)


class _Linear(torch.autograd.Function):
    """``y = x W^T + b`` with a fixed weight and bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_oi: Tensor, bias_o: Tensor | None) -> Tensor:  # noqa: ANN401
        """Multiply."""
        ctx.weight_oi = weight_oi
        y_no = linear(x.reshape(-1, x.shape[-1]), weight_oi, bias_o)
        return y_no.view(*x.shape[:-1], weight_oi.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        """``dx = g W``."""
        for_x = linear(gradient.reshape(-1, gradient.shape[-1]), ctx.weight_oi.t())
        return for_x.view(*gradient.shape[:-1], ctx.weight_oi.shape[1]), None, None
