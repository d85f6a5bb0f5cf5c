"""Lion: the sign of a mix of gradient and momentum.

Chen et al., 2023, algorithm 2, https://arxiv.org/abs/2302.06675. torch has no such optimizer: a
class of that name is taken for it where its hyperparameters are ``lr``, ``betas`` and
``weight_decay`` (decoupled) and its state is ``exp_avg``.
"""

from __future__ import annotations

from torch import Tensor

from gradtrail.hooks.directions._base import DIRECTIONS, Direction, Options, ParameterState

__all__ = ["lion"]

# what torch and schedulers put into every group, and how options of known variants are off
_HARMLESS = frozenset(
    {"betas", "capturable", "differentiable", "foreach", "fused", "initial_lr"}
    | {"lr", "maximize", "weight_decay"}
)
_OFF = {"cautious_factor": 1}


def lion(gradient: Tensor, state: ParameterState) -> Tensor:
    r"""Give :math:`\mathrm{sign}(\beta_1 m + (1 - \beta_1) g)`.

    Args:
        gradient: Shape ``[b, n]``.
        state: Moment ``exp_avg`` of shape ``[n]``, and the options.

    Returns:
        Shape ``[b, n]``.
    """
    beta1 = state.options["betas"][0]
    return (beta1 * state.moment("exp_avg", gradient) + (1 - beta1) * gradient).sign_()


def _check(options: Options) -> None:
    """Refuse variants.

    Args:
        options: A group's hyperparameters.

    Raises:
        ValueError: If there are others than the paper's, and they are on.
    """
    others = [
        name
        for name, value in options.items()
        if name not in _HARMLESS and value not in (None, _OFF.get(name, False))
    ]
    if others:
        raise ValueError(
            "Lion must have no hyperparameters besides lr, betas, weight_decay and maximize, got "
            f"{others[0]}={options[others[0]]!r}. Turn it off."
        )


DIRECTIONS.register(Direction("Lion", ("exp_avg",), ("betas",), lion, decouples=True, check=_check))
