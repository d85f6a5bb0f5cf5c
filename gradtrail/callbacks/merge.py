"""One block an optimizer step: the micro-batches of gradient accumulation, merged."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from gradtrail.callbacks.base import AbstractStepCallback
from gradtrail.factors import (
    DenseGradient,
    GradientBlock,
    JoinMemo,
    LayerGradient,
    concatenate,
    map_tensors,
    to_dense,
)
from gradtrail.hooks import HookManager, OptimizerStep

__all__ = ["MergedSteps", "merge_blocks"]


class MergedSteps(AbstractStepCallback):
    """Calls a function once an optimizer step, with the gradients of all its examples.

    The blocks of a step's micro-batches are held until it is complete. A step that a loss scaler
    skipped is left out: its gradients are not finite, and no parameter moved by them.
    """

    def __init__(self, function: Callable[[GradientBlock], None]) -> None:
        """Keep the function.

        Args:
            function: Receives a block whose ``step`` is the number of the optimizer step.
        """
        self._function = function
        self._blocks: list[GradientBlock] = []
        self._manager: HookManager | None = None

    def on_attach(self, manager: HookManager) -> None:
        """Refuse a loop that does not announce its optimizer steps.

        Args:
            manager: What captures.

        Raises:
            ValueError: If it knows of no optimizer.
        """
        if manager.optimizer is None:
            raise ValueError(
                "optimizer must be passed to collect() where blocks are merged by optimizer step, "
                "got None. Write manager.collect(optimizer)."
            )
        self._manager = manager
        self._blocks.clear()

    def on_step(self, block: GradientBlock) -> None:
        """Hold the block of a micro-batch."""
        self._blocks.append(block)

    def on_optimizer_step(self, step: OptimizerStep) -> None:
        """Merge what is held and hand it on."""
        blocks, self._blocks = self._blocks, []
        if self._manager is None or not blocks or step.skipped:
            return
        # a layer that was refused in a later micro-batch has no gradients that could be told apart
        covered = {entry.layer for entry in self._manager.coverage.with_status("covered")}
        names = [name for name in self._manager.layers if name in covered]
        self._function(merge_blocks(step.step, blocks, names))

    def on_detach(self) -> None:
        """Drop what waited for a step that did not come."""
        self._manager = None
        self._blocks.clear()

    def logs(self) -> Mapping[str, float]:
        """Nothing to say."""
        return {}


def merge_blocks(
    step: int, blocks: Sequence[GradientBlock], names: Sequence[str] | None = None
) -> GradientBlock:
    """Join blocks of one capture along their examples.

    Args:
        step: Number of the result.
        blocks: At least one; lengths may differ and are padded with positions of zero gradient.
        names: The layers of the result; None means those of the first block.

    Returns:
        All examples in order. A layer that some blocks lack has zero gradients there.
    """
    memo, layers = JoinMemo(), {}
    for name in blocks[0].layers if names is None else names:
        known = next((block.layers[name] for block in blocks if name in block.layers), None)
        if known is not None:
            found = [block.layers.get(name) or _zeros(known, len(block.ids)) for block in blocks]
            layers[name] = _join(found, memo)
    return GradientBlock(step, tuple(name for block in blocks for name in block.ids), layers)


def _join(parts: Sequence[LayerGradient], memo: JoinMemo) -> LayerGradient:
    """Join one layer, written out where some of its blocks are (``capture="auto"``)."""
    written = [isinstance(part, DenseGradient) for part in parts]
    if any(written) and not all(written):
        parts = [to_dense(part) for part in parts]
    return concatenate(parts, memo)


def _zeros(like: LayerGradient, count: int) -> LayerGradient:
    """Zero gradients of the same layer."""
    return map_tensors(like, lambda tensor: tensor.new_zeros(count, *tensor.shape[1:]))
