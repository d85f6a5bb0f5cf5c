"""What a run will cost, before it starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gradtrail.attribution.checkpoints import Checkpoint, weights_of
from gradtrail.attribution.data import Collate, Rows, as_rows
from gradtrail.attribution.losses import LossReduction, resolve_loss
from gradtrail.attribution.memory import query_budget
from gradtrail.attribution.method import AbstractAttributor, make_method
from gradtrail.attribution.queries import query_form
from gradtrail.attribution.session import Batch
from gradtrail.attribution.setup import make_session, padding_id
from gradtrail.factors import LayerGradient, Projection, dense_size, tensors_of
from gradtrail.hooks import Coverage, LayerChoice, select_layers
from gradtrail.options import check_choice, check_positive

__all__ = ["Plan", "plan"]


@dataclass(frozen=True)
class Plan:
    """Memory and passes of a run; prints as a short text.

    Attributes:
        method: Name of the method.
        num_train: Training examples.
        num_query: Queries.
        query_bytes: Bytes of all queries' gradients, on the device.
        layer_bytes: Bytes of the largest layer's factors of one training batch.
        device_bytes: Both together, above the model and a batch's activations.
        host_bytes: Bytes of the scores.
        disk_bytes: Bytes on disk.
        query_passes: Forward and backward passes over the queries.
        train_passes: Forward and backward passes over the training data.
        coverage: What is captured.
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

    def __str__(self) -> str:
        """The figures in words."""
        return "\n".join(
            [
                f"{self.method}: {self.num_train:,} training examples, {self.num_query:,} queries",
                f"passes: {self.query_passes} over the queries, {self.train_passes} over train "
                "(forward and output-gradient backward)",
                f"device: {_size(self.device_bytes)} above the model and one batch "
                f"({_size(self.query_bytes)} of query gradients, {_size(self.layer_bytes)} for "
                "the largest layer)",
                f"host: {_size(self.host_bytes)} of scores; disk: {_size(self.disk_bytes)}",
                f"covered share of parameters: {self.coverage.share:.1%}",
            ]
        )


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
        seed: As in ``attribute``.
        **method_options: As in ``attribute``.

    Returns:
        The plan.
    """
    name, _, _ = make_method(method, method_options)
    check_choice("granularity", granularity, ("example", "token"))
    check_positive("batch_size", batch_size)
    points = 1 if checkpoints is None else len(weights_of(checkpoints, checkpoint_weights))
    pad = padding_id(model)
    rows = as_rows(train, "train", collate_fn, pad)
    queries = as_rows(query, "query", collate_fn, pad)
    losses = {
        "train": resolve_loss(loss, loss_reduction),
        "query": resolve_loss(query_loss or loss, loss_reduction),
    }
    selection = select_layers(model, layers=layers, exclude=exclude)
    session = make_session(model, selection, device, projection, seed, progress=False)
    meter = _Meter(len(rows), len(queries), query_budget(session.device))
    probed = "train" if len(rows) else "query"
    with session.opened(rows if len(rows) else queries, losses[probed]):
        for side, data, size, sink in (
            ("query", queries, query_batch_size or batch_size, meter.add_query),
            ("train", rows, batch_size, meter.add_train),
        ):
            head = Rows(range(min(size, len(data))), data.batch)
            session.capture(head, losses[side], batch_size=size, phase="plan", sink=sink)
    shares = meter.positions if granularity == "token" else 1
    return Plan(
        method=name,
        num_train=len(rows),
        num_query=len(queries),
        query_bytes=meter.query_bytes,
        layer_bytes=meter.layer_bytes,
        device_bytes=meter.query_bytes + meter.layer_bytes,
        host_bytes=4 * len(rows) * len(queries) * shares,
        disk_bytes=0,
        query_passes=points,
        train_passes=points,
        coverage=session.selection.coverage,
    )


class _Meter:
    """Adds up what one batch of each side shows."""

    def __init__(self, num_train: int, num_query: int, left: int) -> None:
        self._num_train, self._num_query, self._left = num_train, num_query, left
        self._held: dict[int, Tensor] = {}
        self.query_bytes = 0
        self.layer_bytes = 0
        self.positions = 0

    def add_query(self, place: Batch, name: str, gradient: LayerGradient) -> None:
        """Add what all queries' gradients of a layer will take; a shared input counts once."""
        del name
        written, size = query_form(gradient, self._num_train, self._num_query, self._left)
        if written:
            self._left -= size
            self.query_bytes += size
            return
        for tensor in tensors_of(gradient):
            if id(tensor) not in self._held:
                self._held[id(tensor)] = tensor
                self.query_bytes += tensor.nbytes * self._num_query // place.size

    def add_train(self, place: Batch, name: str, gradient: LayerGradient) -> None:
        """Keep the largest layer: its factors and, at most, its gradients written out."""
        del name
        self.positions = place.tokens
        factors = sum(tensor.nbytes for tensor in tensors_of(gradient))
        written = 4 * dense_size(gradient) * gradient.num_examples
        self.layer_bytes = max(self.layer_bytes, factors + written)


def _size(count: int) -> str:
    """Bytes in the unit that reads best."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{value:,.1f} {unit}" if unit != "B" else f"{count} B"
