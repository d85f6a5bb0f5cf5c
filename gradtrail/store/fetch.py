"""What runs beside a log: a thread that fetches its next record, and those that feed it."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import suppress

from gradtrail.errors import StoreError
from gradtrail.store.disk import Entry

__all__ = ["AbstractCompanion", "AbstractFeeder", "AbstractSource", "fetched"]


class AbstractFeeder(ABC):
    """Somebody who has taken records for a log and not appended them yet."""

    @abstractmethod
    def drain(self) -> None:
        """Wait until all that was taken is appended; what went wrong meanwhile is raised."""


class AbstractCompanion(ABC):
    """Somebody who keeps something beside a log's records, which is written after the last."""

    @abstractmethod
    def complete(self) -> None:
        """Write it: all records are appended and flushed, and the log is about to be closed."""


class AbstractSource(ABC):
    """Where records are brought from."""

    @abstractmethod
    def is_slow(self, entry: Entry) -> bool:
        """Whether bringing a record takes long enough to have a thread do it."""

    @abstractmethod
    def touch(self, entry: Entry) -> None:
        """Refuse a record whose shard is damaged, or a source that was closed."""

    @abstractmethod
    def fetch(self, entry: Entry) -> None:
        """Verify a record's shard and have its bytes brought into the system's cache."""


def fetched(source: AbstractSource, entries: Sequence[Entry], *, prefetch: bool) -> Iterator[Entry]:
    """Go through records, each once it is known to be whole.

    The next record is asked for while one is given, and a thread verifies the next shard that has
    not been read yet while the records of the one before it are: never more than one ahead.

    Args:
        source: Where they are brought from.
        entries: The records.
        prefetch: Whether that is done.

    Yields:
        The records in order.
    """
    waiting: threading.Thread | None = None
    reached = 0  # the record that the last thread was started for
    try:
        for number, entry in enumerate(entries):
            if prefetch and number + 1 < len(entries) and not source.is_slow(entries[number + 1]):
                _fetch(source, entries[number + 1])
            if prefetch and number >= reached:
                if waiting is not None:
                    waiting.join()
                later = range(number + 1, len(entries))
                reached = next((n for n in later if source.is_slow(entries[n])), len(entries))
                waiting = _started(source, entries[reached : reached + 1])
            source.touch(entry)
            yield entry
    finally:
        if waiting is not None:
            waiting.join()


def _started(source: AbstractSource, entries: Sequence[Entry]) -> threading.Thread | None:
    """Start to fetch a record in the background, or none."""
    if not entries:
        return None
    thread = threading.Thread(target=_fetch, args=(source, entries[0]), daemon=True)
    thread.start()
    return thread


def _fetch(source: AbstractSource, entry: Entry) -> None:
    """Fetch a record; what goes wrong is raised where it is read."""
    with suppress(StoreError, OSError):
        source.fetch(entry)
