"""What stands for a model where only its stored gradients are there: layers, digests, coverage."""

from __future__ import annotations

import fnmatch
import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from gradtrail.errors import GradTrailWarning, StoreError
from gradtrail.factors import Projection
from gradtrail.hooks import Coverage, ParameterCoverage
from gradtrail.options import near_names
from gradtrail.store import GradientStore, LayerFacts, StoreFacts

__all__ = [
    "PRECONDITIONED",
    "LayerNames",
    "StoredModel",
    "check_pair",
    "check_readable",
    "directions_of",
    "entries_of",
    "matching_names",
    "preconditioned_by",
    "stored_model",
    "tell_directions",
]

LayerNames: TypeAlias = str | Sequence[str] | None

PRECONDITIONED = "preconditioned"  # extra fact of queries that a curvature was applied to
_COMPARED = ("projection", "checkpoint_digest")


@dataclass(frozen=True, eq=False)
class StoredModel:
    """The layers of one or two stores that a run reads.

    Attributes:
        layers: What is known of each.
        explicit: Whether the user named layers.
        coverage: Every layer with its status.
        facts: What the train store was captured with.
        output_layers: Layers that are the output embedding.
        without_kronecker: Layers without Kronecker structure, whatever form they are stored in.
        preconditioned: What a curvature made of the queries, or None where they are plain.
        covered: Sides of the covariances, output and input, that were accumulated over every row
            that is read, by layer.
    """

    layers: Mapping[str, LayerFacts]
    explicit: bool
    coverage: Coverage
    facts: StoreFacts
    output_layers: frozenset[str] = field(default_factory=frozenset)
    without_kronecker: frozenset[str] = field(default_factory=frozenset)
    preconditioned: Mapping[str, Any] | None = None
    covered: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def projection(self) -> Projection | None:
        """Compression that every gradient went through, or None."""
        given = self.facts.projection
        return None if given is None else Projection(**given)

    @property
    def digest(self) -> str:
        """Digest of the weights that were captured; empty where they changed during the capture."""
        return self.facts.checkpoint_digest or ""

    def without(self, reasons: Mapping[str, str]) -> StoredModel:
        """Leave layers out.

        Args:
            reasons: By layer, why.

        Returns:
            The other layers; the coverage says what was left out.
        """
        kept = {name: facts for name, facts in self.layers.items() if name not in reasons}
        coverage = self.coverage.without_layers(dict(reasons), "left out")
        return replace(self, layers=kept, coverage=coverage)


def check_pair(train: GradientStore, query: GradientStore) -> None:
    """Refuse two stores whose gradients are not comparable.

    Args:
        train: Gradients of training examples.
        query: Gradients of queries.

    Raises:
        StoreError: If a fact differs; the weights may be unknown on one side.
    """
    for store, option in ((train, "train_store"), (query, "query_store")):
        check_readable(store, option)
    if PRECONDITIONED in train.facts.extra:
        raise StoreError(
            "train_store must hold gradients as they were captured, got queries that method "
            f"{preconditioned_by(train)['method']!r} was applied to. Pass them as query_store."
        )
    for name in _COMPARED:
        ours, theirs = getattr(train.facts, name), getattr(query.facts, name)
        unknown = name == "checkpoint_digest" and (ours is None or theirs is None)
        if ours != theirs and not unknown:
            cause = " They are of other weights." if name == "checkpoint_digest" else ""
            raise StoreError(
                f"train_store and query_store must have the same {name}, got {ours!r} and "
                f"{theirs!r}.{cause} Capture both alike."
            )


def check_readable(store: GradientStore, option: str) -> None:
    """Refuse a store that nothing was captured into, or only a part of what was to be.

    Args:
        store: The store.
        option: What it was passed as.

    Raises:
        TypeError: If it is no store.
        StoreError: If it is not whole.
    """
    if not isinstance(store, GradientStore):
        raise TypeError(
            f"{option} must be a GradientStore, got {type(store).__name__}. Open it with "
            "GradientStore(path, mode='read')."
        )
    if store.facts is None:
        raise StoreError(f"{option} must hold gradients, got a store that nothing was written to.")
    wanted = store.facts.extra.get("num_rows")
    if wanted is not None and int(wanted) != len(store):
        raise StoreError(
            f"{option} must be whole, got {len(store)} of {wanted} rows. Call cache again: it goes "
            "on where it stopped."
        )


def stored_model(
    train: GradientStore,
    query: GradientStore | None,
    *,
    layers: LayerNames = None,
    exclude: LayerNames = None,
) -> StoredModel:
    """Choose the layers that are read.

    Args:
        train: Gradients of training examples.
        query: Gradients of queries, or None where train meets itself.
        layers: Glob patterns on the names of stored layers; None takes every one.
        exclude: What to leave out, likewise.

    Returns:
        The layers and what is known of them. A layer that only one store has raises
        ``StoreError``.

    Raises:
        ValueError: If nothing is left.
    """
    ours = dict(train.layers)
    theirs = ours if query is None else dict(query.layers)
    taken = set(ours) | set(theirs)
    if query is not None and PRECONDITIONED in query.facts.extra:
        taken &= set(theirs)  # what has no curvature was left out of them on purpose
    if layers is not None:
        taken &= matching_names(layers, taken, "layers") & set(ours) & set(theirs)
    if exclude is not None:
        taken -= matching_names(exclude, set(ours) | set(theirs), "exclude")
    _check_sides(taken, train, train if query is None else query)
    kept = {name: facts for name, facts in {**theirs, **ours}.items() if name in taken}
    if not kept:
        raise ValueError(
            f"layers and exclude must leave a layer that both stores have, got none of "
            f"{', '.join([*ours][:5]) or 'no layers'}."
        )
    coverage = _coverage(train.facts, ours)
    dropped = dict.fromkeys(set(ours) - set(kept), "not among the chosen layers")
    return StoredModel(
        kept,
        layers is not None,
        coverage.without_layers(dropped, "left out"),
        train.facts,
        frozenset(_json(train.facts, "output_layers") or ()),
        frozenset(_json(train.facts, "without_kronecker") or ()),
        None if query is None else preconditioned_by(query),
    )


