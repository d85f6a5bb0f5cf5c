"""Finding the tensors in whatever a module returns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

__all__ = ["tensors_in"]


def tensors_in(value: Any) -> Iterator[Tensor]:  # noqa: ANN401
    """Walk through mappings, tuples, lists and dataclasses.

    Args:
        value: What a module returned.

    Yields:
        Every tensor in it.
    """
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from tensors_in(entry)
    elif isinstance(value, (tuple, list)):
        for entry in value:
            yield from tensors_in(entry)
    elif is_dataclass(value) and not isinstance(value, type):
        for entry in fields(value):
            yield from tensors_in(getattr(value, entry.name))
