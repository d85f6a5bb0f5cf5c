"""Tensors held in memory by whoever keeps them: plain, settled, and left alone by others."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gradtrail.files import DTYPE_NAMES
from gradtrail.machine import free_bytes

__all__ = ["FILE_DTYPES", "Held", "budget_bytes", "check_tensor", "settled", "tensor_state"]

FILE_DTYPES = frozenset(DTYPE_NAMES)

_DEFAULT_SHARE = 0.5


class Held:
    """A tensor in memory that nobody writes into any more; a write through torch is noticed."""

    def __init__(self, tensor: Tensor) -> None:
        """Hold a tensor, alone in its storage."""
        self._tensor, self._state = tensor, tensor_state(tensor)

    def was_written(self) -> bool:
        """Whether it was written into since."""
        return tensor_state(self._tensor) != self._state

    def checked(self, name: str, holder: str) -> Tensor:
        """Give the tensor, unless it was written into.

        Args:
            name: What it is called.
            holder: Who holds it, for the message.

        Returns:
            The tensor itself.

        Raises:
            RuntimeError: If it was.
        """
        if self.was_written():
            raise RuntimeError(
                f"{name!r} must be left alone while the {holder} holds it, got one that was "
                "written into. Put it again after the change, or put a clone."
            )
        return self._tensor


def tensor_state(tensor: Tensor) -> tuple[object, ...]:
    """What is different after a write through torch, or another view of the same memory."""
    version = tensor._version  # noqa: SLF001  # torch has no public name for it
    return version, tensor.data_ptr(), tensor.shape, tensor.stride()


def settled(tensor: Tensor, place: torch.device) -> Tensor:
    """The values on a device, contiguous and alone in their storage; the tensor if it is so."""
    with torch.inference_mode(mode=False), torch.no_grad():
        moved = tensor.detach().to(place).resolve_conj().resolve_neg().contiguous()
        alone = moved.untyped_storage().nbytes() == moved.nbytes
        if alone and not moved.is_inference():
            return moved
        return moved.clone(memory_format=torch.contiguous_format)


def check_tensor(name: str, tensor: Tensor, *, files: bool) -> None:
    """Refuse what has no plain values to keep.

    Args:
        name: What the tensor is called.
        tensor: The tensor.
        files: Whether it may have to go to a file.

    Raises:
        TypeError: If it is no dense tensor with data, or of a dtype that no file holds.
    """
    plain = isinstance(tensor, Tensor) and type(tensor.detach()) is Tensor
    if not plain or tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
        kind = type(tensor).__name__
        if plain:
            kind = f"a tensor of layout {tensor.layout} and dtype {tensor.dtype} on {tensor.device}"
        raise TypeError(
            f"{name!r} must be a dense torch.Tensor with data, got {kind}. Convert it, for "
            "example with to_dense(), dequantize() or full_tensor()."
        )
    if files and tensor.dtype not in FILE_DTYPES:
        raise TypeError(
            f"{name!r} must have a dtype that safetensors files hold, got {tensor.dtype}. Convert "
            "it, or choose residency 'memory'."
        )


def budget_bytes(budget: int | float | None, place: torch.device) -> int:
    """Bytes that a budget allows."""
    share = _DEFAULT_SHARE if budget is None else budget
    if isinstance(share, bool) or not isinstance(share, (int, float)):
        valid = False
    elif isinstance(share, int):
        valid = share >= 1
    else:
        valid = 0 < share <= 1
    if not valid:
        raise ValueError(
            "budget must be an int of at least 1 (bytes), a float in (0, 1] (a share of the free "
            f"memory) or None, got {budget!r}."
        )
    return share if isinstance(share, int) else math.floor(share * free_bytes(place))
