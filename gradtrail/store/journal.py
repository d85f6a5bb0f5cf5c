"""The journal: one line of JSON a shard, each with a checksum of its own, only ever appended to."""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from gradtrail.errors import StoreError
from gradtrail.files import sync_folder, write_all

__all__ = ["Journal", "encode_line", "journal_name", "read_journal"]

_SUM = re.compile(rb',"line_crc":(\d{1,10})\}$')


@dataclass(frozen=True)
class JournalText:
    """A journal as it lies on the disk.

    Attributes:
        entries: What its whole lines say, by line number from 1, the first line left out.
        num_bytes: Bytes of its whole lines.
        is_torn: Whether a part of a line follows them.
    """

    entries: Mapping[int, Mapping[str, Any]]
    num_bytes: int
    is_torn: bool


def journal_name(rank: int) -> str:
    """Name of a rank's journal."""
    return f"journal-{rank:04d}.jsonl"


def encode_line(entry: Mapping[str, Any]) -> bytes:
    """Write one line: compact JSON, with the CRC-32 of what it is without that as last entry."""
    text = json.dumps(entry, separators=(",", ":")).encode()
    return b'%s,"line_crc":%d}\n' % (text[:-1], zlib.crc32(text))


def decode_line(line: bytes) -> dict[str, Any] | None:
    """Read one line without its end; None if it is not one that was written whole."""
    found = _SUM.search(line)
    if found is None:
        return None
    text = line[: found.start()] + b"}"
    if zlib.crc32(text) != int(found[1]):
        return None
    try:
        entry = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) else None


def read_journal(path: Path, run: str, rank: int) -> JournalText:
    """Read a journal.

    Args:
        path: Its file; one that is missing counts as empty.
        run: Id of the store's run, as its manifest has it.
        rank: Whose it is.

    Returns:
        Its whole lines.

    Raises:
        StoreError: If a line but the last is damaged, or it belongs to another store.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return JournalText({}, 0, is_torn=False)
    lines = data.split(b"\n")
    rest = lines.pop()
    entries, num_bytes = {}, 0
    for number, line in enumerate(lines, 1):
        entry = decode_line(line)
        if entry is None:
            if number == len(lines) and not rest and b"\0" in line:
                break  # a disk that lost power may keep the line's end before its beginning
            raise StoreError(
                f"The journal must be whole, got a damaged line {number} of {str(path)!r}. What "
                "it names cannot be trusted: restore the file, or write the store anew with "
                "mode='overwrite'."
            )
        if number == 1:
            _check_first(path, entry, run, rank)
        else:
            entries[number] = entry
        num_bytes += len(line) + 1
    return JournalText(entries, num_bytes, is_torn=num_bytes < len(data))


def _check_first(path: Path, entry: Mapping[str, Any], run: str, rank: int) -> None:
    """Refuse a journal of another store."""
    found = {name: entry.get(name) for name in ("run", "rank")}
    if found != {"run": run, "rank": rank} or type(entry.get("rank")) is not int:
        raise StoreError(
            f"The journal must be of run {run!r} and rank {rank}, got {found} in {str(path)!r}. It "
            "was copied from another store: put the right one back."
        )


class Journal:
    """A rank's journal, open for appending."""

    def __init__(
        self, folder: Path, run: str, rank: int, num_bytes: int, *, outlasts: bool
    ) -> None:
        """Open it, and cut off what follows its whole lines.

        Args:
            folder: The store's folder.
            run: Id of the store's run.
            rank: Whose it is.
            num_bytes: Bytes of its whole lines.
            outlasts: Whether lines are flushed to the disk.
        """
        self._outlasts = outlasts
        path = folder / journal_name(rank)
        is_new = not path.exists()
        self._file = FileIO(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "r+")
        self._file.truncate(num_bytes)
        self.num_bytes = num_bytes
        if not num_bytes:
            self.append({"run": run, "rank": rank})
        if is_new:
            sync_folder(folder)

    def append(self, entry: Mapping[str, Any]) -> None:
        """Write a line, flushed to the disk; if that fails, no part of it stays."""
        line = encode_line(entry)
        self._file.truncate(self.num_bytes)  # what an interrupt left
        self._file.seek(self.num_bytes)
        try:
            write_all(self._file, memoryview(line))
            if self._outlasts:
                os.fsync(self._file.fileno())
        except OSError:
            self._file.truncate(self.num_bytes)
            raise
        self.num_bytes += len(line)

    def close(self) -> None:
        """Close the file. Closing twice is fine."""
        self._file.close()
