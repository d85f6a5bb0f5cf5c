"""What every entry point does before and after the work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from gradtrail.attribution.cached_options import CacheOptions
from gradtrail.attribution.digest import model_digest
from gradtrail.attribution.method import AbstractAttributor, Task
from gradtrail.attribution.query_source import SourceRows
from gradtrail.attribution.session import Session
from gradtrail.attribution.shares import Gather
from gradtrail.distributed import world_size
from gradtrail.factors import Projection
from gradtrail.hooks import Selection
from gradtrail.hooks.wrapped import communicates
from gradtrail.options import check_choice

__all__ = [
    "as_projection",
    "call_of",
    "call_of_task",
    "check_ranks",
    "ids_of",
    "make_session",
    "of_model",
    "padding_id",
    "points_of",
    "recorded_options",
    "recorded_projection",
]

# checkpoints and their weights
Points: TypeAlias = tuple[Sequence[Any] | None, Sequence[float] | None]


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


def check_ranks(
    session: Session,
    attributor: AbstractAttributor,
    task: Task | None = None,
    gather: Gather = "all",
) -> None:
    """Refuse what does not work in many processes.

    Args:
        session: The session.
        attributor: The method.
        task: What is to be scored, or None.
        gather: Who receives the scores.

    Raises:
        ValueError: If something does not.
    """
    check_choice("gather", gather, ("all", "rank0"))
    if world_size() == 1:
        return
    if not attributor.shares_rows:
        raise ValueError(
            f"method must be one that shares training examples between processes, got "
            f"{attributor.name!r} with {world_size()} processes. Set shares_rows=True in its class "
            "if the score of one example needs no other, or call it in one process."
        )
    if session.model is None or not communicates(session.model):
        return
    if task is not None and isinstance(task.query, SourceRows):
        raise ValueError(
            "a query that brings its own loss must go with a model that every process holds whole, "
            "got one that FSDP has cut into parts. Pass the plain model, or one in DDP."
        )


def call_of(session: Session, attributor: AbstractAttributor) -> dict[str, Any]:
    """Give what of any call must be the same on every rank, by the name of the argument."""
    if world_size() == 1:
        return {}
    return {
        **of_model(session),
        "method": attributor.name,
        "method_options": attributor.describe_options(),
        "layers": [unit.name for unit in session.selection.units],
        "projection": recorded_projection(session.projection),
        "seed": session.seed,
    }


def call_of_task(
    session: Session,
    attributor: AbstractAttributor,
    task: Task,
    kept: CacheOptions | None,
    points: Points,
) -> dict[str, Any]:
    """Give the same of a call that scores queries."""
    return {
        **call_of(session, attributor),
        **points_of(*points),
        "train": len(task.train),
        "query": len(task.query),
        "batch_size": [task.batch_size, task.query_batch_size],
        "granularity": task.per_token,
        "gradient_cache_residency": None if kept is None else kept.residency,
        "capture": None if kept is None else kept.capture,
    }


def points_of(checkpoints: Sequence[Any] | None, weights: Sequence[float] | None) -> dict[str, Any]:
    """Write down how many checkpoints there are, and their weights."""
    return {
        "checkpoints": None if checkpoints is None else len(checkpoints),
        "checkpoint_weights": None if weights is None else [float(value) for value in weights],
    }


def recorded_projection(projection: Projection | None) -> dict[str, Any] | None:
    """Write a projection down in plain values."""
    if projection is None:
        return None
    return {"kind": projection.kind, "dim": projection.dim, "seed": projection.seed}


def of_model(session: Session) -> dict[str, str]:
    """Digest the weights that every rank must have, where it has all of them."""
    is_cut = world_size() == 1 or communicates(session.model)
    return {} if is_cut else {"model": model_digest(session.model)}


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
    return {
        **attributor.describe_options(),
        "loss": task.loss.description,
        "query_loss": task.query_loss.description,
        "granularity": "token" if task.per_token else "example",
        "projection": recorded_projection(session.projection),
        **points_of(checkpoints, weights),
        "dtype": str(next(session.model.parameters()).dtype).removeprefix("torch."),
        **session.notes,
        **session.digests(),
    }
