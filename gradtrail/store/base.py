"""What every store has: a log, and what can be done with it whatever its records are."""

from __future__ import annotations

import weakref
from abc import ABC
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from gradtrail.store.layout import AbstractKind
from gradtrail.store.log import Log
from gradtrail.store.options import LogOptions, Residency
from gradtrail.store.place import Mode

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["AbstractStore"]


class AbstractStore(ABC):  # noqa: B024  # what differs is what its records are, not a method
    """A store on top of a log.

    Attributes:
        log: The log, for the store itself and those who write to it.
    """

    log: Log

    def __init__(self, kind: AbstractKind, options: LogOptions) -> None:
        """Open the log.

        Args:
            kind: What its records are.
            options: Where it lies and how it is opened.
        """
        self.log = Log(kind, options)
        if options.mode != "read":
            # whoever forgets to close, or ends the interpreter, loses nothing
            self._closer = weakref.finalize(self, self.log.close)

    @property
    def path(self) -> Path | None:
        """Its folder, also a temporary one; None with residency ``"memory"``."""
        return self.log.folder

    @property
    def mode(self) -> Mode:
        """How it was opened."""
        return self.log.options.mode

    @property
    def residency(self) -> Residency:
        """Where its tensors rest."""
        return self.log.options.residency

    @property
    def is_writable(self) -> bool:
        """Whether records may be appended: it is open, and not for reading only."""
        return self.log.is_writable

    @property
    def is_closed(self) -> bool:
        """Whether it was closed."""
        return self.log.is_closed

    @property
    def is_temporary(self) -> bool:
        """Whether its folder, if it has one, goes away with it; such a store is one process's."""
        return self.log.options.path is None

    @property
    def run(self) -> str:
        """Random id that the store was given when it was made."""
        return self.log.manifest.run

    @property
    def disk_bytes(self) -> int:
        """Bytes of the shards that are closed."""
        return self.log.file_bytes

    def verify(self) -> None:
        """Read everything and compare it with what was written; damaged files are named."""
        self.log.verify()

    def flush(self) -> None:
        """Close the open shard: all records so far outlast the process then.

        What a ``BackgroundWriter`` has taken for this store is written first.
        """
        self.log.flush()

    def close(self) -> None:
        """Flush, and let go of files and memory. Closing twice is fine."""
        self.log.close()

    def __enter__(self) -> Self:
        """Enter a block at whose end the store is closed."""
        self.log.check_open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the store."""
        self.close()
