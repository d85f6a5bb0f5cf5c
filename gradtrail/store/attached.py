"""Named tensors beside the records of a store: small safetensors files, replaced as a whole."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from gradtrail.errors import StoreError
from gradtrail.files import DTYPE_NAMES, crc32, tensor_bytes, write_tensors
from gradtrail.store.place import attachment_name

__all__ = ["attached_files", "read_attached", "write_attached"]

_SUM = "gradtrail_crc32"


def write_attached(
    folder: Path, name: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> None:
    """Keep tensors in a folder under a name, in place of what it held before.

    Args:
        folder: The store's folder.
        name: Lower-case letters, digits and underscores.
        tensors: The tensors.
        metadata: Strings to record with them.
    """
    noted = {**metadata, _SUM: str(_checksum(tensors, metadata))}
    write_tensors(folder / attachment_name(name), tensors, noted)


def read_attached(folder: Path, name: str) -> tuple[dict[str, Tensor], dict[str, str]] | None:
    """Give what was attached under a name.

    Args:
        folder: The store's folder.
        name: Its name.

    Returns:
        Tensors and metadata; None if there is nothing.
    """
    path = folder / attachment_name(name)
    return _read(path) if path.exists() else None


def attached_files(folder: Path) -> dict[str, Callable[[], object]]:
    """What reads each attached file and compares it with its checksum, by the file's name."""
    paths = sorted(folder.glob("attached-*.safetensors"))
    return {path.name: partial(_read, path) for path in paths}


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read a file and compare it with its checksum."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata() or {})
            tensors = {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118  # no mapping
    except (SafetensorError, OSError) as error:
        raise StoreError(f"{str(path)!r} must be a whole file, got {error}. Restore it.") from error
    expected = metadata.pop(_SUM, None)
    if expected != str(_checksum(tensors, metadata)):
        raise StoreError(
            f"{str(path)!r} must be as it was written, got another checksum than {expected}. "
            "Restore it, or delete it and compute it again."
        )
    return tensors, metadata


def _checksum(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> int:
    """CRC-32 of everything in a file but its own entry, tensors by name."""
    names = sorted(tensors)
    described = [
        [name, DTYPE_NAMES[tensors[name].dtype], list(tensors[name].shape)] for name in names
    ]
    crc = crc32(json.dumps([sorted(metadata.items()), described]).encode())
    for name in names:
        crc = crc32(tensor_bytes(tensors[name]), crc)
    return crc
