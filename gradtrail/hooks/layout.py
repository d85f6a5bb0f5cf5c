"""Where the examples are in what a layer sees: on an axis, folded into rows, or not at all.

A layer's first axis is the batch in most models, but not in all: position tables see one row for
the whole batch, time-major models put positions first, routers fold both into rows, experts see
chosen rows. A live pass finds out by running one example alone and then twice in one batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

__all__ = [
    "BATCH_FIRST",
    "Layout",
    "Seen",
    "batch_first",
    "compare_calls",
    "confirm_order",
    "guess_layout",
]

_Kind: TypeAlias = Literal["axis", "rows", "expand", "single", "shared", "unknown"]


@dataclass(frozen=True)
class Layout:
    """How a layer's inputs and outputs hold the batch.

    Attributes:
        kind: ``"axis"``: one axis is the batch; ``"rows"``: batch and positions are folded,
            batch-major; ``"expand"``: an axis of size 1 stands for all, to be expanded;
            ``"single"``: everything belongs to the only example; ``"shared"``: one value serves
            the whole batch; ``"unknown"``: rows that cannot be assigned.
        axis: The batch axis for ``"axis"``.
    """

    kind: _Kind
    axis: int = 0

    @property
    def reason(self) -> str | None:
        """Why examples cannot be told apart, or None where they can."""
        if self.kind == "shared":
            return "one value serves the whole batch, so its examples cannot be told apart"
        if self.kind == "unknown":
            return "it sees rows that cannot be assigned to examples of the batch"
        return None


BATCH_FIRST = Layout("axis")
_ORDER_TOLERANCE = 1e-2


class Seen(NamedTuple):
    """What one call's input looked like.

    Attributes:
        shape: Its shape.
        marks: One number an entry of its first axis, by which the entries are told apart.
        whole: Whether it has several positions beside the first axis, as sequences have.
    """

    shape: tuple[int, ...]
    marks: Tensor
    whole: bool

    @classmethod
    def of(cls, tensor: Tensor) -> Seen:
        """Look at an input."""
        rows = tensor.detach().flatten(1) if tensor.dim() > 1 else tensor.detach().reshape(-1, 1)
        # weights of both signs: a normalised row's plain sum and sum of squares say nothing
        weights = torch.arange(rows.shape[1], device=rows.device, dtype=torch.float32).sin()
        marks = (rows.float() * weights).sum(1).nan_to_num(0, 0, 0)
        positions = tensor.shape[1:-1] if tensor.is_floating_point() else tensor.shape[1:]
        whole = len(positions) > 0 and (positions.numel() > 1 or tensor.is_floating_point())
        return cls(tuple(tensor.shape), marks, whole)


def compare_calls(one: Sequence[Seen], two: Sequence[Seen], tokens: int) -> Layout | None:
    """Find a layer's layout from its calls on one example and on the same example twice.

    Args:
        one: Its calls on one example.
        two: Its calls on two.
        tokens: Number of positions of one example in the model's own input.

    Returns:
        The layout, or None where it was not called.
    """
    if not one and not two:
        return None
    if len(one) != len(two):
        return Layout("unknown")
    pairs = zip(one, two, strict=True)
    layouts = {compare_shapes(left.shape, right.shape, tokens) for left, right in pairs}
    if len(layouts) == 1:
        return layouts.pop()
    bad = [layout for layout in layouts if layout.reason is not None]
    return bad[0] if bad else Layout("unknown")


def confirm_order(
    layout: Layout | None,
    calls: Sequence[Seen],
    reversed_calls: Sequence[Seen],
    batch: int,
    tokens: int,
) -> Layout | None:
    """Check on a batch of different examples that rows come in the examples' order.

    Args:
        layout: What the shapes say, or None where the layer had not been called.
        calls: The layer's calls on the batch.
        reversed_calls: Its calls on the same batch in reverse order.
        batch: Number of examples.
        tokens: Number of positions of each in the model's own input.

    Returns:
        The layout, or an unknown one where a router chooses or reorders the rows.
    """
    if layout == Layout("expand"):
        return layout if all(look.shape[0] == 1 for look in calls) else Layout("shared")
    unchecked = layout is not None and (layout.kind not in ("axis", "rows") or layout.axis)
    if unchecked or (not calls and not reversed_calls):
        return layout
    if len(calls) != len(reversed_calls):
        return Layout("unknown")
    for there, back in zip(calls, reversed_calls, strict=True):
        size = there.shape[0] if there.shape else 0
        fits = size == (batch * tokens if layout == Layout("rows") else batch)
        if there.shape != back.shape or not size or not fits:
            return Layout("unknown")
        swapped = back.marks.view(batch, -1).flip(0).flatten()
        scale = there.marks.abs().max()
        if not torch.allclose(there.marks, swapped, rtol=0, atol=_ORDER_TOLERANCE * float(scale)):
            return Layout("unknown")
    return layout


def compare_shapes(one: tuple[int, ...], two: tuple[int, ...], tokens: int) -> Layout:
    """Find the batch from the shapes of one call on one example and on two.

    Args:
        one: Shape of the layer's input for one example.
        two: Shape for the same example twice.
        tokens: Number of positions of one example in the model's own input.

    Returns:
        The layout.
    """
    if len(one) != len(two):
        return Layout("unknown")
    axes = [axis for axis, (left, right) in enumerate(zip(one, two, strict=True)) if left != right]
    if not axes and 0 in one:
        return Layout("unknown")
    if not axes:
        expandable = len(one) > 0 and one[0] == 1
        return Layout("expand") if expandable else Layout("shared")
    axis = axes[0]
    if len(axes) > 1 or two[axis] != 2 * one[axis]:
        return Layout("unknown")
    if one[axis] == 1:
        return Layout("axis", axis)
    if axis == 0 and one[0] == tokens:
        return Layout("rows")
    return Layout("unknown")


def guess_layout(shape: tuple[int, ...], batch: int, tokens: int) -> Layout:
    """Guess the batch from one call alone, in a training loop that must not be disturbed.

    Args:
        shape: Shape of the layer's input.
        batch: Number of examples of the step.
        tokens: Number of positions of one example in the model's own input.

    Returns:
        The layout; a first axis equal to the batch is taken for it.
    """
    if shape and shape[0] == batch:
        return BATCH_FIRST
    if batch == 1:
        return Layout("single")
    if shape and shape[0] == 1:
        return Layout("shared")
    if len(shape) == 2 and tokens > 1 and shape[0] == batch * tokens:
        return Layout("rows")
    return Layout("unknown") if len(shape) > 1 else Layout("shared")


def batch_first(tensor: Tensor, layout: Layout, batch: int, tokens: int) -> Tensor | None:
    """Bring the batch to the front.

    Args:
        tensor: A layer's input or output gradient.
        layout: Its layout.
        batch: Number of examples.
        tokens: Number of positions of one example in the model's own input.

    Returns:
        A view ``[b, ...]``, or None where the tensor does not have that many examples.
    """
    if layout.kind == "single":
        return tensor.unsqueeze(0)
    if layout.kind == "rows":
        if tensor.shape[0] != batch * tokens:
            return None
        return tensor.reshape(batch, tokens, *tensor.shape[1:])
    moved = tensor.movedim(layout.axis, 0) if layout.axis else tensor
    return moved if moved.dim() > 0 and moved.shape[0] == batch else None
