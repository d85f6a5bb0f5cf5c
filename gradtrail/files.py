"""Files that are whole or absent: safetensors written one tensor at a time, and small texts.

Everything is written under another name in the same folder, flushed to the disk and renamed.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterable, Mapping
from io import FileIO
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

try:  # the extra "stores": the same number at fifteen times the rate, which a capture feels
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

__all__ = [
    "DTYPE_NAMES",
    "FileSum",
    "crc32",
    "encode_header",
    "header_entries",
    "join_sums",
    "replace_text",
    "sync_folder",
    "tensor_bytes",
    "write_all",
    "write_summed",
    "write_tensors",
]

_ONE, _DIVISOR = 1 << 31, 0xEDB88320  # of CRC-32, lowest power in the highest bit
_CHUNK = 1 << 20  # summed and written while it is in the processor's cache

DTYPE_NAMES: dict[torch.dtype, str] = {
    getattr(torch, name): code
    for name, code in {
        "float64": "F64",
        "float32": "F32",
        "float16": "F16",
        "bfloat16": "BF16",
        "complex64": "C64",
        "bool": "BOOL",
        "float8_e4m3fn": "F8_E4M3",
        "float8_e4m3fnuz": "F8_E4M3FNUZ",
        "float8_e5m2": "F8_E5M2",
        "float8_e5m2fnuz": "F8_E5M2FNUZ",
        "int64": "I64",
        "int32": "I32",
        "int16": "I16",
        "int8": "I8",
        "uint64": "U64",
        "uint32": "U32",
        "uint16": "U16",
        "uint8": "U8",
    }.items()
    if name in dir(torch)
}


class FileSum(NamedTuple):
    """Size and checksum of a file.

    Attributes:
        num_bytes: Its bytes.
        crc32: CRC-32 of all of them, as ``zlib.crc32`` gives it.
    """

    num_bytes: int
    crc32: int


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> FileSum:
    """Write a safetensors file, whole or not at all, copying at most one tensor at a time.

    The mapping is gone through twice: for the shapes and for the values, so that one which makes
    its tensors when it is asked holds one of them at a time.

    Args:
        path: Where to; a file of that name is replaced.
        tensors: Dense tensors of any device, by name.
        metadata: Strings for the file's header.

    Returns:
        Size and checksum of the file.
    """
    specs = ((name, tensor.dtype, tensor.shape) for name, tensor in tensors.items())
    head = encode_header(header_entries(specs), metadata)
    unfinished = _unfinished(path)
    try:
        with FileIO(unfinished, "w") as file:
            crc = write_summed(file, memoryview(head), 0)
            num_bytes = len(head)
            for name in tensors:
                view = tensor_bytes(tensors[name])
                crc = write_summed(file, view, crc)
                num_bytes += len(view)
            os.fsync(file.fileno())
        unfinished.replace(path)
        sync_folder(path.parent)
    finally:
        unfinished.unlink(missing_ok=True)
    return FileSum(num_bytes, crc)


def replace_text(path: Path, text: str) -> None:
    """Put a small text in place of a file's, whole or not at all.

    Args:
        path: The file, which need not exist.
        text: What it holds afterwards, in UTF-8.
    """
    unfinished = _unfinished(path)
    try:
        with FileIO(unfinished, "w") as file:
            write_all(file, memoryview(text.encode()))
            os.fsync(file.fileno())
        unfinished.replace(path)
        sync_folder(path.parent)
    finally:
        unfinished.unlink(missing_ok=True)


def _unfinished(path: Path) -> Path:
    """A name beside a file's that no other writer has, on this host or another."""
    return path.with_name(f"{path.name}.{uuid.uuid4().hex[:12]}.tmp")


def sync_folder(folder: Path) -> None:
    """Flush a folder's names to the disk, where the system has a way to."""
    if os.name != "posix":
        return
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, row-major; a view of it where it is contiguous and on the CPU."""
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else memoryview(b"")


def header_entries(
    specs: Iterable[tuple[str, torch.dtype, Iterable[int]]], start: int = 0
) -> dict[str, dict[str, object]]:
    """Describe tensors that lie one behind the other, as a safetensors header does.

    Args:
        specs: Name, dtype and shape of each, in order.
        start: Where the first begins, in bytes from the header's end.

    Returns:
        Entries of the header by name.
    """
    entries: dict[str, dict[str, object]] = {}
    for name, dtype, shape in specs:
        sides = [int(side) for side in shape]
        stop = start + dtype.itemsize
        for side in sides:
            stop = start + (stop - start) * side
        entries[name] = {
            "dtype": DTYPE_NAMES[dtype],
            "shape": sides,
            "data_offsets": [start, stop],
        }
        start = stop
    return entries


def encode_header(entries: Mapping[str, object], metadata: Mapping[str, str]) -> bytes:
    """Give what a safetensors file begins with: the header's length in 8 bytes, then the header.

    Args:
        entries: Entries of the header by name.
        metadata: Strings to record.

    Returns:
        The bytes, a multiple of 8 of them.
    """
    text = json.dumps({"__metadata__": dict(metadata), **entries}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors start at a multiple of 8 bytes
    return len(text).to_bytes(8, "little") + text


def write_summed(file: FileIO, view: memoryview, crc: int) -> int:
    """Write bytes in one pass that also adds them to a checksum.

    Args:
        file: Where to, at its position.
        view: The bytes.
        crc: CRC-32 of what came before.

    Returns:
        CRC-32 with them.
    """
    for start in range(0, len(view), _CHUNK):
        chunk = view[start : start + _CHUNK]
        crc = crc32(chunk, crc)
        write_all(file, chunk)
    return crc


def join_sums(first: int, second: int, num_bytes: int) -> int:
    """Give the CRC-32 of two texts, one behind the other, from those of each.

    A CRC is the remainder of a polynomial over two elements; bytes that follow multiply it by
    ``x ** (8 * num_bytes)``.

    Args:
        first: CRC-32 of the first.
        second: CRC-32 of the second.
        num_bytes: Bytes of the second.

    Returns:
        CRC-32 of both together.
    """
    factor, power = _ONE, _ONE >> 8
    while num_bytes:
        if num_bytes & 1:
            factor = _product(factor, power)
        power = _product(power, power)
        num_bytes >>= 1
    return _product(factor, first) ^ second


def _product(a: int, b: int) -> int:
    """Multiply two remainders; the highest bit stands for 1, the lowest for ``x ** 31``."""
    total = 0
    for place in range(31, -1, -1):
        if a >> place & 1:
            total ^= b
        b = b >> 1 ^ (_DIVISOR if b & 1 else 0)
    return total


def write_all(file: FileIO, view: memoryview) -> None:
    """Write bytes in as many calls as the system takes."""
    while view:
        view = view[file.write(view) :]
