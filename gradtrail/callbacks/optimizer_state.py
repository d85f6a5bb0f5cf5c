"""The optimizer's moments and hyperparameters, recorded at every step of a training loop.

Suffixes: n entry of one parameter, in the order of its layer's written-out gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from gradtrail.callbacks.base import AbstractRecordingCallback
from gradtrail.callbacks.checks import check_store, warn_gap
from gradtrail.factors import GradientBlock
from gradtrail.hooks import (
    DIRECTIONS,
    HookManager,
    LayerParameters,
    LayerState,
    OptimizerSnapshot,
    OptimizerStep,
    layer_parameters,
)
from gradtrail.hooks.optimizer_state import from_record, read_state, state_of, to_record
from gradtrail.hooks.sharded import Shards, reducing_sizes
from gradtrail.hooks.sharded_state import whole_states
from gradtrail.options import check_choice, check_positive
from gradtrail.store import StepStore

__all__ = ["OptimizerStateCallback", "read_states"]

_SIDES = {"before": ("before",), "after": ("after",), "both": ("before", "after")}


class OptimizerStateCallback(AbstractRecordingCallback):
    """Records what the optimizer holds for the captured parameters, before and after its steps.

    Each record has the number of the optimizer step, the moments by parameter name, copied, in the
    order of the layers' written-out gradients, every group's hyperparameters as that step used
    them (learning rate of the schedule included), and the ids, sizes and scales of the backwards
    that it sums. A step that a loss scaler skipped leaves no record, but the next one names it. A
    loop that resumes replaces the records of the steps that it makes again. Of several processes
    that DDP or FSDP lets train one model each records its backwards, the first the moments.
    """

    def __init__(
        self,
        store: StepStore,
        *,
        moments: Literal["before", "after", "both"] = "before",
        every: int = 1,
    ) -> None:
        """Choose what to record.

        Args:
            store: Where to; it stays open when the loop is over.
            moments: Whether a record holds the moments that the step starts from (LESS asks for
                these), those that it leaves, or both. Hyperparameters are recorded always.
            every: Record the steps whose number is a multiple of this.
        """
        check_store(type(self).__name__, store, StepStore, or_none=False)
        check_choice("moments", moments, _SIDES)
        check_positive("every", every)
        self._store = store
        self._moments = moments
        self._every = every
        self._manager: HookManager | None = None
        self._layers: dict[str, LayerParameters] = {}
        self._backwards: list[tuple[int, float | Tensor]] = []
        self._skipped: list[int] = []
        self._before: tuple[dict[str, Tensor], dict[str, Any]] | None = None
        self._shards: Shards | None = None
        self._keeps = True  # the moments, which the first process may have stored
        self._stack = ExitStack()

    def on_attach(self, manager: HookManager) -> None:
        """Find the captured parameters in the optimizer.

        Args:
            manager: What captures.

        Raises:
            RuntimeError: If the callback is attached already.
            ValueError: If the loop names no optimizer, or it holds no captured layer.
        """
        if self._manager is not None:
            raise RuntimeError(
                "OptimizerStateCallback must be attached once, got a second capture."
            )
        optimizer = manager.optimizer
        if optimizer is None:
            raise ValueError(
                "optimizer must be passed to collect() where its state is recorded, got None. "
                "Write manager.collect(optimizer)."
            )
        kind = DIRECTIONS.find(optimizer).kind
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        every = layer_parameters(manager.selection.units, manager.model)
        self._layers = {
            name: layer
            for name, layer in every.items()
            if all(id(parameter) in held for parameter in layer.parameters.values())
        }
        if not self._layers:
            raise ValueError(
                f"optimizer must hold a captured layer, got a {kind} of other parameters. Pass "
                "the optimizer that trains the model to collect()."
            )
        self._shards = Shards(manager.model)
        self._keeps = not self._store.log.manifest.rank or not reducing_sizes(manager.model)
        self._store.define(
            recorder=type(self).__name__,
            moments=self._moments,
            every=self._every,
            optimizer=kind,
            layers={name: _facts_of(layer) for name, layer in self._layers.items()},
        )
        discard_from(self._store, manager.optimizer_steps)
        name, start = type(self).__name__, manager.optimizer_steps
        warn_gap(name, self._store, self._store.steps, start, self._every)
        self._manager = manager
        self._stack.callback(self._let_go)
        self._stack.callback(optimizer.register_step_pre_hook(self._before_step).remove)

    def on_step(self, block: GradientBlock) -> None:
        """Note the size of a backward, and its scale once a loss scaler's part is taken out."""
        scale = self._manager.scale * self._manager.scaler_factor
        self._backwards.append((len(block.ids), scale))

    def on_optimizer_step(self, step: OptimizerStep) -> None:
        """Record a step, unless it was skipped."""
        backwards, self._backwards = self._backwards, []
        before, self._before = self._before, None
        if step.skipped:
            self._skipped.append(step.step)
        if step.skipped or before is None:
            return
        tensors, values = {}, {"skipped": self._skipped}
        found = {"before": before}
        if "after" in _SIDES[self._moments]:
            found["after"] = self._look(copies=self._keeps)
        for side, (moments, facts) in found.items():
            values[side] = facts
            if side in _SIDES[self._moments] and self._keeps:
                tensors |= {f"{side}/{name}": value for name, value in moments.items()}
        values["ids"] = list(step.ids)
        values["sizes"] = [size for size, _ in backwards]
        values["scales"] = numbers_of(scale for _, scale in backwards)
        self._store.append(step.step, tensors, values)
        self._skipped = []

    def flush(self) -> None:
        """Have everything written that was recorded so far."""
        self._store.flush()

    def on_detach(self) -> None:
        """Let go of the loop; what has been recorded is written."""
        self._stack.close()
        self._store.flush()

    def logs(self) -> Mapping[str, float]:
        """Nothing to say."""
        return {}

    def _let_go(self) -> None:
        self._manager = self._shards = None
        self._layers = {}
        self._backwards, self._before, self._skipped = [], None, []

    def _before_step(self, *_: object) -> None:
        """Look at the state that a step starts from, with the hyperparameters that it will use."""
        due = self._manager.optimizer_steps % self._every == 0
        copies = self._keeps and "before" in _SIDES[self._moments]
        self._before = self._look(copies=copies) if due else None

    def _look(self, *, copies: bool) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Take the state of the captured parameters apart, on the CPU.

        Args:
            copies: Whether the moments are wanted; else they are left where they are.

        Returns:
            What ``to_record`` gives.
        """
        optimizer = self._manager.optimizer
        direction = DIRECTIONS.find(optimizer)
        groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        states = {}
        for layer in self._layers.values():
            here = {}
            for role, parameter in layer.parameters.items():
                state = read_state(direction, state_of(optimizer, parameter), groups[id(parameter)])
                here[layer.names[role]] = (parameter, state)
            whole = whole_states(direction, here, self._shards)
            for role, name in layer.names.items():
                state = whole[name]
                if copies:
                    moments = {
                        key: layer.row(role, value.detach()).to("cpu", copy=True)
                        for key, value in state.moments.items()
                    }
                    state = replace(state, moments=moments)
                states[name] = state
        return to_record(OptimizerSnapshot(direction.kind, states))


def read_states(
    facts: Mapping[str, Any],
    values: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    when: Literal["before", "after"] = "before",
    *,
    layers: Iterable[str] | None = None,
) -> dict[str, LayerState]:
    """Read what ``OptimizerStateCallback`` recorded of one step.

    Args:
        facts: The store's facts.
        values: The record's values.
        tensors: The record's tensors, at least those of the layers asked for.
        when: Which side of the step.
        layers: Which layers; None means all that were recorded.

    Returns:
        The optimizer's state by layer, in the order of the layer's written-out gradient.

    Raises:
        ValueError: If that side was not recorded, or the store is of another recorder.
        KeyError: If a layer was not recorded.
    """
    check_choice("when", when, ("before", "after"))
    recorder = facts.get("recorder")
    if recorder != OptimizerStateCallback.__name__ or when not in _SIDES[facts["moments"]]:
        got = recorder if recorder != OptimizerStateCallback.__name__ else facts["moments"]
        raise ValueError(
            f"The store must have the optimizer's state {when} each step, got records of "
            f"{got!r}. Train with OptimizerStateCallback(store, moments='both') or '{when}'."
        )
    known = facts["layers"]
    chosen = list(known) if layers is None else list(layers)
    missing = [name for name in chosen if name not in known]
    if missing:
        raise KeyError(
            f"The optimizer's state must have been recorded for every layer, got none of "
            f"{missing[0]!r}. Capture it in training, with its parameters in the optimizer."
        )
    names = {name for layer in chosen for _, name, _ in known[layer]}
    side = dict(values[when])
    side["parameters"] = {
        name: entry for name, entry in side["parameters"].items() if name in names
    }
    start = len(when) + 1
    own = {key[start:]: value for key, value in tensors.items() if key.startswith(f"{when}/")}
    snapshot = from_record(own, side)
    return {
        layer: LayerState(
            snapshot.kind,
            {role: size for role, _, size in known[layer]},
            {role: snapshot.parameters[name] for role, name, _ in known[layer]},
        )
        for layer in chosen
    }


def discard_from(store: StepStore, step: int) -> None:
    """Drop the records of steps that a loop which resumes is going to make again."""
    for number in [number for number in store.steps if number >= step]:
        store.discard(number)


def numbers_of(values: Iterable[float | Tensor]) -> list[float]:
    """Read numbers, some of which may be on a device, which is asked once."""
    found = list(values)
    tensors = [value.detach().double().reshape(()) for value in found if isinstance(value, Tensor)]
    read = iter(torch.stack(tensors).tolist() if tensors else ())
    return [next(read) if isinstance(value, Tensor) else float(value) for value in found]


def _facts_of(layer: LayerParameters) -> list[list[Any]]:
    """Role, name and number of entries of each parameter, in the order of the gradient."""
    return [[role, name, layer.sizes[role]] for role, name in layer.names.items()]
