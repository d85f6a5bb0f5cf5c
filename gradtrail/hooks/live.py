"""A pass over a fixed model: parameters frozen, no weight gradients, everything put back."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from gradtrail.errors import CaptureError, GradTrailWarning
from gradtrail.hooks.capture import Anchor, Capture, Sink
from gradtrail.hooks.layout import Layout, compare_shapes
from gradtrail.hooks.selection import Selection
from gradtrail.hooks.taps import Taps

__all__ = ["LivePass"]


class LivePass:
    """Runs forwards and output-gradient-only backwards over a model that must not change.

    While it is open the parameters are frozen and the model evaluates (dropout off); flags,
    modes, generators, hooks and compilation are as they were once it is closed, also after an
    error. Autograd computes output gradients only, and stops at the lowest captured layer.
    """

    def __init__(self, model: nn.Module, selection: Selection) -> None:
        """Prepare a pass.

        Args:
            model: The model.
            selection: The layers to capture.
        """
        self.model = model
        self.selection = selection
        self.taps = Taps(selection.units)
        self.reached: set[str] = set()
        self._layouts: dict[str, Layout] = {}
        self._stack = ExitStack()
        self._opened = False

    def __enter__(self) -> LivePass:
        """Freeze the model and put the hooks on.

        Returns:
            The open pass.
        """
        with ExitStack() as stack:
            stack.callback(_restore_random_state, *_random_state())
            for parameter in self.model.parameters():
                stack.callback(parameter.requires_grad_, parameter.requires_grad)
                parameter.requires_grad_(False)  # noqa: FBT003  # torch's own signature
            for module in self.model.modules():
                stack.callback(setattr, module, "training", module.training)
                module.training = False
            stack.callback(self.taps.remove)
            self.taps.install()
            if "torch._dynamo" in sys.modules:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Put everything back."""
        self._stack.__exit__(kind, error, trace)

    def probe(self, run: Callable[[int], Any], tokens: int) -> None:
        """Find out where each layer holds the batch, and drop layers that hold no examples.

        Args:
            run: Runs the model's forward on one example repeated the given number of times.
            tokens: Number of positions of that example in the model's own input.

        Raises:
            CaptureError: If a layer the user named cannot tell its examples apart.
        """
        seen = []
        for copies in (1, 2):
            with torch.no_grad(), self.taps.recording_shapes() as shapes:
                run(copies)
            seen.append(shapes)
        reasons: dict[str, str] = {}
        for hooked in self.taps.modules:
            layout = _layout_of(hooked.name, seen, tokens)
            if layout is None:
                continue
            self._layouts[hooked.name] = layout
            if layout.reason is not None:
                reasons |= {unit.name: layout.reason for unit, _ in hooked.memberships}
        if reasons and self.selection.explicit:
            listed = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
            raise CaptureError(
                f"layers must name layers that see one row an example, got {listed}. "
                "Leave them out."
            )
        if reasons:
            self._drop(reasons)

    def run(
        self, losses: Callable[[], Tensor], *, batch: int, tokens: int, sink: Sink
    ) -> tuple[Tensor, tuple[str, ...]]:
        """Run one forward and backward and hand each layer's gradient to the sink as it comes.

        Args:
            losses: Runs the model and returns one summed loss an example. Shape ``[b]``.
            batch: Number of examples ``b``.
            tokens: Number of positions of one example in the model's own input.
            sink: Receives ``(layer name, gradient)``.

        Returns:
            The losses, and the names of layers that no gradient reached (their gradient is 0).

        Raises:
            CaptureError: If no gradient reached any layer, or a layer's rows do not fit.
        """
        capture, values = self._forward(losses, batch, tokens, sink)
        if capture.reentrant and not self._opened:
            self._open_inputs()
            capture, values = self._forward(losses, batch, tokens, sink)
        if capture.refused:
            name, reason = next(iter(capture.refused.items()))
            raise CaptureError(f"{name} must see one row an example, got otherwise: {reason}.")
        if values.requires_grad:
            with self.taps.backward(capture):
                values.sum().backward()
            capture.finish()
        if not capture.completed and batch:
            called = "none was called" if not capture.called else "the loss does not depend on them"
            listed = ", ".join(unit.name for unit in self.selection.units[:3])
            raise CaptureError(
                f"The backward must reach a captured layer, got no gradient at any of "
                f"{len(self.selection.units)} ({listed}, ...): {called}. "
                "Check the loss and the layers."
            )
        self.reached |= capture.completed
        return values.detach(), capture.missing(self.selection.units)

    def never_reached(self) -> tuple[str, ...]:
        """Names of the layers that no gradient of any batch reached."""
        return tuple(u.name for u in self.selection.units if u.name not in self.reached)

    def _forward(
        self, losses: Callable[[], Tensor], batch: int, tokens: int, sink: Sink
    ) -> tuple[Capture, Tensor]:
        capture = Capture(batch, tokens, sink, live=True, layouts=self._layouts)
        with torch.inference_mode(mode=False), torch.enable_grad(), self.taps.forward(capture):
            values = losses()
        if not isinstance(values, Tensor) or values.shape != (batch,):
            got = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise ValueError(
                f"loss must return one value an example, shape ({batch},), got {got}. For a "
                'scalar pass loss_reduction="sum", "mean" or "token_mean".'
            )
        return capture, values

    def _drop(self, reasons: dict[str, str]) -> None:
        """Leave out layers found unsupported, and say so."""
        units = tuple(unit for unit in self.selection.units if unit.name not in reasons)
        coverage = self.selection.coverage.without_layers(reasons)
        self.selection = replace(self.selection, units=units, coverage=coverage)
        listed = "; ".join(f"{name}: {reason}" for name, reason in list(reasons.items())[:3])
        more = f" and {len(reasons) - 3} more" if len(reasons) > 3 else ""
        warnings.warn(
            f"{len(reasons)} layers are left out ({listed}{more}); coverage() lists them.",
            GradTrailWarning,
            stacklevel=5,
        )
        self.taps.remove()
        self.taps = Taps(units)
        self._stack.callback(self.taps.remove)
        self.taps.install()

    def _open_inputs(self) -> None:
        """Make what enters the layers require grad, which reentrant checkpointing asks for."""
        self._opened = True
        anchor = torch.zeros((), requires_grad=True)

        def opened(value: Any) -> Any:  # noqa: ANN401
            if not isinstance(value, Tensor) or not value.is_floating_point():
                return value
            return value if value.requires_grad else Anchor.apply(value, anchor)

        def enter(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
            return tuple(map(opened, args)), {key: opened(value) for key, value in kwargs.items()}

        def leave(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:  # noqa: ANN401
            return opened(output) if torch.is_grad_enabled() else None

        root = self.model.register_forward_pre_hook(enter, with_kwargs=True)
        self._stack.callback(root.remove)
        for module in self.model.modules():
            if isinstance(module, nn.Embedding):
                self._stack.callback(module.register_forward_hook(leave).remove)


def _layout_of(
    name: str, seen: list[dict[str, list[tuple[int, ...]]]], tokens: int
) -> Layout | None:
    """Layout of one module from its calls on one example and on two."""
    one, two = (shapes.get(name, []) for shapes in seen)
    if not one and not two:
        return None
    if len(one) != len(two):
        return Layout("unknown")
    layouts = {compare_shapes(left, right, tokens) for left, right in zip(one, two, strict=True)}
    if len(layouts) == 1:
        return layouts.pop()
    bad = [layout for layout in layouts if layout.reason is not None]
    return bad[0] if bad else Layout("unknown")


def _random_state() -> tuple[Tensor, list[Tensor]]:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return torch.get_rng_state(), cuda


def _restore_random_state(cpu: Tensor, cuda: list[Tensor]) -> None:
    torch.set_rng_state(cpu)
    if cuda:
        torch.cuda.set_rng_state_all(cuda)
