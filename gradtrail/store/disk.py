"""The part of a log that lies in a folder: writing records to shards, and reading them back."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from gradtrail.errors import StoreError
from gradtrail.files import FileSum
from gradtrail.store.held import Held
from gradtrail.store.journal import Journal, journal_name, read_journal
from gradtrail.store.layout import Layout, Layouts
from gradtrail.store.manifest import Manifest
from gradtrail.store.place import SHARD_NAME, shard_name
from gradtrail.store.shard_file import WriteBuffer
from gradtrail.store.shards import Shard, ShardWriter

__all__ = ["Entry", "FolderWriter", "RankEntries", "read_entries"]

_OWN = {"layout", "discarded"}


@dataclass(eq=False)
class Entry:
    """One record: what it holds and where.

    Attributes:
        layout: Its tensors.
        facts: What was recorded with them, fit for JSON.
        rank: Who wrote it.
        order: The how manyth of this rank it is.
        shard: The shard it lies in, or None.
        start: Where it begins there, in bytes from the first record.
        held: Its tensors that are in memory, by key.
        discarded: Whether it counts no more.
    """

    layout: Layout
    facts: Mapping[str, Any]
    rank: int
    order: int
    shard: Shard | None = None
    start: int = 0
    held: dict[str, Held] = field(default_factory=dict)
    discarded: bool = False


@dataclass(eq=False)
class RankEntries:
    """What one rank's journal names.

    Attributes:
        rank: Whose it is.
        entries: Its records, discarded ones left out.
        shards: Its shards.
        num_bytes: Bytes of its whole lines.
        count: Number of records ever journalled.
    """

    rank: int
    entries: list[Entry] = field(default_factory=list)
    shards: list[Shard] = field(default_factory=list)
    num_bytes: int = 0
    count: int = 0


def read_entries(folder: Path, manifest: Manifest, rank: int, layouts: Layouts) -> RankEntries:
    """Read what a rank's journal names, without touching a shard's content.

    Args:
        folder: The store's folder.
        manifest: Its manifest.
        rank: The rank.
        layouts: Where layouts are shared.

    Returns:
        The records.

    Raises:
        StoreError: If a line says what this library does not write, or a shard has another size.
    """
    path = folder / journal_name(rank)
    text = read_journal(path, manifest.run, rank)
    found = RankEntries(rank, num_bytes=text.num_bytes)
    for number, line in text.entries.items():
        try:
            if set(line) == {"discard"}:
                _discard(found, line["discard"])
            else:
                _add_shard(found, folder, rank, line, layouts)
        except (StoreError, ValueError, TypeError, KeyError, IndexError) as error:
            raise StoreError(
                f"Line {number} of {str(path)!r} must be one that was written here, got {error!s} "
                "instead. Restore the store's files, or write it anew with mode='overwrite'."
            ) from error
    for shard in found.shards:
        shard.check_size()
    return found


def _discard(found: RankEntries, step: object) -> None:
    if type(step) is not int:
        raise ValueError(f"step {step!r}")
    found.entries = [entry for entry in found.entries if entry.facts["step"] != step]


def _add_shard(
    found: RankEntries, folder: Path, rank: int, line: Mapping[str, Any], layouts: Layouts
) -> None:
    """Note the records of one line."""
    name, total = _name_and_sum(line)
    if name != shard_name(rank, len(found.shards)):
        raise ValueError(f"shard {name!r} as number {len(found.shards)}")
    read = [layouts.read(entry, total.num_bytes) for entry in _listed(line["layouts"])]
    used, entries, start = [], [], 0
    shard = Shard(folder / name, name, used, total)
    for record in _listed(line["records"]):
        if not isinstance(record, dict) or type(record["layout"]) is not int:
            raise ValueError("a record without layout")
        if not 0 <= record["layout"] < len(read):
            raise ValueError(f"layout {record['layout']} of {len(read)}")
        facts = {key: value for key, value in record.items() if key not in _OWN}
        layout = read[record["layout"]]
        entry = Entry(layout, facts, rank, found.count, shard, start)
        found.count += 1
        layouts.kind.check_facts(layout, facts)
        if record.get("discarded") is not True:
            entries.append(entry)
        used.append(layout)
        start += layout.stride
    if not used or start > total.num_bytes:
        raise ValueError(f"{start} bytes of records in {total.num_bytes} bytes")
    shard.data_start = total.num_bytes - start
    found.shards.append(shard)
    found.entries += entries


def _name_and_sum(line: Mapping[str, Any]) -> tuple[str, FileSum]:
    """Read which file a line names: never one outside the folder."""
    name, num_bytes, crc = line["shard"], line["bytes"], line["crc32"]
    if not isinstance(name, str) or SHARD_NAME.fullmatch(name) is None:
        raise ValueError(f"{name!r} for a shard")
    if not all(type(value) is int and value >= 0 for value in (num_bytes, crc)):
        raise ValueError(f"bytes {num_bytes!r} and crc32 {crc!r}")
    return name, FileSum(num_bytes, crc)


def _listed(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{type(value).__name__} for a list")
    return value


class FolderWriter:
    """Writes a rank's records to shards and names the whole ones in its journal."""

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        found: RankEntries,
        shard_bytes: int,
        *,
        outlasts: bool,
    ) -> None:
        """Go on behind what is there.

        Args:
            folder: The store's folder.
            manifest: Its manifest, which is on the disk.
            found: What this rank's journal names.
            shard_bytes: Size at which a shard is closed.
            outlasts: Whether the files outlast the process, and so a power failure too.
        """
        self.folder, self.manifest, self.shard_bytes = folder, manifest, shard_bytes
        self._outlasts = outlasts
        self._rank = manifest.rank
        self._journal = Journal(
            folder, manifest.run, self._rank, found.num_bytes, outlasts=outlasts
        )
        self._next = len(found.shards)
        self._open: ShardWriter | None = None
        self._buffer = WriteBuffer()
        self.pending: list[Entry] = []

    def add(self, entry: Entry, tensors: Sequence[Callable[[], Tensor]]) -> None:
        """Write a record into the open shard; it is journalled with the shard."""
        if self._open is None:
            name = shard_name(self._rank, self._next)
            self._open = ShardWriter(
                self.folder,
                name,
                self.shard_bytes,
                entry.layout,
                outlasts=self._outlasts,
                buffer=self._buffer,
            )
        try:
            entry.start = self._open.add(entry.layout, tensors)
        except BaseException:
            if not self.pending:
                self.drop()  # a shard holds at least one record
            raise
        entry.shard = self._open.shard
        self.pending.append(entry)

    @property
    def is_full(self) -> bool:
        """Whether the open shard has its size."""
        return self._open is not None and self._open.num_bytes >= self.shard_bytes

    def finish(self) -> int:
        """Close the open shard and journal it.

        Returns:
            Bytes of its file; 0 if none was open.

        Raises:
            OSError: If it cannot be written. Then its records are lost and the rest is as it was.
        """
        if self._open is None:
            return 0
        writer, pending = self._open, self.pending
        try:
            total = writer.finish()
            if self.manifest.is_changed:
                self.manifest.save(self.folder)
            self._journal.append(_line(writer.name, total, pending))
        except OSError:
            self.drop()
            raise
        self._open, self.pending, self._next = None, [], self._next + 1
        return total.num_bytes

    def drop(self) -> None:
        """Delete the open shard; its records are lost."""
        if self._open is not None:
            self._open.abandon()
        self._open, self.pending = None, []

    def discard(self, step: int) -> None:
        """Journal that all records of a step so far count no more."""
        self._journal.append({"discard": step})

    def close(self) -> None:
        """Close the journal. The open shard must be finished before."""
        self._journal.close()


def _line(name: str, total: FileSum, entries: Sequence[Entry]) -> dict[str, Any]:
    """The journal's line of a shard."""
    layouts: dict[str, int] = {}
    records = []
    for entry in entries:
        number = layouts.setdefault(entry.layout.text, len(layouts))
        mark = {"discarded": True} if entry.discarded else {}
        records.append({"layout": number, **entry.facts, **mark})
    return {
        "shard": name,
        "bytes": total.num_bytes,
        "crc32": total.crc32,
        "layouts": [json.loads(text) for text in layouts],
        "records": records,
    }
