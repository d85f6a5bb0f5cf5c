"""Scores of several checkpoints: a weighted sum, or an average on one scale."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gradtrail.attribution.checkpoints import Checkpoint, loaded, weights_of
from gradtrail.attribution.method import AbstractAttributor
from gradtrail.attribution.session import Session

__all__ = ["score_checkpoints"]


def score_checkpoints(
    session: Session,
    attributor: AbstractAttributor,
    checkpoints: Sequence[Checkpoint] | None,
    weights: Sequence[float] | None,
    score: Callable[[], tuple[Tensor, Tensor | None]],
) -> tuple[Tensor, Tensor | None]:
    """Score with each checkpoint in the model and join the results.

    An ensemble brings each checkpoint's scores to unit standard deviation, each set of columns on
    its own, before it averages them: curvatures of two models are not on one scale. A method that
    is averaged as it is keeps each checkpoint's scale.

    Args:
        session: The session.
        attributor: The method.
        checkpoints: The checkpoints; None: the model as it is.
        weights: One factor a checkpoint, or None for 1.
        score: Scores with the weights that are in the model, queries on the last axis.

    Returns:
        Scores and lengths, as ``score`` gives them.

    Raises:
        ValueError: If the weights of an average have no mean.
    """
    attributor.check_checkpoints(None if checkpoints is None else len(checkpoints))
    if checkpoints is None:
        return score()
    total = lengths = None
    factors = weights_of(checkpoints, weights)
    is_mean = attributor.ensemble or attributor.averaged
    if is_mean and sum(factors) <= 0:
        raise ValueError(
            f"checkpoint_weights must add up to more than 0 for an average, got {factors}. Leave "
            "them out to weigh all alike."
        )
    for number, (point, factor) in enumerate(zip(checkpoints, factors, strict=True)):
        session.checkpoint = number
        with loaded(session.model, point):
            part, lengths = score()
        if attributor.ensemble:
            part = _on_one_scale(part, len(attributor.sweep or (None,)))
        if is_mean:
            factor /= sum(factors)
        total = part * factor if total is None else total.add_(part, alpha=factor)
    return total, lengths


def _on_one_scale(values: Tensor, sets: int) -> Tensor:
    """Divide every set of columns by the standard deviation of its examples' scores."""
    if values.dim() == 1:
        values = values.unsqueeze(-1)
        return _on_one_scale(values, 1).squeeze(-1)
    parts = values.unflatten(-1, (sets, -1)).transpose(-1, -2)
    examples = parts.sum(1) if values.dim() == 3 else parts
    if not examples.numel():
        return values
    deviation = examples.double().flatten(0, -2).std(0, correction=0)
    deviation = torch.where(deviation > 0, deviation, torch.ones_like(deviation))
    return (parts / deviation).transpose(-1, -2).flatten(-2)
