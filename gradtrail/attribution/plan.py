"""What a run will cost, before it starts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gradtrail.attribution.cached_covariances import watch_for
from gradtrail.attribution.cached_form import KeptForm
from gradtrail.attribution.cached_open import refuse_budget
from gradtrail.attribution.cached_options import (
    CacheOptions,
    CacheResidency,
    CaptureForm,
    cache_options,
)
from gradtrail.attribution.checkpoints import Checkpoint, weights_of
from gradtrail.attribution.data import Collate, Rows, as_rows
from gradtrail.attribution.losses import Loss, LossReduction, resolve_loss
from gradtrail.attribution.measures import Demands, Measures
from gradtrail.attribution.memory import free_bytes, query_budget
from gradtrail.attribution.method import AbstractAttributor, make_method
from gradtrail.attribution.pass_cache import BatchSink
from gradtrail.attribution.query_source import as_queries, head_of, query_loss_of
from gradtrail.attribution.session import Session
from gradtrail.attribution.setup import as_projection, make_session, padding_id
from gradtrail.factors import Projection
from gradtrail.hooks import Coverage, LayerChoice, select_layers
from gradtrail.options import check_choice, check_positive

__all__ = ["Plan", "plan"]

_QUEUE = 256 << 20  # bytes that may wait to be written


@dataclass(frozen=True)
class Plan:
    """Memory and passes of a run; prints as a short text.

    Attributes:
        method: Name of the method.
        num_train: Training examples.
        num_query: Queries.
        query_bytes: Bytes of all queries' gradients, on the device.
        layer_bytes: Bytes of the largest layer's factors of one training batch.
        device_bytes: All that lies on the device above the model and a batch's activations.
        host_bytes: Bytes of the scores, and of what rests beside them.
        disk_bytes: Bytes on disk.
        query_passes: Forward and backward passes over the queries.
        train_passes: Forward and backward passes over the training data.
        coverage: What is captured.
        curvature_bytes: Bytes of the fitted curvature, counted above where it rests.
        kept_bytes: Bytes of training factors kept on the device so that no pass is repeated.
        refine_passes: Most passes over train that ``refine`` adds, one an iteration.
        store_bytes: Bytes of the training gradients that a cache keeps, counted above where they
            lie; 0 without a cache.
        store_on: ``"memory"``, ``"disk"`` or ``"tiered"``; None without a cache.
        forms: Form each layer is kept in, ``"factored"`` or ``"materialized"``.
        covariance_bytes: Bytes of the covariances that ``cache`` keeps beside the gradients.
            ``attribute`` keeps them only with another ``capture`` than ``"factored"``, and then
            they are counted above.
    """

    method: str
    num_train: int
    num_query: int
    query_bytes: int
    layer_bytes: int
    device_bytes: int
    host_bytes: int
    disk_bytes: int
    query_passes: int
    train_passes: int
    coverage: Coverage
    curvature_bytes: int = 0
    kept_bytes: int = 0
    refine_passes: int = 0
    store_bytes: int = 0
    store_on: CacheResidency | None = None
    forms: Mapping[str, str] = field(default_factory=dict)
    covariance_bytes: int = 0

    def __str__(self) -> str:
        """The figures in words."""
        return "\n".join(
            [
                f"{self.method}: {self.num_train:,} training examples, {self.num_query:,} queries",
                f"passes: {self.query_passes} over the queries, {self.train_passes} over train "
                "(forward and output-gradient backward)" + self._refinement(),
                f"device: {_size(self.device_bytes)} above the model and one batch "
                f"({_size(self.query_bytes)} of query gradients, {_size(self.layer_bytes)} for "
                "the largest layer" + self._curvature() + ")",
                f"host: {_size(self.host_bytes)}, scores among it; disk: {_size(self.disk_bytes)}",
                *self._store(),
                f"covered share of parameters: {self.coverage.share:.1%}",
            ]
        )

    def _refinement(self) -> str:
        """What a refinement adds, in words."""
        if not self.refine_passes:
            return ""
        return (
            f", and up to {self.refine_passes} over train for refine, each of about 1.5 to 1.9 "
            "forwards and backwards a query"
        )

    def _store(self) -> list[str]:
        """What a cache keeps, in words; nothing without one."""
        if self.store_on is None:
            return []
        counts = Counter(self.forms.values())
        forms = ", ".join(f"{count} {form}" for form, count in sorted(counts.items()))
        place = {"memory": "in memory", "disk": "on disk", "tiered": "in memory and on disk"}
        return [
            f"store: {_size(self.store_bytes)} of training gradients {place[self.store_on]} "
            f"(layers: {forms or 'none'})" + self._covariances()
        ]

    def _covariances(self) -> str:
        """What lies beside a cache, in words; nothing for a method without covariances."""
        if not self.covariance_bytes:
            return ""
        return f"; {_size(self.covariance_bytes)} of covariances where cache() fills it"

    def _curvature(self) -> str:
        """What a curvature adds, in words; nothing for a method without one."""
        if not self.curvature_bytes:
            return ""
        kept = f", {_size(self.kept_bytes)} of kept training factors" if self.kept_bytes else ""
        return f"{kept}, and {_size(self.curvature_bytes)} of curvature where that rests"


def plan(  # noqa: PLR0913  # the one-call entry point
    model: nn.Module,
    train: Any,  # noqa: ANN401
    query: Any,  # noqa: ANN401
    *,
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
    checkpoints: Sequence[Checkpoint] | None = None,
    checkpoint_weights: Sequence[float] | None = None,
    granularity: Literal["example", "token"] = "example",
    projection: Projection | str | int | None = None,
    gradient_cache_residency: CacheResidency | None = None,
    cache_dir: str | Path | None = None,
    capture: CaptureForm = "factored",
    cache_dtype: str | torch.dtype | None = None,
    seed: int = 0,
    **method_options: Any,  # noqa: ANN401
) -> Plan:
    """Say what ``attribute`` would take, by measuring one batch of each side.

    Args:
        model: The trained model.
        train: Training examples.
        query: Queries.
        method: As in ``attribute``.
        loss: As in ``attribute``.
        query_loss: As in ``attribute``.
        loss_reduction: As in ``attribute``.
        layers: As in ``attribute``.
        exclude: As in ``attribute``.
        batch_size: Training examples a batch.
        query_batch_size: Queries a batch; None means ``batch_size``.
        collate_fn: As in ``attribute``.
        device: As in ``attribute``.
        checkpoints: As in ``attribute``; they are counted, not loaded.
        checkpoint_weights: As in ``attribute``.
        granularity: As in ``attribute``.
        projection: As in ``attribute``.
        gradient_cache_residency: As in ``attribute``.
        cache_dir: As in ``attribute``; nothing is written, and what lies there is not counted.
        capture: As in ``attribute``; ``forms`` says what each layer comes to.
        cache_dtype: As in ``attribute``.
        seed: As in ``attribute``.
        **method_options: As in ``attribute``.

    Returns:
        The plan.
    """
    name, attributor, _ = make_method(method, method_options)
    check_choice("granularity", granularity, ("example", "token"))
    check_positive("batch_size", batch_size)
    caching = (gradient_cache_residency, cache_dir, capture, cache_dtype)
    cache = _checked_cache(attributor, caching, per_token=granularity == "token")
    points = 1 if checkpoints is None else len(weights_of(checkpoints, checkpoint_weights))
    pad = padding_id(model)
    rows = as_rows(train, "train", collate_fn, pad)
    queries = as_queries(query, model, collate_fn, pad)
    trained = resolve_loss(loss, loss_reduction)
    losses = {
        "train": trained,
        "query": query_loss_of(query, query_loss, loss_reduction, trained),
    }
    selection = select_layers(model, layers=layers, exclude=exclude)
    selection = attributor.choose(model, selection, as_projection(projection, seed))
    session = make_session(model, selection, device, projection, seed, progress=False)
    kept = None if cache is None else KeptForm(cache.capture, cache.dtype, {})
    meter = Measures(len(rows), len(queries), query_budget(session.device), kept)
    sides = {
        "query": (queries, losses["query"], query_batch_size or batch_size, meter.add_query),
        "train": (rows, losses["train"], batch_size, meter.add_train),
    }
    _measure(session, sides, "train" if len(rows) else "query")
    shares = meter.positions if granularity == "token" else 1
    needs = attributor.demands(meter, session)
    values = len(rows) * len(queries) * shares * len(attributor.sweep or (None,))
    planned = _planned(name, meter, needs, values, points, session.selection.coverage)
    if cache is None:
        return planned
    planned = replace(planned, covariance_bytes=_covariances(attributor, session, meter))
    return _with_store(planned, meter, cache, points, min(batch_size, len(rows)))


def _checked_cache(
    attributor: AbstractAttributor, caching: tuple[Any, Any, Any, Any], *, per_token: bool
) -> CacheOptions | None:
    """Read the options of a cache, or None where there is none."""
    cache = cache_options(*caching, per_token=per_token)
    if cache is not None:
        refuse_budget(attributor)
    return cache


def _measure(
    session: Session, sides: Mapping[str, tuple[Rows, Loss, int, BatchSink]], probed: str
) -> None:
    """Run one batch of each side."""
    with session.opened(*sides[probed][:2]):
        for data, loss, size, sink in sides.values():
            head = head_of(data, size)
            session.capture(head, loss, batch_size=size, phase="plan", sink=sink)


def _with_store(
    planned: Plan, meter: Measures, cache: CacheOptions, points: int, batch: int
) -> Plan:
    """Add a cache: its bytes where they lie, and a batch of all layers that waits to be written."""
    size = meter.stored_bytes
    stays = points if cache.folder is not None else 1  # each checkpoint's own, or one at a time
    fits = {"memory": size, "disk": 0, "tiered": min(size, free_bytes(torch.device("cpu")) // 2)}
    held = fits[cache.residency]
    queued = 0 if cache.residency == "memory" else min(size, _QUEUE)
    written = {"memory": 0, "disk": size, "tiered": size if cache.folder else size - held}
    beside = planned.covariance_bytes if cache.capture != "factored" else 0
    on_disk = cache.residency != "memory"
    waiting = size * batch // max(1, meter.num_train)
    forms = {
        name: "materialized" if out else "factored" for name, out in meter.kept.written.items()
    }
    return replace(
        planned,
        device_bytes=planned.device_bytes + waiting,
        host_bytes=planned.host_bytes + held + queued + (0 if on_disk else beside),
        disk_bytes=planned.disk_bytes
        + (written[cache.residency] + (beside if on_disk else 0)) * stays,
        store_bytes=size,
        store_on=cache.residency,
        forms=forms,
    )


def _covariances(attributor: AbstractAttributor, session: Session, meter: Measures) -> int:
    """Bytes of the covariances that a method fits with."""
    if watch_for(attributor, session) is None:
        return 0
    kinds = attributor.treatments(session)
    return meter.covariance_bytes(name for name, kind in kinds.items() if kind == "kronecker")


def _planned(
    name: str, meter: Measures, needs: Demands, values: int, points: int, coverage: Coverage
) -> Plan:
    """Add up what lies where."""
    rests = {needs.curvature_on: needs.curvature_bytes}
    held = needs.query_bytes + meter.layer_bytes + needs.kept_bytes
    return Plan(
        method=name,
        num_train=meter.num_train,
        num_query=meter.num_query,
        query_bytes=needs.query_bytes,
        layer_bytes=meter.layer_bytes,
        device_bytes=held + rests.get("device", 0),
        host_bytes=4 * values + rests.get("host", 0),
        disk_bytes=needs.disk_bytes * points + rests.get("disk", 0),
        query_passes=points,
        train_passes=points * needs.train_passes,
        coverage=coverage,
        curvature_bytes=needs.curvature_bytes,
        kept_bytes=needs.kept_bytes,
        refine_passes=points * needs.refine_passes,
    )


def _size(count: int) -> str:
    """Bytes in the unit that reads best."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{value:,.1f} {unit}" if unit != "B" else f"{count} B"
