"""``ShardFile``: a file that grows at its end, written past the system's cache where it is large.

What the system keeps in its cache costs a copy and memory of it for every byte. A capture brings
more than fits there, at the rate of the disk; so records of some size are gathered block by block
in one buffer, which the disk takes straight from.
"""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gradtrail.files import crc32, write_all

try:
    import fcntl
except ImportError:  # not on every system
    fcntl = None

__all__ = ["Mark", "ShardFile", "WriteBuffer"]

_BUFFER = 4 << 20  # bytes of one direct write
_CHUNK = 1 << 19  # bytes that are summed and copied while they are in the processor's cache
_BLOCK = 4096  # bytes: places and sizes of direct writes are multiples of it
_FRESH = os.O_RDWR | os.O_CREAT | os.O_TRUNC | getattr(os, "O_CLOEXEC", 0)


class Mark(NamedTuple):
    """Where a file stood between two records.

    Attributes:
        num_bytes: Its bytes.
        crc32: Their CRC-32.
        tail: Those that fill no block yet.
    """

    num_bytes: int
    crc32: int
    tail: bytes


class WriteBuffer:
    """Memory from which the disk takes; made when the first direct write wants it."""

    def __init__(self) -> None:
        """Have none yet."""
        self._bytes: np.ndarray | None = None

    def bytes(self) -> np.ndarray:
        """Give the memory, as bytes; it begins with a page."""
        if self._bytes is None:
            self._bytes = np.frombuffer(_memory(_BUFFER), np.uint8)
        return self._bytes


class ShardFile:
    """A new file of which the first bytes are left for a header, and summed bytes are added.

    Attributes:
        num_bytes: Bytes that were added.
        crc32: Their CRC-32.
    """

    num_bytes: int
    crc32: int

    def __init__(
        self, path: Path, reserved: int, *, direct: bool, buffer: WriteBuffer | None = None
    ) -> None:
        """Make the file.

        Args:
            path: Where it lies; a file of that name is emptied.
            reserved: Bytes left for the header; with ``direct`` a multiple of 4096.
            direct: Whether to write past the system's cache, where the file system can do so.
            buffer: Memory for that, which no other file uses meanwhile; None: its own.

        Raises:
            OSError: If it cannot be written there. No file is left.
        """
        self._reserved = reserved
        self.num_bytes, self.crc32 = 0, 0
        self._file = FileIO(os.open(path, _FRESH, 0o666), "r+")
        try:
            write_all(self._file, memoryview(b" " * reserved))
            self._direct = direct and _set_direct(self._file, on=True)
            self._buffer = (buffer or WriteBuffer()).bytes() if self._direct else None
        except OSError:
            self._file.close()
            path.unlink()
            raise
        self._filled = 0
        self._place = reserved  # where the buffer's first byte belongs

    @property
    def is_direct(self) -> bool:
        """Whether what is added goes past the system's cache."""
        return self._direct

    @property
    def stop(self) -> int:
        """Where the next byte belongs, from the file's first."""
        return self._reserved + self.num_bytes

    def add(self, view: memoryview) -> None:
        """Add bytes; they can be read after ``settle``."""
        added = np.frombuffer(view, np.uint8)
        for start in range(0, len(added), _CHUNK):
            chunk = added[start : start + _CHUNK]
            self.crc32 = crc32(chunk, self.crc32)
            if self._buffer is None:
                write_all(self._file, memoryview(chunk))
            else:
                self._gather(chunk)
        self.num_bytes += len(added)

    def settle(self) -> None:
        """Have all that was added in the file; zeros may follow it."""
        if self._filled:
            self._put(-(-self._filled // _BLOCK) * _BLOCK)
            whole = self._filled - self._filled % _BLOCK
            self._buffer[: self._filled - whole] = self._buffer[whole : self._filled]
            self._place += whole
            self._filled -= whole

    def mark(self) -> Mark:
        """Note where the file stands, after ``settle``."""
        tail = b"" if self._buffer is None else self._buffer[: self._filled].tobytes()
        return Mark(self.num_bytes, self.crc32, tail)

    def go_back(self, mark: Mark) -> None:
        """Take away what was added since a mark."""
        self.num_bytes, self.crc32, tail = mark
        self._filled, self._place = len(tail), self.stop - len(tail)
        if self._buffer is not None:
            self._buffer[: len(tail)] = np.frombuffer(tail, np.uint8)
        self._file.truncate(self.stop)
        self._file.seek(self.stop)

    def end(self, head: bytes | None) -> None:
        """Cut off what follows the bytes that were added, and write the header.

        Args:
            head: As many bytes as were left for it; None leaves them.
        """
        self._write_plainly()
        self._file.truncate(self.stop)
        if head is not None:
            self._file.seek(0)
            write_all(self._file, memoryview(head))

    def copy_to(self, other: ShardFile) -> None:
        """Add all that was added here to another file; nothing more can be added here."""
        self.end(None)
        self._file.seek(self._reserved)
        buffer = memoryview(bytearray(min(_BUFFER, max(1, self.num_bytes))))
        while count := self._file.readinto(buffer):
            other.add(buffer[:count])
        other.settle()

    def sync(self) -> None:
        """Flush it to the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close it."""
        self._file.close()
        self._buffer = None

    def _gather(self, chunk: np.ndarray) -> None:
        """Copy bytes to the buffer, and write it whenever it is full."""
        while len(chunk):
            part = chunk[: _BUFFER - self._filled]
            stop = self._filled + len(part)
            self._buffer[self._filled : stop] = part
            self._filled, chunk = stop, chunk[len(part) :]
            if stop == _BUFFER:
                self._put(_BUFFER)
                self._place += _BUFFER
                self._filled = 0

    def _put(self, count: int) -> None:
        """Write the buffer's first bytes where they belong; zeros behind what it holds."""
        view, place = memoryview(self._buffer)[:count], self._place
        if count > self._filled:
            self._buffer[self._filled : count] = 0
        while view:
            try:
                done = os.pwrite(self._file.fileno(), view, place)
            except OSError:
                if not self._direct:
                    raise
                done = 0
            if done % _BLOCK or not done:
                self._write_plainly()  # and learn what is wrong, if it is the disk and not the way
            view, place = view[done:], place + done

    def _write_plainly(self) -> None:
        """Go through the system's cache from here on."""
        if self._direct:
            _set_direct(self._file, on=False)
            self._direct = False


def _set_direct(file: FileIO, *, on: bool) -> bool:
    """Choose whether writes go past the system's cache; whether that could be done."""
    flag = getattr(os, "O_DIRECT", 0)
    if fcntl is None or not flag:
        return False
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, flags | flag if on else flags & ~flag)
    except OSError:
        return False  # no such way in this file system
    return True


def _memory(num_bytes: int) -> mmap.mmap:
    """Memory that begins with a page, on large ones where the system has them."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is not None:
        with suppress(OSError):  # a system may know the advice and not take it
            memory.madvise(advice)
    return memory
