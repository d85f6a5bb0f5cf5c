"""What every entry point does before and after the work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from gradtrail.attribution.method import AbstractAttributor, Task
from gradtrail.attribution.session import Session
from gradtrail.factors import Projection
from gradtrail.hooks import Selection

__all__ = ["as_projection", "ids_of", "make_session", "padding_id", "recorded_options"]


def make_session(
    model: nn.Module,
    selection: Selection,
    device: torch.device | str | None,
    projection: Projection | str | int | None,
    seed: int,
    *,
    progress: bool,
) -> Session:
    """Open nothing yet, but check where the model is and what is asked of it.

    Args:
        model: The model.
        selection: The layers to capture.
        device: Where batches go; None means where the parameters are.
        projection: A projection, its kind, its side, or None.
        seed: Seed of a projection that brings none of its own.
        progress: Whether bars are shown.

    Returns:
        The session.

    Raises:
        ValueError: If nothing can be captured.
    """
    if not selection.units:
        raise ValueError(
            "model must have a supported layer with a trained parameter, got none:\n"
            f"{selection.coverage}"
        )
    place = next(model.parameters()).device
    wanted = place if device is None else torch.device(device)
    if (wanted.type, wanted.index or 0) != (place.type, place.index or 0):
        raise ValueError(
            f"device must be where the model is ({place}), got {wanted}. Move the model first."
        )
    return Session(model, selection, place, as_projection(projection, seed), progress, seed)


def as_projection(projection: Projection | str | int | None, seed: int) -> Projection | None:
    """Read the ``projection`` argument.

    Args:
        projection: A projection, its kind, the side of a factored one, or None.
        seed: Seed of a projection that was given by kind or side.

    Returns:
        The projection, or None.

    Raises:
        TypeError: If it is anything else.
    """
    if projection is None or isinstance(projection, Projection):
        return projection
    if isinstance(projection, str):
        return Projection(kind=projection, seed=seed)
    if isinstance(projection, int) and not isinstance(projection, bool):
        return Projection(dim=projection, seed=seed)
    raise TypeError(
        f"projection must be a Projection, a kind or a number, got {type(projection).__name__}."
    )


def padding_id(model: nn.Module) -> int:
    """Token to pad ``input_ids`` with: the model's own, or 0 (padding is masked anyway)."""
    config = getattr(model, "config", None)
    found = getattr(config, "pad_token_id", None)
    return found if isinstance(found, int) and found >= 0 else 0


def ids_of(count: int) -> tuple[int, ...]:
    """Ids of a live run: row numbers."""
    return tuple(range(count))


def recorded_options(
    session: Session,
    attributor: AbstractAttributor,
    task: Task,
    checkpoints: Sequence[Any] | None,
    weights: Sequence[float] | None,
) -> dict[str, Any]:
    """Write down what scores were computed with, in plain values.

    Args:
        session: The session, after its passes.
        attributor: The method.
        task: What was scored.
        checkpoints: The checkpoints, or None.
        weights: Their weights, or None.

    Returns:
        Options by name, fit for JSON.
    """
    projection = session.projection
    return {
        **attributor.describe_options(),
        "loss": task.loss.description,
        "query_loss": task.query_loss.description,
        "granularity": "token" if task.per_token else "example",
        "projection": None
        if projection is None
        else {"kind": projection.kind, "dim": projection.dim, "seed": projection.seed},
        "checkpoints": None if checkpoints is None else len(checkpoints),
        "checkpoint_weights": None if weights is None else [float(value) for value in weights],
        "dtype": str(next(session.model.parameters()).dtype).removeprefix("torch."),
        **session.notes,
        **session.digests(),
    }
