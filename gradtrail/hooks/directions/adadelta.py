"""Adadelta: moves measured by the size of the moves before.

Zeiler, 2012, algorithm 1, https://arxiv.org/abs/1212.5701.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradtrail.hooks.directions._base import DIRECTIONS, Direction, ParameterState

__all__ = ["adadelta"]


def adadelta(gradient: Tensor, state: ParameterState) -> Tensor:
    r"""Give :math:`g \sqrt{d + \epsilon} / \sqrt{v' + \epsilon}`, ``d`` the past moves' squares.

    Args:
        gradient: Shape ``[b, n]``.
        state: Moments ``square_avg`` and ``acc_delta`` of shape ``[n]``, and the options.

    Returns:
        Shape ``[b, n]``.
    """
    rho, eps = state.options["rho"], state.options["eps"]
    second = gradient.square().mul_(1 - rho).add_(rho * state.moment("square_avg", gradient))
    past = (state.moment("acc_delta", gradient) + eps).sqrt_()
    return past / second.add_(eps).sqrt_() * gradient


DIRECTIONS.register(
    Direction("Adadelta", ("square_avg", "acc_delta"), ("rho", "eps"), adadelta),
    torch.optim.Adadelta,
)
