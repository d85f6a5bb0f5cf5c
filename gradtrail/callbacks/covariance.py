"""Kronecker factors of the Fisher, summed up while a model trains.

The sums are those of ``kronecker.CovarianceAccumulator``, over the gradients of a capture that may
be written out or projected before they are stored. Besides the products that a sweep over stored
factors would take, they cost an addition an entry and backward (two with gradient accumulation)
and, while a step is under way, a second set of sums: what it adds can be taken back.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from gradtrail.callbacks.base import AbstractRecordingCallback
from gradtrail.callbacks.checks import check_store
from gradtrail.callbacks.covariance_layers import layers_with_covariances
from gradtrail.callbacks.offload import OffloadCallback
from gradtrail.errors import CurvatureError, GradTrailWarning
from gradtrail.factors import GradientBlock, LayerGradient
from gradtrail.hooks import HookManager, OptimizerStep
from gradtrail.kronecker import (
    CovarianceAccumulator,
    KroneckerFactors,
    covariance_state,
    covariances_from,
    covariances_name,
    restored_accumulator,
)
from gradtrail.options import check_positive
from gradtrail.store import BlockRecord, GradientStore, records_digest
from gradtrail.store.fetch import AbstractCompanion

__all__ = ["KroneckerCovarianceCallback"]


@dataclass(eq=False)
class _Part:
    """Sums of some backwards, and the records that these became."""

    sums: CovarianceAccumulator
    records: list[tuple[int, tuple[int | str, ...]]] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        return sum(len(ids) for _, ids in self.records)


class KroneckerCovarianceCallback(AbstractRecordingCallback, AbstractCompanion):
    """Accumulates Kronecker covariances of what an ``OffloadCallback`` stores beside it.

    They lie in the store as ``"covariances"``, so that K-FAC and EK-FAC can be fitted to gradients
    that have no factors any more. They cover exactly the stored records: what is not stored is
    not counted, and a backward that raised or an optimizer step that a loss scaler skipped leaves
    no trace. Layers without Kronecker structure are passed over, and the output embedding is
    unless the manager's ``layers`` name it. Of several processes each counts what it stores, under
    a name of its own; whoever reads the store adds them up.

    They are written when the capture ends, when its store is closed before that, and on
    ``flush()``, which ``GradTrailCallback`` calls with every checkpoint. A run that was killed may
    leave covariances of fewer records than are stored; a run that resumes where they end counts the
    rest again. One that begins later says so in a warning and goes on without: the gradients are
    whole, and where they are kept as factors a fit sweeps them.
    """

    def __init__(self, store: GradientStore | None = None, *, max_factor_dim: int = 16384) -> None:
        """Choose where they go.

        Args:
            store: That of the ``OffloadCallback``; None keeps them in memory, over every backward
                of the capture.
            max_factor_dim: Longest side of a covariance that is allocated.
        """
        check_store(type(self).__name__, store, GradientStore, or_none=True)
        check_positive("max_factor_dim", max_factor_dim)
        self._store = store
        self._max_side = max_factor_dim
        self._manager: HookManager | None = None
        self._offload: OffloadCallback | None = None
        self._layers: frozenset[str] = frozenset()
        self._total: _Part | None = None  # None: what is stored is not covered
        self._covered_to: int | None = None  # stored steps from here on are counted again
        self._is_complete = False
        self._step: _Part | None = None
        self._backward: _Part | None = None
        self._running: weakref.ref[object] | None = None
        self._handle: object | None = None

    def covariances(self) -> dict[str, KroneckerFactors]:
        """Give the covariances so far, a mean over the examples that this process counted.

        Returns:
            By layer.

        Raises:
            CurvatureError: If there are none.
        """
        if self._total is None or not self._total.records:
            raise CurvatureError(
                "covariances must be taken after a step that was captured, got none. Train first, "
                "with the callback in HookManager(callbacks=...)."
            )
        return covariances_from(*covariance_state(self._total.sums, self._total.num_rows))

    def flush(self) -> None:
        """Write the sums beside the gradients stored so far."""
        if self._store is None or self._total is None:
            return
        self._offload.flush()
        whole = self._total if self._step is None else _joined(self._total, self._step)
        own = _own_records(self._store)
        stored, number = _listed(own), len(whole.records)
        if self._covered_to is not None:  # the rest will be met again
            stored = stored[:number]
        if stored != whole.records:
            warnings.warn(
                f"Covariances must cover what is stored, {len(stored)} records, got {number} that "
                "were counted; they are not kept. Let nothing else write into the store while it "
                "is captured into.",
                GradTrailWarning,
                stacklevel=2,
            )
            return
        known = {entry.layer for entry in self._manager.coverage.with_status("covered")}
        whole.sums.discard(set(whole.sums.names) - known)  # refused after they had come
        tensors, metadata = covariance_state(
            whole.sums, whole.num_rows, records_digest(own[:number])
        )
        self._store.attach(_name_in(self._store), tensors, metadata)

    def on_attach(self, manager: HookManager) -> None:
        """Choose the layers, and go on from what the store holds.

        Args:
            manager: What captures.

        Raises:
            ValueError: If nothing else of the capture writes into the store.
        """
        self._layers = layers_with_covariances(manager, self._max_side)
        beside = [
            one
            for one in manager.callbacks
            if isinstance(one, OffloadCallback) and one.store is self._store
        ]
        if self._store is not None and not beside:
            raise ValueError(
                "store must be that of an OffloadCallback of the same capture, got one that "
                "nothing is written into. Put OffloadCallback(store) among the callbacks, or pass "
                "None to keep covariances in memory."
            )
        self._manager = manager
        self._offload = beside[0] if beside else None
        self._covered_to, self._is_complete = None, False
        self._total = self._found()
        self._step = self._backward = self._running = None
        self._handle = manager.observe(self._add)
        if self._store is not None:
            self._store.log.companions.add(self)

    def on_step(self, block: GradientBlock) -> None:
        """Count a backward that has come to its end."""
        part = self._under_way(block.step)
        self._backward = self._running = None
        if part is None:
            return
        part.sums.discard(set(part.sums.names) - set(block.layers))
        part.sums.end_backward()
        if self._offload is None:
            part.records.append((block.step, block.ids))
        else:
            step = self._offload.placement(block.step).step
            part.records.append((step, self._offload.recorded_ids(block)))
        if self._manager.optimizer is None:
            _absorb(self._total, part)
        elif self._step is None:
            self._step = part
        else:
            _absorb(self._step, part)

    def on_optimizer_step(self, step: OptimizerStep) -> None:
        """Count what the step was made of, unless it did not happen."""
        part, self._step = self._step, None
        if part is not None and not step.skipped:
            _absorb(self._total, part)

    def complete(self) -> None:
        """Write the sums into a store that is closed while the capture is on."""
        self._step = self._backward = self._running = None
        self._offload.settle()
        self.flush()
        self._is_complete = True

    def on_detach(self) -> None:
        """Write the sums."""
        self._handle.remove()
        self._step = self._backward = self._running = None
        try:
            if self._store is not None:
                self._store.log.companions.discard(self)
                self._offload.settle()
                self._write_last()
        finally:
            self._manager = self._offload = self._handle = None

    def logs(self) -> Mapping[str, float]:
        """Nothing to say: the loop's log is what it is without."""
        return {}

    def _write_last(self) -> None:
        """Write the sums at the end of the capture."""
        if self._store.is_writable:
            self.flush()
        elif self._total is not None and not self._is_complete:
            warnings.warn(
                "Covariances must be written while their store takes records, got one that failed "
                "while the capture was on; those of its last flush() are kept, if there was one. "
                "Resume from a checkpoint of that time or before.",
                GradTrailWarning,
                stacklevel=3,
            )

    def _add(self, name: str, gradient: LayerGradient) -> None:
        """Take one layer's gradient, inside the backward."""
        if name not in self._layers:
            return
        part = self._under_way(self._manager.steps)
        if part is not None:
            part.sums.add(name, gradient)

    def _under_way(self, number: int) -> _Part | None:
        """Sums of the backward under way; None if it is not counted.

        Args:
            number: Its number among the captured ones.

        Returns:
            Those that it began, or new ones where those here are of a backward that raised.
        """
        backward = self._manager.backward
        mine = self._running is not None and self._running() is not None
        if mine and backward is not None and self._running() is not backward:
            mine = False
        if not mine:
            counts = self._total is not None and self._counts(number)
            self._backward = self._empty() if counts else None
            self._running = None if backward is None else weakref.ref(backward)
        return self._backward

    def _counts(self, number: int) -> bool:
        """Whether a backward is stored now, or was stored and is not covered yet."""
        if self._offload is None:
            return True
        placement = self._offload.placement(number)
        if self._covered_to is None:
            return placement.is_new
        return placement.is_wanted and placement.step >= self._covered_to

    def _empty(self) -> _Part:
        """Sums of nothing, which know from those before which layers share an input."""
        like = self._total if self._step is None else self._step
        sums = CovarianceAccumulator(max_side=self._max_side, like=like.sums, holds_inputs=False)
        return _Part(sums)

    def _found(self) -> _Part | None:
        """What is covered so far; None if it is not what the store holds."""
        fresh = _Part(CovarianceAccumulator(max_side=self._max_side))
        if self._store is None:
            return fresh
        stored = _listed(_own_records(self._store))
        if not stored or (self._total is not None and self._total.records == stored):
            return self._total if stored else fresh
        attached = self._store.attached(_name_in(self._store))
        count = None if attached is None else self._num_covered(attached[1])
        if count is not None:
            sums, _ = restored_accumulator(*attached, max_side=self._max_side)
            return _Part(sums, stored[:count])
        what = "none" if attached is None else "covariances of other records"
        out = "are not fitted to layers that are written out"
        if self._manager.form.capture == "factored":
            out = "are fitted to the stored factors instead"
        warnings.warn(
            f"Covariances must cover the {len(stored)} records that are stored to go on from "
            f"there, got {what}: none are accumulated. K-FAC and EK-FAC {out}; resume from an "
            "earlier checkpoint, or start again, and call flush() wherever a run saves one "
            "(GradTrailCallback does so).",
            GradTrailWarning,
            stacklevel=2,
        )
        return None

    def _num_covered(self, metadata: Mapping[str, str]) -> int | None:
        """Number of stored records that covariances cover.

        Args:
            metadata: That of the covariances.

        Returns:
            All of them, or those before the step that the loop begins with or one after it: the
            rest is made again and counted then. None where it is neither.
        """
        records, number = _own_records(self._store), 0
        if metadata.get("covers") == records_digest(records):
            return len(records)
        text = metadata.get("num_examples", "")
        rows = int(text) if text.isdecimal() else 0
        while number < len(records) and rows > 0:
            rows -= len(records[number].ids)
            number += 1
        if rows or metadata.get("covers") != records_digest(records[:number]):
            return None
        step = records[number].step
        is_cut = number > 0 and records[number - 1].step == step
        if is_cut or self._manager.optimizer is None or self._manager.optimizer_steps > step:
            return None
        self._covered_to = step
        return number


def _own_records(store: GradientStore) -> list[BlockRecord]:
    """The records of this process; what others stored, they have counted."""
    pairs = zip(store.records, store.log.entries, strict=True)
    return [record for record, entry in pairs if entry.rank == store.log.manifest.rank]


def _listed(records: Iterable[BlockRecord]) -> list[tuple[int, tuple[int | str, ...]]]:
    return [(record.step, tuple(record.ids)) for record in records]


def _name_in(store: GradientStore) -> str:
    return covariances_name(store.log.manifest.rank)


def _absorb(whole: _Part, part: _Part) -> None:
    whole.sums.absorb(part.sums)
    whole.records.extend(part.records)


def _joined(one: _Part, two: _Part) -> _Part:
    """Both together, as they stand now."""
    found = _Part(one.sums.copy(), list(one.records))
    _absorb(found, _Part(two.sums.copy(), two.records))
    return found
