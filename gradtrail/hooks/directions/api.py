"""The move an optimizer would make of one example's gradient alone."""

from __future__ import annotations

from torch import Tensor

from gradtrail.hooks.directions._base import DIRECTIONS, ParameterState

__all__ = ["update_direction"]


def update_direction(
    kind: str, gradient: Tensor, state: ParameterState, *, parameter: Tensor | None = None
) -> Tensor:
    """Give what a step on each gradient alone would move a parameter by, divided by ``-lr``.

    The state is the one before the step and is not changed. The learning rate itself does not
    enter, so a rate of 0 (a warm-up's first step) has a direction too.

    Args:
        kind: Name of the optimizer's class.
        gradient: Gradients of examples, as their losses have them. Shape ``[b, n]``.
        state: The optimizer's state of the parameter; moments of shape ``[n]`` or none.
        parameter: The parameter's entries, ``[n]``: weight decay is then part of the move, coupled
            or decoupled as the optimizer has it. None: weight decay is left out.

    Returns:
        Directions, by which the parameters move backwards. Shape ``[b, n]``.
    """
    direction = DIRECTIONS.named(kind)
    options = state.options
    if options.get("maximize"):
        gradient = -gradient
    rate = 0.0 if parameter is None else options.get("weight_decay") or 0.0
    decouples = direction.decouples
    if decouples is None:
        decouples = bool(options.get("decoupled_weight_decay"))
    if rate and not decouples:
        gradient = gradient + rate * parameter.to(gradient)
    moved = direction.function(gradient, state)
    if rate and decouples:
        moved = moved + rate * parameter.to(moved)
    return moved
