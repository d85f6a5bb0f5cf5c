"""Reading the records of a log, from memory or from its shards."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from gradtrail.errors import StoreError
from gradtrail.store.attached import attached_files
from gradtrail.store.disk import Entry
from gradtrail.store.fetch import AbstractSource, fetched
from gradtrail.store.held import Held, settled
from gradtrail.store.layout import Layouts
from gradtrail.store.manifest import Manifest
from gradtrail.store.options import LogOptions
from gradtrail.store.shards import Shard, tensor_in

__all__ = ["AbstractReadableLog"]

_HOST = torch.device("cpu")


class AbstractReadableLog(AbstractSource):
    """Records of one kind, each a layout's tensors with facts fit for JSON.

    Attributes:
        options: Where it lies and how it was opened.
        manifest: What holds for all of it.
        layouts: The layouts of its records.
        folder: Where its files lie, or None.
        entries: Its records in order, those of all ranks.
        index: Its records by what they are looked up by.
        version: Changes whenever ``entries`` does.
        held_bytes: Bytes that are held in memory.
        file_bytes: Bytes of the shards that are closed.
    """

    options: LogOptions
    manifest: Manifest
    layouts: Layouts
    folder: Path | None
    entries: list[Entry]
    index: dict[Hashable, Entry]
    version: int
    held_bytes: int
    file_bytes: int

    def __init__(self, options: LogOptions, budget: int) -> None:
        """Start without records.

        Args:
            options: Where it lies and how it is opened.
            budget: Bytes that may be held in memory.
        """
        self.options = options
        self.folder = None if options.path is None else Path(options.path).absolute()
        self.entries, self.index, self.version = [], {}, 0
        self.held_bytes = self.file_bytes = 0
        self._budget = budget
        self._shards: list[Shard] = []
        self._closed = False

    @property
    def is_closed(self) -> bool:
        """Whether it was closed."""
        return self._closed

    def check_open(self) -> None:
        """Refuse a log that was closed.

        Raises:
            StoreError: If it was.
        """
        if self._closed:
            raise StoreError("The store must be open, got one that was closed. Open it again.")

    def memory(self, entry: Entry) -> torch.UntypedStorage | None:
        """Map a record as a whole, or None where its tensors come one by one."""
        self.check_open()
        if entry.held or entry.shard is None or self.options.residency == "tiered":
            return None
        entry.shard.check()
        return entry.shard.memory(entry.start, entry.layout)

    def tensor(self, entry: Entry, key: str, memory: torch.UntypedStorage | None = None) -> Tensor:
        """Give one tensor of a record, on the CPU: the held one, or a mapping of its file.

        Args:
            entry: The record.
            key: The tensor's name in it.
            memory: What ``memory`` gave for the record.

        Returns:
            The tensor.
        """
        self.check_open()
        held = entry.held.get(key)
        if held is not None:
            return held.checked(key, "store")
        spec = entry.layout.tensors[key]
        if memory is not None:
            return tensor_in(memory, entry.layout, spec)
        entry.shard.check()
        tensor = entry.shard.tensor(entry.start, spec)
        if self.options.residency != "tiered" or spec.num_bytes + self.held_bytes > self._budget:
            return tensor
        tensor = settled(tensor, _HOST)
        entry.held[key] = Held(tensor)
        self.held_bytes += spec.num_bytes
        return tensor

    def is_slow(self, entry: Entry) -> bool:
        """Whether a record's shard has still to be verified."""
        return _is_needed(entry) and not entry.shard.is_checked

    def touch(self, entry: Entry) -> None:
        """Refuse a record whose shard is damaged, that was discarded, or of a closed log.

        Args:
            entry: The record.

        Raises:
            StoreError: If it is so.
        """
        self.check_open()
        if entry.discarded:
            raise StoreError(
                "A block must be kept while it is read, got one that was discarded since. Begin "
                "to read again."
            )
        if _is_needed(entry):
            entry.shard.check()

    def fetch(self, entry: Entry) -> None:
        """Verify a record's shard and have its bytes brought into the system's cache."""
        if _is_needed(entry):
            entry.shard.check()
            entry.shard.read_ahead(entry.start, entry.layout)

    def verify(self) -> None:
        """Read every shard and compare it with what was written.

        Raises:
            StoreError: If shards are damaged; it names each.
        """
        self.check_open()
        checks: dict[str, Callable[[], object]] = {s.name: s.verify for s in self._shards}
        if self.folder is not None:
            checks |= attached_files(self.folder)
        problems = []
        for check in checks.values():
            try:
                check()
            except StoreError as error:
                problems.append(str(error))
        if problems:
            raise StoreError(" ".join(problems))

    def fetched(self, entries: Sequence[Entry], *, prefetch: bool) -> Iterator[Entry]:
        """Go through records, the next one being fetched in the background meanwhile."""
        return fetched(self, entries, prefetch=prefetch)


def _is_needed(entry: Entry) -> bool:
    """Whether a record's shard must be read to have all its tensors."""
    return entry.shard is not None and len(entry.held) < len(entry.layout.tensors)
