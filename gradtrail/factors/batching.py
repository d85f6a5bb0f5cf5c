"""Joining, cutting and moving per-example gradients along the example axis.

Suffixes: b example, s position, k any feature.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from gradtrail.factors.materialize import to_dense
from gradtrail.factors.types import (
    DenseGradient,
    EmbeddingFactors,
    LayerGradient,
    LinearFactors,
    ScaleFactors,
    SumGradient,
)

__all__ = [
    "JoinMemo",
    "concatenate",
    "map_tensors",
    "merge_uses",
    "move",
    "positions_of",
    "select",
    "tensors_of",
]


class JoinMemo:
    """Remembers joined activations, so that layers which shared an input still share it."""

    def __init__(self, *, limit: int | None = None) -> None:
        """Start empty.

        Args:
            limit: How many inputs are remembered, the last ones; None remembers all.
        """
        self._limit = limit
        self._joined: dict[tuple[int, ...], tuple[list[Tensor], Tensor]] = {}

    def join(self, pieces: list[Tensor], positions: int) -> Tensor:
        """Stack pieces over examples, zero-padded to one number of positions.

        Args:
            pieces: Tensors ``[b, s, ...]``; the same list objects give the same result.
            positions: Number of positions of the result.

        Returns:
            Shape ``[sum of b, positions, ...]``.
        """
        key = tuple(id(piece) for piece in pieces)
        if key not in self._joined:
            if len(self._joined) == self._limit:
                self._joined.pop(next(iter(self._joined)))
            self._joined[key] = (pieces, _stack(pieces, positions))
        return self._joined[key][1]


def concatenate(gradients: Sequence[LayerGradient], memo: JoinMemo | None = None) -> LayerGradient:
    """Join the gradients of one layer over batches.

    Args:
        gradients: At least one, all of one layer; lengths may differ and are padded with positions
            of zero gradient, numbers of uses with uses of zero gradient. Where some are written
            out, all are.
        memo: Keeps inputs shared that were shared between layers.

    Returns:
        The gradients of all examples in order.
    """
    first = gradients[0]
    if len(gradients) == 1:
        return first
    memo = memo or JoinMemo()
    if any(isinstance(gradient, SumGradient) for gradient in gradients):
        return _concatenate_uses(gradients, memo)
    if any(isinstance(gradient, DenseGradient) for gradient in gradients):
        parts = [to_dense(gradient) for gradient in gradients]
        return replace(parts[0], values_bd=torch.cat([part.values_bd for part in parts]))
    positions = max(part.num_positions for part in gradients)
    if isinstance(first, EmbeddingFactors):
        return replace(
            first,
            index_bs=_stack([part.index_bs for part in gradients], positions),
            output_gradient_bso=_stack([part.output_gradient_bso for part in gradients], positions),
        )
    if isinstance(first, ScaleFactors):
        return replace(
            first,
            activation_bsd=_stack([part.activation_bsd for part in gradients], positions),
            output_gradient_bsd=_stack([part.output_gradient_bsd for part in gradients], positions),
        )
    return replace(
        first,
        activation_bsi=memo.join([part.activation_bsi for part in gradients], positions),
        output_gradient_bso=_stack([part.output_gradient_bso for part in gradients], positions),
        constant_bs=_join_constants(gradients, lambda parts: _stack(parts, positions)),
    )


def select(gradient: LayerGradient, index: Tensor | slice) -> LayerGradient:
    """Keep some examples.

    Args:
        gradient: Gradients of any kind.
        index: A slice, or example numbers. Shape ``[k]``.

    Returns:
        The gradients of the chosen examples, views where ``index`` is a slice.
    """
    return map_tensors(gradient, lambda tensor: tensor[index])


def move(
    gradient: LayerGradient,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> LayerGradient:
    """Bring gradients to a device, and their floating parts to a dtype.

    Args:
        gradient: Gradients of any kind.
        device: Where to; None leaves them.
        dtype: Dtype of the floating parts; None leaves it.

    Returns:
        The moved gradients; nothing is copied that is already there.
    """

    def moved(tensor: Tensor) -> Tensor:
        floating = dtype if tensor.is_floating_point() else None
        return tensor.to(device=device, dtype=floating)

    return map_tensors(gradient, moved)


def map_tensors(gradient: LayerGradient, function: Callable[[Tensor], Tensor]) -> LayerGradient:
    """Apply one function to every tensor of a layer gradient."""
    if isinstance(gradient, SumGradient):
        return SumGradient(tuple(map_tensors(part, function) for part in gradient.parts))
    if isinstance(gradient, DenseGradient):
        return replace(gradient, values_bd=function(gradient.values_bd))
    if isinstance(gradient, EmbeddingFactors):
        return replace(
            gradient,
            index_bs=function(gradient.index_bs),
            output_gradient_bso=function(gradient.output_gradient_bso),
        )
    if isinstance(gradient, ScaleFactors):
        return replace(
            gradient,
            activation_bsd=function(gradient.activation_bsd),
            output_gradient_bsd=function(gradient.output_gradient_bsd),
        )
    constant_bs = gradient.constant_bs
    return replace(
        gradient,
        activation_bsi=function(gradient.activation_bsi),
        output_gradient_bso=function(gradient.output_gradient_bso),
        constant_bs=None if constant_bs is None else function(constant_bs),
    )


def tensors_of(gradient: LayerGradient) -> list[Tensor]:
    """Every tensor of a layer gradient."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(gradient, note)
    return found


