"""Writing wide gradients out piece by piece, and multiplying each piece while the cache holds it.

What is written out is read once, by the products with a second set. A wide layer's gradients leave
the cache before they are read; here some rows of every example's matrix meet the same rows of the
second set at once, and the space that they take does not grow with the layer.

Suffixes: b example, s position, i layer input, o layer output, d parameter entry, q second set, p
piece.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradtrail.factors.materialize import widen
from gradtrail.factors.products import linear, outer_sums, suits_onednn
from gradtrail.factors.types import DenseGradient, LinearFactors

__all__ = ["WriteSpace", "gram_in_pieces", "is_wide", "long_products"]

_WIDE = 1 << 22  # entries of all examples from which on they leave the cache: 16 MiB in float32
_PIECE = 1 << 20  # entries of all examples that are written at a time: 4 MiB
_ONE_SUM = 1 << 17  # entries that oneDNN adds up one after the other: more lose digits
_ROWS = 64  # of an example's matrix: products of fewer rows are slower


class WriteSpace:
    """Space that gradients are written to, again and again, so that it is not asked for anew."""

    def __init__(self) -> None:
        """Start without space."""
        self._have: Tensor | None = None

    def take(self, count: int, width: int, like: Tensor) -> Tensor:
        """Give rows of any values, valid until the next call.

        Args:
            count: Number of rows.
            width: Entries a row.
            like: Gives dtype and device.

        Returns:
            Shape ``[count, width]``.
        """
        have = self._have
        if have is None or have.dtype != like.dtype or have.device != like.device:
            have = self._have = like.new_empty(0)
        if have.numel() < count * width:
            self._have = None  # let go of the smaller one first
            have = self._have = like.new_empty(count * width)
        return have[: count * width].view(count, width)


def is_wide(x: LinearFactors) -> bool:
    """Tell whether gradients are better written out in pieces.

    Args:
        x: Factors.

    Returns:
        Whether they are of one group and their entries more than a CPU's cache holds; elsewhere
        few large products are faster than many small ones.
    """
    entries = x.num_examples * x.output_gradient_bso.shape[2] * x.activation_bsi.shape[2]
    on_cpu = x.output_gradient_bso.device.type == "cpu"
    return x.groups == 1 and entries > _WIDE and on_cpu


def gram_in_pieces(x: LinearFactors, y: DenseGradient, space: WriteSpace) -> Tensor:
    r"""Compute :math:`\langle G_b, G_q \rangle` of the weights, without the biases.

    Args:
        x: First gradients, of one group.
        y: Second gradients of the same layer.
        space: Where the pieces are written.

    Returns:
        Inner products, float32 or wider. Shape ``[b, q]``.
    """
    a_bsi, g_bso = widen(x.activation_bsi, x.output_gradient_bso)
    b, _, i = a_bsi.shape
    o = g_bso.shape[2]
    dtype = torch.promote_types(a_bsi.dtype, widen(y.values_bd[:0])[0].dtype)
    products = a_bsi.new_zeros(b, y.num_examples, dtype=dtype)
    pieces = -(-o // max(_ROWS, _PIECE // max(1, b * i)))
    for piece in range(pieces):
        top, bottom = o * piece // pieces, o * (piece + 1) // pieces
        x_bd = space.take(b, (bottom - top) * i, a_bsi)
        x_boi = x_bd.unflatten(1, (bottom - top, i))
        outer_sums(g_bso[:, :, top:bottom], a_bsi, x_boi)
        y_qd = y.values_bd[:, top * i : bottom * i]
        products += long_products(x_bd.to(dtype), y_qd.to(dtype))
    return products


def long_products(x_bd: Tensor, y_qd: Tensor) -> Tensor:
    """Multiply a few very long rows with a few others, ``[b, d]`` by ``[q, d]``.

    Cut into pieces of about 1,024 entries that are multiplied as one batch and added: the rows
    stream through the cache once and the pieces spread over threads, which one product
    with a long inner side does not.

    Args:
        x_bd: First rows.
        y_qd: Second rows.

    Returns:
        Shape ``[b, q]``.
    """
    rows, d = x_bd.shape
    if d <= _ONE_SUM and suits_onednn(rows, x_bd.numel() * y_qd.shape[0], x_bd, y_qd):
        return linear(x_bd, y_qd)
    pieces = d // 1024
    if pieces < 8 or x_bd.shape[0] * y_qd.shape[0] > 4096:
        return x_bd @ y_qd.t()
    cut = d - d % pieces
    x_pbk = x_bd[:, :cut].unflatten(1, (pieces, -1)).transpose(0, 1)
    y_pkq = y_qd[:, :cut].unflatten(1, (pieces, -1)).permute(1, 2, 0)
    products = torch.bmm(x_pbk, y_pkq).sum(0)
    if cut < d:
        products.addmm_(x_bd[:, cut:], y_qd[:, cut:].t())
    return products
