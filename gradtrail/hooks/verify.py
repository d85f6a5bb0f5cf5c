"""Checking a layer rule against autograd, on one call of one module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gradtrail.factors import to_dense
from gradtrail.hooks.intercept import WeightWatcher
from gradtrail.hooks.layers import AbstractLayerRule, LayerCall, Roles

__all__ = ["verify_call"]

# many norms compute in float32 whatever their dtype, and autograd sums their gradient in it too
_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3}
_LOW_PRECISION = 5e-2


def verify_call(
    module: nn.Module, rule: AbstractLayerRule, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> str | None:
    """Compare a rule's gradient, summed over examples, with autograd's on one call.

    The module runs once more on detached arguments with a private random direction as the output
    gradient; no global random state moves and no buffer keeps a change.

    Args:
        module: The module.
        rule: The rule that is to describe it.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.

    Returns:
        What differs, or None where they agree.
    """
    uses: list[tuple[Tensor, Tensor]] = []

    def note(inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        if not rule.elementwise:
            uses.append((inputs[0], output))
        return output

    # the dict holds, during a forward, what FSDP puts together for it
    names = [name for name, value in module._parameters.items() if value is not None]  # noqa: SLF001
    parameters = [module._parameters[name] for name in names]  # noqa: SLF001
    flags = [parameter.requires_grad for parameter in parameters]
    devices = sorted({p.device.index or 0 for p in parameters if p.device.type == "cuda"})
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        with torch.random.fork_rng(devices), torch.enable_grad():
            for parameter in parameters:
                parameter.requires_grad_(parameter.is_floating_point())
            arguments, named = _detached(args), {k: _detached(v) for k, v in kwargs.items()}
            with WeightWatcher(module, note, expand_to=None):
                output = module.forward(*arguments, **named)
            if rule.elementwise:
                uses.append((rule.keep(module, arguments, named).inputs, output))
            return _compare(module, rule, names, uses, output)
    finally:
        for parameter, flag in zip(parameters, flags, strict=True):
            parameter.requires_grad_(flag)
        for buffer, value in buffers:
            buffer.copy_(value)


def _compare(
    module: nn.Module,
    rule: AbstractLayerRule,
    names: list[str],
    uses: list[tuple[Tensor, Tensor]],
    output: Any,  # noqa: ANN401
) -> str | None:
    if not isinstance(output, Tensor):
        return f"it returns a {type(output).__name__}"
    if not uses:
        return "no known operation reads its weight"
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(output.shape, generator=generator).to(output)
    parameters = [module._parameters[name] for name in names]  # noqa: SLF001
    wanted = [*(use[1] for use in uses), *parameters]
    gradients = torch.autograd.grad(output, wanted, direction, allow_unused=True)
    roles = Roles("weight" in names, "bias" in names)
    total: dict[str, Tensor] = {}
    for (inputs, _), gradient in zip(uses, gradients, strict=False):
        if gradient is None:
            continue
        call = LayerCall(inputs.detach())
        with torch.no_grad():
            dense = to_dense(rule.layer_gradient(module, call, gradient, roles))
            for name, value in rule.to_parameters(module, dense).items():
                total[name] = total.get(name, 0) + value.sum(0)
    for name, expected in zip(names, gradients[len(uses) :], strict=True):
        if expected is None:
            continue
        actual = total.get(name, torch.zeros_like(expected)).to(expected.dtype)
        scale = expected.abs().max()
        tolerance = _TOLERANCE.get(expected.dtype, _LOW_PRECISION)
        if (actual - expected).abs().max() > tolerance * scale:
            return f"its {name} gradient does not equal autograd's"
    return None


def _detached(value: Any) -> Any:  # noqa: ANN401
    """Cut tensors off their graph, through tuples and lists."""
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, (tuple, list)):
        return type(value)(_detached(entry) for entry in value)
    return value
