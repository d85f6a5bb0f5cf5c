"""Inner products between two sets of per-example gradients, and per position.

Every route is exact; the cost rule only chooses the cheaper. Matrix products of stacked tokens,
accumulated in float32 or wider, no host synchronisation.

Suffixes: b example, s position, i layer input, o layer output, d parameter entry, q second set.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradtrail.factors.cost import Route, cheaper_route
from gradtrail.factors.materialize import to_dense, widen, write_dense
from gradtrail.factors.pieces import (
    WriteSpace,
    gram_in_pieces,
    is_wide,
    long_products,
)
from gradtrail.factors.products import product
from gradtrail.factors.types import (
    DenseGradient,
    EmbeddingFactors,
    LayerGradient,
    LinearFactors,
    ScaleFactors,
    SumGradient,
)

__all__ = ["GramMemo", "cross_gram", "position_gram"]

_CHUNK_ENTRIES = 1 << 23  # entries of one token Gram matrix at a time: 32 MiB in float32


class GramMemo:
    """Keeps the last token Gram matrix, which layers that read one input share, and scratch space.

    The key is the pair of activation tensors themselves, held here, so a recycled address can
    never be taken for a hit. The scratch space holds what is written out of one layer at a time:
    memory that is written for every layer of every batch is not asked for and given back each time.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._key: tuple[Tensor, Tensor] | None = None
        self._gram: Tensor | None = None
        self.space = WriteSpace()

    def written(self, gradient: LayerGradient) -> DenseGradient:
        """Write out gradients in the scratch space, where they stay until the next call.

        Args:
            gradient: Gradients of any kind.

        Returns:
            The gradients, valid until the next call.
        """
        if not isinstance(gradient, LinearFactors):
            return to_dense(gradient)
        width = gradient.activation_bsi.shape[2] // gradient.groups
        o = gradient.output_gradient_bso.shape[2]
        (like,) = widen(gradient.output_gradient_bso)
        entries = o * (width + int(gradient.has_bias))
        rows = self.space.take(gradient.num_examples, entries, like)
        write_dense(gradient, rows)
        return DenseGradient(rows, (o, width), gradient.has_bias)

    def token_gram(self, a_bsi: Tensor, a_qti: Tensor) -> Tensor:
        """Return ``a_bsi a_qti^T`` over stacked tokens, computed once for a pair of inputs.

        Args:
            a_bsi: First activations. Shape ``[b, s, i]``.
            a_qti: Second activations. Shape ``[q, t, i]``.

        Returns:
            Inner products of tokens, not to be changed in place. Shape ``[b s, q t]``.
        """
        if self._key is None or self._key[0] is not a_bsi or self._key[1] is not a_qti:
            self._gram = _token_gram(a_bsi, a_qti)
            self._key = (a_bsi, a_qti)
        return self._gram

    def clear(self) -> None:
        """Let go of the Gram matrix and its inputs."""
        self._key = self._gram = None


def cross_gram(
    x: LayerGradient,
    y: LayerGradient,
    *,
    route: Route | None = None,
    memo: GramMemo | None = None,
) -> Tensor:
    r"""Compute :math:`\langle G_b, G_q \rangle` for every pair of examples.

    Args:
        x: First gradients, ``b`` examples.
        y: Second gradients of the same parameter, ``q`` examples.
        route: ``"factored"`` or ``"materialized"`` pins how two sets of linear factors
            meet; None takes the cheaper.
        memo: Shares token Gram matrices between layers that read one input.

    Returns:
        Inner products, float32 or wider. Shape ``[b, q]``.
    """
    if isinstance(x, SumGradient):
        return _added(cross_gram(part, y, route=route, memo=memo) for part in x.parts)
    if isinstance(y, SumGradient):
        return _added(cross_gram(x, part, route=route, memo=memo) for part in y.parts)
    if isinstance(x, EmbeddingFactors):
        return _embedding_position_gram(x, y).sum(1)
    if isinstance(y, EmbeddingFactors):
        return cross_gram(y, x).t()
    if isinstance(x, LinearFactors):
        if isinstance(y, LinearFactors) and (route or cheaper_route(x, y)) == "factored":
            return _linear_gram(x, y, memo, per_position=False)
        return _linear_dense_gram(x, to_dense(y), memo or GramMemo())
    if isinstance(y, LinearFactors):
        return _linear_dense_gram(y, to_dense(x), memo or GramMemo()).t()
    return _dense_gram(to_dense(x), to_dense(y))


