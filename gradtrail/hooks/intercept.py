"""Finding the real operation inside a layer class that brings its own ``forward``.

A scaled embedding, learned positions with an offset, a linear layer that does something to its
output: the class's rule does not describe what such a module returns. But the one torch operation
that reads the layer's weight does: it is watched while the module's forward runs, and its input
and output are the capture.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

__all__ = ["WeightWatcher"]

_OnCall = Callable[[tuple[Any, ...], Tensor], Tensor]

# operation -> place of the input and of the weight among its arguments, and their names
_OPERATIONS: dict[Callable[..., Any], tuple[tuple[int, str], tuple[int, str]]] = {
    F.linear: ((0, "input"), (1, "weight")),
    F.embedding: ((0, "input"), (1, "weight")),
    F.conv1d: ((0, "input"), (1, "weight")),
    F.conv2d: ((0, "input"), (1, "weight")),
    F.conv3d: ((0, "input"), (1, "weight")),
    F.layer_norm: ((0, "input"), (2, "weight")),
    torch.addmm: ((1, "mat1"), (2, "mat2")),
}


class WeightWatcher(TorchFunctionMode):
    """Reports each operation that reads one module's weight while active."""

    def __init__(self, module: nn.Module, on_call: _OnCall, *, expand_to: int | None) -> None:
        """Watch a module.

        Args:
            module: Whose ``weight`` to watch.
            on_call: Receives the operation's input and output, returns the output to use.
            expand_to: Number of examples to expand an input of leading size 1 to, or None.
        """
        super().__init__()
        self._weight = module._parameters.get("weight")  # noqa: SLF001  # not a computed attribute
        self._on_call = on_call
        self._expand_to = expand_to
        self.calls = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Run an operation, reporting it where it reads the weight."""
        del types
        kwargs = kwargs or {}
        places = _OPERATIONS.get(func)
        if places is None or _argument(args, kwargs, places[1]) is not self._weight:
            return func(*args, **kwargs)
        inputs = _argument(args, kwargs, places[0])
        if self._expand_to is not None and inputs.dim() and inputs.shape[0] == 1:
            expanded = inputs.expand(self._expand_to, *inputs.shape[1:])
            args, kwargs = _with_argument(args, kwargs, places[0], expanded)
            inputs = expanded
        self.calls += 1
        return self._on_call((inputs,), func(*args, **kwargs))


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], place: tuple[int, str]) -> Any:  # noqa: ANN401
    position, name = place
    return args[position] if len(args) > position else kwargs.get(name)


def _with_argument(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    place: tuple[int, str],
    value: Any,  # noqa: ANN401
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    position, name = place
    if len(args) > position:
        return (*args[:position], value, *args[position + 1 :]), kwargs
    return args, {**kwargs, name: value}