def preconditioned_by(store: GradientStore) -> dict[str, Any] | None:
    """Tell what was applied to stored queries: method and options, or None for plain gradients."""
    return _json(store.facts, PRECONDITIONED)


def directions_of(store: GradientStore) -> str | None:
    """Tell of which optimizer's update directions a store is, or None where it is of gradients."""
    return store.facts.extra.get("gradients")


def tell_directions(store: GradientStore, method: str) -> None:
    """Say that what is scored are an optimizer's directions where gradients are expected.

    Args:
        store: The training side.
        method: What scores it.
    """
    directions = directions_of(store)
    if directions is not None:
        warnings.warn(
            f"train_store holds {directions}: scores of {method!r} are of these in place of "
            "gradients. method='less' takes their cosine with the queries' gradients.",
            GradTrailWarning,
            stacklevel=3,
        )


def matching_names(patterns: LayerNames, names: Iterable[str], option: str) -> set[str]:
    """Find the layers that glob patterns name; one that names a container takes what is in it.

    Args:
        patterns: One or several.
        names: Names of the layers.
        option: What they were passed as, for errors.

    Returns:
        The names.

    Raises:
        TypeError: If a pattern is no text: there are no modules to ask.
        ValueError: If a pattern matches none.
    """
    listed = [patterns] if isinstance(patterns, str) else patterns
    if not isinstance(listed, Iterable) or not all(isinstance(one, str) for one in listed):
        raise TypeError(
            f"{option} must be glob patterns on names of stored layers, got {patterns!r}. A store "
            "has no modules."
        )
    names, taken = list(names), set()
    for pattern in listed:
        inside = f"{pattern}.*"
        found = {
            name
            for name in names
            if fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, inside)
        }
        if not found:
            raise ValueError(
                f"{option} must match a stored layer, got {pattern!r}, which matches none. Near "
                f"names: {near_names(pattern, sorted(names))}."
            )
        taken |= found
    return taken


def _check_sides(taken: set[str], train: GradientStore, query: GradientStore) -> None:
    """Refuse layers that were captured on one side only, and layers of unlike shape."""
    for option, store in (("train_store", train), ("query_store", query)):
        # a layer that was captured but that no example reached is in the coverage alone
        entries = _coverage(store.facts, store.layers).with_status("covered")
        missing = taken - set(store.layers) - {entry.layer for entry in entries}
        if missing:
            raise StoreError(
                f"{option} must have every layer of the other store, got none of "
                f"{', '.join(sorted(missing)[:5])}. Name the layers that both have with layers=, "
                "or leave these out with exclude=."
            )
    for name in sorted(taken & set(train.layers) & set(query.layers)):
        one, two = train.layers[name], query.layers[name]
        if (one.shape, one.has_bias) != (two.shape, two.has_bias):
            sides = [str(one.shape), str(two.shape)]
            if one.shape == two.shape:
                sides = ["a bias" if layer.has_bias else "no bias" for layer in (one, two)]
            raise StoreError(
                f"Layer {name} must have one shape in both stores, got {sides[0]} in train_store "
                f"and {sides[1]} in query_store. {_cause(train, query)}"
            )


def _cause(train: GradientStore, query: GradientStore) -> str:
    """Say why layers of two stores have unlike shapes, as far as the stores tell."""
    mixed = directions_of(train) != directions_of(query)
    projection = train.facts.projection
    if mixed and projection is not None and projection["kind"] == "factored":
        return (
            "Update directions are projected as a whole and gradients by their two sides with kind "
            "'factored'. Capture both with kind 'dense' or 'mask', or without a projection."
        )
    return "They are of models of other sizes. Capture both of one model."


def _coverage(facts: StoreFacts, layers: Mapping[str, LayerFacts]) -> Coverage:
    """The capture's own coverage, or one entry a stored layer."""
    records = _json(facts, "coverage")
    if records is not None:
        return Coverage.from_records(records)
    entries = [
        ParameterCoverage(name, entries_of(layer), "covered", name)
        for name, layer in layers.items()
    ]
    return Coverage(tuple(entries))


def entries_of(layer: LayerFacts) -> int:
    """Entries of a layer's gradient once it is written out."""
    size = 1
    for side in layer.shape:
        size *= side
    return size + (layer.shape[0] if layer.has_bias else 0)


def _json(facts: StoreFacts, name: str) -> Any:  # noqa: ANN401
    """An extra fact that is written as JSON, or None."""
    text = facts.extra.get(name)
    return None if text is None else json.loads(text)
