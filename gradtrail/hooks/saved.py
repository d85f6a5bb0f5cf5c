"""Keeping a layer's input until its output gradient arrives, the way autograd would.

The input is saved through autograd itself, in a side graph that is never run backward: so it goes
through the hooks of activation checkpointing and offloading (and is recomputed when it is needed,
not held), and an input that was changed in place is noticed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from gradtrail.errors import CaptureError

__all__ = ["SavedInput", "apart_from_checkpointing"]

# Tells whether hooks on saved tensors are active; a torch without it always saves through autograd.
_top_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)  # noqa: SLF001


@contextmanager
def apart_from_checkpointing() -> Iterator[None]:
    """Keep an extra computation out of what checkpointing saves, which it will not do again."""
    kept = torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, lambda tensor: tensor)
    with _disable_current_modes(), kept:
        yield


class _Save(torch.autograd.Function):
    """Saves tensors and gives back a scalar whose node holds them."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[None, ...]:  # noqa: ANN401
        return (None,) * (1 + len(ctx.saved_tensors))


class _Recorded:
    """What autograd saved; held by the output, without which older torch lets the node go."""

    def __init__(self, output: Tensor) -> None:
        self._output = output

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]:
        """The tensors as autograd gives them back.

        Returns:
            What was saved.
        """
        return self._output.grad_fn.saved_tensors


class _Held:
    """The same for tensors that nothing but autograd itself would keep: held, with their version.

    Where no hook on saved tensors is active there is nothing to be recomputed or offloaded, and a
    node of its own would cost more than all else that is done for a call.
    """

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        self._tensors = tuple(tensor.detach() for tensor in tensors)
        self._versions = tuple(tensor._version for tensor in tensors)  # noqa: SLF001

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]:
        """The tensors, as they were.

        Returns:
            What was held.

        Raises:
            RuntimeError: If one was changed in place.
        """
        for tensor, version in zip(self._tensors, self._versions, strict=True):
            if tensor._version != version:  # noqa: SLF001
                raise RuntimeError("a tensor was modified by an inplace operation")
        return self._tensors


def _save(tensors: tuple[Tensor, ...], anchor: Tensor) -> _Held | _Recorded:
    """Save tensors; what comes back gives them as ``saved_tensors``."""
    if _top_hooks is not None and _top_hooks(False) is None:  # noqa: FBT003  # torch's own signature
        return _Held(tensors)
    return _Recorded(_Save.apply(anchor, *(tensor.detach() for tensor in tensors)))


class SavedInput:
    """One input tensor (with the extras of its rule), shared by the layers that read it."""

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        """Start without readers.

        Args:
            tensors: What to keep, the layer's main input first.
        """
        self._source = tuple((tensor, tensor._version) for tensor in tensors)  # noqa: SLF001
        self._nodes: list[_Held | _Recorded] = []
        self._remaining = 0
        self._value: tuple[tuple[Tensor, ...], dict[object, Tensor]] | None = None

    def holds(self, tensors: tuple[Tensor, ...]) -> bool:
        """Tell whether these are the very tensors held, unchanged since."""
        return len(tensors) == len(self._source) and all(
            tensor is held and tensor._version == version  # noqa: SLF001
            for tensor, (held, version) in zip(tensors, self._source, strict=True)
        )

    def add_reader(self, tensors: tuple[Tensor, ...], anchor: Tensor) -> None:
        """Count one more layer that will read, and save the tensors for it.

        Every reader saves, though one copy of the reference would do: so the order of what is
        saved is the same when activation checkpointing runs a part of the forward again.

        Args:
            tensors: What to keep, the same as at the start.
            anchor: A scalar that requires grad, so that autograd records the node.
        """
        self._nodes.append(_save(tensors, anchor))
        self._remaining += 1

    def close(self) -> None:
        """Stop holding the tensors that readers are told apart by."""
        self._source = ()

    def read(self, layer: str) -> tuple[tuple[Tensor, ...], dict[object, Tensor]]:
        """Give the tensors back, with a cache for what readers derive from them.

        Args:
            layer: Name of the layer that asks, for the error.

        Returns:
            The saved tensors and the cache; the last reader's call lets go of both.

        Raises:
            CaptureError: If a tensor was changed in place or let go.
            RuntimeError: If autograd could not give a tensor back.
        """
        if not self._nodes:
            raise CaptureError(
                f"{layer} must meet one backward a forward, got another one. "
                "Pass retain_graph=True to the first."
            )
        if self._value is None:
            try:
                self._value = (self._nodes[0].saved_tensors, {})
            except RuntimeError as error:
                if "inplace operation" not in str(error):
                    raise
                raise CaptureError(
                    f"The input of {layer} must stay as the layer read it until the backward, "
                    "got one that was changed in place. Use an out-of-place operation there."
                ) from error
        value = self._value
        self._remaining -= 1
        if self._remaining <= 0:
            self._value = None
        return value

    def restart(self) -> None:
        """Expect every reader once more, whatever an earlier backward read."""
        self._value = None
        self._remaining = len(self._nodes)

    def release(self) -> None:
        """Let go of the tensors: no other backward can come."""
        self._value = None
        self._nodes.clear()
