"""The sum of a backward's per-example gradients, as the gradient of one example."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from gradtrail.factors import DenseGradient, LayerGradient, SumGradient, map_tensors

__all__ = ["sum_examples"]


def sum_examples(gradient: LayerGradient) -> LayerGradient:
    """Sum the gradients of all examples of a block.

    Args:
        gradient: Gradients of any kind.

    Returns:
        The gradient of one example that has the positions of all, ``[1, b s, k]``, nothing copied;
        what is written out is added, ``[1, d]``.
    """
    if isinstance(gradient, SumGradient):
        return SumGradient(tuple(sum_examples(part) for part in gradient.parts))
    if isinstance(gradient, DenseGradient):
        return replace(gradient, values_bd=gradient.values_bd.sum(0, keepdim=True))
    return map_tensors(gradient, _join_positions)


def _join_positions(tensor: Tensor) -> Tensor:
    return tensor.reshape(1, tensor.shape[0] * tensor.shape[1], *tensor.shape[2:])
