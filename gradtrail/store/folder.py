"""A folder of one owner: tensors as safetensors files that are gone when the owner is."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

__all__ = ["PrivateFolder"]

_KEY = "tensor"
_HEADER = 4096  # more than the header of a file with one tensor, in whole blocks of the disk


class PrivateFolder:
    """Files with one tensor each, in a new folder that nobody else writes to.

    The folder and its files go when it is closed, when it is forgotten and when the interpreter
    ends; a process killed outright leaves them. Only files written here are deleted, and the
    folder only if nothing else lies in it.
    """

    def __init__(self, parent: str | Path | None) -> None:
        """Make the folder.

        Args:
            parent: Where; it is made if it is missing. None: the system's temporary folder.

        Raises:
            OSError: If no folder can be made there.
        """
        try:
            if parent is not None:
                Path(parent).mkdir(parents=True, exist_ok=True)
            self.path = Path(tempfile.mkdtemp(prefix="gradtrail-", dir=parent))
        except OSError as error:
            raise OSError(
                error.errno,
                f"directory must be a folder that can be written to, got {str(parent)!r} "
                f"({error.strerror}). Name another one, or keep the tensors in memory.",
            ) from error
        self._files: set[Path] = set()
        self._next = 0
        self._owner = os.getpid()
        self._finalizer = weakref.finalize(self, _remove, self.path, self._files, self._owner)

    def write(self, name: str, tensor: Tensor) -> Path:
        """Write a contiguous CPU tensor to a file of its own.

        Args:
            name: What the tensor is called, for messages.
            tensor: The tensor; its dtype is among ``FILE_DTYPES``.

        Returns:
            Path of the file, which is whole.

        Raises:
            RuntimeError: If this is a fork of the process that made the folder.
            OSError: If it cannot be written. Then no part of it is left.
        """
        if os.getpid() != self._owner:
            raise RuntimeError(
                f"{name!r} must be written by the process that made the cache, got a fork of it. "
                "Make a cache in the new process."
            )
        path = self.path / f"{self._next:06d}.safetensors"
        self._next += 1
        unfinished = path.with_suffix(".tmp")
        self._files.add(unfinished)
        try:
            save_file({_KEY: tensor}, unfinished)
            self._files.add(path)
            unfinished.replace(path)
        except (OSError, SafetensorError) as error:
            raise OSError(
                getattr(error, "errno", None) or errno.EIO,
                f"{name!r} ({tensor.nbytes} bytes) could not be written to {str(self.path)!r}: "
                f"{error}. What was stored before is still there. Name a directory that can be "
                "written to and has room.",
            ) from error
        finally:
            self._drop(unfinished)
        return path

    def read(self, name: str, path: Path) -> Tensor:
        """Read a file back into memory of its own.

        Args:
            name: What the tensor is called, for messages.
            path: What ``write`` returned.

        Returns:
            The tensor, on the CPU; not a view of the file.

        Raises:
            OSError: If the file is gone or damaged.
        """
        try:
            with safe_open(path, framework="pt") as file:
                return file.get_tensor(_KEY).clone()
        except (OSError, SafetensorError) as error:
            raise OSError(
                getattr(error, "errno", None) or errno.EIO,
                f"{name!r} could not be read from {str(path)!r}: {error}. Something else changed "
                "the folder. Compute the tensor again and put it once more.",
            ) from error

    def check_room(self, name: str, num_bytes: int) -> None:
        """Refuse what the disk has no room for, before anything is written.

        Args:
            name: What the tensor is called.
            num_bytes: Its size.

        Raises:
            OSError: If the disk has too little room.
        """
        free = shutil.disk_usage(self.path).free
        if num_bytes + _HEADER > free:
            raise OSError(
                errno.ENOSPC,
                f"{name!r} must fit on the disk, got {num_bytes} bytes where "
                f"{str(self.path.parent)!r} has {free} free. Name a directory on a larger disk, "
                "or keep fewer or smaller layers. What was stored before is still there.",
            )

    def remove(self, path: Path) -> None:
        """Delete one file that was written here."""
        if path in self._files and os.getpid() == self._owner:
            self._drop(path)

    def close(self) -> None:
        """Delete the files and the folder. Closing twice is fine."""
        self._finalizer()

    def _drop(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self._files.discard(path)


def _remove(folder: Path, files: set[Path], owner: int) -> None:
    """Delete a folder's own files, then the folder if that leaves it empty."""
    if os.getpid() != owner:
        return  # a forked child holds a copy of the object, not of the files
    for path in files:
        with suppress(OSError):
            path.unlink()
    files.clear()
    with suppress(OSError):
        folder.rmdir()
