"""Training factors that are kept after one pass, so that later stages need no other.

Suffixes: b example.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from gradtrail.attribution.memory import free_bytes
from gradtrail.attribution.session import Batch
from gradtrail.factors import LayerGradient, map_tensors, tensors_of

__all__ = ["KeptFactors", "kept_budget"]

_SHARE = 3


def kept_budget(given: int | None, device: torch.device) -> int:
    """Say how many bytes of training factors may be kept.

    Args:
        given: The user's budget, or None.
        device: Where they are kept.

    Returns:
        The budget; a third of the free memory where none was given.
    """
    return free_bytes(device) // _SHARE if given is None else given


class KeptFactors:
    """Layer gradients of every training batch, as long as they fit a budget.

    After the first batch the bytes of all are known well enough to decide; a later batch that
    goes beyond the budget ends the keeping too. Then everything is let go.

    The tensors are kept as they are, which costs no copy. On the CPU the holes that a pass's own
    tensors leave between them come on top, up to half as much again.
    """

    def __init__(self, num_rows: int, budget: int, *, is_share: bool = False) -> None:
        """Start with nothing kept.

        Args:
            num_rows: Rows that will come.
            budget: Bytes that may be kept.
            is_share: Whether they are one rank's share of the training data.
        """
        self.is_share = is_share
        self._num_rows = num_rows
        self._left = budget
        self._pieces: dict[str, list[tuple[Batch, LayerGradient]]] = {}
        self._seen: dict[int, tuple[Tensor, Tensor]] = {}
        self._batch_bytes = 0
        self._num_seen = 0
        self.active = budget > 0

    @property
    def is_whole(self) -> bool:
        """Whether every row's gradients are there."""
        return self.active and self._num_seen == self._num_rows

    def add(self, place: Batch, name: str, gradient: LayerGradient) -> None:
        """Keep one layer of one batch.

        Args:
            place: The batch.
            name: The layer.
            gradient: Its gradients; a tensor that is a small part of a larger one is copied.
        """
        if not self.active:
            return
        gradient = map_tensors(gradient, self._held)
        self._pieces.setdefault(name, []).append((place, gradient))

    def close(self, place: Batch) -> None:
        """End a batch, and give up once all batches will not fit.

        Args:
            place: The batch.
        """
        if not self.active:
            return
        first = self._num_seen == 0
        self._num_seen += place.size
        self._left -= self._batch_bytes
        # batches differ in length: the mean of those seen says what the others will take
        to_come = self._num_rows - self._num_seen
        expected = self._batch_bytes * to_come // place.size if first else 0
        if self._left < expected or self._left < 0:
            self.drop()
        self._seen.clear()
        self._batch_bytes = 0

    @property
    def like(self) -> Tensor:
        """An empty tensor of the device and dtype of what is kept."""
        for pieces in self._pieces.values():
            for _, gradient in pieces:
                for tensor in tensors_of(gradient):
                    if tensor.is_floating_point():
                        return tensor.new_empty(0)
        return torch.empty(0)

    def _held(self, tensor: Tensor) -> Tensor:
        """Count a tensor once, however many layers share it."""
        if id(tensor) not in self._seen:
            held = _compact(tensor)
            self._seen[id(tensor)] = (tensor, held)
            self._batch_bytes += held.untyped_storage().nbytes()
        return self._seen[id(tensor)][1]

    def pieces(self, name: str) -> list[tuple[Batch, LayerGradient]]:
        """What is kept of one layer, batch by batch."""
        return self._pieces.get(name, [])

    def items(self) -> Iterator[tuple[str, list[tuple[Batch, LayerGradient]]]]:
        """Every layer with what is kept of it, without letting go."""
        return iter(self._pieces.items())

    def take(
        self, names: Iterable[str] = ()
    ) -> Iterator[tuple[str, list[tuple[Batch, LayerGradient]]]]:
        """Hand over layer by layer; what was handed over is no longer kept.

        Args:
            names: Layers that come first, in this order, also with nothing kept of them.

        Yields:
            The layer and its pieces.
        """
        self.active = False
        for name in names:
            yield name, self._pieces.pop(name, [])
        while self._pieces:
            name = next(iter(self._pieces))
            yield name, self._pieces.pop(name)

    def drop(self) -> None:
        """Let everything go."""
        self.active = False
        self._pieces.clear()
        self._seen.clear()


def _compact(tensor: Tensor) -> Tensor:
    """Copy a tensor that would keep much more memory than its own alive."""
    storage = tensor.untyped_storage().nbytes()
    return tensor.clone() if storage > 2 * tensor.nbytes else tensor
