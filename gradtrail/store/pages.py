"""Pages of a mapped file: brought in with one request, not one fault after the other."""

from __future__ import annotations

import ctypes
import mmap
import sys
from functools import cache
from typing import Any

import torch

__all__ = ["bring_in"]

_POPULATE_READ = 22  # MADV_POPULATE_READ of Linux 5.14, for which Python has no name


def bring_in(storage: torch.UntypedStorage, start: int) -> None:
    """Map the pages of a file's mapping from a place on; where that cannot be done they fault in.

    Args:
        storage: The mapping.
        start: First byte that will be read.
    """
    call = _madvise()
    if call is None or start >= storage.nbytes():
        return
    begin = start - start % mmap.PAGESIZE
    call(storage.data_ptr() + begin, storage.nbytes() - begin, _POPULATE_READ)


@cache
def _madvise() -> Any | None:  # noqa: ANN401  # a function of the C library
    """The system's call, or None where there is none."""
    if sys.platform != "linux":
        return None
    call = ctypes.CDLL(None).madvise
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    call.restype = ctypes.c_int
    return call
