"""Linear layers whose weight gradients a backward may leave to a callback.

Autograd sums a weight's gradient over the whole batch. A callback that will take examples out of
that sum again can form the sum over the others in its place, which is one product instead of two.
Outputs and input gradients are autograd's own, to the bit.

Suffixes: i layer input, o layer output, n token.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradtrail.hooks.capture import Capture
from gradtrail.hooks.manager import HookManager
from gradtrail.hooks.selection import Owner, Unit

__all__ = ["DeferredWeights"]

_Refuses = Callable[[nn.Parameter], bool]


class DeferredWeights:
    """Which layers' weight gradients the backward under way has left out.

    A layer is left to autograd where its module is anything but a plain ``nn.Linear`` or GPT-2's
    ``Conv1D``, shares its weight, computes in another dtype than its weight's, or has hooks on it.

    Attributes:
        enabled: Whether captures that begin from now on defer at all.
    """

    enabled: bool

    def __init__(self, manager: HookManager, refuses: _Refuses) -> None:
        """Start without layers.

        Args:
            manager: What captures.
            refuses: Tells of a parameter whether its gradient must come from autograd.
        """
        self.enabled = False
        self._manager = weakref.ref(manager)
        self._refuses = refuses
        self._names: dict[int, str] = {}
        # by capture: a forward that checkpointing repeats must save what it saved before
        self._decisions: weakref.WeakKeyDictionary[Capture, bool] = weakref.WeakKeyDictionary()
        self._backward: Callable[[], object | None] = lambda: None
        self._is_alone = False
        self._left: set[str] = set()

    def watch(self, units: Iterable[Unit], stack: ExitStack) -> None:
        """Put functions that may defer in the places of the modules' own until a stack unwinds.

        Args:
            units: The captured layers, of trained parameters.
            stack: Takes the way back.
        """
        reference = weakref.ref(self)

        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Tensor:  # noqa: ANN401
            deferred = reference()
            ticket = None if deferred is None else deferred._ticket(module, args, kwargs)  # noqa: SLF001
            if ticket is None:
                return type(module).forward(module, *args, **kwargs)
            return _Product.apply(args[0], module.weight, module.bias, ticket)

        for unit in units:
            if len(unit.owners) == 1 and _is_plain(unit.owners[0]):
                module = unit.owners[0].module
                self._names[id(module)] = unit.name
                # a method, not a function: a copy of the module gets one of its own
                module.forward = types.MethodType(forward, module)
                stack.callback(_put_back, module, module.forward)
        stack.callback(self._names.clear)

    @property
    def left_out(self) -> frozenset[str]:
        """Names of layers whose weight gradients the last backward left out and nobody formed."""
        return frozenset(self._left)

    def formed(self, name: str) -> None:
        """Take note that a layer's weight gradient was formed after the backward."""
        self._left.discard(name)

    def forget(self) -> None:
        """Let go of what the last backward left out."""
        self._left.clear()

    def leaves_out(self, ticket: _Ticket) -> bool:
        """Decide at a layer's backward whether it is to leave the weight out.

        Args:
            ticket: What its forward knew.

        Returns:
            True where the capture of the forward has taken note of the layer's gradient.
        """
        manager = self._manager()
        backward = None if manager is None else manager.backward
        if (
            backward is None
            or backward.capture is not ticket.capture
            or not backward.capture.running
        ):
            return False
        if self._backward() is not backward:  # one before may not have come to its end
            self._backward = weakref.ref(backward)
            self._left.clear()
            # one backward may run through several forwards, each with rows of its own
            others = (one for one in self._decisions if one is not ticket.capture)
            self._is_alone = all(one.ended for one in others)
        if self._is_alone:
            self._left.add(ticket.name)
        return self._is_alone

    def _ticket(self, module: nn.Module, args: tuple[Any, ...], kwargs: Any) -> _Ticket | None:  # noqa: ANN401
        """What a call's backward needs to know, or None where the call is not to be deferred."""
        manager, name = self._manager(), self._names.get(id(module))
        capture = None if manager is None else manager.reported_to()
        if capture is None or name is None:
            return None
        if not self._decisions.setdefault(capture, self.enabled) or not torch.is_grad_enabled():
            return None
        weight, bias = module.weight, module.bias
        if kwargs or len(args) != 1 or type(args[0]) is not Tensor or args[0].dim() < 2:
            return None
        device = args[0].device.type
        if args[0].dtype != weight.dtype or torch.is_autocast_enabled(device):
            return None
        if any(self._refuses(one) for one in (weight, bias) if one is not None):
            return None
        return _Ticket(weakref.ref(self), capture, name, isinstance(module, nn.Linear))


