"""Layer gradients as matrices with the bias in the last column, and turned into other bases.

Suffixes: b example, s position, t any stacked position, g group, o output, i input, j input with
the constant of the bias, k turned side.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gradtrail.factors import (
    DenseGradient,
    LayerGradient,
    LinearFactors,
    outer_sums,
    product,
    suits_onednn,
    widen,
)
from gradtrail.kronecker.covariance import linear_parts

__all__ = ["Scratch", "from_matrices", "to_matrices", "turn_factors", "turned_matrices"]


def to_matrices(dense: DenseGradient, groups: int) -> Tensor:
    """Join the bias to the weight's rows.

    Args:
        dense: Written-out gradients of a layer that is affine in its weight.
        groups: Number of groups of the layer.

    Returns:
        Shape ``[b, g, o, j]``.
    """
    (values_bd,) = widen(dense.values_bd)
    rows, (o, width) = values_bd.shape[0], dense.shape
    weight = values_bd[:, : dense.weight_size].view(rows, groups, o // groups, width)
    if not dense.has_bias:
        return weight
    bias = values_bd[:, dense.weight_size :].reshape(rows, groups, o // groups, 1)
    return torch.cat([weight, bias], -1)


def from_matrices(matrices_bgoj: Tensor, *, has_bias: bool) -> DenseGradient:
    """Part the bias from the weight's rows again.

    Args:
        matrices_bgoj: Gradients. Shape ``[b, g, o, j]``.
        has_bias: Whether the last column is the bias's.

    Returns:
        The gradients, written out.
    """
    rows, groups, o, joined = matrices_bgoj.shape
    shape = (groups * o, joined - int(has_bias))
    if not has_bias:
        return DenseGradient(matrices_bgoj.reshape(rows, -1), shape)
    weight_bd = matrices_bgoj[..., :-1].reshape(rows, -1)
    bias_bd = matrices_bgoj[..., -1].reshape(rows, -1)
    return DenseGradient(torch.cat([weight_bd, bias_bd], 1), shape, has_bias=True)


class Scratch:
    """Space that is written for every batch, so that it is not asked for and given back."""

    def __init__(self) -> None:
        """Start without space."""
        self._held: dict[str, Tensor] = {}

    def take(self, use: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Give space, valid until the same use asks again.

        Args:
            use: What it is for.
            shape: Its shape.
            like: Gives dtype and device.

        Returns:
            A tensor of any values.
        """
        have, count = self._held.get(use), math.prod(shape)
        if (
            have is None
            or have.numel() < count
            or have.dtype != like.dtype
            or have.device != like.device
        ):
            self._held.pop(use, None)  # let go of the smaller one first
            have = self._held[use] = like.new_empty(count)
        return have[:count].view(shape)


def turn_factors(
    part: LinearFactors,
    input_gjk: Tensor,
    output_gok: Tensor,
    *,
    scratch: Scratch | None = None,
) -> LinearFactors:
    r"""Multiply both factors by a matrix: :math:`G \to M_o^T G M_i`.

    Args:
        part: Factors; the bias's constant is taken as the last input.
        input_gjk: What inputs are multiplied by. Shape ``[g, j, k]``.
        output_gok: What output gradients are multiplied by. Shape ``[g, o, k]``.
        scratch: Where the result lies, valid until the next call, or None.

    Returns:
        Factors without a bias, whose inputs are ``k`` wide.
    """
    a_bsi, g_bso = widen(part.activation_bsi, part.output_gradient_bso)
    width = a_bsi.shape[2] // part.groups
    a_bsk = _multiplied(a_bsi, input_gjk[:, :width], scratch, "inputs")
    if part.has_bias:
        row_k = input_gjk[:, width].flatten()
        if part.constant_bs is None:
            a_bsk += row_k
        else:
            a_bsk += part.constant_bs.to(row_k).unsqueeze(-1) * row_k
    g_bsk = _multiplied(g_bso, output_gok, scratch, "outputs")
    return LinearFactors(a_bsk, g_bsk, groups=part.groups)


