"""The manifest: what holds for a whole store, in one small JSON file, replaced as a whole."""

from __future__ import annotations

import json
import uuid
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from gradtrail.errors import StoreError
from gradtrail.files import replace_text

__all__ = [
    "FORMAT",
    "MANIFEST",
    "Manifest",
    "is_foreign",
    "is_store",
    "manifest_name",
    "read_manifest",
]

FORMAT = "gradtrail-store-1"
MANIFEST = "manifest.json"
_LARGEST = 1 << 28  # bytes of a manifest; a real one has some hundred a layer


@dataclass(eq=False)
class Manifest:
    """What holds for a whole store.

    Attributes:
        kind: ``"gradients"`` or ``"steps"``.
        run: Random id that ties journals to it.
        rank: Whose it is; that of rank 0 also holds the facts.
        world_size: Number of processes that write.
        dtype: Name of the dtype that floating tensors are cast to, or None.
        facts: What the writer declared, or None before it did.
        layers: What is known of each layer; written before the first record that has it.
        is_changed: Whether it is not yet on the disk as it is.
    """

    kind: str
    run: str = field(default_factory=lambda: uuid.uuid4().hex)
    rank: int = 0
    world_size: int = 1
    dtype: str | None = None
    facts: dict[str, Any] | None = None
    layers: dict[str, Any] = field(default_factory=dict)
    is_changed: bool = True

    def note_layers(self, layers: Mapping[str, Any]) -> None:
        """Take over what is known of each layer, to be written before the records are."""
        if layers != self.layers:
            self.layers = dict(layers)
            self.is_changed = True

    def save(self, folder: Path) -> None:
        """Write it, whole or not at all."""
        entries = {
            "format": FORMAT,
            "kind": self.kind,
            "version": _version(),
            "run": self.run,
            "rank": self.rank,
            "world_size": self.world_size,
            "dtype": self.dtype,
            "facts": self.facts,
            "layers": self.layers,
        }
        entries["crc32"] = _checksum(entries)
        replace_text(folder / manifest_name(self.rank), json.dumps(entries, indent=1) + "\n")
        self.is_changed = False


def manifest_name(rank: int) -> str:
    """Name of a rank's manifest."""
    return MANIFEST if rank == 0 else f"manifest-{rank:04d}.json"


def read_manifest(folder: Path, kind: str, rank: int = 0) -> Manifest | None:
    """Read a manifest.

    Args:
        folder: The store's folder.
        kind: The kind of store that is asked for.
        rank: Whose manifest.

    Returns:
        The manifest, or None if there is none.

    Raises:
        StoreError: If it is damaged, of another format or of another kind.
    """
    path = folder / manifest_name(rank)
    try:
        if path.stat().st_size > _LARGEST:
            raise StoreError(f"{str(path)!r} must be a manifest, got {path.stat().st_size} bytes.")
        entries = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise StoreError(
            f"{str(path)!r} must be a whole manifest, got text that cannot be read ({error}). "
            "Restore the file, or write the store anew with mode='overwrite'."
        ) from error
    found = entries.get("format") if isinstance(entries, dict) else None
    if found != FORMAT:
        raise StoreError(
            f"{str(path)!r} must be a manifest of format {FORMAT!r}, got {found!r}. Read it with "
            "the version of the library that wrote it."
        )
    if entries.pop("crc32", None) != _checksum(entries):
        raise StoreError(
            f"{str(path)!r} must be as it was written, got another checksum. Restore the file, or "
            "write the store anew with mode='overwrite'."
        )
    _check_entries(path, entries, rank)
    if entries["kind"] != kind:
        raise StoreError(
            f"path must hold a store of {kind}, got one of {entries['kind']} in {str(folder)!r}. "
            "Open it with the class that wrote it, or pass another folder."
        )
    names = ("kind", "run", "rank", "world_size", "dtype", "facts", "layers")
    return Manifest(**{name: entries[name] for name in names}, is_changed=False)


def _check_entries(path: Path, entries: Mapping[str, Any], rank: int) -> None:
    """Refuse entries that are missing or of another type."""
    wanted = {
        "kind": lambda value: isinstance(value, str),
        "run": lambda value: isinstance(value, str),
        "rank": lambda value: type(value) is int and value == rank,
        "world_size": lambda value: type(value) is int and 1 <= value <= 10_000,
        "dtype": lambda value: value in {None, "float32", "bfloat16", "float16"},
        "facts": lambda value: value is None or isinstance(value, dict),
        "layers": lambda value: isinstance(value, dict),
    }
    for name, is_right in wanted.items():
        try:
            right = name in entries and is_right(entries[name])
        except TypeError:  # a value that cannot be looked up
            right = False
        if not right:
            raise StoreError(
                f"{str(path)!r} must have a proper {name!r}, got {entries.get(name)!r}. Restore "
                "the file, or write the store anew with mode='overwrite'."
            )


def _checksum(entries: Mapping[str, Any]) -> int:
    """CRC-32 of the entries as compact JSON with sorted names."""
    return zlib.crc32(json.dumps(entries, separators=(",", ":"), sort_keys=True).encode())


def is_foreign(folder: Path) -> bool:
    """Whether a folder's manifest is whole, and of something else than a store."""
    return _is_ours(folder) is False


def is_store(folder: Path) -> bool:
    """Whether a folder's manifest is whole, and of a store."""
    return _is_ours(folder) is True


def _is_ours(folder: Path) -> bool | None:
    """Whether a manifest is of a store, of whatever format; None where none can be read."""
    try:
        entries = json.loads((folder / MANIFEST).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    found = entries.get("format") if isinstance(entries, dict) else None
    return isinstance(found, str) and found.startswith("gradtrail-store-")


def _version() -> str:
    try:
        return version("gradtrail")
    except PackageNotFoundError:
        return "unknown"
