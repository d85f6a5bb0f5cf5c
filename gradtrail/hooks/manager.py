"""Capturing per-example gradients in a training loop that must not notice."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradtrail.errors import CaptureError
from gradtrail.factors import GradientBlock, LayerGradient, Projection
from gradtrail.hooks.batch import first_tensor, tokens_of
from gradtrail.hooks.capture import Capture
from gradtrail.hooks.coverage import Coverage
from gradtrail.hooks.examples import BatchShape, ExampleIds, batch_shape
from gradtrail.hooks.identity import call_fields
from gradtrail.hooks.layout import Layout
from gradtrail.hooks.listeners import Listeners, StepCallback, checked_callbacks
from gradtrail.hooks.live import is_fixed
from gradtrail.hooks.notices import warn_frozen
from gradtrail.hooks.optimizer_state import OptimizerSnapshot
from gradtrail.hooks.reduction import LossReduction, LossScale, Reduction
from gradtrail.hooks.refusals import Refusals
from gradtrail.hooks.selection import LayerChoice, Selection, select_layers
from gradtrail.hooks.step import Form, Observer, Step, check_projection
from gradtrail.hooks.taps import Backward, Taps
from gradtrail.hooks.tensors import tensors_in
from gradtrail.hooks.update_directions import UpdateDirections
from gradtrail.hooks.wrapped import lent_storages
from gradtrail.options import check_choice

__all__ = ["HookManager"]


class HookManager:
    """Captures every example's gradient while a loop of the user's trains the model.

    Between ``collect()``'s start and end every forward of the model with a backward makes one
    step: ``last`` holds its ``GradientBlock`` and each callback receives it. Parameters, losses and
    random state are what they would be without the manager, to the bit. A forward under
    ``no_grad``, one whose backward never comes and a backward that raises leave nothing behind.
    """

    def __init__(  # noqa: PLR0913  # a constructor the design spells out
        self,
        model: nn.Module,
        *,
        layers: LayerChoice = None,
        exclude: LayerChoice = None,
        include_frozen: bool = False,
        loss_reduction: LossReduction = "sum",
        loss_scale: LossScale | None = None,
        projection: Projection | None = None,
        capture: Literal["factored", "materialized", "auto"] = "factored",
        optimizer: Optimizer | OptimizerSnapshot | None = None,
        sample_id_key: str | int | None = None,
        sample_hash_fields: Sequence[str | int] | None = None,
        callbacks: Sequence[StepCallback] = (),
    ) -> None:
        """Choose what to capture; nothing is hooked until ``collect()``.

        A per-example gradient is the gradient of that example's own summed loss, so where the
        loop's loss is a mean its divisor is multiplied back.

        With an ``optimizer`` every gradient becomes the optimizer's update direction: what a step
        on it alone would move the parameters by, divided by ``-lr`` and without weight decay, from
        the optimizer's state at the time of the backward (or the snapshot's). Directions are
        written out layer by layer, then projected where that is asked for.

        Args:
            model: The model that is called in the loop.
            layers: Which layers, as in ``attribute``.
            exclude: Which to leave out.
            include_frozen: Whether parameters that are not trained count.
            loss_reduction: The loop's loss: a sum, a mean over examples or counted labels, or
                ``"model"``: what the model returns as its loss, and whatever is made of it.
            loss_scale: What the loop multiplies its loss with besides: a number, a function, None.
            projection: Compression of every layer's gradient, or None.
            capture: Factors as they are, written out, or whichever is smaller.
            optimizer: Turns gradients into update directions; it holds every captured parameter.
            sample_id_key: Forward argument (name or position) that holds the ids, or None.
            sample_hash_fields: Arguments that the content hash covers; None means all.
            callbacks: Functions that are called with every block, or listeners; in order.
        """
        check_choice("capture", capture, ("factored", "materialized", "auto"))
        check_projection(projection)
        self.model = model
        self.steps = 0
        self.last: GradientBlock | None = None
        self.scale: float | Tensor = 1.0
        self.divisor: float | Tensor = 1.0
        self.weights: Tensor | None = None
        self.batch_shape: BatchShape | None = None
        self.divisor_spans_step = False
        self.keeps_unscaled = False  # for a callback that takes ScaledLayers.unscaled
        self.layouts: dict[str, Layout] = {}  # where layers hold the batch; others are guessed
        # by callback: what it notes of each captured forward's arguments, and of the last block's
        self.forward_notes: dict[Hashable, Callable[[tuple[Any, ...], dict[str, Any]], Any]] = {}
        self.notes: dict[Hashable, Any] = {}
        self._selection = select_layers(
            model, layers=layers, exclude=exclude, include_frozen=include_frozen
        )
        self.loss_reduction, self.loss_scale = loss_reduction, loss_scale
        self.callbacks = checked_callbacks(callbacks)
        self._reduction = Reduction(model, loss_reduction, loss_scale)
        self._observers: OrderedDict[int, Observer] = OrderedDict()
        transform = None
        if optimizer is not None:
            transform = UpdateDirections(model, self._selection.units, optimizer)
        self.form = Form(projection, capture, self._observers, transform)
        self.ids = ExampleIds(sample_id_key, sample_hash_fields)
        self._listeners = Listeners(self.callbacks)
        self._taps = Taps(self._selection.units)
        self.reported_to = self._taps.reported_to  # gives the capture that a call belongs to
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._open: list[Step | None] = []
        self._refusals = Refusals(model, self._selection, self._taps.modules)
        warn_frozen(model, self._selection)

    @property
    def coverage(self) -> Coverage:
        """Every parameter with its status, as far as is known by now."""
        return self._selection.coverage.without_layers(self._refusals.reasons)

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the captured layers, in the order of the model's modules."""
        return tuple(unit.name for unit in self._selection.units)

    @property
    def selection(self) -> Selection:
        """The captured layers with their modules and parameters."""
        return self._selection

    @property
    def backward(self) -> object | None:
        """The captured backward under way, one object from its first gradient to its last."""
        return self._taps.backward_under_way

    @property
    def projection(self) -> Projection | None:
        """Compression of every layer's gradient."""
        return self.form.projection

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer whose steps are announced, while ``collect()`` is under way."""
        return self._listeners.optimizer

    @property
    def optimizer_steps(self) -> int:
        """Number of optimizer steps so far; a loop that resumes sets where it stands."""
        return self._listeners.optimizer_steps

    @optimizer_steps.setter
    def optimizer_steps(self, steps: int) -> None:
        self._listeners.optimizer_steps = steps

    @property
    def scaler_factor(self) -> float:
        """What a loss scaler multiplies losses with at present and takes out before a step.

        It is known where the optimizer brings its scaler along, as a ``Trainer``'s does, and where
        ``loss_scale`` is the ``get_scale`` of one, or a function that names one; else 1.

        Returns:
            The factor.
        """
        scaler = self._listeners.scaler or self._reduction.scaler
        return 1.0 if scaler is None else float(scaler.get_scale())

    def skip_optimizer_step(self) -> None:
        """Say that an optimizer step did not happen, because a gradient was not finite."""
        self._listeners.optimizer_step(skipped=True)

    def observe(self, observer: Observer) -> torch.utils.hooks.RemovableHandle:
        """Have a function called with each layer's gradient before it is written out.

        It is called inside the backward, as ``(layer name, gradient)``, with the gradient of the
        examples' own losses, projected where the capture projects. What it is given it must not
        change, nor keep: the input may be the loop's own, and would be held past its layer's
        backward. A backward that raises may have called it for some layers.

        Args:
            observer: The function.

        Returns:
            A handle whose ``remove()`` ends it.
        """
        handle = torch.utils.hooks.RemovableHandle(self._observers)
        self._observers[handle.id] = observer
        return handle

    @contextmanager
    def collect(self, optimizer: Optimizer | None = None) -> Iterator[HookManager]:
        """Capture every forward with a backward made inside.

        Compiled code runs uncompiled inside: it would pass over the hooks.

        Args:
            optimizer: Its steps are announced to the callbacks; None: they hear of none.

        Yields:
            The manager.

        Raises:
            RuntimeError: If the manager is collecting already.
        """
        if self._handles:
            raise RuntimeError("collect() must not be nested, got a manager that is collecting.")

        # plain functions: a copy of the model carries them along without copying the manager
        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: Any = None) -> None:  # noqa: ANN401
            if module is self.model:
                self._enter(args, kwargs)

        def leave(module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:  # noqa: ANN401
            if module is self.model:
                self._leave(output)

        with ExitStack() as stack:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.callback(self.remove)
            self._taps.install()
            self._taps.on_stray = self._refusals.warn_stray
            self._handles = [
                self.model.register_forward_pre_hook(enter, with_kwargs=True),
                self.model.register_forward_hook(leave, always_call=True),
            ]
            stack.enter_context(self._listeners.attached(self, optimizer))
            yield self

    def remove(self) -> None:
        """Take every hook off the model; ``collect()`` puts them on again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._taps.remove()
        self._taps.current = None
        self._taps.recompute_for(None)
        self._open.clear()
        self._refusals.stop_looking()

    def _enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Start a capture at the root forward."""
        if torch.compiler.is_compiling():
            raise CaptureError(
                "The model must run uncompiled while it is captured, got torch.compile inside "
                "collect(). Compile it before."
            )
        if not self._handles:  # a hook before this one has just taken it off
            return
        nested = bool(self._open)
        if nested or not torch.is_grad_enabled() or is_fixed(self.model):
            self._open.append(None)
            return
        fields = call_fields(args, kwargs)
        scalars = [n for n, v in fields.items() if isinstance(v, Tensor) and v.dim() == 0]
        aside = {*scalars, self.ids.key}
        batch = {name: value for name, value in fields.items() if name not in aside}
        main = first_tensor(batch)
        if main is None:
            raise CaptureError(
                "The model must be called with a tensor that has a batch axis, got "
                f"{sorted(fields)}. Call the module that takes the batch."
            )
        size = main.shape[0]
        capture = Capture(size, tokens_of(batch), sink=_ignore, layouts=self.layouts)
        borrowed = lent_storages(self.model, tensors_in(fields))
        step = Step(capture, self.form, self.ids.of(fields, size), borrowed=borrowed)
        step.divisor = self._reduction.divisor(fields, size)
        step.weights = self._reduction.weights(fields, size)
        step.spans = self._reduction.spans_step(fields)
        step.keeps_unscaled = self.keeps_unscaled
        step.shape = batch_shape(batch, size)
        step.notes = {key: note(args, kwargs) for key, note in self.forward_notes.items()}
        step.fields = fields if self._reduction.measures else {}
        capture.sink = step.keep
        capture.start = partial(self._begin_backward, step)
        self._open.append(step)
        self._taps.current = capture
        self._refusals.look()

    def _leave(self, output: Any) -> None:  # noqa: ANN401
        """End the forward and wait for the backward at the model's outputs."""
        step = self._open.pop() if self._open else None
        if step is None:
            return
        self._taps.current = None
        step.capture.end_forward()
        self._refusals.stop_looking()

        points: tuple[Tensor, ...] = ()
        if step.fields and output is not None:  # a forward that raised returns nothing
            points, step.divisor = self._reduction.measured(output, step.fields, step.capture.batch)
            step.fields = {}

        def announce(gradient: Tensor, *, measure: bool) -> None:
            self._begin_backward(step, gradient if measure else None)

        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:  # a hook on a leaf would outlive the step
                measure = any(tensor is point for point in points)
                tensor.register_hook(partial(announce, measure=measure))

    def _begin_backward(self, step: Step, outer: Tensor | None = None) -> bool:
        """At the first output (or layer) reached by a backward: arrange to notice its end.

        Args:
            step: The step whose graph is run through.
            outer: Gradient at the model's own loss, where that is what was reached.

        Returns:
            Whether the backward is captured.
        """
        if not self._handles:
            step.capture.running = False
            return False
        task = torch._C._current_graph_task_id()  # noqa: SLF001  # no public way to know the task
        if step.task != task:
            step.task = task
            step.layers.clear()
            step.copies.clear()
            step.scale = self._reduction.scale(step.divisor, outer)
            if outer is not None and outer.dim():  # divided outside the model: nobody knows by what
                step.weights = None
            keep = torch._C._autograd._get_current_graph_task_keep_graph()  # noqa: SLF001
            step.capture.begin(keep_graph=keep)
            backward = Backward(step.capture)
            self._taps.recompute_for(backward)
            engine = torch.autograd.Variable._execution_engine  # noqa: SLF001  # as DDP does
            # the engine lets go of its callbacks at the end, and also where it fails
            engine.queue_callback(partial(self._end_backward, step, backward))
        return True

    def _end_backward(self, step: Step, _backward: Backward) -> None:
        """Make the block of a backward that came to its end."""
        self._taps.recompute_for(None)
        capture = step.capture
        capture.finish()
        self._refusals.settle(step)
        layers = step.take(self.layers)
        step.copies.clear()
        capture.completed.clear()
        self.last = GradientBlock(self.steps, step.ids, layers)
        self.steps += 1
        self.scale = 1.0 if step.scale is None else step.scale
        self.divisor, self.weights = step.divisor, step.weights
        self.divisor_spans_step = step.spans
        self.batch_shape, self.notes = step.shape, step.notes
        self._listeners.step(self.last)


def _ignore(_name: str, _gradient: LayerGradient) -> None:
    """Stand in for a sink until the step that holds the real one exists."""
