"""RMSprop, centred and with momentum where asked.

Graves, 2013, equations 38-45, https://arxiv.org/abs/1308.0850.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradtrail.hooks.directions._base import DIRECTIONS, Direction, ParameterState

__all__ = ["rmsprop"]


def rmsprop(gradient: Tensor, state: ParameterState) -> Tensor:
    r"""Give :math:`g / (\sqrt{v'} + \epsilon)`, added to the decayed buffer with momentum.

    Centred: :math:`v'` less the square of the gradients' average.

    Args:
        gradient: Shape ``[b, n]``.
        state: Moments ``square_avg``, ``grad_avg`` and ``momentum_buffer`` of shape ``[n]``, and
            the options.

    Returns:
        Shape ``[b, n]``.
    """
    options = state.options
    alpha = options["alpha"]
    second = gradient.square().mul_(1 - alpha).add_(alpha * state.moment("square_avg", gradient))
    if options["centered"]:
        mean = torch.lerp(state.moment("grad_avg", gradient), gradient, 1 - alpha)
        second = second.addcmul_(mean, mean, value=-1)
    moved = gradient / second.sqrt_().add_(options["eps"])
    if options["momentum"] > 0:
        moved = moved.add_(options["momentum"] * state.moment("momentum_buffer", gradient))
    return moved


DIRECTIONS.register(
    Direction(
        "RMSprop",
        ("square_avg", "grad_avg", "momentum_buffer"),
        ("alpha", "eps", "centered", "momentum"),
        rmsprop,
    ),
    torch.optim.RMSprop,
)
