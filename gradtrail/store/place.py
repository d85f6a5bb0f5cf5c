"""The folder of a store: who may write to it, what lies in it, and what a mode does to that."""

from __future__ import annotations

import os
import re
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Literal, get_args

from gradtrail.errors import StoreError
from gradtrail.files import sync_folder
from gradtrail.store.manifest import MANIFEST, Manifest, is_foreign, read_manifest

try:
    import fcntl
except ImportError:  # a system without it has no way to tell two writers apart
    fcntl = None

__all__ = [
    "MODES",
    "SHARD_NAME",
    "Lock",
    "Mode",
    "attachment_name",
    "check_mode",
    "make_folder",
    "prepare",
    "remove_folder",
    "remove_unfinished",
    "ranks_in",
    "remove_store",
    "shard_name",
    "shards_in",
    "temporary_folder",
]

Mode = Literal["create", "resume", "overwrite", "read"]
MODES: tuple[Mode, ...] = get_args(Mode)

SHARD_NAME = re.compile(r"\d{4}-\d{6}\.safetensors", re.ASCII)
_ATTACHMENT = re.compile(r"[a-z][a-z0-9_]{0,63}", re.ASCII)
_MANIFEST = re.compile(r"manifest(-\d{4})?\.json", re.ASCII)
_JOURNAL = re.compile(r"journal-(\d{4})\.jsonl", re.ASCII)
_STORED = re.compile(
    r"manifest(-\d{4})?\.json|journal-\d{4}\.jsonl|\d{4}-\d{6}\.safetensors"
    r"|attached-[a-z][a-z0-9_]{0,63}\.safetensors",
    re.ASCII,
)
_UNFINISHED = re.compile(rf"({_STORED.pattern})(\.new|\.[0-9a-f]+)?\.tmp", re.ASCII)
_OWNER = re.compile(r"(?:manifest-)?(\d{4})[-.]", re.ASCII)
_LOCK = re.compile(r"\.lock(-\d{4})?", re.ASCII)


def shard_name(rank: int, number: int) -> str:
    """Name of a rank's shard."""
    return f"{rank:04d}-{number:06d}.safetensors"


def attachment_name(name: str) -> str:
    """Name of the file of tensors that are attached to a store.

    Args:
        name: What they are called.

    Returns:
        The file's name.

    Raises:
        ValueError: If ``name`` is none that a file may have.
    """
    if not isinstance(name, str) or _ATTACHMENT.fullmatch(name) is None:
        raise ValueError(
            f"name must be lower-case letters, digits and underscores, got {name!r}. Pass one like "
            "'covariances'."
        )
    return f"attached-{name}.safetensors"


def ranks_in(folder: Path) -> list[int]:
    """Ranks whose journals lie in a folder, ascending."""
    found = (_JOURNAL.fullmatch(name) for name in _names(folder))
    return sorted(int(match[1]) for match in found if match)


def shards_in(folder: Path) -> dict[int, str]:
    """One of the shards that lie in a folder, of each rank that has any."""
    return {int(name[:4]): name for name in _names(folder) if SHARD_NAME.fullmatch(name)}


