"""What a record holds: the names, dtypes and shapes of its tensors, and what they are together."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from gradtrail.errors import StoreError
from gradtrail.files import DTYPE_NAMES

__all__ = ["AbstractKind", "Layout", "Layouts", "TensorSpec", "plan_layout"]

_DTYPES = {code: dtype for dtype, code in DTYPE_NAMES.items()}
_ALIGNED = 8  # bytes: every element of a file lies at a multiple of its own size
_LARGEST = 1 << 62


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a record.

    Attributes:
        key: Its name in the record.
        dtype: Its dtype.
        shape: Its shape.
        start: Where it begins, in bytes from the record's first.
        num_bytes: Its size.
    """

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    num_bytes: int


@dataclass(frozen=True, eq=False)
class Layout:
    """What records of one form hold; records of equal layout share the object.

    Attributes:
        tensors: The tensors by key, in the order in which they lie: larger elements first.
        form: What the tensors are together, fit for JSON.
        num_bytes: Bytes of the tensors.
        padding: Bytes after them, up to a multiple of 8.
        text: The layout as JSON.
    """

    tensors: Mapping[str, TensorSpec]
    form: Any
    num_bytes: int
    padding: int
    text: str

    @property
    def stride(self) -> int:
        """Bytes from the record's first to that of the next."""
        return self.num_bytes + self.padding


def plan_layout(
    tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]], form: object
) -> Layout:
    """Lay out the tensors of a record.

    Args:
        tensors: Key, dtype and shape of each.
        form: What they are together, fit for JSON.

    Returns:
        The layout.
    """
    ordered = sorted(tensors, key=lambda entry: -entry[1].itemsize)
    start, specs = 0, {}
    for key, dtype, shape in ordered:
        size = _size(dtype, shape)
        specs[key] = TensorSpec(key, dtype, shape, start, size)
        start += size
    listed = [[spec.key, DTYPE_NAMES[spec.dtype], list(spec.shape)] for spec in specs.values()]
    text = json.dumps({"tensors": listed, "form": form}, separators=(",", ":"))
    return Layout(specs, form, start, -start % _ALIGNED, text)


class AbstractKind(ABC):
    """What one kind of store makes of its records.

    Attributes:
        name: Its name in the manifest.
    """

    name: str

    @abstractmethod
    def describe(self, layout: Layout) -> dict[str, Any]:
        """Say what a layout tells of each layer, as the manifest records it.

        A form that makes no sense raises ``ValueError``.

        Args:
            layout: The layout.

        Returns:
            A description fit for JSON, by layer name.
        """

    @abstractmethod
    def merge(self, layers: dict[str, Any], others: Mapping[str, Any]) -> bool:
        """Add what is told of layers to what is known; whether that was news.

        What contradicts each other raises ``ValueError``.

        Args:
            layers: What is known; added to.
            others: What is told.

        Returns:
            Whether it was news.
        """

    @abstractmethod
    def check_facts(self, layout: Layout, facts: Mapping[str, Any]) -> None:
        """Refuse facts of a record that this kind does not write, with a ``ValueError``."""

    @abstractmethod
    def key(self, facts: Mapping[str, Any]) -> Hashable:
        """Give what a record is looked up by."""

    @abstractmethod
    def order(self, facts: Mapping[str, Any], declared: Mapping[str, Any]) -> int:
        """Tell where a record stands among those of all ranks of a store that declared facts."""


class Layouts:
    """The layouts of a store, each kept once and checked once.

    Attributes:
        kind: What its records are.
        layers: What they tell of each layer, as the manifest has it.
    """

    kind: AbstractKind
    layers: dict[str, Any]

    def __init__(self, kind: AbstractKind) -> None:
        """Start with no layout.

        Args:
            kind: What the records are.
        """
        self.kind = kind
        self.layers = {}
        self._known: dict[str, Layout] = {}

    def check(self, layout: Layout) -> Layout:
        """Give the layout that is equal to this one and was there first, or check a new one."""
        known = self._known.get(layout.text)
        if known is None:
            told = dict(self.layers)
            self.kind.merge(told, self.kind.describe(layout))
            self._checked = layout, told
        return known or layout

    def keep(self, layout: Layout) -> None:
        """Keep the layout that was checked last, now that a record has it."""
        if layout.text not in self._known:
            checked, self.layers = self._checked
            self._known[checked.text] = checked

    def read(self, entry: object, limit: int) -> Layout:
        """Read a layout that a file holds.

        Args:
            entry: What was parsed.
            limit: Bytes that its tensors may have.

        Returns:
            The layout, shared.

        Raises:
            StoreError: If it is not one that this library writes. Nothing is allocated then.
        """
        text = json.dumps(entry, separators=(",", ":"))
        if text in self._known:
            return self._known[text]
        try:
            layout = plan_layout(_parse_tensors(entry), entry["form"])
            _check_written(layout, text, limit)
            layout = self.check(layout)
            self.keep(layout)
            return layout
        except (ValueError, TypeError, KeyError, RecursionError, RuntimeError) as error:
            raise StoreError(f"a record's layout is none of this library ({error})") from error


def _parse_tensors(entry: Any) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:  # noqa: ANN401
    """Check every type and sign of what was parsed."""
    if not isinstance(entry, dict) or set(entry) != {"tensors", "form"}:
        raise ValueError("it is no pair of tensors and form")
    found = {}
    for item in entry["tensors"]:
        key, code, shape = item
        if not isinstance(key, str) or key in found or not isinstance(shape, list):
            raise ValueError(f"tensor {key!r} is named twice or has no shape")
        if not isinstance(code, str) or code not in _DTYPES:
            raise ValueError(f"tensor {key!r} has dtype {code!r}")
        if not all(type(side) is int and 0 <= side < _LARGEST for side in shape):
            raise ValueError(f"tensor {key!r} has shape {shape}")
        found[key] = (key, _DTYPES[code], tuple(shape))
    return list(found.values())


def _check_written(layout: Layout, text: str, limit: int) -> None:
    """Refuse a layout that is laid out in another way, or larger than the file it is in."""
    if layout.num_bytes > limit:
        raise ValueError(f"{layout.num_bytes} bytes of tensors where {limit} are stored")
    if layout.text != text:
        raise ValueError("its tensors are not in the order in which they are written")


def _size(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor."""
    size = dtype.itemsize
    for side in shape:
        size *= side
    return size
