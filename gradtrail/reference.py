"""The oracle: per-example gradients by plain autograd, one example at a time.

Slow and simple on purpose. Every fast path is tested against it, in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["dot_products", "module_gradients", "per_example_gradients"]


def per_example_gradients(
    model: nn.Module,
    examples: Iterable[Any],
    loss: Callable[[nn.Module, Any], Tensor],
    names: Iterable[str] | None = None,
) -> dict[str, Tensor]:
    """Run every example alone through autograd.

    Args:
        model: The model, used as it is (mode, flags).
        examples: One batch of a single example each.
        loss: Gives the summed loss of one such batch.
        names: Parameters to differentiate for; None means all.

    Returns:
        By parameter name, unreduced. Shape ``[n, *parameter.shape]``; a parameter that an
        example does not use has zeros there.
    """
    parameters = dict(model.named_parameters())
    wanted = list(parameters if names is None else names)
    rows: dict[str, list[Tensor]] = {name: [] for name in wanted}
    flags = {name: parameters[name].requires_grad for name in wanted}
    try:
        for name in wanted:
            parameters[name].requires_grad_(parameters[name].is_floating_point())
        for example in examples:
            value = loss(model, example).sum()
            inputs = [parameters[name] for name in wanted]
            gradients = torch.autograd.grad(value, inputs, allow_unused=True)
            for name, gradient in zip(wanted, gradients, strict=True):
                kept = torch.zeros_like(parameters[name]) if gradient is None else gradient
                rows[name].append(kept.detach().clone())
    finally:
        for name, flag in flags.items():
            parameters[name].requires_grad_(flag)
    return {name: torch.stack(values) for name, values in rows.items()}


def module_gradients(
    module: nn.Module, arguments: tuple[Any, ...], direction: Tensor
) -> dict[str, Tensor]:
    """Differentiate one module, one example at a time, along a given output gradient.

    Args:
        module: The module.
        arguments: Arguments of one call, the batch axis first.
        direction: Gradient at the module's output, the batch axis first.

    Returns:
        By parameter name. Shape ``[b, *parameter.shape]``.
    """
    parameters = dict(module.named_parameters())
    rows: dict[str, list[Tensor]] = {name: [] for name in parameters}
    for row in range(direction.shape[0]):
        alone = [
            value[row : row + 1] if isinstance(value, Tensor) else value for value in arguments
        ]
        output = module(*alone)
        gradients = torch.autograd.grad(
            output, list(parameters.values()), direction[row : row + 1], allow_unused=True
        )
        for name, gradient in zip(parameters, gradients, strict=True):
            rows[name].append(torch.zeros_like(parameters[name]) if gradient is None else gradient)
    return {name: torch.stack(values) for name, values in rows.items()}


def dot_products(
    train: Mapping[str, Tensor], query: Mapping[str, Tensor], *, normalize: bool = False
) -> Tensor:
    """Multiply per-example gradients entry by entry.

    Args:
        train: By parameter name. Shape ``[n, *parameter.shape]``.
        query: By parameter name. Shape ``[q, *parameter.shape]``.
        normalize: Whether to divide by both norms over all parameters together.

    Returns:
        Inner products, or cosines (0 where a gradient is zero). Shape ``[n, q]``.
    """
    left = torch.cat([train[name].flatten(1) for name in train], dim=1)
    right = torch.cat([query[name].flatten(1) for name in train], dim=1)
    products = left @ right.t()
    if not normalize:
        return products
    norms = left.norm(dim=1).unsqueeze(1) * right.norm(dim=1).unsqueeze(0)
    return torch.where(norms > 0, products / norms, torch.zeros_like(products))
