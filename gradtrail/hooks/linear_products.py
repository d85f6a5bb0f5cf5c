"""Linear layers whose products a live pass sends to oneDNN, where that is faster.

The forward and the output gradients of a live pass are matrix products with weights that are
frozen; no weight gradient is asked for. Where this package's own products go to oneDNN, see
``gradtrail.factors.products``, these do as well; the result differs by rounding alone. Calls that
are not of this plain kind, and those inside a transform of ``torch.func``, run the module's own
forward.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gradtrail.factors import linear, onednn_is_faster, suits_onednn
from gradtrail.hooks.transforms import is_transformed

__all__ = ["linear_forward"]


def linear_forward(module: nn.Module) -> Callable[..., Tensor] | None:
    """Give a linear layer's forward with its products exchanged.

    Args:
        module: Any module.

    Returns:
        The bound forward, or None where the module is no plain linear layer or where oneDNN is no
        faster.
    """
    cls = type(module)
    is_conv1d = cls.__name__ == "Conv1D" and cls.__module__ == "transformers.pytorch_utils"
    if not onednn_is_faster() or not (is_conv1d or cls is nn.Linear):
        return None
    return types.MethodType(_exchanged(cls, transposed=is_conv1d), module)


@functools.cache
def _exchanged(cls: type[nn.Module], *, transposed: bool) -> Callable[..., Tensor]:
    """A class's forward whose products go to oneDNN where they suit it."""

    @functools.wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:  # noqa: ANN401
        if len(args) == 1 and not kwargs:
            weight, bias = self.weight, self.bias  # FSDP puts others in their place for a pass
            if _suits(args[0], weight, bias, transposed=transposed):
                return _Linear.apply(args[0], weight.t() if transposed else weight, bias)
        return cls.forward(self, *args, **kwargs)

    return forward


def _suits(x: object, weight: Tensor, bias: Tensor | None, *, transposed: bool) -> bool:
    """Whether a call is a product of plain matrices of which only the input may want a gradient."""
    fixed = [weight] if bias is None else [weight, bias]
    plain = type(x) is Tensor and not x.is_nested and x.layout == torch.strided
    if not plain or x.dim() < 2 or any(tensor.requires_grad for tensor in fixed):
        return False
    if torch.is_autocast_enabled("cpu") or is_transformed():
        return False
    rows = x.numel() // max(1, x.shape[-1])
    if not suits_onednn(rows, rows * weight.numel(), x.detach(), *fixed):
        return False
    inputs, outputs = weight.shape if transposed else weight.shape[::-1]
    fits = x.shape[-1] == inputs and (weight.is_contiguous() or weight.t().is_contiguous())
    # oneDNN reads a bias as contiguous, whatever its stride
    return fits and (bias is None or (bias.shape == (outputs,) and bias.stride() == (1,)))


class _Linear(torch.autograd.Function):
    """``y = x W^T + b`` with a fixed weight and bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_oi: Tensor, bias_o: Tensor | None) -> Tensor:  # noqa: ANN401
        """Multiply."""
        ctx.save_for_backward(weight_oi)
        y_no = linear(x.reshape(-1, x.shape[-1]), weight_oi, bias_o)
        # no view, as autograd counts them, so that it may be changed in place
        return torch.ops.aten._unsafe_view(y_no, [*x.shape[:-1], y_no.shape[1]])  # noqa: SLF001

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        """``dx = g W``, which has a gradient itself."""
        (weight_oi,) = ctx.saved_tensors
        return _Linear.apply(gradient, weight_oi.t(), None), None, None
