"""Saying where scores are not numbers: a weight that is NaN, a gradient that overflowed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from gradtrail.attribution.data import Rows, move_batch
from gradtrail.attribution.losses import Loss
from gradtrail.attribution.query_source import SourceRows
from gradtrail.attribution.session import Session
from gradtrail.attribution.stored import StoredRows
from gradtrail.errors import GradTrailWarning
from gradtrail.factors import LayerGradient, tensors_of
from gradtrail.hooks import tokens_of
from gradtrail.hooks.wrapped import communicates

__all__ = ["warn_not_finite"]

_SHOWN = 5
_Run: TypeAlias = Callable[[Callable[[str, LayerGradient], None]], Tensor]


def warn_not_finite(
    values: Tensor,
    session: Session,
    train: tuple[Rows, Loss],
    query: tuple[Rows, Loss] | None = None,
    *,
    alone: bool = False,
) -> None:
    """Name the rows whose scores are not finite, and the layer where one of them went wrong.

    The scores themselves are looked at, on the CPU; only where some are not finite does one
    example run again.

    Args:
        values: Scores ``[n, q]`` or ``[n, s, q]``, or ``[n]`` of each example with itself.
        session: The open session.
        train: The training examples and their loss.
        query: The queries and their loss, or None.
        alone: Whether other ranks do not look: then nothing is run that needs them.
    """
    good_nq = torch.isfinite(values)
    if bool(good_nq.all()) or not values.numel():
        return
    good_nq = good_nq.all(1) if values.dim() == 3 else good_nq.reshape(len(values), -1)
    bad_queries = [] if query is None else _numbers(~good_nq.any(0))
    kept = [place for place in range(good_nq.shape[1]) if place not in set(bad_queries)]
    bad_rows = _numbers(~good_nq[:, kept].all(1)) if kept else []
    named = [
        f"{what} {', '.join(map(str, numbers[:_SHOWN]))}{', ...' if len(numbers) > _SHOWN else ''}"
        for what, numbers in (("training examples", bad_rows), ("queries", bad_queries))
        if numbers
    ]
    rows, loss, number = (*train, bad_rows[0]) if bad_rows else (*query, bad_queries[0])
    if alone and session.model is not None and communicates(session.model):
        cause = "which layer it begins in is looked for with gather='all'"
    else:
        cause = _cause(session, rows, loss, number)
    warnings.warn(
        f"The scores of {' and '.join(named)} are not finite: {cause}. They stay as computed, "
        "NaN or infinite.",
        GradTrailWarning,
        stacklevel=4,
    )


def _numbers(flags: Tensor) -> list[int]:
    return flags.nonzero()[:, 0].tolist()


def _cause(session: Session, rows: Rows, loss: Loss, number: int) -> str:
    """Run one example again, or read it, and look at every layer."""
    if isinstance(rows, StoredRows):
        return _stored_cause(rows, number)
    return _first_cause(_runs(session, rows, loss, number), number) or (
        "their gradients are, but the products of these are not"
    )


def _stored_cause(rows: StoredRows, number: int) -> str:
    """Look at every stored layer of one example."""
    layers = rows.store.get([rows.numbers[number]]).layers
    for name in layers if rows.layers is None else rows.layers:
        gradient = layers.get(name)
        tensors = [] if gradient is None else tensors_of(gradient)
        if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors):
            return f"the stored gradient of {number} in {name} is not"
    return "their gradients are, but the products of these are not"


def _runs(session: Session, rows: Rows, loss: Loss, number: int) -> Iterator[_Run]:
    """What runs one example again, in several parts where it is a sum of them."""
    if isinstance(rows, SourceRows):
        for part in rows.source.batches(1):
            if rows.source.is_summed or part.start == number:
                yield partial(session.run_part, rows, part)
        return
    batch = move_batch(rows.batch([number]), session.device)
    yield lambda sink: session.live.run(
        lambda: loss(session.model, batch), batch=1, tokens=tokens_of(batch), sink=sink
    )[0]


def _first_cause(runs: Iterator[_Run], number: int) -> str | None:
    return next((cause for cause in (_look_at(run, number) for run in runs) if cause), None)


def _look_at(run: _Run, number: int) -> str | None:
    """Look at every layer of one run; None where all is finite."""
    layers: list[tuple[str, list[bool]]] = []

    def look(name: str, gradient: LayerGradient) -> None:
        finite = [bool(torch.isfinite(tensor).all()) for tensor in tensors_of(gradient)]
        layers.append((name, finite))

    losses = run(look)
    if not bool(torch.isfinite(losses).all()):
        inputs = [name for name, finite in reversed(layers) if not finite[0]]
        where = f"{inputs[0]} is the first layer to read" if inputs else "no layer reads"
        value = float(losses[~torch.isfinite(losses)][0])
        return f"the loss of {number} is {value}, and {where} an input that is not"
    wrong = [name for name, finite in layers if not all(finite)]
    if wrong:
        return f"from the loss of {number} down the gradient of {wrong[0]} is the first that is not"
    return None
