"""Exact entries at randomly chosen coordinates.

Suffixes: b example, s position, i layer input, o layer output, k kept entry.
"""

from __future__ import annotations

from functools import lru_cache

from torch import Tensor

from gradtrail.factors.materialize import to_dense, widen
from gradtrail.factors.projection._random import coordinates, generator_for
from gradtrail.factors.projection.options import Projection
from gradtrail.factors.types import DenseGradient, LayerGradient, LinearFactors, SumGradient

__all__ = ["mask_coordinates", "project_mask"]


def project_mask(name: str, gradient: LayerGradient, projection: Projection) -> DenseGradient:
    """Keep ``dim`` entries of every gradient, scaled by ``sqrt(d / dim)``.

    Args:
        name: The layer's name.
        gradient: Gradients of any kind.
        projection: Number of entries and seed.

    Returns:
        The kept entries, in the order of ``mask_coordinates``. Shape ``[b, k]``.
    """
    if isinstance(gradient, SumGradient):
        parts = [project_mask(name, part, projection) for part in gradient.parts]
        return DenseGradient(sum(part.values_bd for part in parts), parts[0].shape)
    if isinstance(gradient, LinearFactors) and gradient.groups == 1:
        return _mask_linear(name, gradient, projection)
    (values_bd,) = widen(to_dense(gradient).values_bd)
    size = values_bd.shape[1]
    keep_k = mask_coordinates(name, size, projection).to(values_bd.device)
    scale = (size / keep_k.numel()) ** 0.5
    return DenseGradient(values_bd[:, keep_k] * scale, (keep_k.numel(),))


def _mask_linear(name: str, x: LinearFactors, projection: Projection) -> DenseGradient:
    a_bsi, g_bso = widen(x.activation_bsi, x.output_gradient_bso)
    i, o = a_bsi.shape[2], g_bso.shape[2]
    size = o * i + (o if x.has_bias else 0)
    keep_k = mask_coordinates(name, size, projection)
    weight_k = keep_k[keep_k < o * i]
    bias_k = (keep_k[weight_k.numel() :] - o * i).to(a_bsi.device)
    values_bk = a_bsi.new_empty(a_bsi.shape[0], keep_k.numel())
    if weight_k.numel():
        rows, columns = (weight_k // i).to(a_bsi.device), (weight_k % i).to(a_bsi.device)
        values_bk[:, : weight_k.numel()] = (g_bso[:, :, rows] * a_bsi[:, :, columns]).sum(1)
    values_bk[:, weight_k.numel() :] = g_bso.sum(1)[:, bias_k]
    scale = (size / keep_k.numel()) ** 0.5
    return DenseGradient(values_bk.mul_(scale), (keep_k.numel(),))


def mask_coordinates(name: str, size: int, projection: Projection) -> Tensor:
    """Give the kept entry numbers of a layer with ``size`` entries, sorted. Shape ``[k]``."""
    return _cached_coordinates(name, size, projection.dim, projection.seed)


@lru_cache(maxsize=1024)
def _cached_coordinates(name: str, size: int, dim: int, seed: int) -> Tensor:
    return coordinates(dim, size, generator_for(seed, name, "mask"))
