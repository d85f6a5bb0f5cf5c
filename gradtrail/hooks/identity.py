"""Telling examples apart by content: a hash that does not depend on padding.

The hash of a row of a padded batch equals that of the raw item. Fields are separated and typed in
the digest, so no two different examples are confused by how their bytes happen to join.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields as dataclass_fields
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor

from gradtrail.hooks.tensors import tensors_in

__all__ = ["batch_ids", "call_fields", "example_id"]

_MASK = "attention_mask"


def example_id(item: Mapping[str, Any] | Tensor, fields: Iterable[str] | None = None) -> str:
    """Hash one raw item.

    Args:
        item: Fields by name (tensors, numbers, lists of numbers; others are ignored), or a tensor.
        fields: Names of the fields that count; None means all.

    Returns:
        32 hexadecimal digits, equal to the id of the item's row in any padded batch.
    """
    named = item if isinstance(item, Mapping) else {"0": item}
    tensors = {name: _as_tensor(value) for name, value in named.items()}
    batch = {name: value.unsqueeze(0) for name, value in tensors.items() if value is not None}
    return batch_ids(batch, 1, fields)[0]


def call_fields(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Name what a call was given.

    Args:
        args: Positional arguments.
        kwargs: Keyword arguments.

    Returns:
        By keyword or position; what a mapping or a dataclass holds by its own keys, what a
        sequence with tensors holds by position and place.
    """
    named = [*((str(place), value) for place, value in enumerate(args)), *kwargs.items()]
    fields: dict[str, Any] = {}
    for name, value in named:
        fields.update(_opened(name, value))
    return fields


def _opened(name: str, value: Any) -> dict[str, Any]:  # noqa: ANN401
    """Look into structures, at any depth."""
    if isinstance(value, Mapping):
        inside = {str(key): entry for key, entry in value.items()}
    elif is_dataclass(value) and not isinstance(value, type):
        inside = {field.name: getattr(value, field.name) for field in dataclass_fields(value)}
    elif isinstance(value, (tuple, list)) and any(True for _ in tensors_in(value)):
        inside = {f"{name}.{place}": entry for place, entry in enumerate(value)}
    else:
        return {name: value}
    found: dict[str, Any] = {}
    for key, entry in inside.items():
        found.update(_opened(key, entry))
    return found


def batch_ids(
    batch: Mapping[str, Any], size: int, fields: Iterable[str] | None = None
) -> tuple[str, ...]:
    """Hash every row of a batch.

    Args:
        batch: Fields by name; those that are no tensors with ``size`` rows are ignored.
        size: Number of rows.
        fields: Names of the fields that count; None means all.

    Returns:
        One id a row. With an ``attention_mask`` only its unmasked positions count in fields of
        its length, and the mask itself is left out.

    Raises:
        KeyError: If a named field is missing.
    """
    rows = {
        name: value.detach()
        for name, value in batch.items()
        if isinstance(value, Tensor) and value.dim() and value.shape[0] == size
    }
    wanted = sorted(rows) if fields is None else list(fields)
    missing = [name for name in wanted if name not in rows]
    if missing:
        raise KeyError(
            f"sample_hash_fields must name arguments of every step, got {missing} beside "
            f"{sorted(rows)}. Name fields that each forward receives."
        )
    mask = rows.get(_MASK)
    mask = mask.cpu() != 0 if mask is not None and mask.dim() == 2 else None
    chosen = [(name, rows[name].cpu().contiguous()) for name in sorted(wanted) if name != _MASK]
    return tuple(_digest(chosen, mask, row) for row in range(size))


def _digest(fields: Sequence[tuple[str, Tensor]], mask: Tensor | None, row: int) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name, values in fields:
        value = values[row]
        if mask is not None and value.dim() and value.shape[0] == mask.shape[1]:
            value = value[mask[row]]
        head = f"{name}\x1f{value.dtype}\x1f{tuple(value.shape)}\x1e".encode()
        digest.update(len(head).to_bytes(4, "little") + head)
        digest.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _as_tensor(value: Any) -> Tensor | None:  # noqa: ANN401
    """Make a tensor of a number or a list of numbers; None of anything else."""
    if isinstance(value, Tensor):
        return value
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        return None
