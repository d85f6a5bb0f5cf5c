"""Writing the per-example gradients of a training run into a store, while it trains."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from typing import Any, Literal

from gradtrail.callbacks.base import AbstractRecordingCallback
from gradtrail.callbacks.checks import check_store
from gradtrail.callbacks.recorded_steps import Placement, RecordedSteps, check_same
from gradtrail.callbacks.summed import sum_examples
from gradtrail.errors import GradTrailWarning
from gradtrail.factors import GradientBlock, LayerGradient
from gradtrail.hooks import HookManager, OptimizerStep
from gradtrail.hooks.wrapped import output_embedding
from gradtrail.store import BackgroundWriter, GradientStore

__all__ = ["OffloadCallback"]


class OffloadCallback(AbstractRecordingCallback):
    """Stores the gradients of a training run, each under the number of its optimizer step.

    The step is ``manager.optimizer_steps`` where the loop announces its optimizer (a ``Trainer``:
    its ``global_step``), else the backwards are counted. What belongs to no step of the optimizer
    is not kept: neither a step that a loss scaler skipped, nor one that the loop did not complete.

    A training that is resumed into a store opened with ``mode="resume"`` goes on where it stands:
    what is stored is not stored again, and other examples at a stored place are an error. A plain
    loop that resumes sets ``manager.optimizer_steps`` (without an optimizer ``manager.steps``).
    Steps that are missing before its start, and a capture that added nothing, are warned of.

    A block's ``meta`` has ``place`` (which backward of its step) and ``scale`` (an example's
    contribution to the gradient that the optimizer meets is its own divided by that); one record an
    example also ``tokens``, ``lengths`` and ``padding_left``.
    """

    def __init__(
        self,
        store: GradientStore,
        *,
        every: int = 1,
        recording: Literal["per_example", "per_block"] = "per_example",
        gradient_accumulation_steps: int = 1,
        asynchronous: bool = True,
    ) -> None:
        """Choose what is kept.

        Args:
            store: Where to; the caller's to close.
            every: Steps 0, k, 2k, ... are kept.
            recording: One record an example; or one a backward: the sum of its examples'
                gradients under the id ``"<step>.<place>"``, theirs in ``meta["members"]``.
            gradient_accumulation_steps: Backwards a step. Only for loops that do not announce
                their optimizer; with one, any other number than 1 is refused.
            asynchronous: Whether a thread of its own writes; its errors come with the next step.
        """
        check_store("OffloadCallback", store, GradientStore, or_none=False)
        self.store = store
        self._steps = RecordedSteps(
            every=every,
            recording=recording,
            gradient_accumulation_steps=gradient_accumulation_steps,
        )
        self._asynchronous = asynchronous
        self._manager: HookManager | None = None
        self._writer: BackgroundWriter | None = None
        self._unfinished: int | None = None
        self._num_new = self._num_stored = 0

    def placement(self, number: int) -> Placement:
        """Tell where a backward of the capture under way is kept.

        Args:
            number: Its number, as in ``GradientBlock.step``; that of one which runs is
                ``manager.steps``.

        Returns:
            Its step and place, whether it is kept, and what is stored there already.
        """
        return self._steps.placement(number)

    def recorded_ids(self, block: GradientBlock) -> tuple[int | str, ...]:
        """Ids under which the gradients of a backward are stored."""
        if self._steps.recording == "per_example":
            return block.ids
        return (self.placement(block.step).block_id,)

    def flush(self) -> None:
        """Have everything written that was captured so far."""
        if self._writer is not None:
            self._writer.flush()
        self.store.flush()

    def settle(self) -> None:
        """Have everything written, but for an optimizer step that is under way: it is given up.

        In a store that was closed before, what it holds of such a step stays.
        """
        self.flush()
        unfinished, self._unfinished = self._unfinished, None
        if unfinished is not None and self.store.is_writable:
            self._take_back(unfinished)

    def on_attach(self, manager: HookManager) -> None:
        """Say what will be captured, and start the writer.

        Args:
            manager: What captures.

        Raises:
            ValueError: If it has another callback that writes into the same store.
        """
        others = (one for one in manager.callbacks if isinstance(one, OffloadCallback))
        if any(one is not self and one.store is self.store for one in others):
            raise ValueError(
                "store must be written by one OffloadCallback of a capture, got two with the same. "
                "Leave one out."
            )
        self._steps.start(manager, self.store)
        self.store.define(**_facts(manager, self._steps))
        self._writer = BackgroundWriter(self.store) if self._asynchronous else None
        self._manager, self._unfinished = manager, None
        self._num_new = self._num_stored = 0

    def on_step(self, block: GradientBlock) -> None:
        """Store the gradients of a backward, unless they are stored or not wanted."""
        placement = self.placement(block.step)
        if not placement.is_wanted:
            return
        check_same(placement, block.ids)
        if not placement.is_new:
            self._num_stored += 1
            return
        self._num_new += 1
        meta = self._meta(placement, block)
        layers: Mapping[str, LayerGradient] = dict(block.layers.items())
        if self._steps.recording == "per_block":
            layers = {name: sum_examples(gradient) for name, gradient in layers.items()}
        if self._manager.optimizer is not None:
            self._unfinished = placement.step
        kept = GradientBlock(placement.step, self.recorded_ids(block), layers)
        if self._writer is None:
            self.store.append(kept, meta=meta)
        else:
            self._writer.submit(kept, meta)

    def on_optimizer_step(self, step: OptimizerStep) -> None:
        """Keep what the step was made of, or take it back where it did not happen."""
        self._unfinished = None
        self._steps.end_step()
        if step.skipped:
            self._take_back(step.step)

    def on_detach(self) -> None:
        """Write what is left."""
        try:
            self.settle()
        finally:
            writer, self._writer, self._manager = self._writer, None, None
            self._steps.stop()
            if writer is not None:
                writer.close()
        if self._num_stored and not self._num_new:
            warnings.warn(
                "A capture must add something to its store, got one whose "
                f"{self._num_stored} backwards were stored already: nothing was written, and what "
                "is stored may be of other weights. Write another training into another folder, "
                "or with mode='overwrite'.",
                GradTrailWarning,
                stacklevel=2,
            )

    def logs(self) -> Mapping[str, float]:
        """Nothing to say: the loop's log is what it is without."""
        return {}

    def _take_back(self, step: int) -> None:
        """Discard what is stored of a step that did not happen."""
        if self._writer is not None:
            self._writer.flush()
        if self.store.find(step=step):
            self.store.discard(step)

    def _meta(self, placement: Placement, block: GradientBlock) -> dict[str, Any]:
        """What is known of a backward besides its gradients."""
        manager, shape = self._manager, self._manager.batch_shape
        meta = {
            "place": placement.place,
            "scale": float(manager.scale) * manager.scaler_factor,
        }
        if self._steps.recording == "per_block":
            return {**meta, "members": list(block.ids)}
        left = shape.padding_left
        return {
            **meta,
            "size": len(block.ids),
            "tokens": shape.tokens,
            "lengths": shape.lengths.tolist(),
            "padding_left": None if left is None else left.tolist(),
        }


def _facts(manager: HookManager, steps: RecordedSteps) -> dict[str, Any]:
    """What defines a capture: it must be the same where a store is resumed."""
    projection, selection = manager.projection, manager.selection
    head = output_embedding(manager.model)
    output_layers = [
        unit.name
        for unit in selection.units
        if head is not None and any(owner.module is head for owner in unit.owners)
    ]
    extra = {
        "source": "training",
        "every": str(steps.every),
        "output_layers": json.dumps(output_layers),
        "without_kronecker": json.dumps(selection.without_kronecker),
        "coverage": json.dumps(selection.coverage.to_records()),
    }
    if manager.form.transform is not None:
        extra["gradients"] = f"update directions of {manager.form.transform.kind}"
    return {
        "id_scheme": manager.ids.scheme,
        "recording": steps.recording,
        "capture": manager.form.capture,
        "projection": None
        if projection is None
        else {"kind": projection.kind, "dim": projection.dim, "seed": projection.seed},
        "loss_reduction": manager.loss_reduction,
        "extra": extra,
    }
