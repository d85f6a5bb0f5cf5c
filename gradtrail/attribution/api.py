"""The one-call entry points."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gradtrail.attribution.cached_open import opened_cache, prepare, runs_model
from gradtrail.attribution.cached_options import (
    CacheOptions,
    CacheResidency,
    CaptureForm,
    cache_options,
)
from gradtrail.attribution.checkpoints import Checkpoint
from gradtrail.attribution.data import Collate, as_rows
from gradtrail.attribution.ensembles import score_checkpoints
from gradtrail.attribution.finite import warn_not_finite
from gradtrail.attribution.losses import LossReduction, resolve_loss
from gradtrail.attribution.method import AbstractAttributor, Task, make_method
from gradtrail.attribution.query_source import as_queries, head_of, query_loss_of
from gradtrail.attribution.scores import AttributionScores
from gradtrail.attribution.session import Session
from gradtrail.attribution.setup import (
    as_projection,
    call_of,
    call_of_task,
    check_ranks,
    ids_of,
    make_session,
    padding_id,
    points_of,
    recorded_options,
)
from gradtrail.attribution.shares import Gather, in_step, inner_model, joined_scores
from gradtrail.distributed import is_main
from gradtrail.factors import Projection
from gradtrail.hooks import Coverage, LayerChoice, select_layers
from gradtrail.options import check_choice, check_positive

__all__ = ["attribute", "coverage", "self_influence"]

LossFunction = Callable[[nn.Module, Any], Tensor]


def attribute(  # noqa: PLR0913  # the one-call entry point
    model: nn.Module,
    train: Any,  # noqa: ANN401  # any data set
    query: Any,  # noqa: ANN401
    *,
    method: str | AbstractAttributor = "graddot",
    loss: LossFunction | None = None,
    query_loss: LossFunction | None = None,
    loss_reduction: LossReduction | None = None,
    layers: LayerChoice = None,
    exclude: LayerChoice = None,
    batch_size: int = 8,
    query_batch_size: int | None = None,
    collate_fn: Collate | None = None,
    device: torch.device | str | None = None,
    checkpoints: Sequence[Checkpoint] | None = None,
    checkpoint_weights: Sequence[float] | None = None,
    granularity: Literal["example", "token"] = "example",
    projection: Projection | str | int | None = None,
    gradient_cache_residency: CacheResidency | None = None,
    cache_dir: str | Path | None = None,
    capture: CaptureForm = "factored",
    cache_dtype: str | torch.dtype | None = None,
    progress: bool = True,
    seed: int = 0,
    gather: Gather = "all",
    **method_options: Any,  # noqa: ANN401
) -> AttributionScores | dict[float, AttributionScores] | None:
    r"""Score every training example against every query: which examples taught this?

    A score above 0 means that training more on the example lowers the query's loss. Scores are raw
    inner products of per-example gradients (sums over positions), not divided by the number of
    examples; they do not depend on batch size, order or padding. The model evaluates with frozen
    parameters during the call and is left as it was found, random generators included.

    ``train`` and ``query`` are a ``Dataset``, a list of rows, a Hugging Face data set or a
    ``DataLoader`` that does not shuffle. With ``collate_fn=None`` rows of ``input_ids`` are padded
    and others go through torch's default collator. ``loss=None`` infers the loss from ``labels``
    or an ``(inputs, targets)`` pair. For a measurement that should go up pass its negative
    as ``query_loss``. Layers are named by glob patterns on dotted names, module types or callables
    ``(name, module) -> bool``; a pattern that names a container takes everything in it.

    A method that reads the training data several times (a curvature's fit, chunks of queries) runs
    the model in every pass, unless the gradients fit in memory (``gradient_budget``). With
    ``gradient_cache_residency`` they are kept in a store while the first pass captures and uses
    them, and every later pass reads them: the model passes over ``train`` once. A ``cache_dir``
    stays: after a kill the same call goes on, a complete one is read without a forward over
    ``train``, and one of other weights, data or options is refused. Only gradients of the data's
    own labels are kept: the passes of ``fisher="expected"`` and ``"sampled"`` and of
    ``refine="cg"`` run the model as ever, and the scoring passes alone are spared; a method with
    one pass gains only what stays in ``cache_dir``. Scores are those of the gradients as kept:
    ``cache_dtype`` rounds them in the first pass too.

    In many processes of ``torch.distributed`` every rank makes the same call, with the model plain,
    in DDP, in FSDP (``use_orig_params=True``) or after ``fully_shard``. Each scores its share of
    ``train`` against all queries; every rank returns all scores.

    Args:
        model: The trained model.
        train: Training examples, ``n`` rows.
        query: Queries, ``q`` rows, or a source that brings its own loss.
        method: ``"graddot"``, ``"gradcos"``, ``"tracin"``, ``"kfac"``, ``"ekfac"``, ``"trak"``,
            ``"less"`` or an attributor; ``"adamw"`` and ``"dvemb"`` take stores of a training run.
        loss: ``(model, batch) -> [b]``, one summed loss an example; None infers it.
        query_loss: The queries' own loss; None means ``loss``.
        loss_reduction: How a loss that returns a scalar was reduced.
        layers: Which layers; None means every supported one with a trained parameter.
        exclude: Which layers to leave out.
        batch_size: Training examples a batch.
        query_batch_size: Queries a batch; None means ``batch_size``.
        collate_fn: Makes a batch of a list of rows.
        device: Where the model is; None asks the model.
        checkpoints: State dicts, safetensors files or folders, or callables; ``"tracin"`` sums
            over them, ``"kfac"`` and ``"ekfac"`` average scores of unit standard deviation.
        checkpoint_weights: One factor a checkpoint (TracIn: the learning rate); None means 1.
        granularity: ``"token"`` gives one share a position, ``[n, s, q]``.
        projection: A ``Projection``, its kind, or the side of a factored one.
        gradient_cache_residency: Keeps the training gradients: in ``"memory"``, on ``"disk"``, or
            ``"tiered"``, in memory as far as it reaches; None keeps none.
        cache_dir: Folder in which they stay; None: they are removed when the call ends.
        capture: ``"factored"``, ``"materialized"``, or ``"auto"`` for the smaller of the two.
        cache_dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"``; None keeps the model's.
        progress: Whether bars are shown.
        seed: Seed of a projection given by kind or side.
        gather: Who returns the scores: ``"all"`` ranks, or ``"rank0"`` (others return None).
        **method_options: Options of the method, such as ``normalize``.

    Returns:
        Scores ``[n, q]``; row ``i`` is ``train[i]``. With ``damping_sweep`` one result a damping.

    References:
        Pruthi et al., 2020, eq. 1, https://arxiv.org/abs/2002.08484
    """
    name, attributor, over_checkpoints = make_method(method, method_options)
    check_choice("granularity", granularity, ("example", "token"))
    check_positive("batch_size", batch_size)
    model, trained = inner_model(model), resolve_loss(loss, loss_reduction)
    pad = padding_id(model)
    task = Task(
        train=as_rows(train, "train", collate_fn, pad),
        query=as_queries(query, model, collate_fn, pad),
        loss=trained,
        query_loss=query_loss_of(query, query_loss, loss_reduction, trained),
        batch_size=batch_size,
        query_batch_size=batch_size if query_batch_size is None else query_batch_size,
        per_token=granularity == "token",
    )
    check_positive("query_batch_size", task.query_batch_size)
    caching = (gradient_cache_residency, cache_dir, capture, cache_dtype)
    kept = cache_options(*caching, per_token=task.per_token)
    _check_checkpoints(name, checkpoints, checkpoint_weights, over_checkpoints=over_checkpoints)
    selection = select_layers(model, layers=layers, exclude=exclude)
    selection = attributor.choose(model, selection, as_projection(projection, seed))
    session = make_session(model, selection, device, projection, seed, progress=progress)
    check_ranks(session, attributor, task, gather)
    points = (checkpoints, checkpoint_weights)
    call = call_of_task(session, attributor, task, kept, points) | {"gather": gather}
    with in_step("attribute", model, call):
        score = partial(_score, session, attributor, task, kept, gather)
        values, lengths = score_checkpoints(session, attributor, *points, score)
        options = recorded_options(session, attributor, task, *points)
    if gather == "rank0" and not is_main():
        return None
    make = partial(_result, name=name, task=task, session=session, lengths=lengths)
    return _results(values, attributor.sweep, options, make)


def self_influence(  # noqa: PLR0913  # the one-call entry point
    model: nn.Module,
    train: Any,  # noqa: ANN401
    *,
    method: str | AbstractAttributor = "graddot",
    loss: LossFunction | None = None,
    loss_reduction: LossReduction | None = None,
    layers: LayerChoice = None,
    exclude: LayerChoice = None,
    batch_size: int = 8,
    collate_fn: Collate | None = None,
    device: torch.device | str | None = None,
    checkpoints: Sequence[Checkpoint] | None = None,
    checkpoint_weights: Sequence[float] | None = None,
    projection: Projection | str | int | None = None,
    gradient_cache_residency: CacheResidency | None = None,
    cache_dir: str | Path | None = None,
    capture: CaptureForm = "factored",
    cache_dtype: str | torch.dtype | None = None,
    progress: bool = True,
    seed: int = 0,
    **method_options: Any,  # noqa: ANN401
) -> Tensor:
    """Score every training example against itself: how much does it stand on its own?

    The diagonal of ``attribute(model, train, train)`` without forming ``n`` by ``n`` scores.

    Args:
        model: The trained model.
        train: Training examples, ``n`` rows.
        method: As in ``attribute``.
        loss: As in ``attribute``.
        loss_reduction: As in ``attribute``.
        layers: As in ``attribute``.
        exclude: As in ``attribute``.
        batch_size: Training examples a batch.
        collate_fn: As in ``attribute``.
        device: As in ``attribute``.
        checkpoints: As in ``attribute``.
        checkpoint_weights: As in ``attribute``.
        projection: As in ``attribute``.
        gradient_cache_residency: As in ``attribute``.
        cache_dir: As in ``attribute``.
        capture: As in ``attribute``.
        cache_dtype: As in ``attribute``.
        progress: Whether a bar is shown.
        seed: As in ``attribute``.
        **method_options: Options of the method.

    Returns:
        At least 0, float32 on the CPU. Shape ``[n]``.
    """
    name, attributor, over_checkpoints = make_method(method, method_options)
    check_positive("batch_size", batch_size)
    kept = cache_options(gradient_cache_residency, cache_dir, capture, cache_dtype)
    model = inner_model(model)
    rows = as_rows(train, "train", collate_fn, padding_id(model))
    resolved = resolve_loss(loss, loss_reduction)
    _check_checkpoints(name, checkpoints, checkpoint_weights, over_checkpoints=over_checkpoints)
    selection = select_layers(model, layers=layers, exclude=exclude)
    selection = attributor.choose(model, selection, as_projection(projection, seed))
    session = make_session(model, selection, device, projection, seed, progress=progress)
    check_ranks(session, attributor)
    own = rows.share()

    def score() -> tuple[Tensor, None]:
        with opened_cache(session, attributor, (own, resolved), batch_size, kept) as cache:
            probe = rows if runs_model(cache, session, attributor, rows) else head_of(rows, 0)
            with session.opened(probe, resolved):
                prepare(cache, session, attributor, batch_size)
                values = attributor.self_score(session, own, resolved, batch_size).cpu().double()
                values, _ = joined_scores(values, None, own)
                warn_not_finite(values, session, (rows, resolved))
        return values, None

    points = (checkpoints, checkpoint_weights)
    call = {
        **call_of(session, attributor),
        **points_of(*points),
        "train": len(rows),
        "batch_size": batch_size,
        "capture": capture,
        "gradient_cache_residency": gradient_cache_residency,
    }
    with in_step("self_influence", model, call):
        total, _ = score_checkpoints(session, attributor, *points, score)
    return total.float()


def coverage(
    model: nn.Module,
    *,
    layers: LayerChoice = None,
    exclude: LayerChoice = None,
    include_frozen: bool = False,
    method: str | AbstractAttributor = "graddot",
    **method_options: Any,  # noqa: ANN401
) -> Coverage:
    """List every parameter: covered, left out by choice, or unsupported with the reason.

    Args:
        model: The model.
        layers: Which layers to capture, as in ``attribute``.
        exclude: Which to leave out.
        include_frozen: Whether frozen parameters count.
        method: As in ``attribute``; K-FAC and EK-FAC leave layers out that have no curvature.
        **method_options: As in ``attribute``.

    Returns:
        The coverage; ``print`` it for a table, ``.share`` is the covered share.
    """
    _, attributor, _ = make_method(method, method_options)
    selection = select_layers(model, layers=layers, exclude=exclude, include_frozen=include_frozen)
    return attributor.choose(model, selection, None).coverage


def _score(
    session: Session,
    attributor: AbstractAttributor,
    task: Task,
    kept: CacheOptions | None,
    gather: Gather,
) -> tuple[Tensor, Tensor | None]:
    """Score with the weights that are in the model now."""
    train, query = (task.train, task.loss), (task.query, task.query_loss)
    here = replace(task, train=task.train.share())
    held = (here.train, task.loss)
    with opened_cache(session, attributor, held, task.batch_size, kept) as cache:
        probe, loss = train if runs_model(cache, session, attributor, task.train) else query
        own = task.query_loss is not loss and len(task.query)
        with session.opened(probe, loss, query if own else None):
            prepare(cache, session, attributor, task.batch_size)
            values, lengths = attributor.score(session, here)
            values, lengths = joined_scores(values, lengths, here.train, to=gather)
            warn_not_finite(values, session, train, query, alone=gather == "rank0")
    return values, lengths


def _results(
    values: Tensor,
    sweep: Sequence[float] | None,
    options: dict[str, Any],
    make: Callable[..., AttributionScores],
) -> AttributionScores | dict[float, AttributionScores]:
    """Wrap the scores, those of each strength of a sweep on their own."""
    if sweep is None:
        return make(values, options=options)
    sets = values.unflatten(-1, (len(sweep), -1)).unbind(-2)
    pairs = zip(sweep, sets, strict=True)
    return {key: make(part, options={**options, "damping": key}) for key, part in pairs}


def _result(
    values: Tensor,
    *,
    name: str,
    task: Task,
    session: Session,
    lengths: Tensor | None,
    options: dict[str, Any],
) -> AttributionScores:
    """Wrap one set of scores."""
    return AttributionScores(
        values.to(dtype=torch.float32, device="cpu"),
        ids_of(len(task.train)),
        ids_of(len(task.query)),
        name,
        options,
        session.selection.coverage,
        lengths if task.per_token else None,
    )


def _check_checkpoints(
    name: str,
    checkpoints: Sequence[Checkpoint] | None,
    weights: Sequence[float] | None,
    *,
    over_checkpoints: bool,
) -> None:
    """Refuse checkpoints that would do nothing, and a sum over none."""
    if checkpoints is None and weights is not None:
        raise ValueError("checkpoint_weights must go with checkpoints, got checkpoints=None.")
    if name == "tracin" and checkpoints is None:
        raise ValueError(
            "checkpoints must be given for method 'tracin', got None. Pass state dicts, "
            "safetensors files or folders; for the model as it is use method='graddot'."
        )
    if checkpoints is not None and not over_checkpoints:
        raise ValueError(
            f"checkpoints must go with a method that takes several, got method {name!r}. "
            "Use method='tracin'."
        )
