"""Adam, AdamW (decoupled weight decay), amsgrad and Adamax.

Kingma & Ba, 2015, algorithms 1 and 2, https://arxiv.org/abs/1412.6980;
Loshchilov & Hutter, 2019, https://arxiv.org/abs/1711.05101;
Reddi et al., 2018, https://arxiv.org/abs/1904.09237.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gradtrail.hooks.directions._base import DIRECTIONS, Direction, ParameterState

__all__ = ["adam", "adamax"]


def adam(gradient: Tensor, state: ParameterState) -> Tensor:
    r"""Give :math:`\hat m' / (\sqrt{\hat v'} + \epsilon)`, both moments as the step leaves them.

    With ``amsgrad`` the second moment is the largest there has been, corrected for its bias after
    the maximum is taken, as torch does.

    Args:
        gradient: Shape ``[b, n]``.
        state: Moments ``exp_avg``, ``exp_avg_sq`` and ``max_exp_avg_sq`` of shape ``[n]``, options.

    Returns:
        Shape ``[b, n]``.
    """
    beta1, beta2 = state.options["betas"]
    step = state.step + 1
    first = torch.lerp(state.moment("exp_avg", gradient), gradient, 1 - beta1)
    second = gradient.square().mul_(1 - beta2).add_(beta2 * state.moment("exp_avg_sq", gradient))
    if state.options.get("amsgrad"):
        second = torch.maximum(second, state.moment("max_exp_avg_sq", gradient))
    scale = second.sqrt_().div_(math.sqrt(1 - beta2**step)).add_(state.options["eps"])
    return first.div_(scale).div_(1 - beta1**step)


def adamax(gradient: Tensor, state: ParameterState) -> Tensor:
    r"""Give :math:`\hat m' / u'` with :math:`u' = \max(\beta_2 u, |g| + \epsilon)`.

    Args:
        gradient: Shape ``[b, n]``.
        state: Moments ``exp_avg`` and ``exp_inf`` of shape ``[n]``, and the options.

    Returns:
        Shape ``[b, n]``.
    """
    beta1, beta2 = state.options["betas"]
    first = torch.lerp(state.moment("exp_avg", gradient), gradient, 1 - beta1)
    largest = gradient.abs().add_(state.options["eps"])
    largest = torch.maximum(largest, beta2 * state.moment("exp_inf", gradient))
    return first.div_(largest).div_(1 - beta1 ** (state.step + 1))


_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
_OPTIONS = ("betas", "eps", "amsgrad")
DIRECTIONS.register(Direction("Adam", _MOMENTS, _OPTIONS, adam, None), torch.optim.Adam)
DIRECTIONS.register(Direction("AdamW", _MOMENTS, _OPTIONS, adam, decouples=True), torch.optim.AdamW)
DIRECTIONS.register(
    Direction("Adamax", ("exp_avg", "exp_inf"), ("betas", "eps"), adamax), torch.optim.Adamax
)
