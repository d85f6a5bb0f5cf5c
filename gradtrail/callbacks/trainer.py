"""Per-example gradients from inside ``transformers.Trainer``, in one line of the user's."""

from __future__ import annotations

import atexit
import inspect
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from types import FrameType
from typing import Any, Literal

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradtrail.callbacks.base import AbstractRecordingCallback, AbstractStepCallback
from gradtrail.callbacks.merge import MergedSteps
from gradtrail.factors import GradientBlock, Projection
from gradtrail.hooks import (
    HookManager,
    LayerChoice,
    LossReduction,
    LossScale,
    OptimizerSnapshot,
    check_projection,
    checked_callbacks,
)
from gradtrail.hooks.wrapped import unwrapped

__all__ = ["GradTrailCallback"]

_LOGGER = logging.getLogger("gradtrail")


class GradTrailCallback:
    """A ``TrainerCallback`` that captures every training example's gradient.

    It attaches a ``HookManager`` to the model when training begins and takes it off when training
    ends. Training is what it would be without, to the bit; evaluation is not captured.
    The micro-batches of gradient accumulation belong to the optimizer step that sums them. A
    gradient is that of the example's own loss, summed over its positions: what the Trainer divides
    by (tokens, accumulated batches) and multiplies with (fp16's loss scale, ranks) is undone.

    Whenever the Trainer saves a checkpoint, what the callbacks record is flushed into their stores,
    so a run that is killed and resumed from there misses nothing.

    Where training ends by an exception, the hooks come off at ``detach()``, when the next
    training begins, or at the model's next call, which they do not touch.
    """

    def __new__(cls, *_: Any, **__: Any) -> GradTrailCallback:  # noqa: ANN401
        """Make an object that is a ``transformers.TrainerCallback`` too."""
        return object.__new__(_with_trainer_base(cls))

    def __init__(  # noqa: PLR0913  # takes what HookManager takes
        self,
        callbacks: Sequence[AbstractStepCallback | Callable[[GradientBlock], None]] = (),
        *,
        layers: LayerChoice = None,
        exclude: LayerChoice = None,
        include_frozen: bool = False,
        loss_reduction: LossReduction = "model",
        loss_scale: LossScale | None = None,
        projection: Projection | None = None,
        capture: Literal["factored", "materialized", "auto"] = "factored",
        optimizer: OptimizerSnapshot | Literal["trainer"] | None = None,
        sample_id_key: str | None = None,
        sample_hash_fields: Sequence[str] | None = None,
    ) -> None:
        """Choose what to capture, as for ``HookManager``; the model is the Trainer's.

        Functions among the callbacks are called once an optimizer step, with one block of all its
        examples whose ``step`` is the Trainer's ``global_step``. With a ``sample_id_key`` the batch
        holds the ids under that key (``remove_unused_columns=False``); the model does not see it.

        Args:
            callbacks: What acts on the gradients, in order.
            layers: Which layers, as in ``attribute``.
            exclude: Which to leave out.
            include_frozen: Whether parameters that are not trained count.
            loss_reduction: ``"model"`` for the model's own loss, else how the loss is reduced.
            loss_scale: What a loss taken outside the model is multiplied with, fp16's scale aside.
            projection: Compression of every layer's gradient, or None.
            capture: Factors as they are, written out, or whichever is smaller.
            optimizer: Turns gradients into update directions: a snapshot, or ``"trainer"`` for the
                Trainer's own as it stands before each step.
            sample_id_key: Key of the batch that holds ids; None: content hashes.
            sample_hash_fields: What the content hash covers; None means all.

        Raises:
            TypeError: If ``optimizer`` is anything else, such as an optimizer.
        """
        check_projection(projection)
        known = optimizer is None or isinstance(optimizer, OptimizerSnapshot)
        if not known and not (isinstance(optimizer, str) and optimizer == "trainer"):
            raise TypeError(
                "optimizer must be an OptimizerSnapshot, 'trainer' or None, got "
                f"{optimizer if isinstance(optimizer, str) else type(optimizer).__name__!r}. Write "
                "'trainer' for the optimizer that the Trainer makes."
            )
        self.manager: HookManager | None = None
        self._callbacks = tuple(
            one if isinstance(one, AbstractStepCallback) else MergedSteps(one)
            for one in checked_callbacks(callbacks)
        )
        self._optimizer = optimizer
        self._options = {
            "layers": layers,
            "exclude": exclude,
            "include_frozen": include_frozen,
            "loss_reduction": loss_reduction,
            "projection": projection,
            "capture": capture,
            "sample_id_key": sample_id_key,
            "sample_hash_fields": sample_hash_fields,
        }
        self._loss_scale = loss_scale
        self._stack = ExitStack()

    def detach(self) -> None:
        """Take the capture off the model, if it is on."""
        stack, self._stack = self._stack, ExitStack()
        stack.close()

    def on_train_begin(
        self,
        args: Any,  # noqa: ANN401
        state: Any,  # noqa: ANN401
        control: Any,  # noqa: ANN401
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        """Attach to the model that the Trainer is about to train."""
        del control
        self.detach()
        _refuse_unknown_ground(args, self._options["loss_reduction"])
        optimizer, loop = kwargs["optimizer"], _Loop()
        model = loop.wrapper_of(kwargs["model"])
        inner = unwrapped(model)

        def leave_if_over(module: nn.Module, _args: tuple[Any, ...]) -> None:
            if module in (model, inner) and not loop.is_running():
                _LOGGER.warning("Training ended by an exception; the capture is taken off.")
                self.detach()

        self.manager = HookManager(
            model,
            **self._options,
            loss_scale=self._total_scale(optimizer),
            optimizer=optimizer if self._optimizer == "trainer" else self._optimizer,
            callbacks=self._callbacks,
        )
        self.manager.optimizer_steps = state.global_step
        with ExitStack() as stack:
            atexit.register(self.detach)  # after a run that failed, while modules still exist
            stack.callback(atexit.unregister, self.detach)
            for module in dict.fromkeys((model, inner)):
                stack.callback(module.register_forward_pre_hook(leave_if_over).remove)
            stack.enter_context(self.manager.collect(optimizer))
            if self._options["sample_id_key"] is not None:
                stack.callback(_hide_from(inner, self._options["sample_id_key"]))
            self._stack = stack.pop_all()

    def _total_scale(self, optimizer: Any) -> LossScale | None:  # noqa: ANN401
        """Multiply the scale with that of mixed precision, where it is not measured anyway."""
        scaler, own = getattr(optimizer, "scaler", None), self._loss_scale
        if scaler is None or self._options["loss_reduction"] == "model":
            return own
        factor = own if callable(own) else lambda: 1.0 if own is None else own
        return lambda: scaler.get_scale() * factor()

    def on_optimizer_step(
        self,
        args: Any,  # noqa: ANN401
        state: Any,  # noqa: ANN401
        control: Any,  # noqa: ANN401
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        """Tell of a step that the loss scaler skipped; others announce themselves."""
        del args, state, control
        if self.manager is not None and getattr(kwargs["optimizer"], "step_was_skipped", False):
            self.manager.skip_optimizer_step()

    def on_save(
        self,
        args: Any,  # noqa: ANN401
        state: Any,  # noqa: ANN401
        control: Any,  # noqa: ANN401
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        """Have what was recorded outlast the process, as the checkpoint does."""
        del args, state, control, kwargs
        for one in self._callbacks:  # covariances bring the gradients they are of with them
            if isinstance(one, AbstractRecordingCallback):
                one.flush()

    def on_log(
        self,
        args: Any,  # noqa: ANN401
        state: Any,  # noqa: ANN401
        control: Any,  # noqa: ANN401
        logs: dict[str, float] | None = None,
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        """Add the callbacks' numbers to what the Trainer logs of its training steps."""
        del args, control, kwargs
        if logs is None or "loss" not in logs:
            return
        numbers = {name: value for one in self._callbacks for name, value in one.logs().items()}
        logs.update(numbers)
        state.log_history[-1].update(numbers)

    def on_train_end(
        self,
        args: Any,  # noqa: ANN401
        state: Any,  # noqa: ANN401
        control: Any,  # noqa: ANN401
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        """Take the capture off the model."""
        del args, state, control, kwargs
        self.detach()


class _Loop:
    """The training loop that is running now: the outermost call of transformers' code."""

    def __init__(self) -> None:
        """Find it on the stack."""
        frame = inspect.currentframe().f_back
        self._thread = threading.get_ident()
        self._frame: FrameType = frame.f_back
        while frame is not None:
            if str(frame.f_globals.get("__name__")).startswith("transformers."):
                self._frame = frame
            frame = frame.f_back

    def wrapper_of(self, model: nn.Module) -> nn.Module:
        """Find what the loop calls in place of a model.

        Callbacks are given the model itself; the wrapper that averages its gradients over
        processes is known to the ``Trainer`` alone, whose frames are on the stack.

        Args:
            model: The model, or FSDP's wrapper.

        Returns:
            ``DistributedDataParallel`` around it, or the model where there is none.
        """
        frame = inspect.currentframe()
        while frame is not None and frame is not self._frame.f_back:
            found = getattr(frame.f_locals.get("self"), "model_wrapped", None)
            if isinstance(found, DistributedDataParallel) and unwrapped(found) is unwrapped(model):
                return found
            frame = frame.f_back
        return model

    def is_running(self) -> bool:
        """Whether it is still on the stack; other threads cannot tell."""
        if threading.get_ident() != self._thread:
            return True
        frame = inspect.currentframe()
        while frame is not None and frame is not self._frame:
            frame = frame.f_back
        return frame is not None


@cache
def _with_trainer_base(cls: type) -> type:
    """Derive a class from the library's own base as well, which is imported only here."""
    from transformers import TrainerCallback

    if issubclass(cls, TrainerCallback):
        return cls
    return type(cls.__name__, (cls, TrainerCallback), {"__module__": cls.__module__})


def _refuse_unknown_ground(args: Any, loss_reduction: str) -> None:  # noqa: ANN401
    """Refuse what would leave the examples' gradients wrong or uncaptured.

    Args:
        args: The Trainer's arguments.
        loss_reduction: How its loss is reduced.

    Raises:
        ValueError: If an argument asks for such a thing.
    """
    if args.label_smoothing_factor and loss_reduction == "model":
        raise ValueError(
            "label_smoothing_factor must be 0 with loss_reduction='model', got "
            f"{args.label_smoothing_factor}: the Trainer then takes the loss outside the model. "
            "Turn it off, or say with loss_reduction and loss_scale what is made of the loss."
        )
    if args.n_gpu > 1:
        raise ValueError(
            f"n_gpu must be at most 1, got {args.n_gpu}: DataParallel trains copies of the model. "
            "Start one process a device, or let it see one device only."
        )
    if args.deepspeed:
        raise ValueError(
            f"deepspeed must be off, got {args.deepspeed!r}: it takes gradients out of the "
            "parameters while a backward is under way. Train without it, or with fsdp."
        )
    if args.fsdp and (args.fsdp_config or {}).get("xla"):
        raise ValueError(
            "fsdp_config must be without xla, got xla=True: its wrapper is not torch's. "
            "Train with torch's own FSDP."
        )


def _hide_from(model: nn.Module, key: str) -> Callable[[], None]:
    """Keep an entry of the batch from the model, which does not know it.

    Args:
        model: The model.
        key: Name of the argument.

    Returns:
        What undoes it.
    """

    def hide(
        module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None
    ) -> tuple[tuple[Any, ...], Mapping[str, Any]] | None:
        if module is not model or kwargs is None or key not in kwargs:
            return None
        return args, {name: value for name, value in kwargs.items() if name != key}

    return model.register_forward_pre_hook(hide, with_kwargs=True).remove
