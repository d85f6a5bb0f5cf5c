"""A pass over a fixed model: parameters frozen, no weight gradients, everything put back."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from gradtrail.errors import CaptureError, GradTrailWarning
from gradtrail.factors import map_tensors, to_dense
from gradtrail.hooks.capture import Anchor, Capture, HookedModule, Sink
from gradtrail.hooks.fixed import hold_fixed, is_fixed
from gradtrail.hooks.fused import fuse_elementwise
from gradtrail.hooks.layout import Layout, Seen, compare_calls, confirm_order
from gradtrail.hooks.outside import OutsideReads
from gradtrail.hooks.selection import Selection
from gradtrail.hooks.taps import Taps
from gradtrail.hooks.wrapped import communicates, lent_storages, put_back_whole

__all__ = ["LivePass", "is_fixed"]

_SAME = 1e-2
_ROW = Seen((), torch.zeros(1), whole=False)


class LivePass:
    """Runs forwards and output-gradient-only backwards over a model that must not change.

    While it is open the parameters are frozen and the model evaluates (dropout off); flags,
    modes, generators, hooks and compilation are as they were once it is closed, also after an
    error. Autograd computes output gradients only, and stops at the lowest captured layer.
    """

    def __init__(
        self,
        model: nn.Module,
        selection: Selection,
        layouts: Mapping[str, Layout] | None = None,
    ) -> None:
        """Prepare a pass.

        Args:
            model: The model.
            selection: The layers to capture.
            layouts: What ``probe`` of an earlier pass over the model found, or None.
        """
        self.model = model
        self.selection = selection
        self.taps = Taps(selection.units)
        self.reached: set[str] = set()
        self.layouts: dict[str, Layout] = dict(layouts or {})
        self._stack = ExitStack()
        self._unwatched = ExitStack()  # takes hooks and fused operations off again
        self._opened = False
        self._parted = communicates(model)

    def __enter__(self) -> LivePass:
        """Freeze the model and put the hooks on.

        Returns:
            The open pass.
        """
        with ExitStack() as stack:
            hold_fixed(self.model, stack)
            stack.callback(self._unwatched.close)
            self._watch()
            if "torch._dynamo" in sys.modules:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            self._stack = stack.pop_all()
        if self._opened:  # entered again, over a model that asks for it
            self._open_inputs()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Put everything back."""
        self._stack.__exit__(kind, error, trace)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Run the model as its author wrote it: fixed, but without hooks and fused operations."""
        self._unwatched.close()
        try:
            yield
        finally:
            self._watch()

    def probe(
        self,
        run: Callable[[Sequence[int]], Any],
        tokens: int,
        num_rows: int,
        other: Callable[[], Any] | None = None,
    ) -> None:
        """Find out where each layer holds the batch, and drop layers that hold no examples.

        Args:
            run: Runs the model's forward on the rows with the given numbers.
            tokens: Number of positions of the first row in the model's own input.
            num_rows: Number of rows that may be asked for, at least 1; a few are enough.
            other: Runs the model under another loss that will be used, or None.

        Raises:
            CaptureError: If a layer the user named cannot tell its examples apart.
        """
        reads = OutsideReads(self.taps.modules)
        with _before_inputs_are_open():
            with reads:
                one = self._look(run, [0])
                if other is not None:
                    self._look(lambda _: other(), [0])
            layouts = self._find_layouts(run, tokens, range(num_rows), one)
        reasons = reads.reasons()
        for hooked in self.taps.modules:
            layout = layouts[hooked.name]
            if layout is None:
                continue
            self.layouts[hooked.name] = layout
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
        self,
        losses: Callable[[], Tensor | tuple[Tensor, ...]],
        *,
        batch: int,
        tokens: int,
        sink: Sink,
        several: bool = False,
        done: Callable[[], None] | None = None,
    ) -> tuple[Tensor, tuple[str, ...]]:
        """Run one forward and backward and hand each layer's gradient to the sink as it comes.

        Args:
            losses: Runs the model and returns one summed loss an example, ``[b]``; with
                ``several`` such an entry for each backward, a tuple or ``[k, b]``.
            batch: Number of examples ``b``.
            tokens: Number of positions of one example in the model's own input.
            sink: Receives ``(layer name, gradient)``, for every layer once a backward.
            several: Whether ``k`` backwards go through the one forward.
            done: Called after each backward, or None.

        Returns:
            The losses, and the names of layers that no gradient reached (their gradient is 0).

        Raises:
            CaptureError: If a layer's rows do not fit; also if no gradient reached any layer.
        """
        forward = partial(self._forward, losses, batch, tokens, sink, several=several)
        first = not self.reached and not self._opened
        with _before_inputs_are_open() if first else nullcontext():
            capture, rows = forward()
        if capture.reentrant and not self._opened:
            self._open_inputs()
            capture, rows = forward()
        if capture.refused:
            name, reason = next(iter(capture.refused.items()))
            raise CaptureError(f"{name} must see one row an example, got otherwise: {reason}.")
        missing = {unit.name: None for unit in self.selection.units}
        for left, row in zip(reversed(range(len(rows))), rows, strict=True):
            self._backward(capture, row, keep_graph=left > 0)
            for name in capture.completed:
                missing.pop(name, None)
            if done is not None:
                done()
        if self._parted:
            put_back_whole(self.model)
        values = torch.stack([row.detach() for row in rows]) if several else rows[0].detach()
        return values, tuple(missing)

    def never_reached(self) -> tuple[str, ...]:
        """Names of the layers that no gradient of any batch reached."""
        return tuple(u.name for u in self.selection.units if u.name not in self.reached)

    def _forward(
        self, losses: Callable[[], Any], batch: int, tokens: int, sink: Sink, *, several: bool
    ) -> tuple[Capture, tuple[Tensor, ...]]:
        owning = self._owning(sink) if self._parted else sink
        capture = Capture(batch, tokens, owning, live=True, layouts=self.layouts)
        with self.taps.forward(capture):
            values = losses()
        if several and isinstance(values, Tensor) and values.dim():
            values = values.unbind()
        rows = values if several and isinstance(values, tuple) else (values,)
        for row in rows:
            if isinstance(row, Tensor) and row.shape == (batch,):
                continue
            got = tuple(row.shape) if isinstance(row, Tensor) else type(row).__name__
            raise ValueError(
                f"loss must return one value an example, shape ({batch},), got {got}. For a "
                'scalar pass loss_reduction="sum", "mean" or "token_mean".'
            )
        return capture, rows

    def _owning(self, sink: Sink) -> Sink:
        """Hand copies on of what lies in parameters that FSDP lets go of after the pass."""
        lent = lent_storages(self.model, ())

        def own(tensor: Tensor) -> Tensor:
            return tensor.clone() if tensor.untyped_storage().data_ptr() in lent else tensor

        return lambda name, gradient: sink(name, map_tensors(gradient, own))

    def _backward(self, capture: Capture, values: Tensor, *, keep_graph: bool) -> None:
        """Run one backward.

        Args:
            capture: The forward's capture.
            values: One loss an example. Shape ``[b]``.
            keep_graph: Whether another backward follows.

        Raises:
            CaptureError: If no gradient reached any layer.
        """
        capture.completed.clear()
        if values.requires_grad:
            with self.taps.backward(capture, keep_graph=keep_graph):
                values.sum().backward(retain_graph=keep_graph)
            capture.finish()
        constant_zero = not values.requires_grad and not values.any()
        if not capture.completed and not constant_zero:
            called = "none was called" if not capture.called else "the loss does not depend on them"
            listed = ", ".join(unit.name for unit in self.selection.units[:3])
            raise CaptureError(
                f"The backward must reach a captured layer, got no gradient at any of "
                f"{len(self.selection.units)} ({listed}, ...): {called}. "
                "Check the loss and the layers."
            )
        self.reached |= capture.completed

    def _find_layouts(
        self,
        run: Callable[[Sequence[int]], Any],
        tokens: int,
        rows: range,
        one: dict[str, list[Seen]],
    ) -> dict[str, Layout | None]:
        """Layout by module name, None where no row called the module."""
        two = self._look(run, [0, 0])
        modules = {hooked.name: hooked for hooked in self.taps.modules}
        names = list(modules)
        layouts = {
            name: compare_calls(one.get(name, ()), two.get(name, ()), tokens) for name in names
        }
        for name in names:
            if layouts[name] == Layout("expand") and not self._expands(name, run, tokens):
                layouts[name] = Layout("shared")
        # whole sequences keep their example's place; single rows may come from a router
        doubtful = [name for name in names if not all(look.whole for look in one.get(name, [_ROW]))]
        if doubtful and len(rows) > 1:
            there, back = self._look(run, rows), self._look(run, rows[::-1])
            for name in doubtful:
                layouts[name] = confirm_order(
                    layouts[name], there.get(name, ()), back.get(name, ()), len(rows), tokens
                )
        routed = {
            _kind_of(modules[name]) for name in doubtful if layouts[name] == Layout("unknown")
        }
        # an expert may have passed by chance where the one beside it did not
        return layouts | {
            name: Layout("unknown") for name in doubtful if _kind_of(modules[name]) in routed
        }

    def _look(
        self, run: Callable[[Sequence[int]], Any], rows: Sequence[int]
    ) -> dict[str, list[Seen]]:
        """Run some rows and note the layers' inputs."""
        with torch.no_grad(), self.taps.recording() as seen:
            run(rows)
        return seen

    def _expands(self, name: str, run: Callable[[Sequence[int]], Any], tokens: int) -> bool:
        """Whether a table read once for all examples may be read once for each instead.

        Args:
            name: Name of the module.
            run: Runs the model's forward on the rows with the given numbers.
            tokens: Number of positions of the first row in the model's own input.

        Returns:
            Whether the same example twice gives one gradient twice.
        """
        taps = Taps(tuple(u for u in self.selection.units if name in {o.name for o in u.owners}))
        found: list[Tensor] = []
        capture = Capture(
            2,
            tokens,
            lambda _, gradient: found.append(to_dense(gradient).values_bd),
            live=True,
            layouts={name: Layout("expand")},
        )
        taps.install()
        try:
            with taps.forward(capture):
                output = run([0, 0])
            if isinstance(output, Tensor) and output.requires_grad:
                with taps.backward(capture):
                    output.sum().backward()
                capture.finish()
        except (RuntimeError, ValueError, IndexError):
            return False
        finally:
            taps.remove()
        gaps = [(values[0] - values[1]).abs().max() for values in found]
        tops = [_SAME * values.abs().max() for values in found]
        return not capture.refused and not any(
            bool(gap > top) for gap, top in zip(gaps, tops, strict=True)
        )

    def _drop(self, reasons: dict[str, str]) -> None:
        """Leave out layers found unsupported, and say so.

        Args:
            reasons: By layer name, why.

        Raises:
            CaptureError: If no layer is left.
        """
        units = tuple(unit for unit in self.selection.units if unit.name not in reasons)
        coverage = self.selection.coverage.without_layers(reasons)
        self.selection = replace(self.selection, units=units, coverage=coverage)
        listed = "; ".join(f"{name}: {reason}" for name, reason in list(reasons.items())[:3])
        if not units:
            raise CaptureError(f"The model must have a layer that holds examples, got {listed}.")
        more = f" and {len(reasons) - 3} more" if len(reasons) > 3 else ""
        warnings.warn(
            f"{len(reasons)} layers are left out ({listed}{more}); coverage() lists them.",
            GradTrailWarning,
            stacklevel=5,
        )
        self._unwatched.close()
        self.taps = Taps(units)
        self._watch()

    def _watch(self) -> None:
        """Put hooks and fused operations on, and what opens the inputs where that is needed."""
        self._unwatched.callback(self.taps.remove)
        self.taps.install()
        fuse_elementwise(self.model, self._unwatched)
        if self._opened:
            self._open_inputs()

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
        self._unwatched.callback(root.remove)
        for module in self.model.modules():
            if isinstance(module, nn.Embedding):
                self._unwatched.callback(module.register_forward_hook(leave).remove)


def _kind_of(hooked: HookedModule) -> tuple[str, type[nn.Module], tuple[torch.Size, ...]]:
    """What the modules of one list have in common: the name but for numbers, class and shapes."""
    shapes = tuple(parameter.shape for parameter in hooked.module.parameters())
    return re.sub(r"\d+", "*", hooked.name), type(hooked.module), shapes


@contextmanager
def _before_inputs_are_open() -> Iterator[None]:
    """Silence reentrant checkpointing about inputs without a graph: they are given one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad=True")
        yield
