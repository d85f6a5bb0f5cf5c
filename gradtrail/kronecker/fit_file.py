"""The file of a persisted fit: one safetensors file, written under another name and renamed.

The header's metadata records what defines the fit, so that a fit of other weights, data or
options is refused with both values.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gradtrail.errors import CurvatureError
from gradtrail.kronecker.fit import KroneckerFit, LayerRecord, Tensors

__all__ = ["FIT_FILE", "load_fit", "save_fit", "signature"]

FIT_FILE = "fit.safetensors"
_FORMAT = "gradtrail-fit-1"
_DTYPES = {torch.float32: "F32", torch.float64: "F64"}
_ROLES = {
    "kfac": {"activation_cov", "gradient_cov"},
    "ekfac": {"activation_basis", "gradient_basis", "eigenvalues"},
    "dense": {"fisher"},
    "diagonal": {"squares"},
}


def save_fit(fit: KroneckerFit, directory: Path, damping: Mapping[str, Any]) -> None:
    """Write a fit, one tensor at a time.

    Args:
        fit: The fit.
        directory: Where to; made if it does not exist.
        damping: Damping the fit was made for, recorded only: it is applied after loading.
    """
    directory.mkdir(parents=True, exist_ok=True)
    keys = list(dict.fromkeys(key for r in fit.records.values() for key in r.keys.values()))
    header = _header(fit, keys, damping)
    rank = torch.distributed.get_rank() if _is_distributed() else 0
    temporary = directory / f".{FIT_FILE}.{rank}.{os.getpid()}"
    try:
        with temporary.open("wb") as file:
            text = json.dumps(header).encode()
            text += b" " * (-len(text) % 8)  # tensors start at a multiple of 8 bytes
            file.write(len(text).to_bytes(8, "little"))
            file.write(text)
            for key in keys:
                file.write(_bytes_of(fit.tensors.get(key, "cpu")))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(directory / FIT_FILE)
    finally:
        temporary.unlink(missing_ok=True)


def load_fit(
    directory: Path, definition: Mapping[str, str], tensors: Tensors, device: torch.device
) -> KroneckerFit:
    """Read a fit back, after a check that it is the one that is asked for.

    Args:
        directory: Where it lies.
        definition: What must define it.
        tensors: Where its tensors go.
        device: Where layers are brought to be used.

    Returns:
        The fit.

    Raises:
        CurvatureError: If the file is damaged.
    """
    path = directory / FIT_FILE
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            _check_definition(path, metadata, definition)
            fit = KroneckerFit(
                metadata["method"],
                tensors,
                device,
                int(metadata["num_examples"]),
                json.loads(metadata["definition"]),
                _records(metadata["records"]),
            )
            checksums = json.loads(metadata["checksums"])
            names = {key for record in fit.records.values() for key in record.keys.values()}
            for key in file.keys():  # noqa: SIM118  # a method of the file, which is no mapping
                if key in names:
                    tensor = file.get_tensor(key)
                    _check_sum(key, tensor, checksums[key])
                    tensors.put(key, tensor)
                    names.remove(key)
    except (SafetensorError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise CurvatureError(
            f"fisher_dir must hold a whole fit, got a damaged {path} ({error}). Delete the file to "
            "fit again."
        ) from error
    if names:
        raise CurvatureError(
            f"fisher_dir must hold a whole fit, got {path} without {sorted(names)[:3]}. Delete the "
            "file to fit again."
        )
    return fit


def signature(directory: Path) -> tuple[int, int, int] | None:
    """Tell one state of a fit's file from another: inode, size and time, or None without one."""
    try:
        state = (directory / FIT_FILE).stat()
    except FileNotFoundError:
        return None
    return state.st_ino, state.st_size, state.st_mtime_ns


def _header(fit: KroneckerFit, keys: Sequence[str], damping: Mapping[str, Any]) -> dict[str, Any]:
    """The file's header: what defines the fit, and where each tensor lies."""
    entries: dict[str, Any] = {}
    checksums: dict[str, int] = {}
    offset = 0
    for key in keys:
        tensor = fit.tensors.get(key, "cpu")
        stop = offset + tensor.nbytes
        entries[key] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, stop],
        }
        checksums[key] = zlib.crc32(_bytes_of(tensor))
        offset = stop
        del tensor
    records = {
        name: {
            "kind": record.kind,
            "keys": dict(record.keys),
            "num_positions": record.num_positions,
        }
        for name, record in fit.records.items()
    }
    metadata = {
        "format": _FORMAT,
        "method": fit.method,
        "num_examples": str(fit.num_examples),
        "definition": json.dumps(fit.definition),
        "damping": json.dumps(dict(damping)),
        "records": json.dumps(records),
        "checksums": json.dumps(checksums),
    }
    return {"__metadata__": metadata, **entries}


def _records(text: str) -> dict[str, LayerRecord]:
    """Read what is held of each layer."""
    found = {}
    for name, entry in json.loads(text).items():
        if set(entry["keys"]) != _ROLES[entry["kind"]]:
            raise ValueError(f"{name} holds {sorted(entry['keys'])} as {entry['kind']!r}")
        found[name] = LayerRecord(entry["kind"], entry["keys"], entry["num_positions"])
    return found


def _check_sum(key: str, tensor: Tensor, expected: int) -> None:
    """Refuse a tensor that is not the one that was written."""
    if zlib.crc32(_bytes_of(tensor)) != expected:
        raise ValueError(f"{key} is not what was written")


def _check_definition(
    path: Path, metadata: Mapping[str, str], definition: Mapping[str, str]
) -> None:
    """Refuse a fit that something else defines."""
    if metadata.get("format") != _FORMAT:
        raise CurvatureError(
            f"fisher_dir must hold a fit of format {_FORMAT}, got {metadata.get('format')!r} in "
            f"{path}. Pass another folder."
        )
    found = json.loads(metadata["definition"])
    for name in dict.fromkeys([*definition, *found]):
        if found.get(name) != definition.get(name):
            raise CurvatureError(
                f"fisher_dir must hold a fit of this {name}: {_short(definition.get(name))}, got "
                f"{_short(found.get(name))} in {path}. Pass another folder, or delete the file to "
                "fit again."
            )


def _short(value: str | None) -> str:
    text = repr(value)
    return text if len(text) <= 300 else f"{text[:140]} ... {text[-140:]}"


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else memoryview(b"")


def _is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
