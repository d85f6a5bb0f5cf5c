"""The records of a training run as steps that the trajectory methods sweep.

Suffixes: m mask, b example, q query, k followed entry, d entry of a layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gradtrail.attribution.memory import free_bytes
from gradtrail.attribution.trajectory import AbstractLayerStep, StepBlock, TrajectoryStep
from gradtrail.attribution.trajectory_checks import (
    check_follows,
    check_ids,
    check_steps,
    recorded_sizes,
    scale_of,
)
from gradtrail.attribution.trajectory_masks import Cut, kept_cuts, whole_cuts
from gradtrail.attribution.trajectory_method import StoredTask
from gradtrail.attribution.trajectory_states import iterate_states
from gradtrail.factors import LayerGradient, Projection, move, to_dense, widen
from gradtrail.progress import progress_bar
from gradtrail.store import StoredBlock

__all__ = [
    "LayerRecord",
    "Linearise",
    "TrainingRecords",
    "layer_options",
    "read_queries",
    "stored_cuts",
    "written",
]

_SHARE = 4  # of the free memory, for a step's gradients written out


@dataclass(frozen=True, eq=False)
class LayerRecord:
    """What the optimizer was for one layer in one step.

    Attributes:
        parts: Role, parameter name and number of entries of the layer's parameters, in its order.
        cut: The followed entries.
        values: The step's values, as ``OptimizerStateCallback`` writes them.
        tensors: The step's tensors.
        like: A gradient of the layer, for device and dtype.
        is_reached: Whether an example of the step has a gradient of the layer.
    """

    parts: tuple[tuple[str, str, int], ...]
    cut: Cut
    values: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    like: Tensor
    is_reached: bool

    @property
    def kind(self) -> str:
        """Name of the optimizer's class."""
        return self.values["before"]["kind"]

    def options(self, name: str) -> list[Any]:
        """An option of the groups that the layer's parameters are in, by part."""
        return layer_options(self.parts, self.values, name)

    def steps_made(self, when: str) -> list[int]:
        """How many steps the optimizer had made before or after this one, by part."""
        places = self.values[when]["parameters"]
        return [places[parameter][1] for _, parameter, _ in self.parts]

    def spread(self, numbers: list[float]) -> Tensor:
        """Bring a number a part to the followed entries.

        Args:
            numbers: One a part.

        Returns:
            Float64. Shape ``[m, 1, k]``, or no axes where the parts agree.

        Raises:
            ValueError: If the parts differ and the gradients' entries are of no one part.
        """
        if len(set(numbers)) == 1:
            return torch.tensor(float(numbers[0]), dtype=torch.float64)
        if self.cut.size != sum(size for _, _, size in self.parts):
            raise ValueError(
                "train_store must be captured without projection where the parameters of a layer "
                f"differ in lr or weight_decay, got {numbers} for "
                f"{', '.join(name for _, name, _ in self.parts)}. A projection of kind 'mask' "
                "will do too."
            )
        pieces = [
            torch.full((size,), float(number), dtype=torch.float64)
            for number, (_, _, size) in zip(numbers, self.parts, strict=True)
        ]
        return self.cut.entries(torch.cat(pieces))

    def filled(self, value: Tensor) -> Tensor:
        """Give what ``spread`` gave the shape ``[m, 1, k]`` and the gradient's dtype and device."""
        return value.to(self.like).expand(self.cut.num_masks, 1, self.cut.num_kept)

    def moment(self, when: str, name: str) -> Tensor:
        """Bring a moment to the followed entries; before the first step it is zero.

        Args:
            when: ``"before"`` or ``"after"``.
            name: The optimizer's name for it.

        Returns:
            Shape ``[m, 1, k]``.
        """
        pieces = []
        for _, parameter, size in self.parts:
            value = self.tensors.get(f"{when}/{name}/{parameter}")
            pieces.append(self.like.new_zeros(size) if value is None else value.to(self.like))
        return self.cut.entries(pieces[0] if len(pieces) == 1 else torch.cat(pieces))