def merge_uses(gradient: LayerGradient) -> LayerGradient:
    """Join the uses of one parameter along the position axis where they are of one kind.

    Args:
        gradient: Gradients of any kind.

    Returns:
        Linear factors where every use is one with the same bias and groups, else the argument.
    """
    if not isinstance(gradient, SumGradient):
        return gradient
    parts = gradient.parts
    kinds = {
        (part.has_bias, part.groups) if isinstance(part, LinearFactors) else None for part in parts
    }
    if len(kinds) != 1 or None in kinds:
        return gradient
    return replace(
        parts[0],
        activation_bsi=torch.cat([part.activation_bsi for part in parts], 1),
        output_gradient_bso=torch.cat([part.output_gradient_bso for part in parts], 1),
        constant_bs=_join_constants(parts, lambda constants: torch.cat(constants, 1)),
    )


def positions_of(gradient: LayerGradient) -> set[int]:
    """Numbers of positions of the uses in a layer gradient; empty where it is written out."""
    parts = gradient.parts if isinstance(gradient, SumGradient) else (gradient,)
    return {part.num_positions for part in parts if not isinstance(part, DenseGradient)}


def _concatenate_uses(gradients: Sequence[LayerGradient], memo: JoinMemo) -> LayerGradient:
    """Join sums of uses use by use; a batch with fewer uses did not call the layer as often."""
    uses = [
        gradient.parts if isinstance(gradient, SumGradient) else (gradient,)
        for gradient in gradients
    ]
    most = max(uses, key=len)
    filled = []
    for gradient, parts in zip(gradients, uses, strict=True):
        absent = [_nothing(use, gradient.num_examples) for use in most[len(parts) :]]
        filled.append([*parts, *absent])
    columns = list(zip(*filled, strict=True))
    if any(len({type(use) for use in column}) > 1 for column in columns):
        return concatenate([to_dense(gradient) for gradient in gradients])
    return SumGradient(tuple(concatenate(column, memo) for column in columns))


def _join_constants(
    parts: Sequence[LinearFactors], join: Callable[[list[Tensor]], Tensor]
) -> Tensor | None:
    """Join what the bias belongs to; where no part says otherwise, that stays 1."""
    if all(part.constant_bs is None for part in parts):
        return None
    return join(
        [
            part.output_gradient_bso.new_ones(part.output_gradient_bso.shape[:2])
            if part.constant_bs is None
            else part.constant_bs
            for part in parts
        ]
    )


def _nothing(use: LayerGradient, num_examples: int) -> LayerGradient:
    """Gradients of the same layer that are zero."""
    return map_tensors(use, lambda tensor: tensor.new_zeros(num_examples, *tensor.shape[1:]))


def _stack(pieces: Sequence[Tensor], positions: int) -> Tensor:
    """Stack ``[b, s, ...]`` over examples with zero positions added on the right."""
    padded = []
    for piece in pieces:
        missing = positions - piece.shape[1]
        # older torch does not pad a tensor without elements
        zeros = piece.new_zeros(piece.shape[0], missing, *piece.shape[2:])
        padded.append(torch.cat([piece, zeros], 1) if missing else piece)
    return torch.cat(padded)
