"""Opening the store of a call's gradients: what is complete is only read, the rest goes on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from gradtrail.attribution.cached_covariances import watch_for
from gradtrail.attribution.cached_identity import identity_of, refuse_other, restricted
from gradtrail.attribution.cached_options import CacheOptions
from gradtrail.attribution.cached_pass import StoreCache
from gradtrail.attribution.data import Rows
from gradtrail.attribution.kronecker import KroneckerMethod
from gradtrail.attribution.losses import Loss
from gradtrail.attribution.method import AbstractAttributor
from gradtrail.attribution.session import Session
from gradtrail.attribution.stored import attached_covariances
from gradtrail.distributed import broadcast_json, guarded
from gradtrail.errors import StoreError
from gradtrail.store import GradientStore
from gradtrail.store.manifest import MANIFEST, is_store

__all__ = [
    "checkpoint_folder",
    "opened_cache",
    "opened_store",
    "prepare",
    "refuse_budget",
    "runs_model",
]


@contextmanager
def opened_cache(
    session: Session,
    attributor: AbstractAttributor,
    data: tuple[Rows, Loss],
    batch_size: int,
    options: CacheOptions | None,
) -> Iterator[StoreCache | None]:
    """Have a session answer the passes over its training data from a store.

    Args:
        session: The session, with the weights in the model.
        attributor: The method.
        data: The training data and their loss.
        batch_size: Rows a batch.
        options: What kind of cache, or None for none.

    Yields:
        The cache, or None. With a whole one the session captures the layers that are stored.
    """
    if options is None:
        yield None
        return
    refuse_budget(attributor)
    options = checkpoint_folder(options, session.checkpoint)
    fits = options.capture != "factored" and watch_for(attributor, session) is not None
    with opened_store(session, data, batch_size, options, covariances=fits) as cache:
        if cache.is_whole and cache.store.facts is not None:
            session.selection = restricted(session.selection, cache.store)
            if data[1].inferred:  # which loss it is a forward would tell
                data[1].description = cache.store.facts.extra["loss_description"]
        session.cache = cache
        try:
            yield cache
        finally:
            session.cache = None


@contextmanager
def opened_store(
    session: Session,
    data: tuple[Rows, Loss],
    batch_size: int,
    options: CacheOptions,
    *,
    covariances: bool,
) -> Iterator[StoreCache]:
    """Open the store of some data, after a check that it is theirs.

    Args:
        session: The session, with the weights in the model and before layers were probed.
        data: The rows and their loss.
        batch_size: Rows a batch.
        options: What kind of store, and where.
        covariances: Whether covariances are to be kept beside the gradients.

    Yields:
        Passes over the data. The store is closed at the end, and removed where it has no folder.
    """
    rows, loss = data
    facts = identity_of(session, rows, loss, batch_size, options)
    with _store(options, facts, rows.total, covariances=covariances) as store:
        yield StoreCache(session, data, store, options, facts)


def checkpoint_folder(options: CacheOptions, checkpoint: int | None) -> CacheOptions:
    """Give each checkpoint a folder of its own, and the training data theirs inside it."""
    if options.folder is None:
        return options
    folder = options.folder
    if checkpoint is not None:
        folder = folder / f"checkpoint-{checkpoint:03d}"
    return replace(options, folder=folder / "train")


def runs_model(
    cache: StoreCache | None, session: Session, attributor: AbstractAttributor, rows: Rows
) -> bool:
    """Tell whether the model will run on the training data, and must be probed with them.

    Args:
        cache: The cache, or None.
        session: The session.
        attributor: The method.
        rows: The training data.

    Returns:
        False where every pass is read.
    """
    if not len(rows):
        return False
    if cache is None or not cache.is_whole:
        return True
    if isinstance(attributor, KroneckerMethod) and (
        attributor.fisher != "empirical" or attributor.refine is not None
    ):
        return True  # passes of their own, whose gradients are not the data's
    return _wants_covariances(cache, session, attributor)


def refuse_budget(attributor: AbstractAttributor) -> None:
    """Refuse an option that decides about copies which a cache makes needless.

    Args:
        attributor: The method.

    Raises:
        ValueError: If it was given a budget for kept gradients.
    """
    budget = attributor.describe_options().get("gradient_budget")
    if budget is not None:
        raise ValueError(
            f"gradient_budget must be None with gradient_cache_residency, got {budget}: the store "
            "keeps what a budget would be for. Leave one of them out."
        )


def prepare(
    cache: StoreCache | None, session: Session, attributor: AbstractAttributor, batch_size: int
) -> None:
    """Fill a cache whose gradients lose their factors, with the covariances a method fits with.

    Args:
        cache: The cache, or None.
        session: The open session.
        attributor: The method.
        batch_size: Rows a batch.
    """
    if cache is not None and _wants_covariances(cache, session, attributor):
        cache.fill(batch_size, "covariances", watch_for(attributor, session))


def _wants_covariances(cache: StoreCache, session: Session, attributor: AbstractAttributor) -> bool:
    """Whether a fit needs factors that cannot be read back."""
    if cache.is_factored or cache.has_covariances:
        return False
    return watch_for(attributor, session) is not None


def _store(
    options: CacheOptions, facts: Mapping[str, Any], num_rows: int, *, covariances: bool
) -> GradientStore:
    """Open a store for reading where it is whole, so that several calls may use it at once."""
    folder, dtype = options.folder, options.dtype
    if folder is None:
        return GradientStore(residency=options.residency, dtype=dtype)
    is_there, is_inside = broadcast_json([(folder / MANIFEST).exists(), is_store(folder.parent)])
    if is_inside:
        raise StoreError(
            f"cache_dir must be a folder that stores are made in, got the store "
            f"{str(folder.parent)!r} itself. Pass the folder that it lies in, or another one."
        )
    if is_there:
        with guarded("reading a store"), ExitStack() as undo:  # nobody writes before all have read
            store = GradientStore(folder, residency=options.residency, mode="read")
            undo.callback(store.close)
            refuse_other(store, facts, options)
            _refuse_foreign(store, num_rows)
            whole = store.facts is not None and len(store) == num_rows
            if whole and not (covariances and attached_covariances(store) is None):
                undo.pop_all()
        if not store.is_closed:
            return store
    mode = "resume" if is_there else "create"  # the latter refuses a folder with other files
    return GradientStore(folder, residency=options.residency, mode=mode, dtype=dtype)


def _refuse_foreign(store: GradientStore, num_rows: int) -> None:
    """Refuse a store whose rows are not those of the data, each once, in order."""
    ids = store.ids
    if not all(one < other for one, other in itertools.pairwise((-1, *ids, num_rows))):
        raise StoreError(
            f"cache_dir must hold rows of {num_rows}, each once, got {len(store)} other examples "
            f"in {str(store.path)!r}. Pass another folder."
        )
