"""A log: records of tensors, added in memory, in a folder, or in both."""

from __future__ import annotations

import bisect
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gradtrail.errors import StoreError
from gradtrail.store.disk import Entry, FolderWriter
from gradtrail.store.fetch import AbstractCompanion, AbstractFeeder
from gradtrail.store.held import Held, budget_bytes, settled
from gradtrail.store.layout import AbstractKind, Layout, Layouts
from gradtrail.store.manifest import Manifest
from gradtrail.store.opening import Opened, open_for_reading, open_for_writing
from gradtrail.store.options import LogOptions
from gradtrail.store.place import Lock, remove_folder, temporary_folder
from gradtrail.store.reading import AbstractReadableLog

__all__ = ["Log"]

_HOST = torch.device("cpu")
_GO_ON = (
    "go on behind what is kept: open the store with mode='resume' and append the missing ones, or "
    "make the same call or run the same training once more."
)


class Log(AbstractReadableLog):
    """Records of one kind that can be read and added to."""

    def __init__(self, kind: AbstractKind, options: LogOptions) -> None:
        """Open it.

        Args:
            kind: What its records are.
            options: Where and how.
        """
        budget = 0 if options.residency == "disk" else budget_bytes(options.budget, _HOST)
        super().__init__(options, budget)
        self._is_temporary = options.path is None and options.residency != "memory"
        self._write_lock = threading.RLock()
        self._lock: Lock | None = None
        self._remover: Callable[[], object] | None = None
        self._writer: FolderWriter | None = None
        self._owner = os.getpid()
        self._failure: OSError | StoreError | None = None
        self._feeders: weakref.WeakSet[AbstractFeeder] = weakref.WeakSet()
        self.companions: weakref.WeakSet[AbstractCompanion] = weakref.WeakSet()  # told of the close
        self._count = 0
        with ExitStack() as undo:
            undo.callback(self._give_up)
            self._open(kind)
            undo.pop_all()

    # ------------------------------------------------------------ opening

    def _open(self, kind: AbstractKind) -> None:
        """Open the folder, make a temporary one, or start without one."""
        options = self.options
        if options.mode == "read":
            self._take(open_for_reading(self.folder, kind))
        elif options.residency == "memory":
            self.manifest = Manifest(kind.name)
            self.layouts = Layouts(kind)
        else:
            if self._is_temporary:
                self.folder = temporary_folder()
                self._remover = weakref.finalize(self, remove_folder, self.folder, self._owner)
            opened = open_for_writing(self.folder, kind, options.mode, shared=bool(options.path))
            self._take(opened)
            self._lock = opened.lock
            own = opened.of_rank(self.manifest.rank)
            self._count = own.count
            self._writer = FolderWriter(
                self.folder,
                self.manifest,
                own,
                options.shard_bytes,
                outlasts=not self._is_temporary,
            )

    def _take(self, opened: Opened) -> None:
        """Take over what a folder holds."""
        self.manifest, self.layouts = opened.manifest, opened.layouts
        self.entries = sorted((e for r in opened.ranks for e in r.entries), key=self._place)
        self._shards = [shard for rank in opened.ranks for shard in rank.shards]
        self.file_bytes = sum(shard.total.num_bytes for shard in self._shards)
        self._reindex()

    def _reindex(self) -> None:
        key = self.layouts.kind.key
        self.index = {key(entry.facts): entry for entry in self.entries}
        self.version += 1

    def _place(self, entry: Entry) -> tuple[int, int, int]:
        declared = self.manifest.facts or {}
        return self.layouts.kind.order(entry.facts, declared), entry.rank, entry.order

    # ------------------------------------------------------------ writing

    def declare(self, facts: dict[str, Any]) -> None:
        """Record what the owner declares, at once."""
        with self._writing():
            self.manifest.facts = facts
            self.manifest.is_changed = True
            if self.folder is not None:
                self.manifest.save(self.folder)

    def append(
        self, layout: Layout, tensors: Sequence[Callable[[], Tensor]], facts: Mapping[str, Any]
    ) -> Entry:
        """Add a record.

        Args:
            layout: What it holds.
            tensors: Gives each tensor in the layout's order.
            facts: What is recorded with them, fit for JSON.

        Returns:
            The record.

        Raises:
            MemoryError: If it does not fit the budget and may not go to a file.
        """
        with self._writing():
            known = self.layouts.check(layout)
            entry = Entry(known, facts, self.manifest.rank, self._count)
            fits = self.held_bytes + layout.num_bytes <= self._budget
            if not fits and self.folder is None:
                raise MemoryError(
                    f"A block must fit the budget of residency 'memory', got {layout.num_bytes} "
                    f"bytes where {self._budget - self.held_bytes} of {self._budget} are left. "
                    "Raise budget=, or choose residency 'tiered' or 'disk'. What was stored before "
                    "is still there."
                )
            if fits and self.options.residency != "disk":
                self._hold(entry, tensors)
                tensors = [partial(held.checked, key, "store") for key, held in entry.held.items()]
            if not fits or (self.folder is not None and not self._is_temporary) or not entry.held:
                self._write(entry, tensors)
            self.layouts.keep(known)
            self.manifest.note_layers(self.layouts.layers)
            self._count += 1
            bisect.insort(self.entries, entry, key=self._place)
            self.index[self.layouts.kind.key(facts)] = entry
            self.version += 1
            if self._writer is not None and self._writer.is_full:
                self._finish_shard()
            return entry

    def _hold(self, entry: Entry, tensors: Sequence[Callable[[], Tensor]]) -> None:
        for key, tensor in zip(entry.layout.tensors, tensors, strict=True):
            entry.held[key] = Held(settled(tensor(), _HOST))
        self.held_bytes += entry.layout.num_bytes

    def _write(self, entry: Entry, tensors: Sequence[Callable[[], Tensor]]) -> None:
        if self._writer is None:
            return
        try:
            self._writer.add(entry, tensors)
        except OSError as error:
            self._let_go(entry)
            raise OSError(
                error.errno,
                f"A block of {entry.layout.num_bytes} bytes could not be written to "
                f"{str(self.folder)!r} ({error.strerror}). {self._kept()} Make room or raise the "
                f"limit, then append it again, or {_GO_ON}",
            ) from error

    def flush(self) -> None:
        """Close the open shard, so that all records so far outlast the process.

        What feeders have taken is written first, and an error of theirs is raised.
        """
        if self._closed or self.options.mode == "read":
            return
        self._drain()
        if self._writer is not None:
            with self._writing():
                self._finish_shard()

    def feed(self, feeder: AbstractFeeder) -> None:
        """Have somebody else's records waited for when the log is flushed or closed."""
        self.check_writable()
        self._feeders.add(feeder)

    def _drain(self) -> None:
        for feeder in list(self._feeders):
            feeder.drain()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Be the only one who writes; whoever is interrupted meanwhile leaves a log that is shut.

        What an interrupt cuts short, on the disk and in memory, is put right by a resume.

        Yields:
            Nothing.
        """
        with self._write_lock, ExitStack() as stack:
            self.check_writable()
            stack.push(self._note_interrupt)
            yield

    def _note_interrupt(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and not issubclass(kind, Exception):
            self._failure = StoreError(
                "The store must not be interrupted while it writes, got "
                f"{kind.__name__}. What was journalled is kept: open it with mode='resume'."
            )

    def _finish_shard(self) -> None:
        """Close the open shard; if that fails its records are lost, and the log takes no more."""
        if self._writer is None:
            return
        self._check_failure()
        lost = list(self._writer.pending)
        try:
            self.file_bytes += self._writer.finish()
        except OSError as error:
            self._fail(error, lost)
        self._shards += [lost[0].shard] if lost else []

    def _fail(self, error: OSError, lost: list[Entry]) -> None:
        gone = {id(entry) for entry in lost}
        for entry in lost:
            self._let_go(entry)
        self.entries = [entry for entry in self.entries if id(entry) not in gone]
        self._reindex()
        self._failure = OSError(
            error.errno,
            f"{len(lost)} blocks could not be written to {str(self.folder)!r} ({error.strerror}). "
            f"{self._kept()} Make room or raise the limit, then {_GO_ON}",
        )
        raise self._failure from error

    def _kept(self) -> str:
        """Say what is stored, for whoever must go on behind it."""
        if not self.entries:
            return "Nothing was stored before."
        rows = sum(len(entry.facts.get("ids", ())) for entry in self.entries)
        counted = f" with {rows} rows" if rows else ""
        last = max(entry.facts["step"] for entry in self.entries)
        return (
            f"{len(self.entries)} blocks{counted} that were stored before, up to step {last}, are "
            "kept there."
        )

    def discard(self, step: int) -> None:
        """Let all of this rank's records of a step so far count no more."""
        self._drain()
        with self._writing():
            rank = self.manifest.rank
            gone = [e for e in self.entries if e.facts["step"] == step and e.rank == rank]
            if not gone:
                return
            pending = set() if self._writer is None else {id(e) for e in self._writer.pending}
            if self._writer is not None and any(id(e) not in pending and e.shard for e in gone):
                self._journal_discard(step)
            for entry in gone:
                entry.discarded = True
                self._let_go(entry)
            self.entries = [entry for entry in self.entries if not entry.discarded]
            self._reindex()

    def _journal_discard(self, step: int) -> None:
        """Write down that a step counts no more."""
        try:
            self._writer.discard(step)
        except OSError as error:
            raise OSError(
                error.errno,
                f"Step {step} could not be taken out of {str(self.folder)!r} ({error.strerror}). "
                "All that was stored is still there, that step too. Make room on the disk and call "
                "discard again.",
            ) from error

    def _let_go(self, entry: Entry) -> None:
        """Free what is held of a record."""
        specs = entry.layout.tensors
        self.held_bytes -= sum(specs[key].num_bytes for key in entry.held)
        entry.held.clear()

    # ------------------------------------------------------------ state

    @property
    def is_writable(self) -> bool:
        """Whether records may be added."""
        return self.options.mode != "read" and not self._closed

    def check_writable(self) -> None:
        """Refuse to write to a log that was closed, opened for reading, or failed.

        Raises:
            RuntimeError: If this is a fork of the process that opened it.
            StoreError: If it was opened for reading.
        """
        self.check_open()
        if self.options.mode == "read":
            raise StoreError(
                "The store must be open for writing, got mode='read'. Open it with mode='resume'."
            )
        if os.getpid() != self._owner:
            raise RuntimeError(
                "The store must be written by the process that opened it, got a fork of it. Open "
                "one of its own there."
            )
        self._check_failure()

    def _check_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Flush, and let go of files and memory. Closing twice is fine."""
        if self._closed:
            return
        if os.getpid() != self._owner:  # a fork: files, locks and threads are its parent's
            self._closed = True
            return
        try:
            if self._failure is None:
                self.flush()
                for companion in list(self.companions):
                    companion.complete()
        finally:
            with self._write_lock:
                self._closed = True
                self._release()

    def _give_up(self) -> None:
        self._closed = True
        self._release()

    def _release(self) -> None:
        if self._writer is not None:
            self._writer.drop()
            self._writer.close()
        if self._lock is not None:
            self._lock.release()
        for entry in self.entries:
            entry.held.clear()
        self.entries, self.index, self._shards = [], {}, []
        self.version += 1
        self.held_bytes = 0
        if self._remover is not None:
            self._remover()
