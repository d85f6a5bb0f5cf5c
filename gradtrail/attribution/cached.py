"""Capturing gradients into stores, to score them later without the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gradtrail.attribution.cached_covariances import CovarianceWatch, watch_for
from gradtrail.attribution.cached_identity import restricted
from gradtrail.attribution.cached_open import opened_store
from gradtrail.attribution.cached_options import CacheOptions, CaptureForm, stored_dtype
from gradtrail.attribution.cached_pass import StoreCache
from gradtrail.attribution.data import Collate, Rows, as_rows
from gradtrail.attribution.losses import Loss, LossReduction, resolve_loss
from gradtrail.attribution.method import AbstractAttributor, make_method
from gradtrail.attribution.query_source import SourceRows, as_queries, query_loss_of
from gradtrail.attribution.session import Session
from gradtrail.attribution.setup import as_projection, call_of, make_session, padding_id
from gradtrail.attribution.shares import in_step, inner_model
from gradtrail.distributed import world_size
from gradtrail.factors import Projection
from gradtrail.hooks import LayerChoice, select_layers
from gradtrail.options import check_choice, check_positive
from gradtrail.store import GradientStore

__all__ = ["CachedGradients", "cache"]


class CachedGradients(NamedTuple):
    """Stores that ``cache`` filled, open for reading.

    Attributes:
        train: Gradients of the training examples, in their order.
        query: Gradients of the queries, or None where none were given.
    """

    train: GradientStore
    query: GradientStore | None


def cache(  # noqa: PLR0913  # the one-call entry point
    model: nn.Module,
    train: Any,  # noqa: ANN401  # any data set
    query: Any | None = None,  # noqa: ANN401
    *,
    cache_dir: str | Path,
    method: str | AbstractAttributor = "graddot",
    loss: Callable[[nn.Module, Any], Tensor] | None = None,
    query_loss: Callable[[nn.Module, Any], Tensor] | None = None,
    loss_reduction: LossReduction | None = None,
    layers: LayerChoice = None,
    exclude: LayerChoice = None,
    batch_size: int = 8,
    query_batch_size: int | None = None,
    collate_fn: Collate | None = None,
    device: torch.device | str | None = None,
    projection: Projection | str | int | None = None,
    progress: bool = True,
    seed: int = 0,
    capture: CaptureForm = "factored",
    dtype: str | torch.dtype | None = None,
    covariances: bool | None = None,
    **method_options: Any,  # noqa: ANN401
) -> CachedGradients:
    """Capture every example's gradient into stores, one pass of the model over each side.

    The stores lie in ``cache_dir/train`` and ``cache_dir/query``; ``attribute_from_cache`` and
    ``search`` score them without the model, and ``attribute`` with the same ``cache_dir`` reads the
    training side. The same call goes on after a kill at any instant: rows are stored for good every
    60 seconds and whenever 64 MiB have come together, those are not run again, and where all are,
    no forward runs. Before anything runs, weights and data are
    digested (the rows are read once more for that, without the model); a folder that holds
    gradients of other weights, data or options is refused. Batches of a later call may be of
    another size: stored blocks keep theirs.

    For a method of the K-FAC family covariances are accumulated in the same pass, from the factors
    and before these are written out, and kept beside the training gradients. If a kill loses their
    sums, they are made from the stored factors, or where there are none by running the model on
    the stored rows once more.

    Args:
        model: The trained model.
        train: Training examples.
        query: Queries, a source of them, or None to capture training examples only.
        cache_dir: Folder of the stores.
        method: As in ``attribute``; decides which layers are captured: all for ``"graddot"``, which
            serves every method, those with Kronecker structure for ``"kfac"`` and ``"ekfac"``.
        loss: As in ``attribute``.
        query_loss: The queries' own loss; None means ``loss``.
        loss_reduction: As in ``attribute``.
        layers: As in ``attribute``.
        exclude: As in ``attribute``.
        batch_size: Training examples a batch.
        query_batch_size: Queries a batch; None means ``batch_size``.
        collate_fn: As in ``attribute``.
        device: As in ``attribute``.
        projection: As in ``attribute``.
        progress: Whether bars are shown.
        seed: As in ``attribute``.
        capture: ``"factored"``, ``"materialized"``, or ``"auto"`` for the smaller of the two.
        dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"``; None keeps the model's.
        covariances: Whether they are kept; None: where the method fits with them.
        **method_options: As in ``attribute``.

    Returns:
        The stores.

    Raises:
        ValueError: If queries' options come without queries.
    """
    name, attributor, _ = make_method(method, method_options)
    check_choice("capture", capture, ("factored", "materialized", "auto"))
    check_positive("batch_size", batch_size)
    model = inner_model(model)
    pad, options = padding_id(model), {"capture": capture, "dtype": stored_dtype("dtype", dtype)}
    trained = resolve_loss(loss, loss_reduction)
    sides = {"train": _Side(as_rows(train, "train", collate_fn, pad), trained, batch_size)}
    if query is not None:
        size = batch_size if query_batch_size is None else query_batch_size
        check_positive("query_batch_size", size)
        own = query_loss_of(query, query_loss, loss_reduction, trained)
        sides["query"] = _Side(as_queries(query, model, collate_fn, pad), own, size)
    elif query_loss is not None or query_batch_size is not None:
        option = "query_loss" if query_loss is not None else "query_batch_size"
        raise ValueError(f"{option} must go with query, got query=None. Leave it out.")
    selection = select_layers(model, layers=layers, exclude=exclude)
    selection = attributor.choose(model, selection, as_projection(projection, seed))
    session = make_session(model, selection, device, projection, seed, progress=progress)
    _refuse_source(sides)
    places = {side: Path(cache_dir) / side for side in sides}
    watch = _watch(covariances, name, attributor, session)
    stored = {
        side: CacheOptions(residency="disk", folder=place, **options)
        for side, place in places.items()
    }
    call = {**call_of(session, attributor), "capture": capture, "covariances": covariances}
    call |= {side: [len(data.rows), data.batch_size] for side, data in sides.items()}
    call["dtype"] = str(options["dtype"])
    with in_step("cache", model, call):
        _capture(session, sides, stored, watch)
    found = {side: GradientStore(place, mode="read") for side, place in places.items()}
    return CachedGradients(found["train"], found.get("query"))


class _Side(NamedTuple):
    """One side's data."""

    rows: Rows
    loss: Loss
    batch_size: int


