"""SGD, with momentum as torch has it (the buffer starts as the first gradient).

Sutskever et al., 2013, https://proceedings.mlr.press/v28/sutskever13.html.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradtrail.hooks.directions._base import DIRECTIONS, Direction, ParameterState

__all__ = ["sgd"]


def sgd(gradient: Tensor, state: ParameterState) -> Tensor:
    """Follow the gradient, or the buffer ``u' = momentum u + (1 - dampening) g``.

    With Nesterov's form, ``g + momentum u'``. A parameter without a buffer gets ``u' = g``.

    Args:
        gradient: Shape ``[b, n]``.
        state: Buffer ``momentum_buffer`` of shape ``[n]``, and the options.

    Returns:
        Shape ``[b, n]``.
    """
    momentum = state.options["momentum"]
    if not momentum:
        return gradient
    moved = gradient
    if state.moments.get("momentum_buffer") is not None:
        buffer = state.moment("momentum_buffer", gradient)
        moved = (1 - state.options["dampening"]) * gradient + momentum * buffer
    return gradient + momentum * moved if state.options["nesterov"] else moved


DIRECTIONS.register(
    Direction("SGD", ("momentum_buffer",), ("momentum", "dampening", "nesterov"), sgd),
    torch.optim.SGD,
)