Linearise: TypeAlias = Callable[[LayerRecord], AbstractLayerStep]


class TrainingRecords:
    """Every step from the first that is scored to the end of the training."""

    def __init__(self, task: StoredTask, cuts: Mapping[str, Cut], *, moments: bool) -> None:
        """Find the steps and the rows of the result.

        Args:
            task: The records, checked by ``check_records``.
            cuts: The followed entries by layer.
            moments: Whether the optimizer's moments are read.
        """
        self._task = task
        self._cuts = cuts
        self._moments = moments
        self._parts = {
            name: tuple(tuple(part) for part in task.optimizer_states.facts["layers"][name])
            for name in task.layers
        }
        self._couplings = {
            name: cut.coupling for name, cut in cuts.items() if cut.coupling is not None
        }
        self.steps, self._rows, self.num_rows = check_steps(task)
        self._query = read_queries(task, cuts)
        self._like = next(iter(self._query.values())).new_zeros(0)
        self._budget = free_bytes(self._like.device) // _SHARE

    @property
    def queries(self) -> Mapping[str, Tensor]:
        """The queries' gradients, written out. By layer, shape ``[m, q, k]``."""
        return self._query

    @property
    def place(self) -> tuple[int, int]:
        """Which share of the work is done here, and among how many it is divided."""
        return self._task.place

    def keep_queries(self, columns: range) -> None:
        """Let go of the queries that are not among some that follow each other."""
        if len(columns) < next(iter(self._query.values())).shape[1]:
            own = slice(columns.start, columns.stop)
            self._query = {name: values[:, own].clone() for name, values in self._query.items()}

    def sweep(self, linearise: Linearise, *, reverse: bool) -> Iterator[TrajectoryStep]:
        """Read every step once.

        Args:
            linearise: Makes what the optimizer did with a layer in a step.
            reverse: Whether the last step comes first.

        Yields:
            The steps; what one holds is let go before the next is read.
        """
        states = iterate_states(
            self._task.optimizer_states,
            self.steps,
            reverse=reverse,
            names=None if self._moments else (),
        )
        names = [name for name in self._task.layers if name in self._task.train.layers]
        blocks = self._task.train.blocks(
            steps=self.steps, layers=names, device=self._task.device, reverse=reverse
        )
        groups = groupby(blocks, key=lambda stored: stored.block.step)
        last = None
        with progress_bar("steps", len(self.steps), enabled=self._task.shows_bar) as bar:
            for (number, group), (_, tensors, values) in zip(groups, states, strict=True):
                stored = list(group)[:: -1 if reverse else 1]
                if last is not None:
                    pair = (last, (number, values))[:: -1 if reverse else 1]
                    check_follows(*pair, moments=self._moments)
                last = number, values
                yield self._step(stored, tensors, values, linearise)
                del stored, group, tensors, values
                bar.update(1)

    def _step(
        self,
        stored: list[StoredBlock],
        tensors: Mapping[str, Tensor],
        values: Mapping[str, Any],
        linearise: Linearise,
    ) -> TrajectoryStep:
        """Make one step of what was read."""
        number = stored[0].block.step
        check_ids(number, [one for block in stored for one in block.block.ids], values)
        blocks = []
        for block, scales in zip(stored, scale_of(number, stored, values), strict=True):
            budget = self._budget // len(stored)
            rows = _CutLayers(block.block.layers, self._cuts, self._like, budget)
            blocks.append(StepBlock(rows, 1 / scales.to(self._like), self._rows.get(block.row)))
        reached = {name for block in blocks for name in block.layers}
        records = {
            name: LayerRecord(
                parts, self._cuts[name], values, tensors, self._like, is_reached=name in reached
            )
            for name, parts in self._parts.items()
        }
        maps = {name: linearise(record) for name, record in records.items()}
        return TrajectoryStep(number, tuple(blocks), maps, self._couplings)