def _capture(
    session: Session,
    sides: Mapping[str, _Side],
    options: Mapping[str, CacheOptions],
    watch: CovarianceWatch | None,
) -> None:
    """Open the stores, capture what is missing and close them, on every rank."""
    with ExitStack() as stack:
        caches = {
            side: stack.enter_context(
                opened_store(
                    session,
                    (data.rows.share(), data.loss),
                    data.batch_size,
                    options[side],
                    covariances=side == "train" and watch is not None,
                )
            )
            for side, data in sides.items()
        }
        _fill(session, dict(sides), caches, watch)


def _refuse_source(sides: Mapping[str, _Side]) -> None:
    """Refuse queries that cannot be shared between processes."""
    if world_size() > 1 and any(isinstance(data.rows, SourceRows) for data in sides.values()):
        raise ValueError(
            "query must be rows of a data set in many processes, got queries that bring their own "
            "batches. Capture those in one process."
        )


def _watch(
    wanted: bool | None,  # noqa: FBT001  # the user's own option
    name: str,
    attributor: AbstractAttributor,
    session: Session,
) -> CovarianceWatch | None:
    """Give what accumulates covariances, where they are wanted."""
    if wanted is False:
        return None
    watch = watch_for(attributor, session)
    if wanted and watch is None:
        raise ValueError(
            "covariances=True must go with a method that fits with covariances of the data's own "
            f"gradients, 'kfac' or 'ekfac' with fisher='empirical', got {name!r}. Leave it out."
        )
    return watch


def _fill(
    session: Session,
    sides: dict[str, _Side],
    caches: dict[str, StoreCache],
    watch: CovarianceWatch | None,
) -> None:
    """Capture what is missing of either side; nothing runs where nothing is."""
    train = caches["train"]
    if train.has_covariances:
        watch = None
    runs = {name: not cache.is_whole for name, cache in caches.items()}
    runs["train"] |= watch is not None and not train.is_factored
    with ExitStack() as stack:
        if any(runs.values()):
            if train.is_whole and train.store.facts is not None:
                session.selection = restricted(session.selection, train.store)
            probed = sides["train" if runs["train"] else "query"]
            other = sides.get("query") if runs["train"] and runs.get("query") else None
            own = other is not None and other.loss is not probed.loss and len(other.rows) > 0
            pair = (other.rows, other.loss) if own else None
            stack.enter_context(session.opened(probed.rows, probed.loss, pair))
        train.fill(sides["train"].batch_size, "train", watch)
        if "query" in caches:
            caches["query"].fill(sides["query"].batch_size, "queries", None)
