"""Inner products of two uses within each example, and squared norms.

Suffixes: b example, s position, i layer input, o layer output.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradtrail.factors.cost import Route, cheaper_norm_route
from gradtrail.factors.materialize import to_dense, widen
from gradtrail.factors.types import (
    EmbeddingFactors,
    LayerGradient,
    LinearFactors,
    SumGradient,
)

__all__ = ["paired_products", "squared_norm"]


def squared_norm(gradient: LayerGradient, *, route: Route | None = None) -> Tensor:
    r"""Compute :math:`|G_b|^2` for every example.

    Args:
        gradient: Gradients of any kind.
        route: ``"factored"`` or ``"materialized"`` pins how linear factors are treated;
            None takes the cheaper.

    Returns:
        Squared Frobenius norms, float32 or wider. Shape ``[b]``.
    """
    if isinstance(gradient, SumGradient):
        total = None
        for row, left in enumerate(gradient.parts):
            for right in gradient.parts[row:]:
                term = _paired(left, right, route)
                term = term if right is left else 2 * term
                total = term if total is None else total + term
        return total
    return _paired(gradient, gradient, route)


def paired_products(x: LayerGradient, y: LayerGradient) -> Tensor:
    r"""Compute :math:`\langle G_b, H_b \rangle`, example by example.

    Args:
        x: First gradients.
        y: Second gradients of the same parameter and as many examples.

    Returns:
        Inner products, float32 or wider. Shape ``[b]``.
    """
    left = x.parts if isinstance(x, SumGradient) else (x,)
    right = y.parts if isinstance(y, SumGradient) else (y,)
    total = None
    for one in left:
        for other in right:
            term = _paired(one, other, None)
            total = term if total is None else total + term
    return total


def _paired(x: LayerGradient, y: LayerGradient, route: Route | None) -> Tensor:
    """Inner product of example b of ``x`` with example b of ``y``: [b]."""
    if isinstance(x, EmbeddingFactors) and isinstance(y, EmbeddingFactors):
        return _paired_embedding(x, y)
    if isinstance(x, LinearFactors) and isinstance(y, EmbeddingFactors):
        return _paired_linear_embedding(x, y)
    if isinstance(x, EmbeddingFactors) and isinstance(y, LinearFactors):
        return _paired_linear_embedding(y, x)
    linear = isinstance(x, LinearFactors) and isinstance(y, LinearFactors)
    if linear and (route or cheaper_norm_route(x)) == "factored":
        return _paired_linear(x, y)
    x_bd = to_dense(x).values_bd
    (x_bd,) = widen(x_bd)
    if y is x:
        return torch.linalg.vector_norm(x_bd, dim=1).square()  # no products of all entries
    (y_bd,) = widen(to_dense(y).values_bd)
    width = min(x_bd.shape[1], y_bd.shape[1])
    return torch.linalg.vecdot(x_bd[:, :width], y_bd[:, :width])


def _paired_linear(x: LinearFactors, y: LinearFactors) -> Tensor:
    a_x, g_x, a_y, g_y = widen(
        x.activation_bsi, x.output_gradient_bso, y.activation_bsi, y.output_gradient_bso
    )
    b = a_x.shape[0]

    def grouped(z: Tensor) -> Tensor:
        if x.groups == 1:
            return z
        return z.unflatten(2, (x.groups, z.shape[2] // x.groups)).transpose(1, 2).flatten(0, 1)

    products = torch.bmm(grouped(g_x), grouped(g_y).transpose(1, 2))
    gram = torch.bmm(grouped(a_x), grouped(a_y).transpose(1, 2))
    if x.has_bias and y.has_bias:
        gram = gram + _constants(x, y)
    products = products * gram
    return products.sum((1, 2)).view(b, x.groups).sum(1)


def _constants(x: LinearFactors, y: LinearFactors) -> Tensor | int:
    """Products of what the biases belong to, laid out as ``grouped`` inputs are."""
    if x.constant_bs is None and y.constant_bs is None:
        return 1
    ones = [
        z.output_gradient_bso.new_ones(z.output_gradient_bso.shape[:2])
        if z.constant_bs is None
        else z.constant_bs
        for z in (x, y)
    ]
    c_x, c_y = widen(*ones)
    products = c_x.unsqueeze(2) * c_y.unsqueeze(1)
    return products.repeat_interleave(x.groups, 0) if x.groups > 1 else products


def _paired_embedding(x: EmbeddingFactors, y: EmbeddingFactors) -> Tensor:
    g_x, g_y = widen(x.output_gradient_bso, y.output_gradient_bso)
    same = x.index_bs.unsqueeze(2) == y.index_bs.unsqueeze(1)
    if x.padding_idx is not None:
        same = same & (x.index_bs != x.padding_idx).unsqueeze(2)
    return (torch.bmm(g_x, g_y.transpose(1, 2)) * same).sum((1, 2))


def _paired_linear_embedding(x: LinearFactors, y: EmbeddingFactors) -> Tensor:
    a_bsi, g_bso, e_bto = widen(x.activation_bsi, x.output_gradient_bso, y.output_gradient_bso)
    index = y.index_bs.unsqueeze(1).expand(-1, g_bso.shape[1], -1)
    products = torch.bmm(a_bsi, e_bto.transpose(1, 2)) * g_bso.gather(2, index)
    if y.padding_idx is not None:
        products = products * (y.index_bs != y.padding_idx).unsqueeze(1)
    return products.sum((1, 2))
