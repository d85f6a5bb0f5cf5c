"""LESS over the steps of a recorded training run.

Suffixes: n training row, q query, b example, k stored entry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TypeAlias

import torch
from torch import Tensor

from gradtrail.attribution.scoring import divided
from gradtrail.attribution.trajectory_checks import (
    check_ids,
    check_recorded,
    check_records,
    is_update,
    refused_projection,
)
from gradtrail.attribution.trajectory_masks import Cut
from gradtrail.attribution.trajectory_method import StoredTask
from gradtrail.attribution.trajectory_records import (
    layer_options,
    read_queries,
    stored_cuts,
    written,
)
from gradtrail.attribution.trajectory_states import iterate_states
from gradtrail.callbacks import read_states
from gradtrail.distributed import gather_rows, shard_of
from gradtrail.hooks import LayerState, update_direction
from gradtrail.progress import progress_bar
from gradtrail.store import StoredBlock

__all__ = ["one_rate", "score_steps"]

Moves: TypeAlias = Callable[[str, Tensor], Tensor]


def one_rate(rates: Sequence[float]) -> float:
    """Give the one learning rate that weighs a cosine over all layers.

    Args:
        rates: Those of the captured parameters.

    Returns:
        The rate.

    Raises:
        ValueError: If they differ.
    """
    if len(set(rates)) != 1:
        raise ValueError(
            "layers must have one learning rate for method 'less', whose cosine is over all of "
            f"them, got {sorted(set(rates))[:5]}. Choose the layers of one with layers or exclude."
        )
    return float(rates[0])


def score_steps(task: StoredTask) -> Tensor:
    """Score the stored examples of the selected steps; each step is read once, by one process.

    Args:
        task: The records.

    Returns:
        Learning rate times cosine, float64, rows in the order of the store, on the CPU. Shape
        ``[n, q]``.
    """
    is_moved = is_update(task.train)
    check_records("less", task, () if is_moved else ("before",), whole=False)
    if not is_moved:
        refused_projection("less", task.train, masks=True)
    cuts = stored_cuts(task)
    queries = {name: values[0] for name, values in read_queries(task, cuts).items()}
    squares = [values.square().sum(1) for values in queries.values()]
    norms_q = sum(squares).double().sqrt()
    steps = _steps_of(task)
    own = shard_of(len(steps), *task.place)
    blocks = [torch.zeros(0, len(norms_q), dtype=torch.float64)]
    for stored, states, rate in _read(task, steps[own.start : own.stop], is_moved=is_moved):
        move = _moves(states, cuts)
        for block in stored:
            scores_bq, squared_b = _products(block, queries, move)
            values_bq = divided(scores_bq.double(), squared_b.double().sqrt(), 0)
            blocks.append((rate * divided(values_bq, norms_q, 1)).cpu())
    values = torch.cat(blocks)
    return gather_rows(values, what="scores") if task.is_shared else values


def _steps_of(task: StoredTask) -> list[int]:
    """Find the selected steps, and refuse them where the optimizer of one is not recorded."""
    steps = None if task.selected_steps is None else list(task.selected_steps)
    steps = sorted({record.step for record in task.train.records} if steps is None else set(steps))
    check_recorded(task, steps)
    return steps


def _read(
    task: StoredTask, steps: Sequence[int], *, is_moved: bool
) -> Iterator[tuple[list[StoredBlock], Mapping[str, LayerState] | None, float]]:
    """Read some steps: their blocks, the optimizer's state before, the learning rate."""
    names = [name for name in task.layers if name in task.train.layers]
    facts = task.optimizer_states.facts
    stored = groupby(
        task.train.blocks(steps=steps, layers=names, device=task.device),
        key=lambda block: block.block.step,
    )
    records = iterate_states(task.optimizer_states, steps, names=() if is_moved else None)
    with progress_bar("steps", len(steps), enabled=task.shows_bar) as bar:
        for (number, group), (_, tensors, values) in zip(stored, records, strict=True):
            blocks = list(group)
            check_ids(number, [one for block in blocks for one in block.block.ids], values)
            rates = [
                rate
                for name in names
                for rate in layer_options(facts["layers"][name], values, "lr")
            ]
            states = None
            if not is_moved:
                states = read_states(facts, values, tensors, "before", layers=names)
            yield blocks, states, one_rate(rates)
            bar.update(1)


def _moves(states: Mapping[str, LayerState] | None, cuts: Mapping[str, Cut]) -> Moves:
    """Make the map from stored gradients ``[b, k]`` to moves; none where they are moves already."""

    def move(name: str, values_bk: Tensor) -> Tensor:
        if states is None:
            return values_bk
        state, cut, start = states[name], cuts[name], 0
        moved_bk = torch.empty_like(values_bk)
        for role, part in state.parts.items():
            own, inside = cut.part(start, state.sizes[role])
            moments = {
                key: (value[inside] if value.dim() else value).to(values_bk.device)
                for key, value in part.moments.items()
            }
            moved_bk[:, own] = update_direction(
                state.kind, values_bk[:, own] / cut.scale, replace(part, moments=moments)
            )
            start += state.sizes[role]
        return moved_bk.mul_(cut.scale)

    return move


def _products(
    block: StoredBlock, queries: Mapping[str, Tensor], move: Moves
) -> tuple[Tensor, Tensor]:
    """Products of a block's moves with the queries ``[b, q]``, and their squared norms ``[b]``."""
    like = next(iter(queries.values()))
    scores_bq = like.new_zeros(len(block.block.ids), like.shape[0])
    squared_b = like.new_zeros(scores_bq.shape[0])
    for name, gradient in block.block.layers.items():
        moved_bk = move(name, written(gradient).to(like))
        scores_bq.addmm_(moved_bk, queries[name].t())
        squared_b += moved_bk.square().sum(1)
    return scores_bq, squared_b
