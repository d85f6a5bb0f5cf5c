"""RAdam: Adam whose adaptive rate is rectified, and left out while its variance is unbounded.

Liu et al., 2020, algorithm 2, https://arxiv.org/abs/1908.03265.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gradtrail.hooks.directions._base import DIRECTIONS, Direction, ParameterState

__all__ = ["radam"]

_TRACTABLE = 5.0  # length of the average from which torch rectifies; the paper has 4


def radam(gradient: Tensor, state: ParameterState) -> Tensor:
    r"""Give :math:`r_t \hat m' / \sqrt{\hat v'}`, or :math:`\hat m'` in the first few steps.

    Args:
        gradient: Shape ``[b, n]``.
        state: Moments ``exp_avg`` and ``exp_avg_sq`` of shape ``[n]``, and the options.

    Returns:
        Shape ``[b, n]``.
    """
    beta1, beta2 = state.options["betas"]
    step = state.step + 1
    first = torch.lerp(state.moment("exp_avg", gradient), gradient, 1 - beta1)
    first = first.div_(1 - beta1**step)
    correction = 1 - beta2**step
    limit = 2 / (1 - beta2) - 1
    length = limit - 2 * step * beta2**step / correction
    if length <= _TRACTABLE:
        return first
    rectifier = (length - 4) * (length - 2) * limit / ((limit - 4) * (limit - 2) * length)
    second = gradient.square().mul_(1 - beta2).add_(beta2 * state.moment("exp_avg_sq", gradient))
    scale = second.sqrt_().add_(state.options["eps"])
    return first.mul_(math.sqrt(correction * rectifier)).div_(scale)


DIRECTIONS.register(
    Direction("RAdam", ("exp_avg", "exp_avg_sq"), ("betas", "eps"), radam, decouples=None),
    torch.optim.RAdam,
)
