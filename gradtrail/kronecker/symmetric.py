"""Symmetric matrices: accumulating, decomposing and inverting covariances.

Suffixes: g group, k side of a covariance, t token (any stacked position).
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradtrail.errors import CurvatureError
from gradtrail.factors import linear, suits_onednn
from gradtrail.kronecker.damping import Damping, inverted

__all__ = ["add_products", "check_finite", "damped_inverse", "decompose", "mirror", "trace_mean"]

_STRIP = 128
_SMALL = 1e-3


def add_products(sum_kk: Tensor, x_tk: Tensor) -> None:
    """Add ``x^T x`` to a symmetric sum, on the CPU to its upper triangle of blocks only.

    Strips of 128 rows meet only the columns from their own on: a little over half of the
    multiplications. ``mirror`` fills in the rest at the end.

    Args:
        sum_kk: The sum so far, changed in place. Shape ``[k, k]``.
        x_tk: Rows. Shape ``[t, k]``.
    """
    width = x_tk.shape[1]
    onednn = suits_onednn(width, min(width, _STRIP) * x_tk.numel(), x_tk)
    x_kt = x_tk.t().contiguous() if onednn else None  # of which any rows lie without gaps
    strip = _STRIP if x_tk.device.type == "cpu" else width
    for start in range(0, width, max(1, strip)):
        stop = min(width, start + strip)
        if x_kt is None:
            sum_kk[start:stop, start:].addmm_(x_tk[:, start:stop].t(), x_tk[:, start:])
        else:
            sum_kk[start:stop, start:].add_(linear(x_kt[start:stop], x_kt[start:]))


def mirror(sum_gkk: Tensor) -> Tensor:
    """Copy the upper triangle into the lower, in place.

    Args:
        sum_gkk: Sums whose upper triangle is whole. Shape ``[g, k, k]``.

    Returns:
        The same tensor.
    """
    width = sum_gkk.shape[-1]
    for start in range(0, width, _STRIP):
        stop = min(width, start + _STRIP)
        corner = sum_gkk[:, start:stop, start:stop]
        corner.copy_(corner.triu() + corner.triu(1).transpose(1, 2))
        sum_gkk[:, stop:, start:stop] = sum_gkk[:, start:stop, stop:].transpose(1, 2)
    return sum_gkk


def trace_mean(cov_gkk: Tensor) -> float:
    """Mean eigenvalue of covariances, all groups together."""
    return float(cov_gkk.diagonal(dim1=-2, dim2=-1).double().mean()) if cov_gkk.numel() else 0.0


def check_finite(tensor: Tensor, layer: str, what: str) -> None:
    """Refuse a tensor that holds NaN or infinity.

    Args:
        tensor: Any tensor.
        layer: The layer it belongs to.
        what: What it is, for the error.

    Raises:
        CurvatureError: If an entry is not finite.
    """
    if not bool(torch.isfinite(tensor).all()):
        raise CurvatureError(
            f"The {what} of {layer} must be finite, got {int((~torch.isfinite(tensor)).sum())} "
            f"entries that are not, of {tensor.numel()}. Look for a NaN weight or an overflow in "
            "low precision with gradtrail.check(model, batch), or leave the layer out with "
            "exclude=."
        )


def decompose(cov_gkk: Tensor, layer: str, what: str) -> tuple[Tensor, Tensor]:
    """Decompose covariances in float64, after a check that they are finite.

    Args:
        cov_gkk: Symmetric, at least 0. Shape ``[g, k, k]``.
        layer: The layer, for errors.
        what: Which covariance, for errors.

    Returns:
        Eigenvalues, ascending, float64 ``[g, k]``, and eigenvectors in columns, in the dtype of
        the argument ``[g, k, k]``.

    Raises:
        CurvatureError: If the decomposition fails.
    """
    check_finite(cov_gkk, layer, what)
    wide = cov_gkk.device if cov_gkk.device.type != "mps" else torch.device("cpu")
    try:
        values, vectors = torch.linalg.eigh(cov_gkk.to(device=wide, dtype=torch.float64))
    except torch.linalg.LinAlgError as error:
        diagonal = cov_gkk.diagonal(dim1=-2, dim2=-1)
        raise CurvatureError(
            f"The eigendecomposition of the {what} of {layer} must converge, got {error} "
            f"(diagonal between {float(diagonal.min()):.3g} and {float(diagonal.max()):.3g}). Fit "
            "on more examples, or leave the layer out with exclude=."
        ) from error
    return values.clamp(min=0).to(cov_gkk.device), vectors.to(cov_gkk)


def damped_inverse(cov_gkk: Tensor, damping: Damping, layer: str, what: str) -> Tensor:
    """Invert damped covariances in float64.

    Args:
        cov_gkk: Symmetric, at least 0. Shape ``[g, k, k]``.
        damping: The damping; relative means of the mean eigenvalue over all groups.
        layer: The layer, for errors.
        what: Which covariance, for errors.

    Returns:
        ``(cov + lambda)^-1``; the pseudo-inverse where the damping is 0 and the covariance
        singular, and 0 where it is 0. In the dtype of the argument, or in float64 where the
        damping is so small that rounding to float32 would outweigh the rest: behind a norm layer
        a covariance has null directions, along which the inverse is ``1 / lambda``.
        Shape ``[g, k, k]``.
    """
    check_finite(cov_gkk, layer, what)
    mean = trace_mean(cov_gkk)
    if mean <= 0:
        return torch.zeros_like(cov_gkk)
    extra = damping.absolute(mean)
    wide = extra < _SMALL * mean and cov_gkk.device.type != "mps"
    dtype = torch.float64 if wide else cov_gkk.dtype
    if extra > 0 and cov_gkk.device.type != "mps":
        wide_gkk = cov_gkk.to(torch.float64, copy=True)  # the fit's own stays as it is
        wide_gkk.diagonal(dim1=-2, dim2=-1).add_(extra)
        factor_gkk, failed = torch.linalg.cholesky_ex(wide_gkk)
        if not bool(failed.any()):
            return torch.cholesky_inverse(factor_gkk).to(cov_gkk.device, dtype)
    values_gk, basis_gkk = decompose(cov_gkk.double(), layer, what)
    # the dtype it was accumulated in says which eigenvalues are rounding errors
    inverse_gk = inverted(values_gk.to(cov_gkk.dtype), extra).double()
    scaled_gkk = basis_gkk * inverse_gk.unsqueeze(-2)
    return (scaled_gkk @ basis_gkk.transpose(-1, -2)).to(cov_gkk.device, dtype)
