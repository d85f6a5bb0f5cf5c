"""NAdam: Adam that looks ahead as Nesterov's momentum does.

Dozat, 2016, algorithm 2, https://openreview.net/forum?id=OM0jvwB8jIp57ZJjtNEZ.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gradtrail.hooks.directions._base import DIRECTIONS, Direction, ParameterState

__all__ = ["nadam"]

_MOMENTUM_RATE = 0.96  # of the paper's schedule, fixed in torch


def nadam(gradient: Tensor, state: ParameterState) -> Tensor:
    r"""Mix the gradient and the first moment by the momentum schedule, over the second moment.

    .. math::
        \left( \frac{1 - \mu_t}{1 - \prod_{k \le t} \mu_k} g
        + \frac{\mu_{t+1}}{1 - \prod_{k \le t+1} \mu_k} m' \right)
        / \left( \sqrt{\hat v'} + \epsilon \right)

    Args:
        gradient: Shape ``[b, n]``.
        state: Moments ``exp_avg`` and ``exp_avg_sq`` of shape ``[n]``, the product so far
            ``mu_product`` without axes, and the options.

    Returns:
        Shape ``[b, n]``.
    """
    options = state.options
    beta1, beta2 = options["betas"]
    step = state.step + 1
    mu, mu_next = (
        beta1 * (1 - 0.5 * _MOMENTUM_RATE ** (count * options["momentum_decay"]))
        for count in (step, step + 1)
    )
    product = state.moments.get("mu_product")
    # in the dtype in which the optimizer keeps it, which rounds
    product = float(torch.ones(()) * mu if product is None else product * mu)
    first = torch.lerp(state.moment("exp_avg", gradient), gradient, 1 - beta1)
    second = gradient.square().mul_(1 - beta2).add_(beta2 * state.moment("exp_avg_sq", gradient))
    scale = second.sqrt_().div_(math.sqrt(1 - beta2**step)).add_(options["eps"])
    mixed = first.mul_(mu_next / (1 - product * mu_next))
    return mixed.add_(gradient, alpha=(1 - mu) / (1 - product)).div_(scale)


DIRECTIONS.register(
    Direction(
        "NAdam",
        ("exp_avg", "exp_avg_sq", "mu_product"),
        ("betas", "eps", "momentum_decay"),
        nadam,
        decouples=None,
    ),
    torch.optim.NAdam,
)
