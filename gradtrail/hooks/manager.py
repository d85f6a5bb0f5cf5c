"""Capturing per-example gradients in a training loop that must not notice."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gradtrail.errors import CaptureError, GradTrailWarning
from gradtrail.factors import (
    GradientBlock,
    LayerGradient,
    LinearFactors,
    Projection,
    merge_uses,
    project,
    to_dense,
)
from gradtrail.hooks.batch import first_tensor, tokens_of
from gradtrail.hooks.capture import Capture
from gradtrail.hooks.coverage import Coverage
from gradtrail.hooks.identity import batch_ids
from gradtrail.hooks.labels import counted_labels
from gradtrail.hooks.selection import LayerChoice, select_layers
from gradtrail.hooks.taps import Taps
from gradtrail.hooks.tensors import tensors_in
from gradtrail.options import check_choice

__all__ = ["HookManager"]

StepCallback = Callable[[GradientBlock], None]


@dataclass(eq=False)
class _Step:
    """One root forward on its way to its backward."""

    capture: Capture
    ids: tuple[int | str, ...]
    layers: dict[str, LayerGradient] = field(default_factory=dict)
    task: int = -1


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
        loss_reduction: Literal["sum", "mean", "token_mean"] = "sum",
        projection: Projection | None = None,
        capture: Literal["factored", "materialized", "auto"] = "factored",
        sample_id_key: str | int | None = None,
        sample_hash_fields: Sequence[str | int] | None = None,
        callbacks: Sequence[StepCallback] = (),
    ) -> None:
        """Choose what to capture; nothing is hooked until ``collect()``.

        A per-example gradient is the gradient of that example's own summed loss, so where the
        loop's loss is a mean its divisor is multiplied back.

        Args:
            model: The model that is called in the loop.
            layers: Which layers, as in ``attribute``.
            exclude: Which to leave out.
            include_frozen: Whether parameters that are not trained count.
            loss_reduction: The loop's loss: a sum, or a mean over examples or counted labels.
            projection: Compression of every layer's gradient, or None.
            capture: Factors as they are, written out, or whichever is smaller.
            sample_id_key: Forward argument (name or position) that holds the ids, or None.
            sample_hash_fields: Arguments that the content hash covers; None means all.
            callbacks: Each is called with every block, in order.
        """
        check_choice("loss_reduction", loss_reduction, ("sum", "mean", "token_mean"))
        check_choice("capture", capture, ("factored", "materialized", "auto"))
        self.model = model
        self.steps = 0
        self.last: GradientBlock | None = None
        self._selection = select_layers(
            model, layers=layers, exclude=exclude, include_frozen=include_frozen
        )
        self._reduction = loss_reduction
        self._projection = projection
        self._form = capture
        self._id_key = sample_id_key
        self._hash_fields = sample_hash_fields
        self._callbacks = tuple(callbacks)
        self._taps = Taps(self._selection.units)
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._open: list[_Step | None] = []
        self._reported: set[frozenset[str]] = set()
        self._refused: dict[str, str] = {}
        _warn_frozen(model, self._selection.units)

    @property
    def coverage(self) -> Coverage:
        """Every parameter with its status, as far as is known by now."""
        return self._selection.coverage.without_layers(self._refused)

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the captured layers, in the order of the model's modules."""
        return tuple(unit.name for unit in self._selection.units)

    @contextmanager
    def collect(self) -> Iterator[HookManager]:
        """Capture every forward with a backward made inside.

        Yields:
            The manager.

        Raises:
            RuntimeError: If the manager is collecting already.
        """
        if self._handles:
            raise RuntimeError("collect() must not be nested, got a manager that is collecting.")
        self._taps.install()
        self._handles = [
            self.model.register_forward_pre_hook(self._enter, with_kwargs=True),
            self.model.register_forward_hook(self._leave, always_call=True),
        ]
        try:
            yield self
        finally:
            self.remove()

    def remove(self) -> None:
        """Take every hook off the model; ``collect()`` puts them on again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._taps.remove()
        self._taps.current = self._taps.running = None
        self._open.clear()

    def _enter(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Start a capture at the root forward."""
        nested = bool(self._open)
        if nested or not torch.is_grad_enabled():
            self._open.append(None)
            return
        self._taps.running = None
        fields = {**{str(place): value for place, value in enumerate(args)}, **kwargs}
        main = first_tensor(fields)
        if main is None or main.dim() == 0:
            raise CaptureError(
                "The model must be called with a tensor that has a batch axis, got "
                f"{sorted(fields)}. Call the module that takes the batch."
            )
        size = main.shape[0]
        capture = Capture(size, tokens_of(fields), sink=_ignore, scale=self._scale(fields, size))
        step = _Step(capture, self._ids(fields, size))
        capture.sink = partial(self._keep, step)
        self._open.append(step)
        self._taps.current = capture

    def _leave(self, _module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:  # noqa: ANN401
        """End the forward and wait for the backward at the model's outputs."""
        step = self._open.pop() if self._open else None
        if step is None:
            return
        self._taps.current = None
        step.capture.end_forward()
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(partial(self._begin_backward, step))

    def _begin_backward(self, step: _Step, _gradient: Tensor) -> None:
        """At the first output reached by a backward: arrange for its end to be noticed."""
        task = torch._C._current_graph_task_id()  # noqa: SLF001  # no public way to know the task
        if step.task == task or not self._handles:
            return
        step.task = task
        step.layers.clear()
        step.capture.keep_graph = torch._C._autograd._get_current_graph_task_keep_graph()  # noqa: SLF001
        self._taps.running = step.capture
        engine = torch.autograd.Variable._execution_engine  # noqa: SLF001  # as DDP and FSDP do
        engine.queue_callback(partial(self._end_backward, step))

    def _end_backward(self, step: _Step) -> None:
        """Make the block of a backward that came to its end."""
        capture = step.capture
        capture.finish()
        if self._taps.running is capture:
            self._taps.running = None
        self._drop_refused(step)
        missing = frozenset(capture.missing(self._selection.units)) - set(self._refused)
        if not step.layers and self._selection.units:
            raise CaptureError(
                "A step must bring a gradient to a captured layer, got none at "
                f"{_reasons(capture, sorted(missing))}."
            )
        if missing and missing not in self._reported:
            self._reported.add(missing)
            warnings.warn(
                f"No gradient reached {_reasons(capture, sorted(missing))}; the step has the "
                "others.",
                GradTrailWarning,
                stacklevel=2,
            )
        layers = {name: step.layers[name] for name in self.layers if name in step.layers}
        step.layers = {}
        capture.completed.clear()
        self.last = GradientBlock(self.steps, step.ids, layers)
        self.steps += 1
        for callback in self._callbacks:
            callback(self.last)

    def _keep(self, step: _Step, name: str, gradient: LayerGradient) -> None:
        """Bring one layer's gradient into the form that was asked for."""
        gradient = merge_uses(gradient)
        if self._projection is not None:
            gradient = project(name, gradient, self._projection)
        if self._form == "materialized" or (self._form == "auto" and _dense_is_smaller(gradient)):
            gradient = to_dense(gradient)
        step.layers[name] = gradient

    def _drop_refused(self, step: _Step) -> None:
        """Leave out layers whose examples cannot be told apart; an error where they were named."""
        reasons = {
            unit.name: step.capture.refused[hooked.name]
            for hooked in self._taps.modules
            if hooked.name in step.capture.refused
            for unit, _ in hooked.memberships
        }
        for name in reasons:
            step.layers.pop(name, None)
        fresh = {name: why for name, why in reasons.items() if name not in self._refused}
        if not fresh:
            return
        self._refused |= fresh
        listed = "; ".join(f"{name}: {why}" for name, why in fresh.items())
        if self._selection.explicit:
            raise CaptureError(f"layers must name layers that see one row an example: {listed}.")
        warnings.warn(
            f"Layers are left out ({listed}); coverage lists them.", GradTrailWarning, stacklevel=2
        )

    def _ids(self, fields: dict[str, Any], size: int) -> tuple[int | str, ...]:
        """Ids of a step's examples."""
        if self._id_key is None:
            names = self._hash_fields
            return batch_ids(fields, size, None if names is None else [str(name) for name in names])
        values = fields.get(str(self._id_key))
        if values is None or len(values) != size:
            raise KeyError(
                f"sample_id_key must name an argument of every forward with {size} ids, got "
                f"{self._id_key!r} beside {sorted(fields)}. Pass it to the model's call."
            )
        return tuple(values.tolist() if isinstance(values, Tensor) else values)

    def _scale(self, fields: dict[str, Any], size: int) -> float | Tensor | None:
        """What undoes the loop's mean."""
        if self._reduction == "sum":
            return None
        if self._reduction == "mean":
            return float(size)
        labels = fields.get("labels")
        if not isinstance(labels, Tensor):
            raise CaptureError(
                "loss_reduction='token_mean' must find labels= in the model's call, got "
                f"{sorted(fields)}. Pass labels, or use loss_reduction='sum'."
            )
        return counted_labels(self.model, labels)


def _ignore(_name: str, _gradient: LayerGradient) -> None:
    """Stand in for a sink until the step that holds the real one exists."""


def _dense_is_smaller(gradient: LayerGradient) -> bool:
    """Compare ``s (i + o)`` numbers of factors with ``i o`` written out."""
    if not isinstance(gradient, LinearFactors):
        return False
    i, o = gradient.activation_bsi.shape[2], gradient.output_gradient_bso.shape[2]
    return gradient.num_positions * (i + o) >= (i // gradient.groups) * o


def _reasons(capture: Capture, names: Sequence[str]) -> str:
    """Names with why no gradient came."""
    shown = [
        f"{name} ({'no gradient flows to it' if name in capture.called else 'never called'})"
        for name in names[:5]
    ]
    return ", ".join(shown) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _warn_frozen(model: nn.Module, units: Sequence[Any]) -> None:
    """Say at registration when no gradient can come."""
    if not units:
        warnings.warn(
            "Every layer that could be captured is frozen, so nothing will be. Pass "
            "include_frozen=True or train some layer.",
            GradTrailWarning,
            stacklevel=3,
        )
        return
    order = {id(module): place for place, module in enumerate(model.modules())}
    trained = [
        order[id(module)]
        for module in model.modules()
        if any(p is not None and p.requires_grad for p in module._parameters.values())  # noqa: SLF001
    ]
    first = min(trained, default=len(order))
    early = [
        unit.name for unit in units if all(order[id(own.module)] < first for own in unit.owners)
    ]
    if early:
        shown = ", ".join(early[:5]) + (", ..." if len(early) > 5 else "")
        warnings.warn(
            f"No trained parameter comes before {len(early)} frozen layers ({shown}): no gradient "
            "may reach them.",
            GradTrailWarning,
            stacklevel=3,
        )
