"""Adagrad: a rate for each entry that falls with the sum of its squared gradients.

Duchi et al., 2011, https://jmlr.org/papers/v12/duchi11a.html.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradtrail.hooks.directions._base import DIRECTIONS, Direction, ParameterState

__all__ = ["adagrad"]


def adagrad(gradient: Tensor, state: ParameterState) -> Tensor:
    r"""Give :math:`g / (\sqrt{s + g^2} + \epsilon)`, over ``1 + step * lr_decay``.

    Args:
        gradient: Shape ``[b, n]``.
        state: Moment ``sum`` of shape ``[n]``, and the options.

    Returns:
        Shape ``[b, n]``.
    """
    options = state.options
    total = gradient.square().add_(state.moment("sum", gradient))
    moved = gradient / total.sqrt_().add_(options["eps"])
    return moved.div_(1 + state.step * options["lr_decay"])


DIRECTIONS.register(
    Direction("Adagrad", ("sum",), ("lr_decay", "eps"), adagrad), torch.optim.Adagrad
)
