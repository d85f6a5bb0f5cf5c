"""Parameters and batches of a training loop, recorded so that its gradients can be made again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gradtrail.callbacks.base import AbstractRecordingCallback
from gradtrail.callbacks.checks import check_store, warn_gap
from gradtrail.callbacks.optimizer_state import discard_from
from gradtrail.callbacks.snapshot_calls import pack
from gradtrail.factors import GradientBlock
from gradtrail.files import crc32, tensor_bytes
from gradtrail.hooks import HookManager, OptimizerStep
from gradtrail.hooks.wrapped import communicates, unwrapped
from gradtrail.options import check_positive
from gradtrail.store import StepStore

__all__ = ["ParameterSnapshotCallback", "call_prefix", "checksums"]


class ParameterSnapshotCallback(AbstractRecordingCallback):
    """Records every trained parameter before a step, and the batches that the step was made of.

    ``replay`` makes the step's per-example gradients again: a record also has the random state,
    the modes and the mixed precision of each forward. Parameters that are not trained, and buffers
    that have not changed, are not stored but known by a checksum, by which a replay with another
    model is refused; so is one whose loss is reduced otherwise. A step that a loss scaler skipped
    leaves no record. A loop that resumes replaces the records of the steps that it makes again.
    Of several processes that train one model each records its batches, the first the parameters.
    """

    def __init__(self, store: StepStore, *, every: int = 1) -> None:
        """Choose what to record.

        Args:
            store: Where to; it stays open when the loop is over.
            every: Record the steps whose number is a multiple of this.
        """
        check_store(type(self).__name__, store, StepStore, or_none=False)
        check_positive("every", every)
        self._store = store
        self._every = every
        self._manager: HookManager | None = None
        self._calls: list[tuple[_Call, tuple[int | str, ...]]] = []
        self._parameters: dict[str, Tensor] | None = None
        self._versions: dict[str, tuple[int, int]] = {}
        self._sums: dict[str, int] = {}
        self._latest: _Call | None = None
        self._stack = ExitStack()

    def on_attach(self, manager: HookManager) -> None:
        """Listen to the model's calls.

        Args:
            manager: What captures.

        Raises:
            RuntimeError: If the callback is attached already.
            ValueError: If the loop names no optimizer, or a process holds parts of parameters.
        """
        if self._manager is not None:
            raise RuntimeError(
                "ParameterSnapshotCallback must be attached once, got a second capture."
            )
        if manager.optimizer is None:
            raise ValueError(
                "optimizer must be passed to collect() where parameters are recorded before its "
                "steps, got None. Write manager.collect(optimizer)."
            )
        model = unwrapped(manager.model)
        if communicates(model):
            raise ValueError(
                "model must be whole in every process where parameters are recorded, got FSDP, "
                "which keeps parts of them. Train without it."
            )
        frozen = [(name, p) for name, p in model.named_parameters() if not p.requires_grad]
        self._store.define(
            recorder=type(self).__name__,
            every=self._every,
            loss_reduction=manager.loss_reduction,
            frozen=checksums(frozen),
        )
        discard_from(self._store, manager.optimizer_steps)
        name, start = type(self).__name__, manager.optimizer_steps
        warn_gap(name, self._store, self._store.steps, start, self._every)
        self._manager = manager
        self._versions = {name: _version(buffer) for name, buffer in model.named_buffers()}
        self._sums = checksums(model.named_buffers())
        with ExitStack() as stack:
            stack.callback(self._let_go)
            manager.forward_notes[self] = self._note
            stack.callback(manager.forward_notes.pop, self)
            handle = manager.model.register_forward_hook(self._on_return(), with_kwargs=True)
            stack.callback(handle.remove)
            for owner in manager.selection.units[0].owners if manager.selection.units else ():
                handle = owner.module.register_forward_pre_hook(self._on_layer())
                stack.callback(handle.remove)
            handle = manager.optimizer.register_step_pre_hook(self._before_step)
            stack.callback(handle.remove)
            self._stack = stack.pop_all()

    def on_step(self, block: GradientBlock) -> None:
        """Keep the call whose backward has ended."""
        call = self._manager.notes.get(self)
        if call is not None:
            self._calls.append((call, block.ids))

    def on_optimizer_step(self, step: OptimizerStep) -> None:
        """Record a step, unless it was skipped."""
        calls, self._calls = self._calls, []
        parameters, self._parameters = self._parameters, None
        if step.skipped or parameters is None or not calls:
            return
        rank, tensors, values, facts = self._store.log.manifest.rank, {}, [], {}
        if rank:  # the first process has stored them
            facts["parameters"] = checksums(parameters.items())
        else:
            tensors = {f"parameter/{name}": value for name, value in parameters.items()}
        for place, (call, ids) in enumerate(calls):
            prefix = call_prefix(rank, place)
            tensors |= {f"{prefix}{name}": value for name, value in call.tensors.items()}
            values.append({**call.facts, "ids": list(ids)})
        unstored = [n for n in self._sums if any(f"buffer/{n}" not in c.tensors for c, _ in calls)]
        sums = {name: self._sums[name] for name in unstored}
        self._store.append(step.step, tensors, {"calls": values, "buffers": sums, **facts})

    def flush(self) -> None:
        """Have everything written that was recorded so far."""
        self._store.flush()

    def on_detach(self) -> None:
        """Let go of the model; what has been recorded is written."""
        self._stack.close()
        self._store.flush()

    def logs(self) -> Mapping[str, float]:
        """Nothing to say."""
        return {}

    def _let_go(self) -> None:
        self._manager.notes = {}
        self._manager = self._latest = self._parameters = None
        self._calls = []

    def _due(self) -> bool:
        return self._manager.optimizer_steps % self._every == 0

    def _note(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call | None:
        """Copy a call before the model has seen it."""
        if not self._due():
            return None
        model, call = unwrapped(self._manager.model), _Call()
        call.facts["args"] = [
            pack(value, f"argument/{place}", call.tensors) for place, value in enumerate(args)
        ]
        call.facts["kwargs"] = {
            name: pack(value, f"argument/{name}", call.tensors) for name, value in kwargs.items()
        }
        call.facts["hidden"] = []
        call.facts["training"] = model.training
        call.facts["others"] = [
            name for name, module in model.named_modules() if module.training != model.training
        ]
        call.tensors["random/cpu"] = torch.get_rng_state()
        device = _device_of(model)
        if device.type == "cuda":
            call.tensors["random/cuda"] = torch.cuda.get_rng_state(device)
        call.facts["autocast"] = _autocast(device)
        call.tensors |= {
            f"buffer/{name}": buffer.detach().to("cpu", copy=True)
            for name, buffer in model.named_buffers()
            if self._versions.get(name) != _version(buffer)
        }
        self._latest = call
        return call

    def _on_return(self) -> Any:  # noqa: ANN401
        """A hook that learns which arguments other hooks kept from the model."""

        # plain functions: a copy of the model carries them along without copying the store
        def leave(module: nn.Module, _args: Any, kwargs: dict[str, Any], _output: Any) -> None:  # noqa: ANN401
            call = self._latest
            if call is not None and module is self._manager.model:
                call.facts["hidden"] = [n for n in call.facts["kwargs"] if n not in kwargs]
                self._latest = None

        return leave

    def _on_layer(self) -> Any:  # noqa: ANN401
        """A hook that learns which mixed precision the model's own forward turns on."""

        def enter(_module: nn.Module, _args: Any) -> None:  # noqa: ANN401
            if self._latest is not None:
                self._latest.facts["autocast"] = _autocast(_device_of(self._manager.model))

        return enter

    def _before_step(self, *_: object) -> None:
        """Copy the parameters that a step is about to move."""
        self._parameters = None
        if self._due():
            self._parameters = {
                name: parameter.detach().to("cpu", copy=True)
                for name, parameter in unwrapped(self._manager.model).named_parameters()
                if parameter.requires_grad
            }


@dataclass(eq=False)
class _Call:
    """One forward: copies of its tensors by name, and the rest as JSON holds it."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)


def call_prefix(rank: int, place: int) -> str:
    """What the names of a call's tensors begin with: which process made it, as its how manieth."""
    return f"call/{rank}.{place}/" if rank else f"call/{place}/"


def checksums(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, int]:
    """Sum up tensors that are not stored: CRC-32 of the bytes, by name."""
    return {name: crc32(tensor_bytes(tensor)) for name, tensor in tensors}


def _version(tensor: Tensor) -> tuple[int, int]:
    """What tells whether a tensor was changed, without looking at its values."""
    return id(tensor), tensor._version  # noqa: SLF001  # torch has no other name for it


def _device_of(model: nn.Module) -> torch.device:
    first = next(model.parameters(), None)
    return torch.device("cpu") if first is None else first.device


def _autocast(device: torch.device) -> str | None:
    """Dtype of mixed precision where it is on."""
    if not torch.is_autocast_enabled(device.type):
        return None
    return str(torch.get_autocast_dtype(device.type)).removeprefix("torch.")
