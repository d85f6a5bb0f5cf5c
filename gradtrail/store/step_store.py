"""``StepStore``: tensors recorded step by step, such as optimizer states and parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradtrail.distributed import world_size
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
        right = set(facts) - {"ranks"} == {"step", "values"} and type(facts["step"]) is int
        ranks = facts.get("ranks", 2)
        if (
            not right
            or not isinstance(facts["values"], dict)
            or type(ranks) is not int
            or ranks < 2
        ):
            raise ValueError(f"a record with {sorted(facts)}")

    def key(self, facts: Mapping[str, Any]) -> int:
        """Look records up by step."""
        return facts["step"]

    def order(self, facts: Mapping[str, Any], declared: Mapping[str, Any]) -> int:  # noqa: ARG002  # of every kind
        """Sort by step."""
        return facts["step"]


class StepStore(AbstractStore):
    """Tensors and values of steps, each step once; residencies and modes as ``GradientStore``.

    Where several processes of ``torch.distributed`` have one folder open, each appends its part of
    a step. A step is there once all of its parts are, for readers that open the store after that:
    its tensors are those of all parts, of one name those of the lowest rank.
    """

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
        self._shared: set[int] = set()  # steps whose other parts are written meanwhile
        self._seen: tuple[int, tuple[dict[int, list[Entry]], set[int]]] | None = None

    @property
    def facts(self) -> Mapping[str, Any] | None:
        """What it declared, or None before ``define``."""
        return self.log.manifest.facts

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps that are stored, ascending; while it is written, those this process stored."""
        self.log.check_open()
        if self.log.options.mode != "read":
            return tuple(sorted(self._own()))
        return tuple(sorted(step for step, found in self._parts().items() if _is_whole(found)))

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
        """Add a step, or this process's part of it.

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
        rank = self.log.manifest.rank  # other processes record the same steps
        if step in self.log.index and any(
            entry.rank == rank and entry.facts["step"] == step for entry in self.log.entries
        ):
            raise StoreError(
                f"step must be one that is not stored, got {step}, which is. Discard it first."
            )
        for name, tensor in tensors.items():
            check_tensor(name, tensor, files=True)
        specs = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
        layout = plan_layout(specs, None)
        givers = [partial(tensors.__getitem__, key) for key in layout.tensors]
        facts = {"step": step, "values": as_json("values", dict(values or {}))}
        ranks = 1 if self.is_temporary else world_size()
        self.log.append(layout, givers, facts if ranks == 1 else {**facts, "ranks": ranks})
        if ranks > 1:
            self._shared.add(step)

    def discard(self, step: int) -> None:
        """Let what this process stored of a step count no more; it may append it again then."""
        self.log.discard(step)

    def values(self, step: int) -> Mapping[str, Any]:
        """Give the values of a step, of several processes those of rank 0."""
        return self.parts(step)[0]

    def parts(self, step: int) -> tuple[Mapping[str, Any], ...]:
        """Give the values of a step that every process has stored, by rank."""
        return tuple(entry.facts["values"] for entry in self._whole(step))

    def names(self, step: int) -> tuple[str, ...]:
        """Names of the tensors of a step."""
        return tuple(_owners(self._whole(step)))

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
        return self._tensors(self._whole(step), names, device)

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
        wanted = sorted(set(self.steps if steps is None else steps), reverse=reverse)
        return self._iterate([self._whole(step) for step in wanted], names)

    def _iterate(
        self, found: list[list[Entry]], names: Sequence[str] | None
    ) -> Iterator[tuple[int, dict[str, Tensor], Mapping[str, Any]]]:
        entries = [entry for parts in found for entry in parts]
        fetched = self.log.fetched(entries, prefetch=True)
        for parts in found:
            facts = list(islice(fetched, len(parts)))[0].facts
            yield facts["step"], self._tensors(parts, names, None), facts["values"]

    def _own(self) -> set[int]:
        """Steps of which this process has stored its part."""
        return self._view()[1]

    def _parts(self) -> dict[int, list[Entry]]:
        """What is stored of every step, by rank."""
        return self._view()[0]

    def _view(self) -> tuple[dict[int, list[Entry]], set[int]]:
        """Group the records, once for as long as they stay the same."""
        if self._seen is None or self._seen[0] != self.log.version:
            parts: dict[int, list[Entry]] = {}
            for entry in self.log.entries:
                parts.setdefault(entry.facts["step"], []).append(entry)
            mine = self.log.manifest.rank
            own = {step for step, found in parts.items() if any(e.rank == mine for e in found)}
            self._seen = (self.log.version, (parts, own))
        return self._seen[1]

    def _whole(self, step: int) -> list[Entry]:
        """The parts of a step, those that belong together, by rank."""
        self.log.check_open()
        found = self._parts().get(step, [])
        is_known = _is_whole(found) and step not in self._shared
        if not found or (self.log.options.mode == "read" and not is_known):
            raise unknown("step", step, self.steps)
        if not is_known:
            raise StoreError(
                f"step must be one whose parts of all processes are known, got {step}, of which "
                f"this process has written its own of {_num_ranks(found)}. Open the store with "
                "mode='read' once all have written."
            )
        return found[: _num_ranks(found)]

    def _tensors(
        self, parts: list[Entry], names: Sequence[str] | None, device: torch.device | str | None
    ) -> dict[str, Tensor]:
        owners = _owners(parts)
        whole = {  # mapped at once where all of a part is wanted, and not some of it
            id(entry): self.log.memory(entry) if names is None else None for entry in parts
        }
        found = {}
        for name in owners if names is None else names:
            if name not in owners:
                raise unknown("names", name, list(owners))
            entry = owners[name]
            tensor = self.log.tensor(entry, name, whole[id(entry)])
            found[name] = tensor if device is None else tensor.to(device)
        return found


def _num_ranks(found: list[Entry]) -> int:
    """How many processes stored a step, as the first of them says."""
    return found[0].facts.get("ranks", 1)


def _is_whole(found: list[Entry]) -> bool:
    """Whether every process's part of a step is there."""
    # parts of a run that fewer processes went on with come behind those that count
    count = _num_ranks(found) if found else 1
    ranks = [(entry.rank, _num_ranks([entry])) for entry in found[:count]]
    return ranks == [(place, count) for place in range(count)]


def _owners(parts: list[Entry]) -> dict[str, Entry]:
    """Which part each tensor of a step is read from."""
    owners: dict[str, Entry] = {}
    for entry in parts:
        owners |= {name: entry for name in entry.layout.tensors if name not in owners}
    return owners
