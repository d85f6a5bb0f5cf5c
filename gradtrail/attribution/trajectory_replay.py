"""Trajectory methods whose training gradients are made again from recorded parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from gradtrail.attribution.method import make_method
from gradtrail.attribution.scores import AttributionScores
from gradtrail.attribution.shares import in_step, needs_every_rank
from gradtrail.attribution.stored_model import check_readable
from gradtrail.attribution.trajectory_method import AbstractStoredMethod, StoredTask
from gradtrail.callbacks import ParameterSnapshotCallback, replay
from gradtrail.callbacks.replay import ReplayLoss
from gradtrail.factors import move
from gradtrail.hooks import HookManager
from gradtrail.store import (
    BlockRecord,
    GradientStore,
    LayerFacts,
    StepStore,
    StoredBlock,
    StoreFacts,
)

__all__ = ["attribute_by_replay"]

_RECORDER = ParameterSnapshotCallback.__name__


def attribute_by_replay(  # noqa: PLR0913  # the one-call entry point
    manager: HookManager,
    snapshots: StepStore,
    query_store: GradientStore,
    *,
    method: str | AbstractStoredMethod,
    optimizer_states: StepStore,
    selected_steps: Sequence[int] | None = None,
    loss: ReplayLoss | None = None,
    progress: bool = True,
    **method_options: Any,  # noqa: ANN401
) -> AttributionScores:
    """Score a recorded training whose gradients were not stored: each step is run once more.

    The scores are those of ``attribute_from_cache`` on the gradients that ``OffloadCallback`` would
    have stored. One step's gradients are held at a time.

    Many processes divide the work; with a model in DDP, whose backward needs all of them, each
    does all of it.

    Args:
        manager: What captures, made as in training and not collecting; its layers count.
        snapshots: What ``ParameterSnapshotCallback`` recorded.
        query_store: Gradients of the queries, of the same layers and projection.
        method: ``"less"``, ``"adamw"`` or ``"dvemb"``, or one of these with its options.
        optimizer_states: What ``OptimizerStateCallback`` recorded.
        selected_steps: Steps whose examples are scored; None means all.
        loss: The loop's loss from the model's output and its arguments by name; None means the
            loss that the model returns.
        progress: Whether a bar is shown.
        **method_options: Options of the method.

    Returns:
        Scores ``[n, q]``; a row is an example in a step.

    Raises:
        ValueError: If the method reads no records of a training. What is missing of these is too.
    """
    name, attributor, _ = make_method(method, method_options)
    if not isinstance(attributor, AbstractStoredMethod):
        raise ValueError(
            f"method must score a recorded training, got {name!r}. Choose 'less', 'adamw' or "
            "'dvemb', or score a model with attribute."
        )
    check_readable(query_store, "query_store")
    train = _Replayed(manager, snapshots, loss, query_store.layers)
    _check_pair(train, query_store)
    chosen = None if selected_steps is None else tuple(sorted(set(selected_steps)))
    _check_steps(snapshots, chosen)
    device = next(manager.model.parameters()).device
    task = StoredTask(
        train=train,
        query=query_store,
        optimizer_states=optimizer_states,
        selected_steps=chosen,
        layers=tuple(layer for layer in manager.layers if layer in query_store.layers),
        device=device,
        progress=progress,
        is_shared=not needs_every_rank(manager.model),
    )
    call = {
        "method": name,
        "method_options": attributor.describe_options(),
        "snapshots": [snapshots.steps, chosen],
        "query_store": len(query_store),
        "layers": task.layers,
    }
    with in_step("attribute_by_replay", manager.model, call, trains=True):
        values = attributor.score_stored(task).to(dtype=torch.float32)
    rows = [
        (record.step, one)
        for record in train.records
        if chosen is None or record.step in chosen
        for one in record.ids
    ]
    return AttributionScores(
        values,
        tuple(one for _, one in rows),
        query_store.ids,
        name,
        {**attributor.describe_options(), "projection": train.facts.projection},
        manager.coverage,
        None,
        tuple(step for step, _ in rows),
    )


@dataclass(frozen=True, eq=False)
class _Replayed:
    """What a trajectory method reads of a store of gradients, made when it is read.

    Attributes:
        manager: What captures.
        snapshots: The recorded parameters and batches.
        loss: The loop's loss, or None for the model's.
        layers: What is known of each layer.
    """

    manager: HookManager
    snapshots: StepStore
    loss: ReplayLoss | None
    layers: Mapping[str, LayerFacts]

    @property
    def facts(self) -> StoreFacts:
        """What the gradients are of."""
        manager = self.manager
        projection, transform = manager.projection, manager.form.transform
        moves = {} if transform is None else {"gradients": f"update directions of {transform.kind}"}
        return StoreFacts(
            id_scheme=manager.ids.scheme,
            capture=manager.form.capture,
            projection=None
            if projection is None
            else {"kind": projection.kind, "dim": projection.dim, "seed": projection.seed},
            loss_reduction=manager.loss_reduction,
            extra={"every": str((self.snapshots.facts or {}).get("every", 1)), **moves},
        )

    @property
    def records(self) -> tuple[BlockRecord, ...]:
        """The steps, one block each."""
        found, row = [], 0
        for step in self.snapshots.steps:
            calls = [call for part in self.snapshots.parts(step) for call in part["calls"]]
            ids = tuple(one for call in calls for one in call["ids"])
            found.append(BlockRecord(step, ids, None, 0, row))
            row += len(ids)
        return tuple(found)

    def blocks(
        self,
        *,
        steps: Sequence[int],
        layers: Sequence[str],
        device: torch.device,
        reverse: bool = False,
    ) -> Iterator[StoredBlock]:
        """Run the steps again, in order or from the last back.

        Args:
            steps: Which.
            layers: Which layers count.
            device: Where the gradients are wanted.
            reverse: Whether the last comes first.

        Yields:
            One block a step.
        """
        rows = {record.step: record.number for record in self.records}
        found = replay(self.manager, self.snapshots, steps=steps, reverse=reverse, loss=self.loss)
        for block in found:
            chosen = {
                name: move(gradient, device=device)
                for name, gradient in block.layers.items()
                if name in layers
            }
            yield StoredBlock(replace(block, layers=chosen), None, rows[block.step])


def _check_pair(train: _Replayed, query: GradientStore) -> None:
    """Check that the queries were captured as the training gradients will be.

    Args:
        train: The training's side.
        query: The queries' gradients.

    Raises:
        ValueError: If projection or layers differ.
    """
    if train.facts.projection != query.facts.projection:
        raise ValueError(
            "query_store must be captured with the projection of the manager, got "
            f"{query.facts.projection} and {train.facts.projection}. Capture both alike."
        )
    known = set(train.manager.layers)
    strange = [name for name in query.layers if name not in known]
    if strange or not query.layers:
        raise ValueError(
            f"query_store must hold layers that the manager captures, got {strange[:3] or 'none'}. "
            "Make both with the same layers and exclude."
        )


def _check_steps(snapshots: StepStore, chosen: Sequence[int] | None) -> None:
    """Check that the steps that are scored, and those between and after them, can be run again.

    Args:
        snapshots: The recorded parameters.
        chosen: The steps that are scored, or None for all.

    Raises:
        ValueError: If one is not recorded.
    """
    facts = snapshots.facts or {}
    found = facts.get("recorder")
    if found != _RECORDER:
        what = f"one of {found!r}" if found else "one that nothing was recorded in"
        raise ValueError(
            f"snapshots must be a StepStore that {_RECORDER} wrote, got {what}. Record with "
            f"{_RECORDER}(StepStore(...))."
        )
    absent = sorted(set(chosen or ()) - set(snapshots.steps))
    if absent:
        raise ValueError(
            f"selected_steps must be steps whose parameters {_RECORDER} recorded, got {absent[:5]}."
        )