def layer_options(
    parts: Iterable[Sequence[Any]], values: Mapping[str, Any], name: str
) -> list[Any]:
    """Read an option of the groups that a layer's parameters were in.

    Args:
        parts: Role, parameter name and number of entries of its parameters.
        values: The step's values, as ``OptimizerStateCallback`` writes them.
        name: The option.

    Returns:
        One value a parameter; None where a group does not have it.
    """
    groups, places = values["before"]["groups"], values["before"]["parameters"]
    return [groups[places[parameter][0]].get(name) for _, parameter, _ in parts]


def stored_cuts(task: StoredTask) -> dict[str, Cut]:
    """Follow the entries that are stored, projected or not, as they are.

    Args:
        task: The records.

    Returns:
        By layer.
    """
    sizes, projection = recorded_sizes(task), task.train.facts.projection
    if projection is None:
        return whole_cuts(sizes)
    if projection["kind"] == "mask":  # a projection like the others: the formula as it stands
        return kept_cuts(sizes, Projection(**projection), corrected=False)
    layers = {**task.query.layers, **task.train.layers}
    return whole_cuts(
        {
            name: math.prod(layers[name].shape) + layers[name].has_bias * layers[name].shape[0]
            for name in sizes
        }
    )


def read_queries(task: StoredTask, cuts: Mapping[str, Cut]) -> dict[str, Tensor]:
    """Read the queries' gradients; a layer that a batch of them did not reach has zeros.

    Args:
        task: The records.
        cuts: The followed entries by layer.

    Returns:
        Written out, in float32 or wider. By layer, shape ``[m, q, k]``.
    """
    sizes: list[int] = []
    pieces: dict[str, dict[int, Tensor]] = {name: {} for name in task.layers}
    names = [name for name in task.layers if name in task.query.layers]
    for number, stored in enumerate(task.query.blocks(layers=names, device=task.device)):
        sizes.append(len(stored.block.ids))
        for name, gradient in stored.block.layers.items():
            pieces[name][number] = written(gradient)
    like = next((part for parts in pieces.values() for part in parts.values()), torch.zeros(0, 0))
    found = {}
    for name, parts in pieces.items():
        width = next((part.shape[1] for part in parts.values()), cuts[name].stored_size)
        rows = [
            parts[number] if number in parts else like.new_zeros(size, width)
            for number, size in enumerate(sizes)
        ]
        joined = torch.cat(rows) if rows else like.new_zeros(0, width)
        found[name] = cuts[name].gradients(joined)
    return found


class _CutLayers(Mapping[str, Tensor]):
    """Followed entries of a block's gradients, written out when a layer is asked for.

    They are kept while they take little of the free memory; otherwise the factors are, and are
    written out again.
    """

    def __init__(
        self,
        layers: Mapping[str, LayerGradient],
        cuts: Mapping[str, Cut],
        like: Tensor,
        budget: int,
    ) -> None:
        """Read the block's layers.

        Args:
            layers: By name; read once.
            cuts: The followed entries.
            like: Gives device and dtype of the result.
            budget: Bytes of written-out gradients that are kept.
        """
        self._layers = {
            name: move(gradient, device=like.device)
            for name, gradient in layers.items()
            if name in cuts
        }
        self._cuts = cuts
        self._like = like
        self._left = budget
        self._kept: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        """Give a layer's gradients. Shape ``[m, b, k]``."""
        if name in self._kept:
            return self._kept[name]
        values = written(self._layers[name]).to(self._like)
        rows = self._cuts[name].gradients(values)
        if rows.nbytes <= self._left:
            self._left -= rows.nbytes
            self._kept[name] = rows
        return rows

    def __iter__(self) -> Iterator[str]:
        """Go through the layers."""
        return iter(self._layers)

    def __len__(self) -> int:
        """Number of layers."""
        return len(self._layers)


def written(gradient: LayerGradient) -> Tensor:
    """Write gradients out, in float32 or wider. Shape ``[b, d]``."""
    (values_bd,) = widen(to_dense(gradient).values_bd)
    return values_bd