def position_gram(x: LayerGradient, y: LayerGradient, *, memo: GramMemo | None = None) -> Tensor:
    r"""Compute :math:`K_{bsq} = g_{bs}^T G_q a_{bs}`, the share of every position of ``x``.

    Args:
        x: First gradients, with positions: factors, or sums of factors of equal length.
        y: Second gradients of the same parameter, of any kind.
        memo: Shares token Gram matrices between layers that read one input.

    Returns:
        Shares; their sum over ``s`` is the inner product. Shape ``[b, s, q]``.

    Raises:
        TypeError: If ``x`` is materialised, so that its positions are gone.
    """
    if isinstance(x, SumGradient):
        return _added(position_gram(part, y, memo=memo) for part in x.parts)
    if isinstance(x, DenseGradient):
        raise TypeError("x must hold factors with positions, got DenseGradient. Capture factored.")
    if isinstance(y, SumGradient):
        return _added(position_gram(x, part, memo=memo) for part in y.parts)
    if isinstance(x, EmbeddingFactors):
        return _embedding_position_gram(x, y)
    if isinstance(x, ScaleFactors):
        return _scale_position_gram(x, to_dense(y))
    if isinstance(y, LinearFactors):
        return _linear_gram(x, y, memo, per_position=True)
    if isinstance(y, EmbeddingFactors):
        return _linear_embedding_products(x, y)
    return _linear_dense_position_gram(x, y)


def _added(terms: object) -> Tensor:
    """Sum tensors of one shape."""
    total = None
    for term in terms:
        total = term if total is None else total + term
    return total


def _token_gram(x_bsk: Tensor, y_qtk: Tensor) -> Tensor:
    x_bsk, y_qtk = widen(x_bsk, y_qtk)
    return product(x_bsk.flatten(0, 1), y_qtk.flatten(0, 1).t())


