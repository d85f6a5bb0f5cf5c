"""What one backward added to each parameter's gradient, told apart from what lay there before."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from gradtrail.hooks import HookManager

__all__ = ["OwnGradients"]


class OwnGradients:
    """Tells what the backward under way has added to each parameter's ``.grad``.

    Autograd hands a parameter's gradient on before it adds it to what is there, so nothing is
    subtracted and nothing changes. Only a reference is kept, and only where there is something.
    """

    def __init__(self) -> None:
        """Start without parameters."""
        self._manager: HookManager | None = None
        self._handles: dict[int, torch.utils.hooks.RemovableHandle] = {}
        self._backward: Callable[[], object | None] = lambda: None
        self._fresh: set[int] = set()
        self._noted: dict[int, Tensor] = {}

    def watch(self, manager: HookManager, parameters: Iterable[nn.Parameter]) -> None:
        """Take note of what the captured backwards bring to some parameters.

        Args:
            manager: What captures.
            parameters: The trained parameters.
        """
        self._manager = manager
        for parameter in parameters:
            self._handles[id(parameter)] = parameter.register_hook(self._hook(parameter))

    def of(self, parameter: nn.Parameter) -> Tensor | None:
        """Give the last backward's own part of a gradient.

        Args:
            parameter: A watched parameter.

        Returns:
            The part, not to be changed; None where all of ``.grad`` is.
        """
        return None if id(parameter) in self._fresh else self._noted.get(id(parameter))

    def is_heard_by_others(self, parameter: nn.Parameter) -> bool:
        """Whether anybody else waits for the gradient that autograd brings to a parameter."""
        handle, hooks = self._handles.get(id(parameter)), parameter._backward_hooks or {}  # noqa: SLF001
        others = [key for key in hooks if handle is None or key != handle.id]
        return bool(others or parameter._post_accumulate_grad_hooks)  # noqa: SLF001

    def drop(self, parameter: nn.Parameter) -> None:
        """Take what the last backward brought to a parameter out of its ``.grad``, if anything."""
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        elif id(parameter) in self._fresh:
            parameter.grad.zero_()
        elif id(parameter) in self._noted:
            parameter.grad.sub_(self._noted[id(parameter)])

    def part(self, parameter: nn.Parameter) -> Tensor:
        """What the last backward brought to a watched parameter, not to be changed."""
        noted = self.of(parameter)
        if noted is not None:
            return noted
        return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad

    def forget(self) -> None:
        """Let go of the last backward's parts."""
        self._fresh.clear()
        self._noted.clear()

    def close(self) -> None:
        """Stop watching."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
        self._manager = None
        self.forget()

    def _begin(self, backward: object) -> None:
        """Forget what an earlier backward brought, which may not have come to its end."""
        if self._backward() is not backward:
            self.forget()
            self._backward = weakref.ref(backward)

    def _hook(self, parameter: nn.Parameter) -> Callable[[Tensor], None]:
        key, reference = id(parameter), weakref.ref(parameter)  # no cycle through the parameter

        def note(gradient: Tensor | None) -> None:
            backward = self._manager.backward
            if backward is None:  # not a captured one
                return
            self._begin(backward)
            if gradient is None or key in self._fresh:  # None: left out of it
                return
            if reference().grad is None:
                self._fresh.add(key)
            elif key in self._noted:  # checkpointed parts that share it bring theirs one by one
                self._noted[key] = self._noted[key] + gradient
            else:
                self._noted[key] = gradient.detach()

        return note
