"""Telling rows that stand for examples from rows that a router picked, by the autograd graph.

An expert of a mixture sees the positions that were chosen for it. Where there happen to be as
many of them as examples, shapes alone would take them for the examples.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

__all__ = ["are_picked"]

_PICKING = ("IndexBackward", "IndexSelectBackward", "GatherBackward", "MaskedSelectBackward")
_MOST_NODES = 64


def are_picked(rows: Tensor, batch: int) -> bool:
    """Tell whether single rows were picked by an index out of more, or fewer, than there are.

    Args:
        rows: A layer's input. Shape ``[b, ...]``.
        batch: Number of examples ``b``.

    Returns:
        True where they were; False where they were not, or the graph does not say.
    """
    if any(side != 1 for side in rows.shape[1:-1]):
        return False  # whole sequences
    waiting, seen = [rows.grad_fn], 0
    while waiting and seen < _MOST_NODES:
        node = waiting.pop()
        if node is None:
            continue
        seen += 1
        for source, place in node.next_functions:
            if source is None:
                continue
            shape = _shape(source, place)
            if node.name().startswith(_PICKING) and shape[:1] != (batch,):
                return True
            if len(shape) > 1 and shape[0] == batch and all(side == 1 for side in shape[1:-1]):
                waiting.append(source)
    return False


def _shape(node: Any, place: int) -> tuple[int, ...]:  # noqa: ANN401  # torch gives nodes no class
    """Shape of what a node of the graph gave out in the forward."""
    metadata = node._input_metadata  # noqa: SLF001  # no public way to know
    return tuple(metadata[place].shape) if place < len(metadata) else ()
