"""``StepStore``: tensors recorded step by step, such as optimizer states and parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradtrail.errors import StoreError
from gradtrail.store.base import AbstractStore
from gradtrail.store.blocks import unknown
from gradtrail.store.disk import Entry
from gradtrail.store.facts import as_json, refuse_differing
from gradtrail.store.held import check_tensor
from gradtrail.store.layout import AbstractKind, Layout, plan_layout
from gradtrail.store.options import LogOptions, Residency
from gradtrail.store.place import Mode

__all__ = ["StepStore"]


class StepKind(AbstractKind):
    """Records that are the tensors and values of one step."""

    name = "steps"

    def describe(self, layout: Layout) -> dict[str, Any]:
        """Say nothing of layers: names of tensors say all there is to know."""
        if layout.form is not None:
            raise ValueError("a step with layers")
        return {}

    def merge(self, layers: dict[str, Any], others: Mapping[str, Any]) -> bool:  # noqa: ARG002  # of every kind
        """Refuse layers, of which steps have none."""
        if others:
            raise ValueError("steps with layers")
        return False

    def check_facts(self, layout: Layout, facts: Mapping[str, Any]) -> None:  # noqa: ARG002  # of every kind
        """Refuse facts that are not those of a step."""
        right = set(facts) == {"step", "values"} and type(facts["step"]) is int
        if not right or not isinstance(facts["values"], dict):
            raise ValueError(f"a record with {sorted(facts)}")

    def key(self, facts: Mapping[str, Any]) -> int:
        """Look records up by step."""
        return facts["step"]

    def order(self, facts: Mapping[str, Any], declared: Mapping[str, Any]) -> int:  # noqa: ARG002  # of every kind
        """Sort by step."""
        return facts["step"]


class StepStore(AbstractStore):
    """Tensors and values of steps, each step once; residencies and modes as ``GradientStore``."""

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        residency: Residency = "disk",
        budget: int | float | None = None,
        mode: Mode = "create",
        shard_bytes: int = 64 << 20,
    ) -> None:
        """Open or make a store.

        Args:
            path: Its folder, or None.
            residency: Where tensors rest.
            budget: Bytes in memory, or a share of what is free; None: half of that.
            mode: What to do with what lies in the folder.
            shard_bytes: Size at which a shard is closed.
        """
        options = LogOptions(
            path=path, residency=residency, budget=budget, mode=mode, shard_bytes=shard_bytes
        )
        super().__init__(StepKind(), options)

    @property
    def facts(self) -> Mapping[str, Any] | None:
        """What it declared, or None before ``define``."""
        return self.log.manifest.facts

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps that are stored, ascending."""
        self.log.check_open()
        return tuple(entry.facts["step"] for entry in self.log.entries)

    def __len__(self) -> int:
        """Number of steps."""
        return len(self.steps)

    def define(self, **facts: Any) -> None:  # noqa: ANN401
        """Declare what the steps are of; in a store that has facts they must be the same.

        One that differs raises ``StoreError``, which names it with both values.

        Args:
            **facts: Anything that fits JSON, by name.
        """
        made = as_json("facts", facts)
        self.log.check_writable()
        before = self.log.manifest.facts
        if before is None:
            self.log.declare(made)
            return
        refuse_differing(self.path, before, made)

    def append(
        self, step: int, tensors: Mapping[str, Tensor], values: Mapping[str, Any] | None = None
    ) -> None:
        """Add a step.

        Args:
            step: Its number.
            tensors: Its tensors by name.
            values: Anything else of it that fits JSON.

        Raises:
            StoreError: If the step is stored already.
            TypeError: If ``step`` is no int.
        """
        self.log.check_writable()
        if isinstance(step, bool) or not isinstance(step, int):
            raise TypeError(f"step must be an int, got {step!r}.")
        if step in self.log.index:
            raise StoreError(
                f"step must be one that is not stored, got {step}, which is. Discard it first."
            )
        for name, tensor in tensors.items():
            check_tensor(name, tensor, files=True)
        specs = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
        layout = plan_layout(specs, None)
        givers = [partial(tensors.__getitem__, key) for key in layout.tensors]
        facts = {"step": step, "values": as_json("values", dict(values or {}))}
        self.log.append(layout, givers, facts)

    def discard(self, step: int) -> None:
        """Let what is stored of a step count no more; the step may then be appended again."""
        self.log.discard(step)

    def values(self, step: int) -> Mapping[str, Any]:
        """Give the values of a step."""
        return self._entry(step).facts["values"]

    def names(self, step: int) -> tuple[str, ...]:
        """Names of the tensors of a step."""
        return tuple(self._entry(step).layout.tensors)

    def read(
        self,
        step: int,
        names: Sequence[str] | None = None,
        device: torch.device | str | None = None,
    ) -> dict[str, Tensor]:
        """Read tensors of a step.

        Args:
            step: Which.
            names: Which tensors; None for all.
            device: Where to; None leaves them on the CPU.

        Returns:
            The tensors by name.
        """
        return self._tensors(self._entry(step), names, device)

    def iterate(
        self,
        steps: Sequence[int] | None = None,
        *,
        reverse: bool = False,
        names: Sequence[str] | None = None,
    ) -> Iterator[tuple[int, dict[str, Tensor], Mapping[str, Any]]]:
        """Go through steps in order, each read once and the next fetched meanwhile.

        Args:
            steps: Which; None for all.
            reverse: Whether the last comes first.
            names: Which tensors; None for all.

        Returns:
            Step, tensors and values of each.
        """
        wanted = {id(self._entry(step)) for step in (self.steps if steps is None else steps)}
        entries = [entry for entry in self.log.entries if id(entry) in wanted]
        return self._iterate(entries[::-1] if reverse else entries, names)

    def _iterate(
        self, entries: list[Entry], names: Sequence[str] | None
    ) -> Iterator[tuple[int, dict[str, Tensor], Mapping[str, Any]]]:
        for entry in self.log.fetched(entries, prefetch=True):
            facts = entry.facts
            yield facts["step"], self._tensors(entry, names, None), facts["values"]

    def _entry(self, step: int) -> Entry:
        self.log.check_open()
        if step not in self.log.index:
            raise unknown("step", step, self.steps)
        return self.log.index[step]

    def _tensors(
        self, entry: Entry, names: Sequence[str] | None, device: torch.device | str | None
    ) -> dict[str, Tensor]:
        stored = entry.layout.tensors
        memory = self.log.memory(entry) if names is None else None  # of all of it or of a part
        found = {}
        for name in stored if names is None else names:
            if name not in stored:
                raise unknown("names", name, list(stored))
            tensor = self.log.tensor(entry, name, memory)
            found[name] = tensor if device is None else tensor.to(device)
        return found
