"""Rotary position embeddings that a live pass applies in two sweeps instead of five.

Llama-like attention modules of ``transformers`` call a function of their own file,
``apply_rotary_pos_emb``, which copies, negates, joins, multiplies and adds. While a live pass is
open, such a module runs its class's own ``forward`` with that one name bound to a function that
computes the same numbers; nothing of the library, nor of any other module, changes.
"""

from __future__ import annotations

import inspect
import math
import types
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from gradtrail.hooks.transforms import is_transformed

__all__ = ["rotary_forward"]

_NAME = "apply_rotary_pos_emb"
_PARAMETERS = ["q", "k", "cos", "sin", "unsqueeze_dim"]
_DTYPES = (torch.float32, torch.float64)
_TOLERANCE = 1e-12
_Function: TypeAlias = Callable[..., Any]
# by function: whether it was seen to compute what ``_Rotation`` does
_SEEN: weakref.WeakKeyDictionary[_Function, bool] = weakref.WeakKeyDictionary()


def rotary_forward(module: nn.Module) -> _Function | None:
    """Give a module's own forward with the rotary embedding exchanged.

    Args:
        module: Any module.

    Returns:
        The bound forward, or None where the module has no rotary embedding of the known kind, or
        one that was not seen to compute the same.
    """
    cls = type(module)
    if not (cls.__module__.startswith("transformers.models.") and "Attention" in cls.__name__):
        return None
    forward = _rebuilt(cls.forward)
    return None if forward is None else types.MethodType(forward, module)


def _rebuilt(function: _Function) -> _Function | None:
    """Copy a function, and those that it wraps, with the one global name bound otherwise."""
    if not isinstance(function, types.FunctionType):
        return None
    names, closure = function.__globals__, function.__closure__
    wrapped = getattr(function, "__wrapped__", None)
    if wrapped is not None:
        inner = _rebuilt(wrapped)
        cells = closure or ()
        if inner is None or not any(_content(cell) is wrapped for cell in cells):
            return None
        closure = tuple(
            types.CellType(inner) if _content(cell) is wrapped else cell for cell in cells
        )
    elif _NAME in function.__code__.co_names and _is_known(names.get(_NAME)):
        names = {**names, _NAME: _exchanged(names[_NAME])}
    else:
        return None
    copy = types.FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, closure
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _content(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # a cell that is not filled yet
        return None


def _is_known(function: object) -> bool:
    """Whether a function rotates two halves: by its numbers and gradients on a small input."""
    if not isinstance(function, types.FunctionType):
        return False
    if function not in _SEEN:
        parameters = dict(inspect.signature(function).parameters)
        parameters.pop("position_ids", None)  # of older versions, which do not read it
        named = list(parameters) == _PARAMETERS and parameters["unsqueeze_dim"].default == 1
        _SEEN[function] = named and all(_agrees(function, axis) for axis in (1, 2))
    return _SEEN[function]


def _agrees(function: _Function, unsqueeze_dim: int) -> bool:
    shapes = [(2, 5, 5, 4), (2, 5, 5, 4), (2, 5, 4), (2, 5, 4)]
    shapes[1] = (2, 1, 5, 4) if unsqueeze_dim == 1 else (2, 5, 1, 4)  # fewer heads
    drawn = [_numbers(shape, start) for start, shape in enumerate(shapes)]
    directions = [_numbers(shape, start) for start, shape in enumerate(shapes[:2], 4)]
    found = []
    with torch.enable_grad():
        for one in (function, _exchanged(function)):
            q, k = (tensor.clone().requires_grad_() for tensor in drawn[:2])
            try:
                outputs = one(q, k, *drawn[2:], unsqueeze_dim=unsqueeze_dim)
                gradients = torch.autograd.grad(outputs, (q, k), directions)
            except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):
                return False
            found.append((*outputs, *gradients))
    pairs = zip(*found, strict=True)
    return all(
        own.shape == ours.shape and torch.allclose(own, ours, rtol=0, atol=_TOLERANCE)
        for own, ours in pairs
    )


def _numbers(shape: tuple[int, ...], start: int) -> Tensor:
    """Numbers of both signs that no random generator is asked for."""
    count = math.prod(shape)
    return (
        torch.arange(count, dtype=torch.float64, device="cpu")
        .mul_(1.7)
        .add_(start)
        .sin_()
        .view(shape)
    )


def _exchanged(own: _Function) -> _Function:
    """The function that takes another's place; what it does not know goes to the other."""

    def apply(
        q: Tensor,
        k: Tensor,
        cos: Tensor,
        sin: Tensor,
        *rest: Any,  # noqa: ANN401
        **named: Any,  # noqa: ANN401
    ) -> tuple[Tensor, Tensor]:
        if rest or set(named) - {"unsqueeze_dim"} or not _fits(q, k, cos, sin):
            return own(q, k, cos, sin, *rest, **named)
        unsqueeze_dim = named.get("unsqueeze_dim", 1)
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return _Rotation.apply(q, cos, sin), _Rotation.apply(k, cos, sin)

    return apply


def _fits(*tensors: Tensor) -> bool:
    """Whether whole heads are turned by fixed angles, all in one dtype that is not narrowed."""
    if is_transformed() or not all(type(tensor) is Tensor for tensor in tensors):
        return False
    width, dtype = tensors[0].shape[-1], tensors[0].dtype
    one_kind = all(one.dtype == dtype and one.shape[-1] == width for one in tensors)
    fixed = not any(angles.requires_grad for angles in tensors[2:])
    return one_kind and fixed and dtype in _DTYPES and width % 2 == 0


class _Rotation(torch.autograd.Function):
    """``y1 = x1 c1 - x2 s1``, ``y2 = x2 c2 + x1 s2`` for the two halves of the last axis."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # noqa: ANN401
        """Rotate."""
        ctx.save_for_backward(cos, sin)
        half = x.shape[-1] // 2
        y = x * cos
        y[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-1)
        y[..., half:].addcmul_(x[..., :half], sin[..., half:])
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        """``dx1 = g1 c1 + g2 s2``, ``dx2 = g2 c2 - g1 s1``."""
        cos, sin = ctx.saved_tensors
        half = gradient.shape[-1] // 2
        for_x = gradient * cos
        for_x[..., :half].addcmul_(gradient[..., half:], sin[..., half:])
        for_x[..., half:].addcmul_(gradient[..., :half], sin[..., :half], value=-1)
        return for_x, None, None
