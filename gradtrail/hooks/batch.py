"""Reading a batch: its main input, its number of examples and of positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

from torch import Tensor

__all__ = ["batch_length", "first_tensor", "take_rows", "tokens_of"]


def first_tensor(batch: Any) -> Tensor | None:  # noqa: ANN401
    """Find the model's main input: ``input_ids`` where there is one, else the first tensor."""
    if isinstance(batch, Tensor):
        return batch
    if isinstance(batch, Mapping):
        preferred = batch.get("input_ids", None)
        values = [preferred, *batch.values()] if preferred is not None else list(batch.values())
    elif isinstance(batch, (tuple, list)):
        values = list(batch)
    elif is_dataclass(batch):
        values = [getattr(batch, f.name) for f in fields(batch)]
    else:
        return None
    found = (first_tensor(value) for value in values)
    return next((tensor for tensor in found if tensor is not None), None)


def batch_length(batch: Any) -> int | None:  # noqa: ANN401
    """Number of examples: the leading size of the main input, or None without one."""
    tensor = first_tensor(batch)
    return tensor.shape[0] if tensor is not None and tensor.dim() else None


def tokens_of(batch: Any) -> int:  # noqa: ANN401
    """Number of positions of one example: the sizes between batch and features."""
    tensor = first_tensor(batch)
    if tensor is None:
        return 1
    sides = tensor.shape[1:-1] if tensor.is_floating_point() else tensor.shape[1:]
    count = 1
    for side in sides:
        count *= side
    return count


def take_rows(batch: Any, rows: Sequence[int]) -> Any:  # noqa: ANN401
    """Make a batch of some rows of another.

    Args:
        batch: Tensors in mappings, tuples, lists or dataclasses.
        rows: Numbers of the rows, repeated or not.

    Returns:
        The same structure; tensors and lists that have one entry a row are cut, others kept.
    """
    size = batch_length(batch)

    def cut(value: Any) -> Any:  # noqa: ANN401
        if isinstance(value, Tensor):
            return value[list(rows)] if value.dim() and value.shape[0] == size else value
        if isinstance(value, Mapping):
            return {name: cut(entry) for name, entry in value.items()}
        if isinstance(value, tuple) and type(value) is not tuple:
            return type(value)(*(cut(entry) for entry in value))
        if isinstance(value, (tuple, list)):
            if len(value) == size and not any(isinstance(entry, Tensor) for entry in value):
                return type(value)(value[row] for row in rows)
            return type(value)(cut(entry) for entry in value)
        if is_dataclass(value) and not isinstance(value, type):
            return replace(value, **{f.name: cut(getattr(value, f.name)) for f in fields(value)})
        return value

    return cut(batch)
