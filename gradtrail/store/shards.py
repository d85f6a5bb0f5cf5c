"""Shards: safetensors files of whole records, written as the records come and read by mapping.

A record's tensor ``key`` is called ``"<n>/<key>"`` in the file, with ``n`` the record's number in
the shard from 0, and ``"<n>:pad"`` are the zero bytes that bring the next record to a multiple of
8. The data begins at a multiple of 8 bytes, so every element lies at a multiple of its size.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from io import FileIO
from pathlib import Path

import torch
from torch import Tensor

from gradtrail.errors import StoreError
from gradtrail.files import (
    FileSum,
    crc32,
    encode_header,
    header_entries,
    join_sums,
    sync_folder,
    tensor_bytes,
)
from gradtrail.store.layout import Layout, TensorSpec
from gradtrail.store.pages import bring_in
from gradtrail.store.shard_file import ShardFile, WriteBuffer

__all__ = ["Shard", "ShardWriter", "tensor_in"]

_METADATA = {"format": "pt", "gradtrail": "shard-1"}
_CHUNK = 1 << 20
_WHOLE_VECTOR = 16  # bytes
_MAPPED = 1 << 16  # smaller tensors are read: a mapping costs more, and their number is limited
_AT_ONCE = 16 << 20  # records of fewer bytes are mapped whole: one mapping for all their tensors
_PAGE = 4096
_DIRECT_RECORD = 1 << 20  # bytes: a smaller one is copied sooner than the disk answers


class Shard:
    """A shard that can be read: a file that is whole, or the one being written.

    Attributes:
        path: Where the file lies now.
        name: What it is called once it is whole.
        layouts: What its records hold, in order.
        total: Size and checksum that the journal has of it; None while it is written.
        data_start: Where the first record begins, in bytes from the file's first.
        is_checked: Whether it is known to be as it was written.
    """

    path: Path
    name: str
    layouts: list[Layout]
    total: FileSum | None
    data_start: int
    is_checked: bool

    def __init__(self, path: Path, name: str, layouts: list[Layout], total: FileSum | None) -> None:
        """Describe a shard.

        Args:
            path: Where it lies.
            name: Its name.
            layouts: Layout of each record.
            total: Size and checksum that the journal has of it; None while it is written.
        """
        self.path, self.name, self.layouts, self.total = path, name, layouts, total
        num_bytes = sum(layout.stride for layout in layouts)
        self.data_start = 0 if total is None else total.num_bytes - num_bytes
        self._lock = threading.Lock()
        self._checking = threading.Lock()
        self.is_checked = total is None

    def check_size(self) -> None:
        """Refuse a file that is missing or of another size than was written.

        Raises:
            StoreError: If it is.
        """
        try:
            size = self.path.stat().st_size
        except FileNotFoundError:
            size = None
        if self.total is not None and size != self.total.num_bytes:
            found = "none" if size is None else f"{size} bytes"
            raise StoreError(_damaged(self, f"{found} where it had {self.total.num_bytes}"))

    def check(self) -> None:
        """Compare every byte with what was written, the first time this is called.

        A shard that this process wrote needs no such check.
        """
        with self._checking:
            if not self.is_checked:
                self.verify()
                self.is_checked = True

    def verify(self) -> None:
        """Compare every byte with what was written: header, records and their checksum.

        Raises:
            StoreError: If the file differs.
        """
        if self.total is None:
            return
        self.check_size()
        with FileIO(self.path) as file:
            head = file.read(self.data_start)
            if head != pad_header(_head(self.layouts), self.data_start):
                raise StoreError(_damaged(self, "a header that its records contradict"))
            crc, buffer = crc32(head), memoryview(bytearray(_CHUNK))
            while count := file.readinto(buffer):
                crc = crc32(buffer[:count], crc)
        if crc != self.total.crc32:
            raise StoreError(_damaged(self, f"checksum {crc} where {self.total.crc32} was written"))

    def read_ahead(self, start: int, layout: Layout) -> None:
        """Ask the system to bring a record's bytes into its cache, without waiting for them."""
        advise = getattr(os, "posix_fadvise", None)  # not on every system
        if advise is None or not layout.num_bytes:
            return
        with self._lock, FileIO(self.path) as file:
            place = self.data_start + start
            advise(file.fileno(), place, layout.num_bytes, os.POSIX_FADV_WILLNEED)

    def memory(self, start: int, layout: Layout) -> torch.UntypedStorage | None:
        """Map the file up to a small record's end, once for all its tensors.

        Args:
            start: Where the record begins, from the first.
            layout: What it holds.

        Returns:
            The mapping, the record at its end; None for one whose tensors are mapped one by one,
            so that no more of it is in memory than is in use.
        """
        if not 0 < layout.num_bytes <= _AT_ONCE:
            return None
        with self._lock:
            begin = self.data_start + start
            storage = self._mapped(begin + layout.num_bytes)
        bring_in(storage, begin)
        return storage

    def tensor(self, start: int, spec: TensorSpec) -> Tensor:
        """Give one tensor of a record: a private mapping of the file, or a copy of a small one.

        The file is opened read-only; who writes into the tensor changes a copy of the page. The
        mapping goes when the tensor does.

        Args:
            start: Where the record begins, from the first.
            spec: Which tensor.

        Returns:
            The tensor.

        Raises:
            StoreError: If the file has become shorter.
        """
        with self._lock:
            offset = self.data_start + start + spec.start
            if spec.num_bytes >= _MAPPED:
                storage = self._mapped(offset + spec.num_bytes)
                bring_in(storage, offset)
                return _view(storage, offset, spec)
            try:
                return _read(self.path, offset, spec)
            except (OSError, EOFError) as error:
                self.check_size()
                raise StoreError(_damaged(self, str(error))) from error

    def _mapped(self, stop: int) -> torch.UntypedStorage:
        """Map the file's first bytes, which keeps no file open."""
        try:
            return torch.UntypedStorage.from_file(str(self.path), False, stop)  # noqa: FBT003  # takes no keywords
        except (OSError, RuntimeError) as error:
            self.check_size()
            raise StoreError(_damaged(self, str(error))) from error

    def rename(self, move: Callable[[], tuple[Path, int, FileSum | None]]) -> None:
        """Rename the file while nobody reads it, and note what ``move`` returns."""
        with self._lock:
            self.path, self.data_start, self.total = move()


