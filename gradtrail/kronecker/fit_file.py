"""The file of a persisted fit: one safetensors file, written under another name and renamed.

The header's metadata records what defines the fit, so that a fit of other weights, data or
options is refused with both values.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gradtrail.errors import CurvatureError
from gradtrail.files import crc32, tensor_bytes, write_tensors
from gradtrail.kronecker.fit import KroneckerFit, LayerRecord, Tensors

__all__ = ["FIT_FILE", "load_fit", "save_fit", "signature"]

FIT_FILE = "fit.safetensors"
_FORMAT = "gradtrail-fit-1"
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
    tensors = _Tensors(fit, keys)
    write_tensors(directory / FIT_FILE, tensors, _metadata(fit, tensors, damping))


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


class _Tensors(Mapping[str, Tensor]):
    """The tensors of a fit, each brought to the host when it is asked for."""

    def __init__(self, fit: KroneckerFit, keys: Sequence[str]) -> None:
        self._fit, self._keys = fit, keys

    def __getitem__(self, key: str) -> Tensor:
        return self._fit.tensors.get(key, "cpu")

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


def _metadata(
    fit: KroneckerFit, tensors: Mapping[str, Tensor], damping: Mapping[str, Any]
) -> dict[str, str]:
    """What defines the fit, what is held of each layer, and a checksum of each tensor."""
    checksums = {key: crc32(tensor_bytes(tensor)) for key, tensor in tensors.items()}
    records = {
        name: {
            "kind": record.kind,
            "keys": dict(record.keys),
            "num_positions": record.num_positions,
        }
        for name, record in fit.records.items()
    }
    return {
        "format": _FORMAT,
        "method": fit.method,
        "num_examples": str(fit.num_examples),
        "definition": json.dumps(fit.definition),
        "damping": json.dumps(dict(damping)),
        "records": json.dumps(records),
        "checksums": json.dumps(checksums),
    }


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
    if crc32(tensor_bytes(tensor)) != expected:
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
