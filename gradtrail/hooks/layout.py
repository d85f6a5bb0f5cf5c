"""Where the examples are in what a layer sees: on an axis, folded into rows, or not at all.

A layer's first axis is the batch in most models, but not in all: position tables see one row for
the whole batch, time-major models put positions first, routers fold both into rows, experts see
chosen rows. A live pass finds out by running one example alone and then twice in one batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch import Tensor

__all__ = ["BATCH_FIRST", "Layout", "batch_first", "compare_shapes", "guess_layout"]

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