def turned_matrices(
    gradient: LayerGradient,
    input_gjk: Tensor,
    output_gok: Tensor,
    *,
    out: Tensor | None = None,
    scratch: Scratch | None = None,
) -> Tensor:
    r"""Write out :math:`M_o^T G M_i` by the cheaper of two exact routes.

    Args:
        gradient: Linear factors, a sum of them, or written-out gradients.
        input_gjk: Applied to the input side. Shape ``[g, j, k]``.
        output_gok: Applied to the output side. Shape ``[g, o, k]``.
        out: Where to write, contiguous, or None. Shape ``[b, g, o, j]``.
        scratch: Space for what is made on the way, or None.

    Returns:
        Shape ``[b, g, o, j]``.
    """
    groups, o, joined = output_gok.shape[0], output_gok.shape[2], input_gjk.shape[2]
    if out is None:
        out = input_gjk.new_empty(gradient.num_examples, groups, o, joined)
    if isinstance(gradient, DenseGradient):
        return torch.matmul(_turn(to_matrices(gradient, groups), output_gok), input_gjk, out=out)
    parts = linear_parts(gradient)
    for place, part in enumerate(parts):
        if _turns_factors(part, joined, o):
            turned = turn_factors(part, input_gjk, output_gok, scratch=scratch)
            products = _written(turned, out if place == 0 else None)
        else:
            written_bgoj = _written_with_bias(part)
            products = torch.matmul(_turn(written_bgoj, output_gok), input_gjk)
        if place:
            out += products
        elif products is not out:
            out.copy_(products)
    return out


def _turns_factors(part: LinearFactors, joined: int, o: int) -> bool:
    """Whether turning ``s`` positions is no dearer than turning the written-out gradient."""
    s = part.num_positions
    return s * (joined * joined + o * o) <= o * joined * (joined + o)


def _turn(matrices_bgoj: Tensor, output_gok: Tensor) -> Tensor:
    return torch.matmul(output_gok.transpose(-1, -2), matrices_bgoj)


def _multiplied(x_bsk: Tensor, matrix_gkm: Tensor, scratch: Scratch | None, use: str) -> Tensor:
    """Multiply every position's features, group by group."""
    groups, _, m = matrix_gkm.shape
    matrix_gkm = matrix_gkm.to(x_bsk.dtype)
    if groups == 1:
        rows = x_bsk.shape[0] * x_bsk.shape[1]
        if scratch is None or suits_onednn(rows, x_bsk.numel() * m, x_bsk, matrix_gkm):
            return product(x_bsk.flatten(0, 1), matrix_gkm[0]).view(*x_bsk.shape[:2], m)
        y_bsm = scratch.take(use, (*x_bsk.shape[:2], m), x_bsk)
        torch.mm(x_bsk.flatten(0, 1), matrix_gkm[0], out=y_bsm.view(-1, m))
        return y_bsm
    x_gtk = x_bsk.flatten(0, 1).unflatten(1, (groups, -1)).transpose(0, 1)
    y_tgm = torch.bmm(x_gtk, matrix_gkm).transpose(0, 1)
    return y_tgm.reshape(*x_bsk.shape[:2], groups * m)


def _written(part: LinearFactors, out: Tensor | None) -> Tensor:
    """Write out factors without a bias: ``[b, g, o, i]``."""
    b, s, _ = part.activation_bsi.shape
    groups = part.groups
    if groups == 1:
        into = None if out is None else out[:, 0]
        written_boi = outer_sums(part.output_gradient_bso, part.activation_bsi, into)
        return written_boi.unsqueeze(1) if out is None else out
    g_bgos = part.output_gradient_bso.view(b, s, groups, -1).permute(0, 2, 3, 1)
    a_bgsi = part.activation_bsi.view(b, s, groups, -1).transpose(1, 2)
    return torch.matmul(g_bgos, a_bgsi)


def _written_with_bias(part: LinearFactors) -> Tensor:
    a_bsi, g_bso = widen(part.activation_bsi, part.output_gradient_bso)
    matrices = _written(LinearFactors(a_bsi, g_bso, groups=part.groups), None)
    if not part.has_bias:
        return matrices
    if part.constant_bs is not None:
        g_bso = g_bso * part.constant_bs.to(g_bso).unsqueeze(-1)
    bias_bgo = g_bso.sum(1).view(a_bsi.shape[0], part.groups, -1, 1)
    return torch.cat([matrices, bias_bgo], -1)
