"""Modules whose elementwise work a live pass does in one operation instead of eight.

Some models spell an activation or a norm out as a chain of elementwise operations, each of which
reads and writes memory in the forward and again in the backward. While a live pass is open
they run the same function in fewer sweeps; the result differs by rounding alone.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradtrail.hooks.linear_products import linear_forward
from gradtrail.hooks.rotary import rotary_forward
from gradtrail.hooks.transforms import is_transformed

__all__ = ["fuse_elementwise"]

_TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}
# by module and dtype: whether the fused function was seen to be the module's own
_SEEN: weakref.WeakKeyDictionary[nn.Module, dict[torch.dtype, bool]] = weakref.WeakKeyDictionary()


def fuse_elementwise(model: nn.Module, stack: ExitStack) -> None:
    """Replace the forward of known elementwise modules until a stack unwinds.

    Args:
        model: The model; modules that bring a ``forward`` of their own are left alone.
        stack: Takes the way back.
    """
    for module in model.modules():
        if "forward" in vars(module):
            continue
        fused = linear_forward(module)
        if fused is None and not module._forward_hooks and not module._forward_pre_hooks:  # noqa: SLF001
            fused = _fused_forward(module)
        if fused is not None:
            stack.callback(vars(module).pop, "forward", None)
            module.forward = fused


def _fused_forward(module: nn.Module) -> Callable[..., Any] | None:
    cls = type(module)
    if cls.__name__ == "NewGELUActivation" and cls.__module__ == "transformers.activations":
        return _tanh_gelu
    if cls.__name__.endswith("RMSNorm") and cls.__module__.startswith("transformers.models."):
        return _rms_forward(module)
    return rotary_forward(module)


def _tanh_gelu(x: Tensor) -> Tensor:
    """Same as ``0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))``."""
    return F.gelu(x, approximate="tanh")


def _rms_forward(module: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """A Llama-style norm's forward, taken over once it has been seen to compute ``w x / rms``."""
    weight = module._parameters.get("weight")  # noqa: SLF001
    if weight is None or not isinstance(_eps(module), float) or weight.dtype not in _TOLERANCE:
        return None
    return types.MethodType(_fused_rms, module)


def _eps(module: nn.Module) -> object:
    return vars(module).get("variance_epsilon", vars(module).get("eps"))


def _fused_rms(self: nn.Module, x: Tensor) -> Tensor:
    weight, own = self.weight, type(self).forward  # FSDP puts another weight there for a pass
    if x.dtype != weight.dtype or is_transformed():
        return own(self, x)
    known = _SEEN.setdefault(self, {})
    if x.dtype not in known:
        with torch.no_grad():
            expected, got = own(self, x), _RMSNorm.apply(x, weight, _eps(self))
        limit = _TOLERANCE[x.dtype] * expected.abs().amax()
        known[x.dtype] = bool((got - expected).abs().amax() <= limit)
    return _RMSNorm.apply(x, weight, _eps(self)) if known[x.dtype] else own(self, x)


class _RMSNorm(torch.autograd.Function):
    """``y = w x r`` with ``r = (mean(x^2) + eps)^(-1/2)`` over the last axis."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:  # noqa: ANN401
        """Normalise and scale."""
        norms = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        rate = norms.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, rate)
        return (x * rate).mul_(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # noqa: ANN401
        """``dx = r (w g) - x r^3 mean(w g x)``, ``dw = sum g x r``."""
        x, weight, rate = ctx.saved_tensors
        for_x = for_weight = None
        if ctx.needs_input_grad[0]:
            scaled = gradient * weight
            mean = torch.linalg.vecdot(scaled, x).unsqueeze(-1).div_(x.shape[-1])
            for_x = scaled.mul_(rate).addcmul_(x, mean.mul_(rate.pow(3)), value=-1)
        if ctx.needs_input_grad[1]:
            for_weight = (gradient * x * rate).flatten(0, -2).sum(0)
        return for_x, for_weight, None
