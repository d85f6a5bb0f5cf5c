"""What a gradtrail callback is: something that acts on captured gradients while a model trains."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from gradtrail.factors import GradientBlock
from gradtrail.hooks import HookManager, OptimizerStep

__all__ = ["AbstractRecordingCallback", "AbstractStepCallback"]


class AbstractStepCallback(ABC):
    """Told of the moments of a training capture, in a plain loop and in a ``Trainer`` alike.

    Order: ``on_attach``; then for every optimizer step one ``on_step`` a micro-batch, each after
    its backward, and one ``on_optimizer_step``; then ``on_detach``. Evaluation in between is not
    announced. A backward that raises is followed by no ``on_step``. An exception from a callback
    fails the loop at that place; ``on_detach`` comes all the same.

    Two things on the manager belong to the block that ``on_step`` receives: ``manager.scale`` is
    what the loop's gradients were multiplied with to make them the examples' own, so an example's
    contribution to a parameter's ``.grad`` is its gradient divided by that; ``manager.selection``
    has the layers with the modules and parameters they stand for.
    """

    @abstractmethod
    def on_attach(self, manager: HookManager) -> None:
        """Prepare for a capture; refuse here what cannot work.

        Args:
            manager: What captures. ``manager.optimizer`` is the innermost optimizer, or None in a
                loop that did not name it to ``collect()``; then ``on_optimizer_step`` never comes.
        """

    @abstractmethod
    def on_step(self, block: GradientBlock) -> None:
        """Act on the gradients of one backward, every ``.grad`` of which has been accumulated.

        It is called from inside ``backward()``, so before gradients are clipped and before
        the optimizer steps. The block's tensors are the callback's to keep, not to change.

        Args:
            block: Per-example gradients, each of the example's own summed loss.
        """

    @abstractmethod
    def on_optimizer_step(self, step: OptimizerStep) -> None:
        """Act on the end of an optimizer step, before gradients are set to zero.

        Args:
            step: Its number, its backwards and examples, and whether a loss scaler skipped it.
        """

    @abstractmethod
    def on_detach(self) -> None:
        """Let go of the model: the capture is over, or failed."""

    @abstractmethod
    def logs(self) -> Mapping[str, float]:
        """Give numbers for the loop's log, which the ``Trainer`` adapter adds to its own.

        Returns:
            By name, what happened since the last call; empty where there is nothing to say.
        """


class AbstractRecordingCallback(AbstractStepCallback):
    """A callback that writes into a store, which may keep the last records in memory for a while.

    ``GradTrailCallback`` flushes those of its callbacks that are of this kind whenever the
    ``Trainer`` saves a checkpoint, so that a run which is resumed from there misses nothing.
    """

    @abstractmethod
    def flush(self) -> None:
        """Have everything written that was recorded so far; it then outlasts the process."""
