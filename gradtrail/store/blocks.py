"""Stored blocks as they are handed out: layers that are read when they are asked for."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradtrail.factors import (
    GradientBlock,
    JoinMemo,
    LayerGradient,
    SumGradient,
    concatenate,
    map_tensors,
    to_dense,
)
from gradtrail.options import near_names, near_numbers
from gradtrail.store.codec import restore, turned
from gradtrail.store.disk import Entry
from gradtrail.store.log import Log

__all__ = ["LazyLayers", "StoredBlock", "join_blocks"]


@dataclass(frozen=True, eq=False)
class StoredBlock:
    """A block of a store.

    Attributes:
        block: Its gradients; a layer is read when it is asked for.
        meta: What was recorded with the block, all its rows included.
        row: Row of its first example in the store.
        taken: Which of the recorded block's examples these are, or None for all.
    """

    block: GradientBlock
    meta: Mapping[str, Any] | None
    row: int
    taken: tuple[int, ...] | None = None


class LazyLayers(Mapping[str, LayerGradient]):
    """A record's layers, each read when it is asked for and kept by nobody but the caller.

    Layers that share an input give one tensor while any of them is alive.
    """

    def __init__(
        self,
        log: Log,
        entry: Entry,
        names: Sequence[str],
        taken: Sequence[int] | None,
        device: torch.device | None,
    ) -> None:
        """Remember where the layers are.

        Args:
            log: The log.
            entry: The record.
            names: Names of the layers.
            taken: Numbers of the examples that are given, or None for all.
            device: Where to, or None.
        """
        self._log, self._entry = log, entry
        # a log gives tensors on the CPU
        self._device = None if device is not None and device.type == "cpu" else device
        self._names = dict.fromkeys(names)
        self._index = None if taken is None else _index(taken)
        self._memory: torch.UntypedStorage | None = None
        self._is_mapped = False
        self._alive: weakref.WeakValueDictionary[str, Tensor] = weakref.WeakValueDictionary()

    def __getitem__(self, name: str) -> LayerGradient:
        """Read a layer's gradient."""
        if name not in self._names:
            raise KeyError(name)
        return restore(self._entry.layout.form[name], self._tensor)

    def __iter__(self) -> Iterator[str]:
        """Go through the names, in order."""
        return iter(self._names)

    def __len__(self) -> int:
        """Number of layers."""
        return len(self._names)

    def _tensor(self, key: str) -> Tensor:
        tensor = self._alive.get(key)
        if tensor is None:
            if not self._is_mapped:
                self._memory, self._is_mapped = self._log.memory(self._entry), True
            tensor = turned(key, self._log.tensor(self._entry, key, self._memory))
            if self._index is not None:
                tensor = tensor[self._index]
            if self._device is not None:
                tensor = tensor.to(self._device)
            self._alive[key] = tensor
        return tensor


def _index(taken: Sequence[int]) -> slice | list[int]:
    """A slice where the numbers follow each other, which needs no copy."""
    first = taken[0] if taken else 0
    whole = list(taken) == list(range(first, first + len(taken)))
    return slice(first, first + len(taken)) if whole else list(taken)


def join_blocks(blocks: Sequence[GradientBlock]) -> GradientBlock:
    """Join blocks over their examples; a layer that one lacks has no gradient there.

    Args:
        blocks: At least one block.

    Returns:
        One block, with the first one's step.
    """
    names = list(dict.fromkeys(name for block in blocks for name in block.layers))
    memo, layers = JoinMemo(), {}
    gotten = [dict(block.layers) for block in blocks]
    for name in names:
        some = next(layers_of[name] for layers_of in gotten if name in layers_of)
        parts = [
            layers_of.get(name) or _nothing(some, len(block.ids))
            for layers_of, block in zip(gotten, blocks, strict=True)
        ]
        kinds = {type(part) for part in parts}
        if len(kinds) > 1 and SumGradient not in kinds:
            parts = [to_dense(part) for part in parts]
        layers[name] = concatenate(parts, memo)
    ids = tuple(identity for block in blocks for identity in block.ids)
    return GradientBlock(blocks[0].step, ids, layers)


def _nothing(some: LayerGradient, num_examples: int) -> LayerGradient:
    """Gradients of the same layer that are zero."""
    return map_tensors(some, lambda tensor: tensor.new_zeros(num_examples, *tensor.shape[1:]))


def unknown(option: str, value: object, known: Sequence[object]) -> ValueError:
    """The error of a step or layer that is not stored."""
    if isinstance(value, int):
        near = near_numbers(value, known)
    else:
        near = near_names(str(value), dict.fromkeys(str(entry) for entry in known))
    return ValueError(f"{option} must be stored, got {value!r}. Near it: {near}.")
