"""Writing out every entry of per-example gradients.

Suffixes: b example, s position, i layer input, o layer output, d parameter entry, v table row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradtrail.factors.cost import accumulation_dtype
from gradtrail.factors.products import outer_sums
from gradtrail.factors.types import (
    DenseGradient,
    EmbeddingFactors,
    LayerGradient,
    LinearFactors,
    ScaleFactors,
    SumGradient,
)

__all__ = ["materialize", "to_dense", "widen", "write_dense"]


def widen(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast tensors to the dtype in which their products are accumulated."""
    dtypes = [tensor.dtype for tensor in tensors]
    dtype = accumulation_dtype(*dtypes)
    if dtypes.count(dtype) == len(dtypes):
        return tensors
    return tuple(tensor.to(dtype) for tensor in tensors)


def to_dense(gradient: LayerGradient) -> DenseGradient:
    """Write out per-example gradients entry by entry.

    Args:
        gradient: Gradients of any kind.

    Returns:
        The same gradients, ``[b, d]``, in float32 or wider; no bias column is joined to the
        weight's rows, bias entries come last.
    """
    if isinstance(gradient, DenseGradient):
        return gradient
    if isinstance(gradient, LinearFactors):
        return _dense_linear(gradient)
    if isinstance(gradient, EmbeddingFactors):
        return _dense_embedding(gradient)
    if isinstance(gradient, ScaleFactors):
        return _dense_scale(gradient)
    return _dense_sum(gradient)


def materialize(gradient: LayerGradient) -> Tensor:
    r"""Write out per-example gradients in matrix form, :math:`G_b = \sum_s g_{bs} a_{bs}^T`.

    Args:
        gradient: Gradients of any kind.

    Returns:
        Per example and unreduced. Shape ``[b, o, i]``, or ``[b, o, i + 1]`` with the bias in the
        last column; ``[b, v, o]`` for a table; ``[b, d]`` or ``[b, d, 2]`` for a scale.
    """
    dense = to_dense(gradient)
    rows = dense.values_bd.shape[0]
    weight = dense.values_bd[:, : dense.weight_size].reshape(rows, *dense.shape)
    if not dense.has_bias:
        return weight
    bias = dense.values_bd[:, dense.weight_size :]
    if weight.dim() == 2:
        return torch.stack([weight, bias], dim=-1)
    return torch.cat([weight, bias.unsqueeze(-1)], dim=-1)


def write_dense(gradient: LayerGradient, out_bd: Tensor) -> None:
    """Write per-example gradients entry by entry into rows that exist already.

    Args:
        gradient: Gradients of any kind.
        out_bd: Where to, laid out as ``to_dense`` does. Shape ``[b, d]``.
    """
    plain = isinstance(gradient, LinearFactors) and gradient.groups == 1
    if not plain or gradient.activation_bsi.shape[2] == 0:
        out_bd.copy_(to_dense(gradient).values_bd)
        return
    a_bsi, g_bso = widen(gradient.activation_bsi, gradient.output_gradient_bso)
    if a_bsi.dtype != out_bd.dtype or g_bso.dtype != out_bd.dtype:
        out_bd.copy_(to_dense(gradient).values_bd)
        return
    o, i = g_bso.shape[2], a_bsi.shape[2]
    outer_sums(g_bso, a_bsi, out_bd[:, : o * i].unflatten(1, (o, i)))
    if gradient.has_bias:
        torch.sum(_times_constant(gradient, g_bso), 1, out=out_bd[:, o * i :])


def _dense_linear(x: LinearFactors) -> DenseGradient:
    a_bsi, g_bso = widen(x.activation_bsi, x.output_gradient_bso)
    b, s, i = a_bsi.shape
    o = g_bso.shape[2]
    width = i // x.groups
    shape = (o, width)
    if width == 0:
        weight_bd = g_bso.new_zeros(b, 0)
    elif x.groups == 1:
        weight_bd = outer_sums(g_bso, a_bsi).view(b, o * i)
    else:
        g = g_bso.view(b, s, x.groups, o // x.groups).permute(0, 2, 3, 1)
        a = a_bsi.view(b, s, x.groups, width).transpose(1, 2)
        weight_bd = torch.matmul(g, a).reshape(b, o * width)
    if not x.has_bias:
        return DenseGradient(weight_bd, shape)
    bias_bo = _times_constant(x, g_bso).sum(1)
    return DenseGradient(torch.cat([weight_bd, bias_bo], dim=1), shape, has_bias=True)


def _times_constant(x: LinearFactors, g_bso: Tensor) -> Tensor:
    """Output gradients as the bias meets them."""
    return g_bso if x.constant_bs is None else g_bso * x.constant_bs.to(g_bso).unsqueeze(-1)


def _dense_embedding(x: EmbeddingFactors) -> DenseGradient:
    (g_bso,) = widen(x.output_gradient_bso)
    b, _, o = g_bso.shape
    if x.padding_idx is not None:
        g_bso = g_bso * (x.index_bs != x.padding_idx).unsqueeze(-1)
    offset_b1 = torch.arange(b, device=x.index_bs.device).unsqueeze(1) * x.num_embeddings
    table = g_bso.new_zeros(b * x.num_embeddings, o)
    table.index_add_(0, (x.index_bs + offset_b1).reshape(-1), g_bso.reshape(-1, o))
    return DenseGradient(table.view(b, x.num_embeddings * o), (x.num_embeddings, o))


def _dense_scale(x: ScaleFactors) -> DenseGradient:
    a_bsd, g_bsd = widen(x.activation_bsd, x.output_gradient_bsd)
    weight_bd = (a_bsd * g_bsd).sum(1)
    shape = (weight_bd.shape[1],)
    if not x.has_bias:
        return DenseGradient(weight_bd, shape)
    return DenseGradient(torch.cat([weight_bd, g_bsd.sum(1)], dim=1), shape, has_bias=True)


def _dense_sum(x: SumGradient) -> DenseGradient:
    parts = [to_dense(part) for part in x.parts]
    values_bd = parts[0].values_bd
    for part in parts[1:]:
        values_bd = values_bd + part.values_bd
    return DenseGradient(values_bd, parts[0].shape, parts[0].has_bias)
