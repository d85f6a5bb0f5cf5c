"""Matrix products on processors of which PyTorch's first choice leaves half idle.

PyTorch multiplies float32 matrices with MKL. On processors that are not Intel's, MKL keeps to
vectors of 256 bits, also where there are 512; oneDNN, which PyTorch brings as well, uses what the
processor has. There, large enough products of this package go to oneDNN: the same float32
multiplications and additions, rounded in another order. Everywhere else they go to
``torch.mm`` and ``torch.bmm``, and so they do under
``torch.backends.mkldnn.flags(enabled=False)``.

Suffixes: m row, k inner side, n column, b example, s position, i layer input, o layer output.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from gradtrail.machine import cpu_vendor

__all__ = ["linear", "onednn_is_faster", "outer_sums", "product", "suits_onednn"]

_ENOUGH = 1 << 21  # multiplications from which on a call is worth its overhead
_ENOUGH_ROWS = 32  # of the left side: for fewer the right one is laid out in vain
# for products of one example each, which are copied to where they belong
_ENOUGH_AN_EXAMPLE = 1 << 23
_ENOUGH_POSITIONS = 64
_STRIP = 1 << 22  # entries that are made beside the place they belong to


def suits_onednn(rows: int, count: int, *tensors: Tensor) -> bool:
    """Tell whether a product had better go to oneDNN, on this machine and in this state.

    Args:
        rows: Number of rows of the left side.
        count: Number of multiplications.
        *tensors: What is multiplied; all must be plain float32 tensors on the CPU that no gradient
            is asked of.

    Returns:
        Whether.
    """
    if count < _ENOUGH or rows < _ENOUGH_ROWS or not onednn_is_faster():
        return False
    graph = torch.is_grad_enabled()
    return all(
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.dtype == torch.float32
        and tensor.device.type == "cpu"
        and not tensor.is_nested
        and tensor.layout == torch.strided
        and not (graph and tensor.requires_grad)
        for tensor in tensors
    )


def linear(x_mk: Tensor, weight_nk: Tensor, bias_n: Tensor | None = None) -> Tensor:
    """Compute ``x w^T + bias`` with oneDNN, where ``suits_onednn`` said yes.

    Args:
        x_mk: Rows; copied where they do not lie one after the other. Shape ``[m, k]``.
        weight_nk: The other side; copied where neither it nor its transpose is contiguous, as
            oneDNN takes a hundred times as long with gaps. Shape ``[n, k]``.
        bias_n: Added to every row, contiguous, or None. Shape ``[n]``.

    Returns:
        Shape ``[m, n]``.
    """
    if not (weight_nk.is_contiguous() or weight_nk.t().is_contiguous()):
        weight_nk = weight_nk.contiguous()
    return torch.ops.mkldnn._linear_pointwise(x_mk, weight_nk, bias_n, "none", [], "")  # noqa: SLF001


def product(x_mk: Tensor, y_kn: Tensor) -> Tensor:
    """Multiply two matrices.

    Which library does it depends on shapes alone, so that what was stored and read again gives the
    same bits as what lay in memory with gaps.

    Args:
        x_mk: Left. Shape ``[m, k]``.
        y_kn: Right. Shape ``[k, n]``.

    Returns:
        Shape ``[m, n]``.
    """
    m, k = x_mk.shape
    if k == y_kn.shape[0] and suits_onednn(m, m * y_kn.numel(), x_mk, y_kn):
        return linear(x_mk, y_kn.t())
    return x_mk @ y_kn


def outer_sums(g_bso: Tensor, a_bsi: Tensor, out_boi: Tensor | None = None) -> Tensor:
    r"""Compute :math:`\sum_s g_{bs} a_{bs}^T` of every example.

    Args:
        g_bso: Left factors. Shape ``[b, s, o]``.
        a_bsi: Right factors, of the same dtype. Shape ``[b, s, i]``.
        out_boi: Where to, of the same dtype, or None. Shape ``[b, o, i]``.

    Returns:
        Shape ``[b, o, i]``.
    """
    b, s, o = g_bso.shape
    i = a_bsi.shape[2]
    count = s * o * i
    enough = s >= _ENOUGH_POSITIONS and count >= _ENOUGH_AN_EXAMPLE
    fits = a_bsi.shape[:2] == (b, s) and (out_boi is None or out_boi.shape == (b, o, i))
    given = (g_bso, a_bsi) if out_boi is None else (g_bso, a_bsi, out_boi)
    if not (enough and fits and suits_onednn(o, count, *given)):
        return torch.bmm(g_bso.transpose(1, 2), a_bsi, out=out_boi)
    if out_boi is None:
        out_boi = g_bso.new_empty(b, o, i)
    strip = max(_ENOUGH_ROWS, _STRIP // i)
    for g_so, a_si, out_oi in zip(g_bso.unbind(), a_bsi.unbind(), out_boi.unbind(), strict=True):
        for start in range(0, o, strip):
            rows = slice(start, start + strip)
            out_oi[rows] = linear(g_so[:, rows].t(), a_si.t())
    return out_boi


def onednn_is_faster() -> bool:
    """Tell whether this machine and the state of PyTorch leave anything to oneDNN.

    Returns:
        False where ``torch.backends.mkldnn`` is switched off, or where products in float32 were
        asked for at less than full precision, which is MKL's and oneDNN's own affair.
    """
    exact = torch.get_float32_matmul_precision() == "highest"
    return _is_faster_here() and torch.backends.mkldnn.enabled and exact


@cache
def _is_faster_here() -> bool:
    """Whether MKL leaves this processor's wide vectors alone and oneDNN is there and right."""
    wide = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    if not wide or cpu_vendor() in {None, "GenuineIntel"} or not torch.backends.mkl.is_available():
        return False
    if not torch.backends.mkldnn.is_available() or not hasattr(
        torch.ops.mkldnn, "_linear_pointwise"
    ):
        return False
    return _is_right()


def _is_right() -> bool:
    """Whether oneDNN's product of a small example is the product, also of strided sides."""
    x_mk = torch.arange(35, dtype=torch.float32).sin_().view(7, 5).t()
    y_kn = torch.arange(21, dtype=torch.float32).cos_().view(7, 3)
    try:
        got = linear(x_mk, y_kn.t(), torch.ones(3))
    except (RuntimeError, TypeError):  # no kernel, or another signature
        return False
    expected = x_mk.double() @ y_kn.double() + 1
    return float((got - expected).abs().max()) < 1e-5
