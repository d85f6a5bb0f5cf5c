"""What a store of gradients declares of itself, of its blocks and of its layers."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from gradtrail.errors import StoreError
from gradtrail.options import check_choice, near_names

__all__ = [
    "BlockRecord",
    "LayerFacts",
    "StoreFacts",
    "check_same",
    "make_facts",
    "place_of",
    "read_facts",
    "read_layer",
    "records_digest",
    "refuse_differing",
]

_NAMED = 2  # differing facts that are named after the first
_SHOWN = 80  # characters of a value in a message
_SCHEME = re.compile(r"index|content(:.+)?|key:.+", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class StoreFacts:
    """What a store's gradients are of: everything that a later capture must agree with.

    Attributes:
        id_scheme: ``"index"`` (rows of a data set), ``"key:<field>"`` (a field of the batch),
            ``"content"`` or ``"content:<fields>"`` (a hash of the example).
        recording: ``"per_example"`` or ``"per_block"``.
        capture: ``"factored"``, ``"materialized"`` or ``"auto"``.
        projection: Compression of every layer, with its kind, dim and seed, or None.
        loss_reduction: How the loss was reduced, or None.
        loss: Which loss, or None.
        checkpoint_digest: Digest of the weights, or None where they changed.
        data_digest: Digest of the data, or None.
        extra: Anything else that a capture must agree with.
    """

    id_scheme: str
    recording: str = "per_example"
    capture: str = "factored"
    projection: Mapping[str, Any] | None = None
    loss_reduction: str | None = None
    loss: str | None = None
    checkpoint_digest: str | None = None
    data_digest: str | None = None
    extra: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the choices.

        Raises:
            ValueError: If a fact is none that a store may have.
        """
        if not isinstance(self.id_scheme, str) or _SCHEME.fullmatch(self.id_scheme) is None:
            raise ValueError(
                "id_scheme must be 'index', 'key:<field>', 'content' or 'content:<fields>', got "
                f"{self.id_scheme!r}."
            )
        check_choice("recording", self.recording, ("per_example", "per_block"))
        check_choice("capture", self.capture, ("factored", "materialized", "auto"))
        for name in ("loss_reduction", "loss", "checkpoint_digest", "data_digest"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise ValueError(f"{name} must be a str or None, got {value!r}.")
        if self.projection is not None and not _is_projection(self.projection):
            raise ValueError(
                "projection must be a mapping of kind, dim and seed or None, got "
                f"{self.projection!r}."
            )
        pairs = self.extra.items() if isinstance(self.extra, Mapping) else [(None, None)]
        if not all(isinstance(text, str) for pair in pairs for text in pair):
            raise ValueError(f"extra must be a mapping of str to str, got {self.extra!r}.")


@dataclass(frozen=True)
class BlockRecord:
    """One stored block, without its gradients.

    Attributes:
        step: Its step.
        ids: One id an example.
        meta: What was recorded with it.
        num_bytes: Bytes of its tensors.
        number: Row of its first example, in store order.
    """

    step: int
    ids: tuple[int | str, ...]
    meta: Mapping[str, Any] | None
    num_bytes: int
    number: int


@dataclass(frozen=True)
class LayerFacts:
    """What a store knows of a layer.

    Attributes:
        kinds: Forms that its gradients have: ``"linear"``, ``"embedding"``, ``"scale"``,
            ``"dense"``, ``"sum"``.
        shape: Shape of its weight, as ``DenseGradient.shape``.
        has_bias: Whether bias entries belong to its gradient.
        groups: Groups of its factors.
        sides: Outputs ``o`` and inputs ``i`` of its factors, all groups together and without the
            bias's constant; None where no form is affine in the weight, or its uses differ.
    """

    kinds: tuple[str, ...]
    shape: tuple[int, ...]
    has_bias: bool
    groups: int
    sides: tuple[int, int] | None


def _is_projection(value: object) -> bool:
    """Whether this says how a projection was drawn."""
    if not isinstance(value, Mapping) or not {"kind", "dim", "seed"} <= set(value):
        return False
    return isinstance(value["kind"], str) and type(value["dim"]) is type(value["seed"]) is int


def make_facts(entries: Mapping[str, Any]) -> StoreFacts:
    """Make facts of keyword arguments.

    Args:
        entries: Facts by name.

    Returns:
        The facts, as they come back from JSON.

    Raises:
        TypeError: If there is no such fact, or one does not fit JSON.
    """
    names = [entry.name for entry in fields(StoreFacts)]
    for name in entries:
        if name not in names:
            raise TypeError(f"define() has no fact {name!r}. Near it: {near_names(name, names)}.")
    if "id_scheme" not in entries:
        raise TypeError("define() must be told id_scheme, got none. Pass 'index' for row numbers.")
    return StoreFacts(**as_json("facts", dict(entries)))


def as_json(what: str, value: Any) -> Any:  # noqa: ANN401
    """Give a value as it comes back from JSON.

    Args:
        what: What it is, for the message.
        value: The value.

    Returns:
        The same out of dicts, lists, strings, numbers, booleans and None.

    Raises:
        TypeError: If it does not fit JSON.
    """
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(
            f"{what} must fit JSON, got {value!r:.200} ({error}). Pass plain numbers, strings, "
            "lists and dicts."
        ) from error


def read_facts(folder: object, entries: Mapping[str, Any]) -> StoreFacts:
    """Read the facts of a manifest.

    Args:
        folder: Where it lies, for the message.
        entries: What was parsed.

    Returns:
        The facts.

    Raises:
        StoreError: If they are none that a store has.
    """
    try:
        return StoreFacts(**entries)
    except (TypeError, ValueError) as error:
        raise StoreError(
            f"The manifest in {str(folder)!r} must have proper facts ({error}). Restore it, or "
            "write the store anew with mode='overwrite'."
        ) from error


def check_same(folder: object, stored: StoreFacts, wanted: StoreFacts) -> None:
    """Refuse to go on with a store of other facts, by a ``StoreError`` that names one with both.

    Args:
        folder: Where it lies, for the message.
        stored: What the store declared.
        wanted: What is declared now.
    """
    # what a capture says of itself names a cause: the choices follow from it
    before, now = ({"extra": facts.extra, **asdict(facts)} for facts in (stored, wanted))
    refuse_differing(folder, before, now)


def refuse_differing(folder: object, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse facts that differ, entry by entry where a fact has entries.

    Args:
        folder: Where the store lies, for the message; None is memory.
        before: What the store declared.
        now: What is declared now.

    Raises:
        StoreError: If an entry differs; the first is named with both values, and some others.
    """
    found = list(_differing("", before, now))
    if not found:
        return
    (name, old, new), *others = found
    also = "; ".join(f"{key} {there} there, {here} here" for key, there, here in others[:_NAMED])
    raise StoreError(
        f"{name} must be that of the store, got {new} where {place_of(folder)} was written with "
        f"{old}. {f'Also: {also}. ' if also else ''}Pass another folder, or mode='overwrite' to "
        "write it anew."
    )


def place_of(folder: object) -> str:
    """Where a store lies, in words."""
    return "the store in memory" if folder is None else repr(str(folder))


def _differing(name: str, old: object, new: object) -> Iterator[tuple[str, str, str]]:
    """Entries that differ, each with its name and both values in short."""
    old, new = _parsed(old), _parsed(new)
    if old == new:
        return
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in dict.fromkeys([*new, *old]):
            inner = f"{name}.{key}" if name else key
            if key in old and key in new:
                yield from _differing(inner, old[key], new[key])
            else:
                sides = (_short(side[key]) if key in side else "nothing" for side in (old, new))
                yield (inner, *sides)
    elif isinstance(old, list) and isinstance(new, list):
        sides = ([e for e in a if e not in b] for a, b in ((old, new), (new, old)))
        less, more = (_short(side) for side in sides)
        yield name, f"{len(old)} entries, {less} among them", f"{len(new)}, {more} among them"
    else:
        yield name, _short(old), _short(new)


def _parsed(value: object) -> object:
    """A mapping or list that was written down as text, or the value as it is."""
    if isinstance(value, str) and value[:1] in {"{", "["}:
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def read_layer(entry: Mapping[str, Any]) -> LayerFacts:
    """Read what a manifest says of a layer; ``TypeError`` or ``KeyError`` if it is nothing."""
    sides = entry["sides"]
    return LayerFacts(
        tuple(entry["kinds"]),
        tuple(entry["shape"]),
        entry["bias"],
        entry["groups"],
        None if sides is None else tuple(sides),
    )


def records_digest(records: Iterable[BlockRecord]) -> str:
    """Digest which examples of which steps are stored, in order.

    Args:
        records: Blocks of a store.

    Returns:
        32 hexadecimal digits. How examples of a step are cut into blocks does not change them.
    """
    digest = hashlib.blake2b(digest_size=16)
    for record in records:
        for identity in record.ids:
            digest.update(json.dumps([record.step, identity]).encode())
    return digest.hexdigest()
