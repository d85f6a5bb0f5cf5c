r"""Inner products of every example's gradient with one target gradient, layer by layer.

With the target ``T`` of a layer written out once, an example's score is the bilinear form
:math:`\langle G_b, T \rangle = \sum_s g_{bs}^T T [a_{bs}, 1]`: one matrix product of the size of a
forward for the whole batch, and no example's gradient is formed.

Suffixes: b example, s position, i layer input, o layer output, d parameter entry, n token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradtrail.callbacks.selection_layers import Direction
from gradtrail.factors import (
    DenseGradient,
    EmbeddingFactors,
    LayerGradient,
    LinearFactors,
    ScaleFactors,
    SumGradient,
    cross_gram,
    to_dense,
    widen,
)

__all__ = ["batch_scores", "target_scores"]

_LONG = 1 << 14  # numbers of one example's product, from which a call of its own costs little


def target_scores(gradient: LayerGradient, target: Direction, *, ghost: bool) -> Tensor:
    r"""Compute :math:`\langle G_b, T \rangle` for every example.

    Args:
        gradient: A layer's gradients.
        target: The target gradient ``T`` of the layer.
        ghost: Whether to use the factors as they are, or to write every gradient out.

    Returns:
        Inner products, float32 or wider. Shape ``[b]``.
    """
    if not ghost or isinstance(gradient, DenseGradient):
        return _written(to_dense(gradient), target)
    parts = gradient.parts if isinstance(gradient, SumGradient) else (gradient,)
    total = None
    for part in parts:
        share = _ghost(part, target)
        total = share if total is None else total + share
    return total


def batch_scores(gradient: LayerGradient) -> Tensor | None:
    r"""Compute :math:`\langle G_b, \sum_{b'} G_{b'} \rangle` from pairs of positions if cheaper.

    Pairs of positions cost ``b^2 s^2 (i + o)`` multiplications, the product with the summed
    gradient ``b s i o``.

    Args:
        gradient: A layer's gradients.

    Returns:
        Inner products, or None where the product with the sum is cheaper. Shape ``[b]``.
    """
    if not isinstance(gradient, LinearFactors) or gradient.groups > 1:
        return None
    i, o = gradient.activation_bsi.shape[2], gradient.output_gradient_bso.shape[2]
    tokens = gradient.num_examples * gradient.num_positions
    if tokens * (i + o) >= i * o:
        return None
    return cross_gram(gradient, gradient, route="factored").sum(1)


def _ghost(part: LayerGradient, target: Direction) -> Tensor:
    """Inner products of one use of the parameter: [b]."""
    if isinstance(part, LinearFactors):
        return _linear(part, target)
    if isinstance(part, EmbeddingFactors):
        return _table(part, target.weight)
    if isinstance(part, ScaleFactors):
        return _scale(part, target)
    return _written(part, target)


def _written(dense: DenseGradient, target: Direction) -> Tensor:
    rows_bd, weight = _one_dtype(dense.values_bd, target.weight)
    total = rows_bd[:, : dense.weight_size] @ weight.reshape(-1)
    if dense.has_bias and target.bias is not None:
        total = total + rows_bd[:, dense.weight_size :] @ target.bias.to(rows_bd.dtype)
    return total


def _linear(part: LinearFactors, target: Direction) -> Tensor:
    a_bsi, g_bso, weight_oi = _one_dtype(
        part.activation_bsi, part.output_gradient_bso, target.weight
    )
    b, i = a_bsi.shape[0], a_bsi.shape[2]
    total = g_bso.new_zeros(b)
    if i and part.groups == 1:
        total = _bilinear(g_bso, weight_oi, a_bsi)
    elif i:
        sides = (g_bso.unflatten(2, (part.groups, -1)), a_bsi.unflatten(2, (part.groups, -1)))
        for group, weight in enumerate(weight_oi.unflatten(0, (part.groups, -1))):
            total = total + _bilinear(sides[0][:, :, group], weight, sides[1][:, :, group])
    if part.has_bias and target.bias is not None:
        total = total + g_bso.sum(1) @ target.bias.to(g_bso.dtype)
    return total


def _bilinear(g_bso: Tensor, weight_oi: Tensor, a_bsi: Tensor) -> Tensor:
    """Sum over s of g^T W a; the product is formed on the narrower side."""
    if weight_oi.shape[1] <= weight_oi.shape[0]:
        left_bsk, matrix, right = g_bso, weight_oi, a_bsi
    else:
        left_bsk, matrix, right = a_bsi, weight_oi.t(), g_bso
    b, s, width = right.shape
    if right.device.type != "cpu" or s * width < _LONG:
        products = left_bsk.flatten(0, 1) @ matrix
        return torch.linalg.vecdot(products.view(b, -1), right.reshape(b, -1))
    total, product_sk = right.new_empty(b), right.new_empty(s, width)
    for row in range(b):  # each product is still in the cache when it is summed up
        torch.mm(left_bsk[row], matrix, out=product_sk)
        total[row] = torch.dot(product_sk.view(-1), right[row].reshape(-1))
    return total


def _table(part: EmbeddingFactors, table_vo: Tensor) -> Tensor:
    g_bso, table_vo = _one_dtype(part.output_gradient_bso, table_vo)
    share_bs = torch.linalg.vecdot(table_vo[part.index_bs], g_bso)
    if part.padding_idx is not None:
        share_bs = share_bs * (part.index_bs != part.padding_idx)
    return share_bs.sum(1)


def _scale(part: ScaleFactors, target: Direction) -> Tensor:
    a_bsd, g_bsd, weight_d = _one_dtype(
        part.activation_bsd, part.output_gradient_bsd, target.weight
    )
    total = (a_bsd * g_bsd).sum(1) @ weight_d
    if part.has_bias and target.bias is not None:
        total = total + g_bsd.sum(1) @ target.bias.to(g_bsd.dtype)
    return total


def _one_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    wide = widen(*tensors)
    return tuple(tensor.to(wide[0].dtype) for tensor in wide)
