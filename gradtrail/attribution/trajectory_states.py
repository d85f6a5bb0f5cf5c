"""What an optimizer was and did, step by step, as one or several processes recorded it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from gradtrail.store import StepStore

__all__ = ["iterate_states"]


def iterate_states(
    states: StepStore,
    steps: Sequence[int],
    *,
    reverse: bool = False,
    names: Sequence[str] | None = None,
) -> Iterator[tuple[int, dict[str, Tensor], Mapping[str, Any]]]:
    """Read what is recorded of an optimizer's steps.

    Processes that train one model together step alike, each with a record of its own examples,
    whose gradients are averaged over them.

    Args:
        states: What ``OptimizerStateCallback`` recorded.
        steps: Which steps.
        reverse: Whether the last comes first.
        names: Which tensors; None for all.

    Yields:
        Step, tensors and values; with ``"processes"`` where several processes recorded it: ids,
        sizes and scales are those of the first, then of the next.
    """
    for number, tensors, _ in states.iterate(steps, reverse=reverse, names=names):
        yield number, tensors, _joined(number, states.parts(number))


def _joined(number: int, parts: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Join what each process recorded of a step.

    Args:
        number: The step.
        parts: Its records, by rank.

    Returns:
        One record.

    Raises:
        ValueError: If they are of different optimizers.
    """
    first, *others = parts
    if not others:
        return first
    if any(other["before"] != first["before"] for other in others):
        raise ValueError(
            f"optimizer_states must be of one optimizer, got {len(parts)} processes that differ "
            f"in step {number}. Record each training in a folder of its own."
        )
    lists = {
        name: [value for part in parts for value in part[name]]
        for name in ("ids", "sizes", "scales")
    }
    return {**first, **lists, "processes": len(parts)}