class ShardWriter:
    """A shard under a temporary name, to which records are added."""

    def __init__(
        self,
        folder: Path,
        name: str,
        shard_bytes: int,
        first: Layout,
        *,
        outlasts: bool,
        buffer: WriteBuffer | None = None,
    ) -> None:
        """Begin a file.

        Room for the header is left in front, as much as records like the first will need. A file
        that outlasts the process goes past the system's cache where its records are large: what
        is read again right away lies in temporary ones.

        Args:
            folder: The store's folder.
            name: Name of the shard.
            shard_bytes: Bytes that it is meant to have.
            first: Layout of the first record.
            outlasts: Whether it outlasts the process, and so is flushed to the disk.
            buffer: Memory to write from, which no other file uses meanwhile; None: its own.
        """
        self.folder, self.name = folder, name
        self._outlasts = outlasts
        count = min(max(1, shard_bytes // max(1, first.stride)) + 1, 1 << 20)
        wanted = min(count * _entry_bytes(first), max(shard_bytes // 8, _PAGE))
        self._reserved = -(-wanted // _PAGE) * _PAGE
        path = folder / f"{name}.tmp"
        self._file = ShardFile(
            path,
            self._reserved,
            direct=outlasts and first.stride >= _DIRECT_RECORD,
            buffer=buffer,
        )
        self.shard = Shard(path, name, [], None)
        self.shard.data_start = self._reserved

    @property
    def num_bytes(self) -> int:
        """Bytes of the records so far."""
        return self._file.num_bytes

    def add(self, layout: Layout, tensors: Sequence[Callable[[], Tensor]]) -> int:
        """Write a record; where that fails no part of it is left.

        Args:
            layout: What it holds.
            tensors: Gives each tensor in the layout's order.

        Returns:
            Where it begins, in bytes from the first.
        """
        mark = self._file.mark()
        with ExitStack() as undo:
            undo.callback(self._file.go_back, mark)
            for tensor in tensors:
                self._file.add(tensor_bytes(tensor()))
            self._file.add(memoryview(bytes(layout.padding)))
            self._file.settle()
            undo.pop_all()
        self.shard.layouts.append(layout)
        return mark.num_bytes

    def finish(self) -> FileSum:
        """Write the header, flush the file to the disk if it outlasts the process, and name it.

        Returns:
            Size and checksum of the file.
        """
        head = _head(self.shard.layouts)
        spare = self._reserved - len(head)
        if 0 <= spare <= self.num_bytes // 16:
            head = pad_header(head, self._reserved)
            self._file.end(head)
        else:
            self._move_behind(head)
        if self._outlasts:
            self._file.sync()
        size, crc = self._file.num_bytes, self._file.crc32
        total = FileSum(len(head) + size, join_sums(crc32(head), crc, size))
        self.shard.rename(lambda: self._give_name(len(head), total))
        self._file.close()
        if self._outlasts:
            sync_folder(self.folder)
        return total

    def abandon(self) -> None:
        """Delete the unfinished file, whose records are lost.

        One that has its name already may be journalled: whoever resumes the store finds out.
        """
        self._file.close()
        (self.folder / f"{self.name}.tmp").unlink(missing_ok=True)
        (self.folder / f"{self.name}.new.tmp").unlink(missing_ok=True)

    def _give_name(self, data_start: int, total: FileSum) -> tuple[Path, int, FileSum]:
        path = self.folder / self.name
        self.shard.path.replace(path)
        return path, data_start, total

    def _move_behind(self, head: bytes) -> None:
        """Copy the records behind a header that does not fit the room left for it."""
        path = self.folder / f"{self.name}.new.tmp"
        file = ShardFile(path, len(head), direct=False)
        try:
            self._file.copy_to(file)
            file.end(head)
        except OSError:
            file.close()
            raise
        old = self.shard.path
        self.shard.rename(lambda: (path, len(head), None))
        self._file.close()
        self._file, self._reserved = file, len(head)
        old.unlink()


def pad_header(head: bytes, size: int) -> bytes:
    """Fill the room left for a header with spaces, which belong to it."""
    text = head[8:] + b" " * (size - len(head))
    return len(text).to_bytes(8, "little") + text


def _head(layouts: Sequence[Layout]) -> bytes:
    """The beginning of a shard whose records have these layouts."""
    entries: dict[str, object] = {}
    start = 0
    for number, layout in enumerate(layouts):
        entries.update(_entries(number, layout, start))
        start += layout.stride
    return encode_header(entries, _METADATA)


def _entries(number: int, layout: Layout, start: int) -> dict[str, dict[str, object]]:
    specs = [(f"{number}/{s.key}", s.dtype, s.shape) for s in layout.tensors.values()]
    if layout.padding:
        specs.append((f"{number}:pad", torch.uint8, (layout.padding,)))
    return header_entries(specs, start)


def _entry_bytes(layout: Layout) -> int:
    """About what a record takes in the header: its first entry, with longer numbers."""
    return len(encode_header(_entries(0, layout, 1 << 24), {})) + 8 * len(layout.tensors)


def tensor_in(memory: torch.UntypedStorage, layout: Layout, spec: TensorSpec) -> Tensor:
    """Give one tensor of a record that is mapped as a whole.

    Args:
        memory: The mapping, which stays while the tensor does.
        layout: What the record holds.
        spec: Which tensor.

    Returns:
        The tensor.
    """
    return _view(memory, memory.nbytes() - layout.num_bytes + spec.start, spec)


def _view(storage: torch.UntypedStorage, offset: int, spec: TensorSpec) -> Tensor:
    """A tensor in a mapping."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(mode=False):
            return _view(storage, offset, spec)
    empty = torch.empty(0, dtype=spec.dtype)
    tensor = empty.set_(storage, offset // spec.dtype.itemsize, spec.shape)
    # MKL rounds some products of what lies elsewhere differently on some processors
    return tensor.clone() if tensor.data_ptr() % _WHOLE_VECTOR else tensor


def _read(path: Path, offset: int, spec: TensorSpec) -> Tensor:
    """Read a small tensor into memory of its own."""
    data = bytearray(spec.num_bytes)
    if spec.num_bytes:
        with FileIO(path) as file:
            file.seek(offset)
            if file.readinto(data) != spec.num_bytes:
                raise EOFError("an early end")
    with torch.inference_mode(mode=False):
        if not data:
            return torch.empty(spec.shape, dtype=spec.dtype)
        return torch.frombuffer(data, dtype=spec.dtype).reshape(spec.shape)


def _damaged(shard: Shard, found: str) -> str:
    return (
        f"Shard {shard.name} of {str(shard.path.parent)!r} must be as it was written, got {found}. "
        "What it holds cannot be used: restore the file, or write the store anew with "
        "mode='overwrite'."
    )