def make_folder(folder: Path) -> None:
    """Make a folder and those above it that are missing, so that a power failure keeps them."""
    missing = [place for place in (folder, *folder.parents) if not place.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for place in missing:
        sync_folder(place.parent)


def temporary_folder() -> Path:
    """Make a new folder of the system's temporary ones."""
    return Path(tempfile.mkdtemp(prefix="gradtrail-"))


class Lock:
    """The right to write to a folder as one rank; it goes with the process that has it.

    A forked child lets its copy go, so that one that lives on does not keep the lock.
    """

    _held: weakref.WeakSet[Lock] = weakref.WeakSet()

    def __init__(self, folder: Path, rank: int) -> None:
        """Take it.

        Args:
            folder: The store's folder.
            rank: As which rank.

        Raises:
            StoreError: If another writer has it.
        """
        path = folder / (f".lock-{rank:04d}" if rank else ".lock")
        self._number = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666)
        try:
            if fcntl is not None:
                fcntl.flock(self._number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.release()
            raise StoreError(
                f"path must have one writer, got {str(folder)!r}, which another writer has open. "
                "Wait for it or end it, or read with mode='read'."
            ) from error
        self._held.add(self)

    @classmethod
    def forget(cls) -> None:
        """Release the locks of the parent, in a child that was forked."""
        for lock in list(cls._held):
            lock.release()

    def release(self) -> None:
        """Give it back. Twice is fine."""
        if self._number >= 0:
            os.close(self._number)
        self._number = -1


def prepare(folder: Path, mode: Mode, kind: str) -> Manifest | None:
    """Bring a folder into the state that a mode begins with; its lock is held.

    Args:
        folder: The store's folder.
        mode: ``"create"``, ``"resume"`` or ``"overwrite"``.
        kind: Kind of the store.

    Returns:
        The manifest of the store that goes on, or None where a new one begins.
    """
    check_mode(folder, mode)
    if mode == "overwrite":
        remove_store(folder)
        return None
    return read_manifest(folder, kind) if mode == "resume" else None


def check_mode(folder: Path, mode: Mode) -> None:
    """Refuse a folder whose files a mode does not allow; nothing is written.

    Args:
        folder: The store's folder.
        mode: ``"create"``, ``"resume"`` or ``"overwrite"``.

    Raises:
        StoreError: If it does not.
    """
    names = _names(folder)
    stored = [name for name in names if _STORED.fullmatch(name)]
    if mode == "overwrite" and is_foreign(folder):
        raise StoreError(
            f"path must hold a store, or none, with mode='overwrite', got {str(folder)!r} with a "
            "manifest.json of something else. Pass another folder."
        )
    others = [n for n in names if not (_LOCK.fullmatch(n) or _UNFINISHED.fullmatch(n))]
    if mode == "overwrite" and others and MANIFEST not in stored:
        _check_own(folder, others)
    if mode == "resume" and stored and MANIFEST not in stored:
        raise StoreError(
            f"path must hold a store with its manifest, got {str(folder)!r} with {stored[0]!r} "
            "and no manifest.json. Restore it, or write anew with mode='overwrite'."
        )
    if mode != "create":
        return
    if stored:
        raise StoreError(
            f"path must hold no store with mode='create', got {str(folder)!r} with {stored[-1]!r}. "
            "Pass mode='resume' to go on with it, mode='overwrite' to write it anew, or another "
            "folder."
        )
    if others:
        raise StoreError(
            f"path must be a new or an empty folder with mode='create', got {str(folder)!r} with "
            f"{others[0]!r} in it. Pass another folder."
        )


def _check_own(folder: Path, names: list[str]) -> None:
    """Refuse to delete files of which nothing says that a store wrote them."""
    foreign = [name for name in names if _STORED.fullmatch(name) is None]
    if foreign or not any(_JOURNAL.fullmatch(name) for name in names):
        raise StoreError(
            "path must hold a store, or be a new or an empty folder, with mode='overwrite', got "
            f"{str(folder)!r} with {(foreign or names)[0]!r} and no manifest.json. Nothing was "
            "deleted: pass another folder, or empty this one yourself."
        )


def remove_unfinished(folder: Path, rank: int, journalled: set[str]) -> None:
    """Delete what a killed writer of this rank left: temporary files and unjournalled shards."""
    for name in _names(folder):
        owner = _OWNER.match(name)
        if (int(owner[1]) if owner else 0) != rank:
            continue
        is_lost = SHARD_NAME.fullmatch(name) is not None and name not in journalled
        if is_lost or _UNFINISHED.fullmatch(name) is not None:
            (folder / name).unlink(missing_ok=True)


def remove_store(folder: Path) -> None:
    """Delete a store's own files so that whoever is killed meanwhile leaves an empty store.

    At no time a journal names what is gone, a shard lies there without its journal, or anything
    without the manifest.

    Args:
        folder: The store's folder.
    """
    names = [n for n in _names(folder) if _STORED.fullmatch(n) or _UNFINISHED.fullmatch(n)]
    journals = [name for name in names if _JOURNAL.fullmatch(name)]
    manifests = [name for name in names if _MANIFEST.fullmatch(name)]
    for name in journals:
        _keep_first_line(folder / name)
    first = [name for name in names if name not in {*journals, *manifests}]
    for name in [*first, *journals, *manifests]:  # that of rank 0 is the last of these
        (folder / name).unlink(missing_ok=True)


def _keep_first_line(journal: Path) -> None:
    """Have a journal name no shard any more."""
    with journal.open("r+b") as file:
        file.truncate(len(file.readline()))


def remove_folder(folder: Path, owner: int) -> None:
    """Delete a temporary folder's store, then the folder if that leaves it empty."""
    if os.getpid() != owner:
        return  # a forked child holds a copy of the object, not of the files
    with suppress(OSError):
        remove_store(folder)
        for name in _names(folder):
            if _LOCK.fullmatch(name):
                (folder / name).unlink(missing_ok=True)
        folder.rmdir()


def _names(folder: Path) -> list[str]:
    """Names in a folder; none where there is no folder."""
    try:
        return sorted(os.listdir(folder))  # noqa: PTH208  # names are wanted, not paths
    except FileNotFoundError:
        return []


if os.name == "posix":
    os.register_at_fork(after_in_child=Lock.forget)
