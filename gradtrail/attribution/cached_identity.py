"""What tells the gradients of one call from those of another: weights, data, loss, layers, form."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gradtrail.attribution.cached_options import CacheOptions
from gradtrail.attribution.curvature_layers import output_layers
from gradtrail.attribution.data import Rows
from gradtrail.attribution.digest import DataDigest, content_ids, model_digest
from gradtrail.attribution.losses import Loss
from gradtrail.attribution.query_source import SourceRows
from gradtrail.attribution.session import Session
from gradtrail.errors import StoreError
from gradtrail.hooks import Selection
from gradtrail.store import GradientStore

__all__ = ["complete_facts", "data_digest", "identity_of", "refuse_other", "restricted"]

_CHOSEN = "chosen_layers"
_LAYERS = "layers"
_COMPARED = (
    "id_scheme",
    "recording",
    "capture",
    "projection",
    "loss",
    "checkpoint_digest",
    "data_digest",
)
_SHOWN = 3
_WORDS = {"checkpoint_digest": "other weights: ", "data_digest": "other data: "}


def identity_of(
    session: Session, rows: Rows, loss: Loss, batch_size: int, options: CacheOptions
) -> dict[str, Any]:
    """Write down what the gradients of some data depend on.

    Args:
        session: The session, with the weights in the model and before layers were probed.
        rows: The data; read once here, without the model, where the store will stay.
        loss: Their loss.
        batch_size: Rows read at a time.
        options: The form they are kept in.

    Returns:
        Facts of a store, but for what is known once the model was probed.
    """
    projection = session.projection
    stays = options.folder is not None
    return {
        "id_scheme": "index",
        "recording": "per_example",
        "capture": options.capture,
        "projection": None
        if projection is None
        else {"kind": projection.kind, "dim": projection.dim, "seed": projection.seed},
        "loss": loss.name,
        "checkpoint_digest": model_digest(session.model) if stays else None,
        "data_digest": data_digest(rows, batch_size) if stays else None,
        "extra": {
            _CHOSEN: json.dumps([unit.name for unit in session.selection.units]),
            "num_rows": str(rows.total),
        },
    }


def data_digest(rows: Rows, batch_size: int) -> str:
    """Digest all rows in order; the model does not run. Of a share every rank must ask."""
    digest = DataDigest(of_share=rows.whole is not None)
    if isinstance(rows, SourceRows):
        for batch in rows.source.batches(batch_size):
            digest.add(batch.ids)
    else:
        for _, size, batch in rows.batches(batch_size):
            digest.add(content_ids(batch, size))
    return digest.hexdigest()


def complete_facts(facts: Mapping[str, Any], session: Session, loss: Loss) -> dict[str, Any]:
    """Add what a probed model tells: the layers that are captured, and what the loss is.

    Args:
        facts: What ``identity_of`` gave.
        session: The open session.
        loss: The loss of the data.

    Returns:
        All facts of the store.
    """
    selection = session.selection
    known = {
        _LAYERS: json.dumps([unit.name for unit in selection.units]),
        "coverage": json.dumps(selection.coverage.to_records()),
        "loss_description": loss.description,
        "output_layers": json.dumps(output_layers(session.model, selection)),
        "without_kronecker": json.dumps(selection.without_kronecker),
    }
    return {**facts, "extra": {**facts["extra"], **known}}


def restricted(selection: Selection, store: GradientStore) -> Selection:
    """Keep the layers that were captured into a store, with or without a gradient.

    Args:
        selection: The layers that could be captured.
        store: The store.

    Returns:
        The layers, and a coverage that leaves the others out.
    """
    held = set(json.loads(store.facts.extra[_LAYERS]))
    absent = {unit.name for unit in selection.units if unit.name not in held}
    reasons = dict.fromkeys(absent, "not among the layers of the stored training gradients")
    units = tuple(unit for unit in selection.units if unit.name in held)
    return replace(selection, units=units, coverage=selection.coverage.without_layers(reasons))


def refuse_other(store: GradientStore, facts: Mapping[str, Any], options: CacheOptions) -> None:
    """Refuse a store that holds the gradients of another call.

    Args:
        store: What lies in the folder.
        facts: What this call would write, with or without what a probed model tells.
        options: The form it would write it in.

    Raises:
        StoreError: If they differ; the field is named with both values.
    """
    if store.facts is None:  # killed before anything was captured
        return
    there = {name: getattr(store.facts, name) for name in _COMPARED}
    here = {name: facts[name] for name in _COMPARED}
    there["dtype"], here["dtype"] = _name(store.dtype), _name(options.dtype)
    for name in (_CHOSEN, _LAYERS):
        if name in facts["extra"]:
            here[name] = json.loads(facts["extra"][name])
            there[name] = json.loads(store.facts.extra.get(name, "null"))
    for field, value in here.items():
        if there[field] != value:
            old, new = _difference(there[field], value)
            also = _counts(store, facts) if field == "data_digest" else ""
            raise StoreError(
                f"cache_dir must hold gradients of this call, got {str(store.path)!r} with "
                f"{_WORDS.get(field, '')}{field} {old}, and {new} here{also}. Pass another folder, "
                "or delete that one."
            )


def _counts(store: GradientStore, facts: Mapping[str, Any]) -> str:
    """Say of how many rows two data sets are."""
    there, here = store.facts.extra.get("num_rows"), facts["extra"]["num_rows"]
    return f": {there} rows there and {here} here" if there != here else f": {here} rows in both"


def _name(dtype: object) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")


def _difference(old: object, new: object) -> tuple[str, str]:
    """Show two values; of two lists of layers, what one has and the other has not."""
    if not isinstance(old, list) or not isinstance(new, list):
        return repr(old), repr(new)
    return _without(old, new), _without(new, old)


def _without(names: list[str], others: list[str]) -> str:
    own = [name for name in names if name not in set(others)]
    shown = ", ".join(own[:_SHOWN]) + (", ..." if len(own) > _SHOWN else "")
    return f"{len(names)} layers" + (f" ({shown} among them)" if own else "")
