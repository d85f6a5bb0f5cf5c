"""Who is told of a training capture, and which backwards belong to one optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

from torch.optim import Optimizer

from gradtrail.factors import GradientBlock

__all__ = ["Listeners", "OptimizerStep", "StepCallback", "StepListener", "checked_callbacks"]


@dataclass(frozen=True)
class OptimizerStep:
    """What one step of the optimizer was made of.

    Attributes:
        step: Number of the optimizer step, from 0; in a ``Trainer``, its ``global_step`` before it.
        blocks: Numbers (``GradientBlock.step``) of the backwards that it sums, in their order.
        ids: Ids of all their examples, in that order.
        skipped: Whether the parameters did not move: a loss scaler met a value not finite.
    """

    step: int
    blocks: tuple[int, ...]
    ids: tuple[int | str, ...]
    skipped: bool = False


@runtime_checkable
class StepListener(Protocol):
    """The moments of a training capture; ``gradtrail.callbacks`` has the class to derive from."""

    def on_attach(self, manager: Any) -> None:  # noqa: ANN401  # a HookManager, which imports this
        """Take note that a capture starts."""

    def on_step(self, block: GradientBlock) -> None:
        """Receive the gradients of a backward that has just completed."""

    def on_optimizer_step(self, step: OptimizerStep) -> None:
        """Take note that the optimizer has stepped."""

    def on_detach(self) -> None:
        """Take note that the capture is over."""

    def logs(self) -> Mapping[str, float]:
        """Give numbers for the loop's log."""


StepCallback: TypeAlias = StepListener | Callable[[GradientBlock], None]


def checked_callbacks(callbacks: Sequence[StepCallback]) -> tuple[StepCallback, ...]:
    """Refuse what would not be told anything.

    Args:
        callbacks: What the user passed.

    Returns:
        The same.

    Raises:
        TypeError: If it is no sequence of listeners and functions.
    """
    if isinstance(callbacks, (str, bytes)) or not isinstance(callbacks, Iterable):
        raise TypeError(
            f"callbacks must be a list, got {_shown(callbacks)}. Write callbacks=[...], with it "
            "inside where it is a callback."
        )
    found = tuple(callbacks)
    for one in found:
        if isinstance(one, type):
            raise TypeError(
                f"callbacks must be functions or objects, got {_shown(one)}. Make one: "
                f"{one.__name__}(...)."
            )
        if not isinstance(one, StepListener) and not callable(one):
            raise TypeError(
                f"callbacks must be functions or callbacks, got {_shown(one)}. Derive it from "
                "AbstractStepCallback, or give a store to a callback: OffloadCallback(store)."
            )
    return found


def _shown(value: object) -> str:
    """What was passed, in few words."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return repr(value) if isinstance(value, (str, int, type(None))) else type(value).__name__


class Listeners:
    """The callbacks of one manager, and the backwards since the last optimizer step."""

    def __init__(self, callbacks: Sequence[StepCallback]) -> None:
        """Keep the callbacks.

        Args:
            callbacks: Listeners, or functions that receive every block; told in order.
        """
        self.optimizer: Optimizer | None = None
        self.optimizer_steps = 0
        self.scaler: Any = None
        self._callbacks = tuple(callbacks)
        self._pending: list[GradientBlock] = []

    @contextmanager
    def attached(self, manager: Any, optimizer: Optimizer | None) -> Iterator[None]:  # noqa: ANN401
        """Tell everybody of the start and, whatever happens, those who heard of it of the end.

        Args:
            manager: The manager that captures.
            optimizer: Whose steps are announced, or None.

        Yields:
            Nothing.
        """
        with ExitStack() as stack:
            stack.callback(self._forget)
            self._pending.clear()
            if optimizer is not None:
                self.optimizer = _innermost(optimizer)
                self.scaler = getattr(optimizer, "scaler", None)  # of accelerate's wrapper
                handle = self.optimizer.register_step_post_hook(self._after_step)
                stack.callback(handle.remove)
            for callback in self._callbacks:
                if isinstance(callback, StepListener):
                    callback.on_attach(manager)
                    stack.callback(callback.on_detach)
            yield

    def step(self, block: GradientBlock) -> None:
        """Hand on the block of a completed backward."""
        if self.optimizer is not None:
            self._pending.append(GradientBlock(block.step, block.ids, {}))
        for callback in self._callbacks:
            if isinstance(callback, StepListener):
                callback.on_step(block)
            else:
                callback(block)

    def optimizer_step(self, *, skipped: bool) -> None:
        """Announce an optimizer step with the backwards since the one before.

        Args:
            skipped: Whether the parameters did not move.
        """
        blocks, self._pending = self._pending, []
        ids = tuple(name for block in blocks for name in block.ids)
        numbers = tuple(block.step for block in blocks)
        step = OptimizerStep(self.optimizer_steps, numbers, ids, skipped)
        self.optimizer_steps += 1
        for callback in self._callbacks:
            if isinstance(callback, StepListener):
                callback.on_optimizer_step(step)

    def _after_step(self, *_: object) -> None:
        self.optimizer_step(skipped=False)

    def _forget(self) -> None:
        self.optimizer = self.scaler = None
        self._pending.clear()


def _innermost(optimizer: Optimizer) -> Optimizer:
    """The optimizer that steps: accelerate's wrapper passes only some calls on to its own."""
    return getattr(optimizer, "optimizer", optimizer)
