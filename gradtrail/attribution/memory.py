"""How much memory may be used without being asked for."""

from __future__ import annotations

import math
import mmap
import sys

import torch
from torch import Tensor

from gradtrail.machine import free_bytes

__all__ = ["free_bytes", "large_zeros", "query_budget"]

_HUGE_PAGE = 2 << 20


def query_budget(device: torch.device) -> int:
    """Bytes that written-out query gradients may take: half of what is free."""
    return free_bytes(device) // 2


def large_zeros(shape: tuple[int, ...], *, like: Tensor) -> Tensor:
    """Make a tensor of zeros that is written once and read over and over.

    On Linux a large one lies on huge pages: the kernel hands them out zeroed, in far fewer faults,
    and long rows stream faster from them.

    Args:
        shape: Its shape.
        like: Gives dtype and device.

    Returns:
        Zeros.
    """
    size = math.prod(shape) * like.element_size()
    if like.device.type != "cpu" or sys.platform != "linux" or size < 2 * _HUGE_PAGE:
        return like.new_zeros(shape)
    memory = mmap.mmap(-1, -(-size // _HUGE_PAGE) * _HUGE_PAGE)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=like.dtype, count=math.prod(shape)).view(shape)