@dataclass(frozen=True, eq=False)
class _Ticket:
    """What a deferred call knows of itself.

    Attributes:
        deferred: Who decides.
        capture: What the call was reported to.
        name: Name of the layer.
        is_row_major: Whether its weight is ``[o, i]``; ``[i, o]`` otherwise.
    """

    deferred: Callable[[], DeferredWeights | None]
    capture: Capture
    name: str
    is_row_major: bool


class _Product(torch.autograd.Function):
    """``y = x W^T + c``, whose backward may leave ``W`` and ``c`` out."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ticket: _Ticket,
    ) -> Tensor:
        """Do what the module's own forward does."""
        ctx.save_for_backward(x, weight)
        ctx.ticket = ticket
        ctx.set_materialize_grads(False)
        if ticket.is_row_major:
            return F.linear(x, weight, bias)
        out = torch.addmm(bias, x.view(-1, x.size(-1)), weight)
        return out.view(*x.shape[:-1], weight.shape[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        """Give the input its gradient, and the parameters theirs where nobody else does."""
        if gradient is None:
            return None, None, None, None
        x, weight = ctx.saved_tensors
        rows, g_no = ctx.ticket.is_row_major, gradient.flatten(0, -2)
        for_x = for_weight = for_bias = None
        if ctx.needs_input_grad[0]:
            for_x = (g_no @ (weight if rows else weight.t())).view(x.shape)
        deferred = ctx.ticket.deferred()
        if _accumulates(ctx) and deferred is not None and deferred.leaves_out(ctx.ticket):
            return for_x, None, None, None
        if ctx.needs_input_grad[1]:
            x_ni = x.flatten(0, -2)
            for_weight = g_no.t() @ x_ni if rows else x_ni.t() @ g_no
        if ctx.needs_input_grad[2]:
            for_bias = g_no.sum(0)
        return for_x, for_weight, for_bias, None


def _accumulates(ctx: Any) -> bool:  # noqa: ANN401
    """Whether this backward would add to the parameters' ``.grad``, not to some or to none."""
    # a bias that is None has no node
    needed = zip(ctx.next_functions[1:3], ctx.needs_input_grad[1:3], strict=False)
    try:
        return all(
            torch._C._will_engine_execute_node(node)  # noqa: SLF001  # no public way
            for (node, _), needs in needed
            if needs
        )
    except RuntimeError:  # inside autograd.grad()
        return False


def _is_plain(owner: Owner) -> bool:
    """Whether a module is one of the two classes, with nothing of its own between."""
    module, cls = owner.module, type(owner.module)
    conv1d = cls.__name__ == "Conv1D" and cls.__module__ == "transformers.pytorch_utils"
    if not owner.trusted or not (cls is nn.Linear or conv1d) or "forward" in vars(module):
        return False
    bias = module.bias
    biased = bias is None or (owner.roles.bias and bias.requires_grad)
    return bool(owner.roles.weight and module.weight.requires_grad and biased)


def _put_back(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Give a module its class's forward again, where nobody has put another in its place."""
    if vars(module).get("forward") is forward:
        del module.forward
