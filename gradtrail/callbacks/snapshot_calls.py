"""The arguments of a model's call, taken apart into tensors and what JSON can hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["pack", "unpack"]


def pack(value: Any, path: str, tensors: dict[str, Tensor]) -> dict[str, Any]:  # noqa: ANN401
    """Copy an argument, at any depth.

    Args:
        value: A tensor, number, text or None, or a list, tuple or mapping of these.
        path: The argument's name, under which its tensors go.
        tensors: Receives copies of them, on the CPU.

    Returns:
        What JSON can hold, with the names of the tensors in their places.

    Raises:
        TypeError: If there is anything else.
    """
    if isinstance(value, Tensor) and value.layout == torch.strided:
        tensors[path] = value.detach().to("cpu", copy=True)
        return {"tensor": path, "on_device": value.device.type != "cpu"}
    if value is None or isinstance(value, (bool, int, float, str)):
        return {"value": value}
    if isinstance(value, Mapping) and all(isinstance(key, (str, int)) for key in value):
        entries = [[key, pack(entry, f"{path}.{key}", tensors)] for key, entry in value.items()]
        return {"mapping": entries}
    if type(value) in (list, tuple):
        entries = [pack(entry, f"{path}.{place}", tensors) for place, entry in enumerate(value)]
        return {"sequence": entries, "is_tuple": isinstance(value, tuple)}
    raise TypeError(
        "A model's arguments must be tensors, numbers, texts, None, or lists, tuples and mappings "
        f"of these to be recorded, got {type(value).__name__} for {path}. Call it without."
    )


def unpack(packed: Mapping[str, Any], tensors: Mapping[str, Tensor], device: torch.device) -> Any:  # noqa: ANN401
    """Put an argument together again.

    Args:
        packed: As ``pack`` gave it.
        tensors: The tensors, by name.
        device: Where those go that were not on the CPU.

    Returns:
        The argument; a mapping of any kind comes back as a ``dict``.
    """
    if "tensor" in packed:
        value = tensors[packed["tensor"]]
        # a copy: the store's own is mapped read-only, and models may write to their input
        return value.to(device if packed["on_device"] else "cpu", copy=True)
    if "mapping" in packed:
        return {key: unpack(entry, tensors, device) for key, entry in packed["mapping"]}
    if "sequence" in packed:
        entries = [unpack(entry, tensors, device) for entry in packed["sequence"]]
        return tuple(entries) if packed["is_tuple"] else entries
    return packed["value"]
