"""Attribution from stores: gradients that were captured once are scored without the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from gradtrail.attribution.finite import warn_not_finite
from gradtrail.attribution.method import AbstractAttributor, Task, make_method
from gradtrail.attribution.scores import AttributionScores, TopK
from gradtrail.attribution.shares import in_step, joined_scores
from gradtrail.attribution.stored import StoredRows
from gradtrail.attribution.stored_model import (
    LayerNames,
    directions_of,
    preconditioned_by,
    tell_directions,
)
from gradtrail.attribution.stored_session import (
    OpenStores,
    StoreReading,
    open_stores,
    stored_call,
    stored_loss,
)
from gradtrail.attribution.trajectory_method import AbstractStoredMethod, StoredTask
from gradtrail.distributed import merge_topk
from gradtrail.options import check_choice, check_positive
from gradtrail.store import GradientStore, StepStore

__all__ = ["attribute_from_cache", "self_influence_from_cache"]

_Result: TypeAlias = AttributionScores | TopK


def attribute_from_cache(  # noqa: PLR0913  # the one-call entry point
    train_store: GradientStore,
    query_store: GradientStore,
    *,
    method: str | AbstractAttributor = "graddot",
    selected_steps: Sequence[int] | None = None,
    layers: LayerNames = None,
    exclude: LayerNames = None,
    top_k: int | None = None,
    batch_size: int | None = None,
    device: torch.device | str | None = None,
    granularity: Literal["example", "token"] = "example",
    optimizer_states: StepStore | None = None,
    progress: bool = True,
    seed: int = 0,
    **method_options: Any,  # noqa: ANN401
) -> AttributionScores | TopK | dict[float, AttributionScores | TopK]:
    """Score stored training examples against stored queries: no model is needed.

    The scores are those of ``attribute`` on the same data. A row is a stored example, in the order
    of the store; a training run that saw an example in several steps stored it as often, and
    ``train_steps`` says when.

    One layer of one batch is read at a time. A curvature is made of the covariances that lie
    beside the train store where they cover every row that is read, else it is fitted on the stored
    factors. These are read again for every stage; they are kept in memory only with
    ``gradient_budget``.

    Args:
        train_store: Gradients of training examples.
        query_store: Gradients of queries, or what ``cache_preconditioned_query`` made of them.
        method: As in ``attribute``; options that run the model are refused.
        selected_steps: Steps of the train store to read; None reads all.
        layers: Glob patterns on names of stored layers; None means all, which both must have.
        exclude: Layers to leave out, likewise.
        top_k: Keep only the highest scores of every query; no table of all scores is made.
        batch_size: Rows that small blocks are joined to; None joins them where that pays.
        device: Where products are computed; None means the CPU.
        granularity: ``"token"`` gives one share a position, ``[n, s, q]``.
        optimizer_states: What a method of training runs reads beside the gradients.
        progress: Whether bars are shown.
        seed: Seed of what a method draws.
        **method_options: Options of the method, such as ``damping``.

    Returns:
        Scores ``[n, q]``, or with ``top_k`` the best ``k`` of every query; with ``damping_sweep``
        one result a damping. Stores that were not captured alike raise ``StoreError``, which names
        the field with both values.
    """
    name, attributor, _ = make_method(method, method_options)
    reading = StoreReading(
        selected_steps=selected_steps,
        layers=layers,
        exclude=exclude,
        batch_size=batch_size,
        device=device,
        progress=progress,
        seed=seed,
    )
    _refuse_checkpoints(name)
    _check_options((name, attributor), reading, top_k, granularity, optimizer_states)
    opened = open_stores(train_store, query_store, attributor, reading)
    if not isinstance(attributor, AbstractStoredMethod):
        tell_directions(train_store, name)
    call = {**stored_call(opened, attributor), "top_k": top_k, "granularity": granularity}
    with in_step("attribute_from_cache", None, call):
        values, second = _scores(opened, attributor, optimizer_states, top_k, granularity)
    options = _recorded(opened, attributor, granularity)
    if attributor.sweep is None:
        return _result(name, opened, values, second, options, top_k)
    count = len(attributor.sweep)
    sets = values.unflatten(-1, (count, -1)).unbind(-2)
    seconds = [second] * count
    if top_k is not None:
        seconds = second.unflatten(-1, (count, -1)).unbind(-2)
    return {
        key: _result(name, opened, one, two, {**options, "damping": key}, top_k)
        for key, one, two in zip(attributor.sweep, sets, seconds, strict=True)
    }


def self_influence_from_cache(  # noqa: PLR0913  # the one-call entry point
    train_store: GradientStore,
    *,
    method: str | AbstractAttributor = "graddot",
    selected_steps: Sequence[int] | None = None,
    layers: LayerNames = None,
    exclude: LayerNames = None,
    batch_size: int | None = None,
    device: torch.device | str | None = None,
    progress: bool = True,
    seed: int = 0,
    **method_options: Any,  # noqa: ANN401
) -> Tensor:
    """Score every stored training example against itself, as ``self_influence`` does with a model.

    Args:
        train_store: Gradients of training examples.
        method: As in ``attribute_from_cache``, like all that follow.
        selected_steps: Steps to read.
        layers: Stored layers to read.
        exclude: Stored layers to leave out.
        batch_size: Rows that small blocks are joined to.
        device: Where products are computed.
        progress: Whether bars are shown.
        seed: Seed of what a method draws.
        **method_options: Options of the method.

    Returns:
        At least 0, float32 on the CPU, one a row of the store that is read. Shape ``[n]``.
    """
    name, attributor, _ = make_method(method, method_options)
    _refuse_checkpoints(name)
    reading = StoreReading(
        selected_steps=selected_steps,
        layers=layers,
        exclude=exclude,
        batch_size=batch_size,
        device=device,
        progress=progress,
        seed=seed,
    )
    opened = open_stores(train_store, None, attributor, reading)
    tell_directions(train_store, name)
    loss = stored_loss(train_store)
    own = opened.train.share_records() if attributor.shares_rows else opened.train
    with in_step("self_influence_from_cache", None, stored_call(opened, attributor)):
        values = attributor.self_score(opened.session, own, loss, opened.batch_size)
        values, _ = joined_scores(values.cpu().double(), None, own)
    warn_not_finite(values, opened.session, (opened.train, loss))
    return values.float()


def _refuse_checkpoints(name: str) -> None:
    """Refuse a sum over checkpoints: a pair of stores is of one."""
    if name == "tracin":
        raise ValueError(
            "method must score one checkpoint's stores, got 'tracin'. Score each checkpoint's with "
            "method='graddot', and add the scores up with your weights."
        )


def _check_options(
    named: tuple[str, AbstractAttributor],
    reading: StoreReading,
    top_k: int | None,
    granularity: str,
    optimizer_states: StepStore | None,
) -> None:
    """Refuse options that do not go together, or would do nothing.

    Args:
        named: The method as the user named it, and itself.
        reading: What is read.
        top_k: How many scores a query are kept, or None.
        granularity: One score an example or a position.
        optimizer_states: What a method of training runs reads.

    Raises:
        ValueError: If there is one.
        TypeError: If ``optimizer_states`` is no store.
    """
    name, attributor = named
    check_choice("granularity", granularity, ("example", "token"))
    sweeps = isinstance(attributor, AbstractStoredMethod)
    if top_k is not None:
        check_positive("top_k", top_k)
        if granularity == "token":
            raise ValueError("top_k must be None with granularity='token', got both. Choose one.")
    if sweeps and granularity == "token":
        raise ValueError(f"granularity must be 'example' with method {name!r}, got 'token'.")
    if sweeps and reading.batch_size is not None:
        raise ValueError(
            f"batch_size must be None with method {name!r}, which reads a step at a time, got "
            f"{reading.batch_size}."
        )
    if optimizer_states is not None and not sweeps:
        raise ValueError(
            f"optimizer_states must go with a method that reads them, got method {name!r}. Leave "
            "it out."
        )
    if optimizer_states is not None and not isinstance(optimizer_states, StepStore):
        raise TypeError(
            f"optimizer_states must be a StepStore, got {optimizer_states!r:.200}. Open its folder "
            "with StepStore(path, mode='read')."
        )


def _scores(
    opened: OpenStores,
    attributor: AbstractAttributor,
    optimizer_states: StepStore | None,
    top_k: int | None,
    granularity: str,
) -> tuple[Tensor, Tensor | None]:
    """Score, with lengths or the rows of the best scores beside.

    Args:
        opened: The stores.
        attributor: The method.
        optimizer_states: What a method of training runs reads.
        top_k: How many scores a query are kept, or None.
        granularity: One score an example or a position.

    Returns:
        Scores ``[n, q]`` or ``[n, s, q]`` of all rows with lengths, or the best with their rows.
    """
    if not isinstance(attributor, AbstractStoredMethod):
        return _score(opened, attributor, top_k, per_token=granularity == "token")
    task = StoredTask(
        train=opened.train.store,
        query=opened.query.store,
        optimizer_states=optimizer_states,
        selected_steps=opened.train.steps,
        layers=tuple(opened.stored.layers),
        device=opened.session.device,
        progress=opened.session.progress,
    )
    return attributor.score_stored(task), None


def _score(
    opened: OpenStores, attributor: AbstractAttributor, top_k: int | None, *, per_token: bool
) -> tuple[Tensor, Tensor | None]:
    """Run a method on the stores, and say which scores are not finite."""
    train, query = opened.train, opened.query
    own = train.share_records() if attributor.shares_rows else train
    task = Task(
        train=own,
        query=query,
        loss=stored_loss(train.store),
        query_loss=stored_loss(query.store),
        batch_size=opened.batch_size,
        query_batch_size=None,
        per_token=per_token,
        top_k=top_k,
    )
    values, second = attributor.score(opened.session, task)
    if top_k is None:
        values, second = joined_scores(values, second, own)
        warn_not_finite(values, opened.session, (train, task.loss), (query, task.query_loss))
    elif own.whole is not None and second is not None:
        values, second = merge_topk(values.double(), second + own.first, top_k)
    return values, second if per_token or top_k is not None else None


def _recorded(
    opened: OpenStores, attributor: AbstractAttributor, granularity: str
) -> dict[str, Any]:
    """What scores were computed with, in plain values."""
    train, query = opened.train.store, opened.query.store
    steps = opened.train.steps
    return {
        **attributor.describe_options(),
        "loss": stored_loss(train).description,
        "query_loss": stored_loss(query).description,
        "granularity": granularity,
        "projection": train.facts.projection,
        "selected_steps": None if steps is None else list(steps),
        "dtype": None if train.dtype is None else str(train.dtype).removeprefix("torch."),
        "gradients": directions_of(train),
        "preconditioned": preconditioned_by(query),
        **opened.session.notes,
        **opened.session.digests(),
    }


def _result(
    name: str,
    opened: OpenStores,
    values: Tensor,
    second: Tensor | None,
    options: dict[str, Any],
    top_k: int | None,
) -> _Result:
    """Wrap one set of scores, or the best of them.

    Args:
        name: The method.
        opened: The stores.
        values: Scores, or the best of them, queries last.
        second: Lengths, or the rows of the best scores, or None.
        options: What they were computed with.
        top_k: How many are wanted, or None.

    Returns:
        The result.
    """
    rows = opened.train
    values = values.to(dtype=torch.float32, device="cpu")
    if top_k is not None and second is not None:
        indices = second.t().contiguous()
        ids = rows.ids
        named = [[ids[row] for row in line] for line in indices.tolist()]
        return TopK(indices, values.t().contiguous(), named)
    found = AttributionScores(
        values,
        rows.ids,
        opened.query.ids,
        name,
        options,
        opened.stored.coverage,
        second,
        _steps_of(rows),
    )
    return found if top_k is None else found.topk(top_k)


def _steps_of(rows: StoredRows) -> tuple[int, ...] | None:
    """Steps of a training run; the batches of a pass over fixed weights are none."""
    return None if rows.store.facts.id_scheme == "index" else rows.row_steps