def _linear_gram(
    x: LinearFactors, y: LinearFactors, memo: GramMemo | None, *, per_position: bool
) -> Tensor:
    """Factored route: product of the activations' and the gradients' token Gram matrices."""
    b, s, q, t = x.num_examples, x.num_positions, y.num_examples, y.num_positions
    if b * s * q * t <= _CHUNK_ENTRIES or q == 1:
        return _linear_gram_chunk(x, y, memo, per_position=per_position)
    step = max(1, _CHUNK_ENTRIES // max(1, b * s * t))
    columns = []
    for start in range(0, q, step):
        part = LinearFactors(
            y.activation_bsi[start : start + step],
            y.output_gradient_bso[start : start + step],
            y.has_bias,
            y.groups,
            None if y.constant_bs is None else y.constant_bs[start : start + step],
        )
        columns.append(_linear_gram_chunk(x, part, None, per_position=per_position))
    return torch.cat(columns, dim=-1)


def _linear_gram_chunk(
    x: LinearFactors, y: LinearFactors, memo: GramMemo | None, *, per_position: bool
) -> Tensor:
    b, s, q, t = x.num_examples, x.num_positions, y.num_examples, y.num_positions
    bias = x.has_bias and y.has_bias
    total = None
    for group in range(x.groups):
        a_x, g_x = _group(x, group)
        a_y, g_y = _group(y, group)
        products = _token_gram(g_x, g_y)
        # activations of width 0 (a bias alone) have inner products 0, and 1 with the constant
        gram = memo.token_gram(a_x, a_y) if memo and x.groups == 1 else _token_gram(a_x, a_y)
        products.mul_(gram + _constants(x, y) if bias else gram)
        products = products.view(b, s, q, t).sum(3)
        products = products if per_position else products.sum(1)
        total = products if total is None else total + products
    return total


def _constants(x: LinearFactors, y: LinearFactors) -> Tensor | int:
    """Products of what the two biases belong to, token by token; 1 where both are 1."""
    if x.constant_bs is None and y.constant_bs is None:
        return 1
    c_x, c_y = (
        None if z.constant_bs is None else widen(z.constant_bs)[0].reshape(-1) for z in (x, y)
    )
    if c_x is None:
        return c_y.unsqueeze(0)
    return c_x.unsqueeze(1) if c_y is None else c_x.unsqueeze(1) * c_y.unsqueeze(0)


def _group(x: LinearFactors, group: int) -> tuple[Tensor, Tensor]:
    """Cut one group out of both factors."""
    if x.groups == 1:
        return x.activation_bsi, x.output_gradient_bso
    i, o = x.activation_bsi.shape[2] // x.groups, x.output_gradient_bso.shape[2] // x.groups
    return (
        x.activation_bsi[:, :, group * i : (group + 1) * i],
        x.output_gradient_bso[:, :, group * o : (group + 1) * o],
    )


def _linear_dense_gram(x: LinearFactors, y: DenseGradient, memo: GramMemo) -> Tensor:
    """Write out ``x``'s weights and multiply; its bias meets ``y``'s without being joined."""
    if is_wide(x):
        products = gram_in_pieces(x, y, memo.space)
    else:
        weight = LinearFactors(x.activation_bsi, x.output_gradient_bso, groups=x.groups)
        x_bd, y_qd = widen(memo.written(weight).values_bd, y.values_bd)
        products = long_products(x_bd, y_qd[:, : y.weight_size])
    if x.has_bias and y.has_bias:
        g_bso = widen(x.output_gradient_bso)[0]
        if x.constant_bs is not None:
            g_bso = g_bso * x.constant_bs.to(g_bso).unsqueeze(-1)
        g_bo = g_bso.sum(1)
        y_qo = y.values_bd[:, y.weight_size :]
        products.addmm_(g_bo.to(products.dtype), y_qo.to(products.dtype).t())
    return products


def _dense_gram(x: DenseGradient, y: DenseGradient) -> Tensor:
    x_bd, y_qd = widen(x.values_bd, y.values_bd)
    if x.has_bias and not y.has_bias:
        x_bd = x_bd[:, : x.weight_size]
    elif y.has_bias and not x.has_bias:
        y_qd = y_qd[:, : y.weight_size]
    return long_products(x_bd, y_qd)


def _embedding_position_gram(x: EmbeddingFactors, y: LayerGradient) -> Tensor:
    """Shares of each read of ``x``: [b, s, q]."""
    if isinstance(y, EmbeddingFactors):
        return _embedding_embedding_gram(x, y)
    if isinstance(y, LinearFactors):
        return _linear_embedding_products(y, x, of_embedding=True)
    (g_bso,) = widen(x.output_gradient_bso)
    dense = to_dense(y)
    q = dense.num_examples
    table_vqo = dense.values_bd.to(g_bso.dtype).view(q, *dense.shape).transpose(0, 1)
    b, s, o = g_bso.shape
    index, g = x.index_bs.reshape(-1), g_bso.reshape(b * s, o, 1)
    step = max(1, _CHUNK_ENTRIES // max(1, q * o))
    rows = [
        torch.bmm(table_vqo[index[start : start + step]], g[start : start + step]).squeeze(-1)
        for start in range(0, b * s, step)
    ]
    shares = torch.cat(rows) if rows else g.new_zeros(0, q)
    return _without_padding(x, shares.view(b, s, q))


def _embedding_embedding_gram(x: EmbeddingFactors, y: EmbeddingFactors) -> Tensor:
    b, s, q, t = x.num_examples, x.num_positions, y.num_examples, y.num_positions
    step = max(1, _CHUNK_ENTRIES // max(1, b * s * t))
    columns = []
    for start in range(0, q, step):
        g_qto = y.output_gradient_bso[start : start + step]
        index_qt = y.index_bs[start : start + step]
        products = _token_gram(x.output_gradient_bso, g_qto)
        products.mul_(x.index_bs.reshape(-1, 1) == index_qt.reshape(1, -1))
        columns.append(products.view(b, s, index_qt.shape[0], t).sum(3))
    shares = torch.cat(columns, dim=-1) if columns else _no_columns(x)
    return _without_padding(x, shares)


def _no_columns(x: EmbeddingFactors) -> Tensor:
    """Shares against no queries at all."""
    return widen(x.output_gradient_bso)[0].new_zeros(x.num_examples, x.num_positions, 0)


def _without_padding(x: EmbeddingFactors, shares_bsq: Tensor) -> Tensor:
    """Drop the reads of the row that receives no gradient."""
    if x.padding_idx is None:
        return shares_bsq
    return shares_bsq * (x.index_bs != x.padding_idx).unsqueeze(-1)


def _linear_embedding_products(
    linear: LinearFactors, table: EmbeddingFactors, *, of_embedding: bool = False
) -> Tensor:
    """Cross terms of one ``[v, o]`` weight used both as a projection and as a table."""
    # the table's gradient has row `index` equal to e; the projection's is g a^T with g over rows:
    # a pair of uses contributes g[index] (a . e)
    b, s, q, t = (
        linear.num_examples,
        linear.num_positions,
        table.num_examples,
        table.num_positions,
    )
    products = _token_gram(linear.activation_bsi, table.output_gradient_bso)
    g_nv = linear.output_gradient_bso.flatten(0, 1)
    products.mul_(g_nv[:, table.index_bs.reshape(-1)])
    products = products.view(b, s, q, t)
    if table.padding_idx is not None:
        products = products * (table.index_bs != table.padding_idx)
    return products.sum(1).permute(1, 2, 0) if of_embedding else products.sum(3)


def _scale_position_gram(x: ScaleFactors, y: DenseGradient) -> Tensor:
    a_bsd, g_bsd, y_qd = widen(x.activation_bsd, x.output_gradient_bsd, y.values_bd)
    shares = (a_bsd * g_bsd) @ y_qd[:, : y.weight_size].t()
    if x.has_bias and y.has_bias:
        shares = shares + g_bsd @ y_qd[:, y.weight_size :].t()
    return shares


def _linear_dense_position_gram(x: LinearFactors, y: DenseGradient) -> Tensor:
    a_bsi, g_bso, y_qd = widen(x.activation_bsi, x.output_gradient_bso, y.values_bd)
    b, s, _ = a_bsi.shape
    o, width = y.shape
    a = a_bsi.reshape(b * s, x.groups, width).transpose(0, 1)
    g = g_bso.reshape(b * s, x.groups, o // x.groups).transpose(0, 1)
    columns = []
    for row_d in y_qd:
        weight = row_d[: y.weight_size].view(x.groups, o // x.groups, width)
        share = (torch.bmm(a, weight.transpose(1, 2)) * g).sum((0, 2)).view(b, s)
        if x.has_bias and y.has_bias:
            bias_bs = g_bso @ row_d[y.weight_size :]
            share = share + (bias_bs if x.constant_bs is None else bias_bs * x.constant_bs)
        columns.append(share)
    return torch.stack(columns, -1) if columns else g_bso.new_zeros(b, s, 0)
