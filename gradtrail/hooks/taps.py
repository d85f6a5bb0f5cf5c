"""The module hooks of a selection, and which capture they report to."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradtrail.errors import CaptureError, UnsupportedLayerError
from gradtrail.hooks.capture import Capture, HookedModule
from gradtrail.hooks.intercept import WeightWatcher
from gradtrail.hooks.layout import Seen
from gradtrail.hooks.saved import apart_from_checkpointing
from gradtrail.hooks.selection import Unit
from gradtrail.hooks.verify import verify_call

__all__ = ["Backward", "Taps"]


@dataclass(frozen=True, eq=False)
class Backward:
    """A backward under way: whoever runs it holds this, and nobody holds it afterwards.

    Attributes:
        capture: What the calls it makes are reported to.
    """

    capture: Capture


class Taps:
    """Installs hooks on the modules of some captured layers and takes them off again."""

    def __init__(self, units: tuple[Unit, ...]) -> None:
        """Find the modules.

        Args:
            units: The captured layers.
        """
        self.current: Capture | None = None
        self.on_stray: Callable[[HookedModule], None] | None = None
        self.seen: dict[str, list[Seen]] | None = None
        self.modules = _hooked_modules(units)
        self._running: weakref.ref[Backward] | None = None
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._watchers: dict[str, list[WeightWatcher]] = {}
        self._verified: set[str] = set()

    def install(self) -> None:
        """Put the hooks on."""
        for hooked in self.modules:
            before, after = self._hooks(hooked)
            if before is not None:
                handle = hooked.module.register_forward_pre_hook(before, with_kwargs=True)
                self._handles.append(handle)
            # before the user's hooks, which may return something else than the module did
            handle = hooked.module.register_forward_hook(
                after, prepend=True, with_kwargs=True, always_call=not hooked.owner.trusted
            )
            self._handles.append(handle)

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @contextmanager
    def forward(self, capture: Capture) -> Iterator[None]:
        """Report the calls made inside to a capture."""
        outer, self.current = self.current, capture
        try:
            yield
        finally:
            self.current = outer
            capture.end_forward()

    @contextmanager
    def backward(self, capture: Capture, *, keep_graph: bool = False) -> Iterator[None]:
        """Report the calls that a backward makes (recomputation) to a capture."""
        outer, backward = self._running, Backward(capture)
        capture.begin(keep_graph=keep_graph)
        self.recompute_for(backward)
        try:
            yield
        finally:
            self._running = outer

    def recompute_for(self, backward: Backward | None) -> None:
        """Report the calls that a backward makes to its capture, as long as somebody holds it.

        Args:
            backward: The backward, or None for none.
        """
        self._running = None if backward is None else weakref.ref(backward)

    @contextmanager
    def recording(self) -> Iterator[dict[str, list[Seen]]]:
        """Only note what every hooked module's input looks like, call by call."""
        self.seen = {}
        try:
            yield self.seen
        finally:
            self.seen = None

    @property
    def backward_under_way(self) -> Backward | None:
        """The backward whose calls are reported."""
        return None if self._running is None else self._running()

    def reported_to(self) -> Capture | None:
        """What calls of the modules are reported to at this moment, or None."""
        return self._active

    @property
    def _active(self) -> Capture | None:
        if self.current is not None:
            return self.current
        backward = self.backward_under_way
        return None if backward is None else backward.capture

    def _idle(self, hooked: HookedModule, module: nn.Module) -> bool:
        """Whether no capture wants to know of a call.

        Args:
            hooked: The module that the hook was made for.
            module: The module that was called: another one where the model was copied.

        Returns:
            Whether there is nothing to do.

        Raises:
            CaptureError: If the call is being traced; the compiler then runs it as it is.
        """
        if torch.compiler.is_compiling():
            raise CaptureError(
                f"{hooked.name} must run uncompiled while it is captured, got torch.compile inside "
                "a capture. Compile the model before it starts."
            )
        if module is not hooked.module:
            return True
        if self._active is not None or self.seen is not None:
            return False
        if self.on_stray is not None and torch.is_grad_enabled():
            self.on_stray(hooked)
        return True

    def _hooks(self, hooked: HookedModule) -> tuple[Any, Any]:
        rule = hooked.owner.rule

        def report(inputs: tuple[Any, ...], kwargs: Mapping[str, Any], output: Tensor) -> Tensor:
            call = rule.keep(hooked.module, inputs, kwargs)
            if self.seen is not None:
                self.seen.setdefault(hooked.name, []).append(Seen.of(call.inputs))
                return output
            capture = self._active
            if not isinstance(output, Tensor):
                raise UnsupportedLayerError(
                    f"{hooked.name} must return a tensor, got {type(output).__name__}."
                )
            return capture.on_call(hooked, call, output, recomputed=self.current is None)

        if hooked.owner.trusted:
            return self._trusted_hooks(hooked, report)
        if rule.elementwise:
            return None, self._checked(hooked, report)
        return self._watching_hooks(hooked, report)

    def _trusted_hooks(self, hooked: HookedModule, report: Any) -> tuple[Any, Any]:  # noqa: ANN401
        def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
            batch = self._expand_to(hooked)
            index = args[0] if args else kwargs.get("input")
            if batch is None or index is None or index.dim() == 0 or index.shape[0] != 1:
                return None
            expanded = index.expand(batch, *index.shape[1:])
            return ((expanded, *args[1:]), kwargs) if args else ((), {"input": expanded})

        def after(
            module: nn.Module,
            args: tuple[Any, ...],
            kwargs: dict[str, Any],
            output: Any,  # noqa: ANN401
        ) -> Any:  # noqa: ANN401
            if self._idle(hooked, module):
                return None
            return report(args, kwargs, output)

        expandable = isinstance(hooked.module, nn.Embedding)
        return (before if expandable else None), after

    def _checked(self, hooked: HookedModule, report: Any) -> Any:  # noqa: ANN401
        """A hook that checks the rule on the module's first call before it relies on it."""

        def after(
            module: nn.Module,
            args: tuple[Any, ...],
            kwargs: dict[str, Any],
            output: Any,  # noqa: ANN401
        ) -> Any:  # noqa: ANN401
            if self._idle(hooked, module):
                return None
            self._verify(hooked, module, args, kwargs)
            return report(args, kwargs, output)

        return after

    def _watching_hooks(self, hooked: HookedModule, report: Any) -> tuple[Any, Any]:  # noqa: ANN401
        """Hooks around a module's own forward that watch the operation reading its weight."""

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._idle(hooked, module):
                return
            self._verify(hooked, module, args, kwargs)
            watcher = WeightWatcher(
                module,
                lambda inputs, output: report(inputs, {}, output),
                expand_to=self._expand_to(hooked),
            )
            self._watchers.setdefault(hooked.name, []).append(watcher)
            watcher.__enter__()

        def after(module: nn.Module, *_: Any) -> None:  # noqa: ANN401
            stack = self._watchers.get(hooked.name)
            if stack and module is hooked.module:
                stack.pop().__exit__(None, None, None)

        return before, after

    def _verify(
        self, hooked: HookedModule, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if hooked.name in self._verified:
            return
        self._verified.add(hooked.name)
        paused = (self.current, self._running, self.seen, self.on_stray)
        self.current = self._running = self.seen = self.on_stray = None
        try:
            with apart_from_checkpointing():
                reason = verify_call(module, hooked.owner.rule, args, kwargs)
        finally:
            self.current, self._running, self.seen, self.on_stray = paused
        if reason is not None:
            raise UnsupportedLayerError(
                f"{hooked.name} must have the gradient its layer kind has, got a "
                f"{type(module).__name__} whose own forward differs: {reason}. Leave it out."
            )

    def _expand_to(self, hooked: HookedModule) -> int | None:
        """Number of examples to expand a position table's input to, where the capture says so."""
        capture = self._active
        if capture is None:
            return None
        layout = capture.layouts.get(hooked.name)
        return capture.batch if layout is not None and layout.kind == "expand" else None


def _hooked_modules(units: tuple[Unit, ...]) -> tuple[HookedModule, ...]:
    """Gather, for every module, the captured layers it belongs to."""
    members: dict[int, list[tuple[Unit, Any]]] = {}
    for unit in units:
        for owner in unit.owners:
            members.setdefault(id(owner.module), []).append((unit, owner))
    return tuple(
        HookedModule(pairs[0][1].name, pairs[0][1].module, tuple(pairs))
        for pairs in members.values()
    )
