r"""LESS: cosines between queries and the moves that the optimizer would make of each example.

Xia et al., 2024, https://arxiv.org/abs/2402.04333. With :math:`\Gamma(g; t)` what a step on the
example alone would move the parameters by, divided by minus the learning rate, from the
optimizer's state before step ``t`` and without weight decay, an example scores

.. math:: \sum_t \eta_t \cos(g_q(t), \Gamma(g_n; t)),

the cosine over all entries of all layers together.

Suffixes: n training row, 3 the sums of a cosine.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradtrail.attribution.data import Rows
from gradtrail.attribution.less_stored import one_rate, score_steps
from gradtrail.attribution.losses import Loss
from gradtrail.attribution.memory import query_budget
from gradtrail.attribution.method import METHODS, MethodEntry, Task
from gradtrail.attribution.queries import QuerySide
from gradtrail.attribution.scoring import Scorer
from gradtrail.attribution.session import Batch, Session
from gradtrail.attribution.trajectory_method import AbstractStoredMethod, StoredTask
from gradtrail.distributed import agree, world_size
from gradtrail.factors import (
    DenseGradient,
    LayerGradient,
    Projection,
    paired_products,
    project,
    squared_norm,
    to_dense,
)
from gradtrail.hooks import LayerState, OptimizerSnapshot, layer_states
from gradtrail.hooks.wrapped import put_back_whole

__all__ = ["LESSMethod"]

OptimizerStates: TypeAlias = OptimizerSnapshot | Optimizer | str | Path
_WAYS = "an OptimizerSnapshot, a file that its save() wrote, or the optimizer itself"


@dataclass(frozen=True, kw_only=True, eq=False)
class LESSMethod(AbstractStoredMethod):
    """Options of ``"less"``.

    Attributes:
        optimizer_states: For ``attribute``: the optimizer at each checkpoint, in their order (one
            alone for the model as it is), as a snapshot, a snapshot's file or an optimizer. Each
            brings the learning rate of its checkpoint.
    """

    optimizer_states: OptimizerStates | Sequence[OptimizerStates] | None = None

    @property
    def name(self) -> str:
        """The registered name."""
        return "less"

    def check_checkpoints(self, count: int | None) -> None:
        """Refuse another number of optimizers than of checkpoints.

        Args:
            count: How many checkpoints there are; None: the model as it is.

        Raises:
            ValueError: If there are no optimizers, or not one a checkpoint.
        """
        if self.optimizer_states is None:
            raise ValueError(
                "optimizer_states must be given for method 'less', got None. Pass one a "
                f"checkpoint: {_WAYS}; or score a recorded training with attribute_from_cache."
            )
        given, wanted = len(self._given), 1 if count is None else count
        if given != wanted:
            raise ValueError(
                f"optimizer_states must hold one state a checkpoint ({wanted}), got {given}."
            )

    def describe_options(self) -> dict[str, Any]:
        """How many optimizer states there were."""
        return {"optimizer_states": None if self.optimizer_states is None else len(self._given)}

    def score(self, session: Session, task: Task) -> tuple[Tensor, Tensor | None]:
        """Score every training example against every query at the checkpoint in the model.

        Args:
            session: The open session.
            task: Data, losses and batch sizes.

        Returns:
            The learning rate times the cosines, ``[n, q]`` on the CPU, and None.

        Raises:
            ValueError: If positions are to be scored, which are no update of their own.
        """
        if task.per_token:
            raise ValueError(
                "granularity must be 'example' for method 'less', got 'token': an optimizer's "
                "update is no sum over positions."
            )
        if not task.train.total:
            return torch.zeros(0, len(task.query)), None
        moves = self._moves(session)
        side = QuerySide(
            len(task.query), len(task.train), budget=query_budget(session.device), norms=True
        )

        def collect(place: Batch, name: str, gradient: LayerGradient) -> None:
            side.add(place.start, name, moves.plain(name, gradient))

        with _unprojected(session):
            session.capture(
                task.query,
                task.query_loss,
                batch_size=task.query_batch_size,
                phase="queries",
                sink=collect,
            )
            side.finish()
            scorer = Scorer(task, side.layers, len(task.query), norms=True)

            def add(place: Batch, name: str, gradient: LayerGradient) -> None:
                scorer.add(place, name, moves.of(name, gradient))

            session.capture(
                task.train,
                task.loss,
                batch_size=task.batch_size,
                phase="train",
                sink=add,
                done=scorer.close,
            )
        values, rows = scorer.result(side.norms)
        return values * moves.rate, rows

    def self_score(
        self, session: Session, rows: Rows, loss: Loss, batch_size: int | None
    ) -> Tensor:
        """Score every training example against itself.

        Args:
            session: The open session.
            rows: The training data.
            loss: Its loss.
            batch_size: Rows a batch.

        Returns:
            The learning rate times each gradient's cosine with its own update. Shape ``[n]``.
        """
        moves = self._moves(session)
        sums_3n = torch.zeros(3, len(rows), dtype=torch.float64)

        def add(place: Batch, name: str, gradient: LayerGradient) -> None:
            plain, moved = moves.plain(name, gradient), moves.of(name, gradient)
            shares = (paired_products(plain, moved), squared_norm(plain), squared_norm(moved))
            sums_3n[:, place.start : place.start + place.size] += torch.stack(shares).cpu().double()

        with _unprojected(session):
            session.capture(rows, loss, batch_size=batch_size, phase="train", sink=add)
        products_n, plain_n, moved_n = sums_3n
        norms_n = (plain_n * moved_n).sqrt()
        return torch.where(norms_n > 0, moves.rate * products_n / norms_n, 0.0)

    def score_stored(self, task: StoredTask) -> Tensor:
        """Score the examples of the selected steps against every query.

        Args:
            task: The records of the training run, and the queries.

        Returns:
            Rows in the order of the store, on the CPU. Shape ``[n, q]``.

        Raises:
            ValueError: If optimizer states of checkpoints were given as well.
        """
        if self.optimizer_states is not None:
            raise ValueError(
                "optimizer_states must be a StepStore for attribute_from_cache, got states of "
                "checkpoints in the method."
            )
        return score_steps(task)

    @property
    def _given(self) -> tuple[OptimizerStates, ...]:
        given = self.optimizer_states
        alone = isinstance(given, (OptimizerSnapshot, Optimizer, str, Path))
        return (given,) if alone else tuple(given)

    def _moves(self, session: Session) -> _Moves:
        """Read the optimizer of the checkpoint that is in the model."""
        put_back_whole(session.model)  # an optimizer knows its parameters, not FSDP's views of them
        snapshot = _snapshot(session.model, self._given[session.checkpoint or 0])
        agree("optimizer_states", _in_short(snapshot))
        states = layer_states(session.model, session.selection.units, snapshot)
        rates = [part.options["lr"] for state in states.values() for part in state.parts.values()]
        return _Moves(states, one_rate(rates), session.projection, session.device)


class _Moves:
    """Gradients and the moves made of them, projected alike."""

    def __init__(
        self,
        states: Mapping[str, LayerState],
        rate: float,
        projection: Projection | None,
        device: torch.device,
    ) -> None:
        """Bring the states to where the gradients are.

        Args:
            states: The optimizer's state by layer.
            rate: The learning rate.
            projection: Compression of what is compared, or None.
            device: Where the gradients are.
        """
        self.rate = rate
        self._projection = projection
        self._states = {name: _moved(state, device) for name, state in states.items()}

    def plain(self, name: str, gradient: LayerGradient) -> LayerGradient:
        """Give gradients as the moves are: projected as a whole, not side by side."""
        if self._projection is None:
            return gradient
        return project(name, to_dense(gradient), self._projection)

    def of(self, name: str, gradient: LayerGradient) -> DenseGradient:
        """Give the moves that a step on each example alone would make."""
        moves = self._states[name].directions(gradient)
        return moves if self._projection is None else project(name, moves, self._projection)


def _moved(state: LayerState, device: torch.device) -> LayerState:
    parts = {
        role: replace(part, moments={key: value.to(device) for key, value in part.moments.items()})
        for role, part in state.parts.items()
    }
    return replace(state, parts=parts)


def _snapshot(model: nn.Module, given: OptimizerStates) -> OptimizerSnapshot:
    """Read what the user passed for one checkpoint.

    Args:
        model: The model.
        given: One of ``optimizer_states``.

    Returns:
        The snapshot.

    Raises:
        TypeError: If it is none of the forms.
    """
    if isinstance(given, OptimizerSnapshot):
        return given
    if isinstance(given, Optimizer):
        return OptimizerSnapshot.of(model, given)
    if isinstance(given, (str, Path)):
        return OptimizerSnapshot.load(given)
    raise TypeError(
        f"optimizer_states must hold {_WAYS}, got {type(given).__name__}. Of a state dict, which "
        "names neither parameters nor the optimizer, make one with "
        'OptimizerSnapshot.from_state_dict(model, state_dict, kind="AdamW").'
    )


def _in_short(snapshot: OptimizerSnapshot) -> list[Any]:
    """What an optimizer is, fit for JSON: its class, its rates and steps, and its moments' sum."""
    if world_size() == 1:
        return []
    states = snapshot.parameters.values()
    moments = [value for state in states for value in state.moments.values()]
    return [
        snapshot.kind,
        sorted({float(state.options["lr"]) for state in states}),
        sorted({state.step for state in states}),
        math.fsum(float(value.sum(dtype=torch.float64)) for value in moments),
    ]


@contextmanager
def _unprojected(session: Session) -> Iterator[None]:
    """Capture whole gradients for a while: an update is no linear map of them.

    Args:
        session: The session.

    Yields:
        Nothing.

    Raises:
        ValueError: If gradients would come projected from a cache.
    """
    projection = session.projection
    if projection is not None and session.cache is not None:
        raise ValueError(
            "projection must be None for method 'less' with a gradient cache, which would hold "
            "projected gradients, got both. Leave one out."
        )
    session.projection = None
    try:
        yield
    finally:
        session.projection = projection


METHODS["less"] = MethodEntry(LESSMethod, {}, checkpoints=True)
