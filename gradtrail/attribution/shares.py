"""Many processes: each scores its share of the training examples, then the rows are joined.

Every rank sees all queries. What a curvature is made of is added up where it is accumulated; here
is what an entry point does around that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradtrail.attribution.data import Rows
from gradtrail.distributed import agree, exchange, gather_rows, guarded, world_size
from gradtrail.hooks.wrapped import communicates

__all__ = [
    "Gather",
    "in_step",
    "inner_model",
    "joined_scores",
    "most_of",
    "needs_every_rank",
    "on_every",
]

Gather: TypeAlias = Literal["all", "rank0"]


def inner_model(model: nn.Module) -> nn.Module:
    """Take DDP off: nothing is reduced in a pass over fixed weights."""
    while isinstance(model, DistributedDataParallel):
        model = model.module
    return model


def needs_every_rank(model: nn.Module) -> bool:
    """Whether a forward or a backward that reaches parameters waits for every process."""
    wrapped = any(isinstance(module, DistributedDataParallel) for module in model.modules())
    return wrapped or communicates(model)


@contextmanager
def in_step(
    section: str, model: nn.Module | None, call: Mapping[str, Any], *, trains: bool = False
) -> Iterator[None]:
    """Let ranks work on one call together: an error on one ends it on all.

    Args:
        section: The entry point, for messages.
        model: The model, or None where stores are read.
        call: What must be the same on every rank, by the name of the argument; fit for JSON.
        trains: Whether steps of a training are run, by all ranks together. In passes over fixed
            weights a part of the model that is in DDP communicates no more than a whole one.

    Yields:
        Nothing.
    """
    if world_size() == 1:
        yield
        return
    waits = model is not None and (needs_every_rank(model) if trains else communicates(model))
    with guarded(section, model_communicates=waits), ExitStack() as stack:
        if model is not None and not trains:
            stack.enter_context(_unreduced(model))
        for name, value in call.items():
            agree(name, value)
        yield


@contextmanager
def _unreduced(model: nn.Module) -> Iterator[None]:
    """Keep DDP inside a model from sending buffers and reducing: ranks run unequally often.

    Args:
        model: The model.

    Yields:
        Nothing.
    """
    flags = ("require_forward_param_sync", "require_backward_grad_sync")
    found = [
        (module, flag, getattr(module, flag))
        for module in model.modules()
        if isinstance(module, DistributedDataParallel)
        for flag in flags
    ]
    try:
        for module, flag, _ in found:
            setattr(module, flag, False)
        yield
    finally:
        for module, flag, value in found:
            setattr(module, flag, value)


def on_every(what: str, *, flag: bool) -> bool:
    """Whether something holds on every rank.

    Args:
        what: What it is, for messages.
        flag: Whether it does here.

    Returns:
        The same on every rank.
    """
    return all(number for (number,) in exchange(what, int(flag)))


def most_of(what: str, number: int) -> int:
    """The largest of a number that ranks find out each for itself."""
    return max(found for (found,) in exchange(what, number))


def joined_scores(
    values: Tensor, lengths: Tensor | None, rows: Rows, *, to: Gather = "all"
) -> tuple[Tensor, Tensor | None]:
    """Join every rank's rows of scores, in the order of the data set.

    Args:
        values: Scores of this rank's rows, ``[n_r]``, ``[n_r, q]`` or ``[n_r, s_r, q]``.
        lengths: Valid positions of its rows, or None.
        rows: The rows.
        to: Whether every rank receives them, or rank 0 alone.

    Returns:
        The same for all rows; where a rank receives none, both without rows. Of rows that are no
        share what was given.
    """
    if rows.whole is None:
        return values, lengths
    values = values.double()
    if values.dim() == 3:
        missing = most_of("positions of scores", values.shape[1]) - values.shape[1]
        values = torch.nn.functional.pad(values, (0, 0, 0, missing))
    joined = gather_rows(values, to=to, what="scores")
    if lengths is not None:
        found = gather_rows(lengths.to(torch.int64), to=to, what="lengths")
        lengths = lengths[:0] if found is None else found
    return values[:0] if joined is None else joined, lengths
