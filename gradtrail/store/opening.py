"""Opening the folder of a store, alone or as one of many processes."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradtrail.distributed import guarded, rank, world_size
from gradtrail.errors import StoreError
from gradtrail.store.disk import RankEntries, read_entries
from gradtrail.store.journal import journal_name
from gradtrail.store.layout import AbstractKind, Layouts
from gradtrail.store.manifest import Manifest, read_manifest
from gradtrail.store.place import (
    Lock,
    Mode,
    check_mode,
    make_folder,
    prepare,
    ranks_in,
    remove_unfinished,
    shards_in,
)

__all__ = ["Opened", "open_for_reading", "open_for_writing"]


@dataclass(eq=False)
class Opened:
    """What a folder holds.

    Attributes:
        manifest: The manifest; of the own rank where it is written to.
        layouts: The layouts of the records.
        ranks: What each rank's journal names.
        lock: The right to write, or None.
    """

    manifest: Manifest
    layouts: Layouts
    ranks: list[RankEntries]
    lock: Lock | None = None

    def of_rank(self, number: int) -> RankEntries:
        """What one rank's journal names."""
        found = [entries for entries in self.ranks if entries.rank == number]
        return found[0] if found else RankEntries(number)


def open_for_reading(folder: Path, kind: AbstractKind) -> Opened:
    """Read what a folder holds; nothing is written.

    Args:
        folder: The store's folder.
        kind: What its records are.

    Returns:
        What it holds.

    Raises:
        StoreError: If it holds no whole store of this kind.
    """
    if folder.is_file():
        raise StoreError(
            f"path must be the folder of a store, got the file {str(folder)!r}. Pass its folder."
        )
    manifest = read_manifest(folder, kind.name)
    if manifest is None:
        raise StoreError(
            f"path must hold a store with mode='read', got {str(folder)!r} without manifest.json. "
            "Pass the folder of a store."
        )
    return _load(folder, kind, manifest)


def open_for_writing(folder: Path, kind: AbstractKind, mode: Mode, *, shared: bool) -> Opened:
    """Take a folder, bring it into the state that a mode begins with, and read what it holds.

    Where several processes share the folder all of them come here: rank 0 prepares it, and an
    error of one is an error of all.

    Args:
        folder: The store's folder.
        kind: What its records are.
        mode: ``"create"``, ``"resume"`` or ``"overwrite"``.
        shared: Whether the processes of a group write to it together.

    Returns:
        What it holds.

    Raises:
        OSError: If it cannot be written to.
    """
    number, world = (rank(), world_size()) if shared else (0, 1)
    try:
        with ExitStack() as undo:
            with guarded("opening a store"):
                if number == 0:
                    check_mode(folder, mode)  # before anything is written
                    make_folder(folder)
                    lock = Lock(folder, 0)
                    undo.callback(lock.release)
                    _begin(folder, kind, mode, world)
            with guarded("opening a store"):
                if number:
                    lock = Lock(folder, number)
                    undo.callback(lock.release)
                opened = _load(folder, kind, _own_manifest(folder, kind, number))
                names = {shard.name for shard in opened.of_rank(number).shards}
                remove_unfinished(folder, number, names)
            undo.pop_all()
    except OSError as error:
        raise OSError(
            error.errno,
            f"path must be a folder that can be written to, got {str(folder)!r} "
            f"({error.strerror}). Pass another one, or read with mode='read'.",
        ) from error
    opened.lock = lock
    return opened


def _begin(folder: Path, kind: AbstractKind, mode: Mode, world: int) -> None:
    """Have rank 0's manifest there."""
    found = prepare(folder, mode, kind.name)
    if found is None:
        Manifest(kind.name, world_size=world).save(folder)
    elif found.world_size < world:  # fewer go on beside the journals of those that are gone
        found.world_size = world
        found.save(folder)


def _own_manifest(folder: Path, kind: AbstractKind, number: int) -> Manifest:
    """A rank's own manifest, made where it has none yet."""
    main = _main_manifest(folder, kind)
    if number == 0:
        return main
    own = read_manifest(folder, kind.name, number)
    if own is None:
        own = Manifest(main.kind, main.run, number, main.world_size, main.dtype, main.facts)
        own.save(folder)
    _check_run(folder, main, own)
    if own.world_size != main.world_size:
        own.world_size = main.world_size
        own.save(folder)
    return own


def _main_manifest(folder: Path, kind: AbstractKind) -> Manifest:
    manifest = read_manifest(folder, kind.name)
    if manifest is None:
        raise StoreError(
            f"Rank 0 must have made the store, got {str(folder)!r} without manifest.json. Pass a "
            "folder that all processes see."
        )
    return manifest


def _check_run(folder: Path, main: Manifest, other: Manifest) -> None:
    if other.run != main.run:
        raise StoreError(
            f"All manifests must be of run {main.run!r}, got {other.run!r} for rank {other.rank} "
            f"in {str(folder)!r}. It was copied from another store: put the right one back."
        )


def _refuse_orphans(folder: Path, lying: Mapping[int, str], ranks: set[int]) -> None:
    """Refuse shards without a journal: what they hold is unknown, and it is not for deletion."""
    for number in sorted(set(lying) - ranks):
        raise StoreError(
            f"Shards must lie beside the journal that names them, got {lying[number]!r} in "
            f"{str(folder)!r} without {journal_name(number)!r}, or with one that is empty. Nothing "
            "was deleted: restore the journal, or write the store anew with mode='overwrite'."
        )


def _load(folder: Path, kind: AbstractKind, manifest: Manifest) -> Opened:
    """Read the journals of all ranks."""
    lying = shards_in(folder)  # listed first: a journal is written before its first shard
    numbers = ranks_in(folder)
    for number in numbers:
        if number >= manifest.world_size:
            raise StoreError(
                f"The journals must be of {manifest.world_size} ranks, as the manifest says, got "
                f"one of rank {number} in {str(folder)!r}. Put the right files back."
            )
    layouts = Layouts(kind)
    ranks = [read_entries(folder, manifest, number, layouts) for number in numbers]
    _refuse_orphans(folder, lying, {rank.rank for rank in ranks if rank.num_bytes})
    told: dict[str, Any] = {}
    try:
        for number in range(manifest.world_size):
            other = read_manifest(folder, kind.name, number)
            if other is not None:
                _check_run(folder, manifest, other)
                kind.merge(told, other.layers)
        lacks = kind.merge(dict(told), layouts.layers)
    except ValueError as error:
        raise StoreError(
            f"The manifest in {str(folder)!r} must describe its layers ({error}). Restore it, or "
            "write the store anew with mode='overwrite'."
        ) from error
    if lacks:
        missing = [name for name, entry in layouts.layers.items() if told.get(name) != entry]
        raise StoreError(
            f"The manifest must describe every layer of the records, got one in {str(folder)!r} "
            f"that does not: {missing[:3]}. Restore it, or write the store anew with "
            "mode='overwrite'."
        )
    layouts.layers = told
    return Opened(manifest, layouts, ranks)
