"""Who the examples of a captured training step are, and where their positions lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradtrail.hooks.batch import first_tensor, tokens_of
from gradtrail.hooks.identity import batch_ids

__all__ = ["BatchShape", "ExampleIds", "batch_shape"]


class ExampleIds:
    """Gives every example of a forward its id: an argument of the call, or its content's hash."""

    def __init__(self, key: str | int | None, fields: Sequence[str | int] | None) -> None:
        """Choose between the two.

        Args:
            key: Argument that holds ids, by name or position, or None for hashes.
            fields: Arguments that a hash covers; None means all.
        """
        self.key = None if key is None else str(key)
        self._shown = key
        self._fields = None if fields is None else tuple(str(name) for name in fields)

    @property
    def scheme(self) -> str:
        """What tells one way to name examples from another: ``"key:<name>"`` or ``"content"``."""
        if self.key is not None:
            return f"key:{self.key}"
        chosen = "" if self._fields is None else ":" + ",".join(sorted(self._fields))
        return f"content{chosen}"

    def of(self, fields: Mapping[str, Any], size: int) -> tuple[int | str, ...]:
        """Name the examples of one call.

        Args:
            fields: What the model was called with, by name.
            size: Number of examples.

        Returns:
            One id an example.

        Raises:
            KeyError: If the argument with the ids is missing or of another length.
        """
        if self.key is None:
            return batch_ids(fields, size, self._fields)
        values = fields.get(self.key)
        if isinstance(values, Tensor):
            values = values.tolist() if values.dim() == 1 else None
        if values is None or len(values) != size:
            raise KeyError(
                f"sample_id_key must name an argument of every forward with {size} ids, got "
                f"{self._shown!r} beside {sorted(fields)}. Pass it to the model's call; a Trainer "
                "does so with remove_unused_columns=False and a data_collator that stacks it."
            )
        return tuple(values)


@dataclass(frozen=True, eq=False)
class BatchShape:
    """Where the examples of one forward have their positions.

    Attributes:
        tokens: Positions of one example in the model's own input, padding included.
        padding_left: Masked positions before the first valid one, by example; None without a
            mask. Shape ``[b]``.
        lengths: Valid positions by example. Shape ``[b]``.
    """

    tokens: int
    padding_left: Tensor | None
    lengths: Tensor


def batch_shape(batch: Mapping[str, Any], size: int) -> BatchShape:
    """Read a batch's valid positions off its attention mask, without asking the device.

    Args:
        batch: What the model was called with, by name.
        size: Number of examples.

    Returns:
        The positions; all of them are valid where there is no mask of the input's shape.
    """
    tokens, main, mask = tokens_of(batch), first_tensor(batch), batch.get("attention_mask")
    fits = isinstance(mask, Tensor) and main is not None and mask.shape == main.shape[:2]
    if not fits or not tokens:
        return BatchShape(tokens, None, torch.full((size,), tokens))
    valid = mask != 0
    lengths = valid.sum(1)
    leading = torch.where(lengths > 0, valid.int().argmax(1), torch.zeros_like(lengths))
    return BatchShape(tokens, leading, lengths)
