"""Two-sided projection of factors: ``P_S G P_A^T`` without forming ``G``.

Choe et al., 2024, section 3, https://arxiv.org/abs/2405.13954.

Suffixes: b example, s position, i layer input, o layer output, k projected side.
"""

from __future__ import annotations

from functools import lru_cache

from torch import Tensor

from gradtrail.factors.materialize import widen
from gradtrail.factors.products import product
from gradtrail.factors.projection._random import gaussian, generator_for
from gradtrail.factors.projection.dense import project_dense
from gradtrail.factors.projection.options import Projection
from gradtrail.factors.types import (
    DenseGradient,
    EmbeddingFactors,
    LayerGradient,
    LinearFactors,
    SumGradient,
)

__all__ = ["project_factored"]


def project_factored(name: str, gradient: LayerGradient, projection: Projection) -> LayerGradient:
    """Project the input side and the output side of one layer.

    Linear factors and tables stay factors (of ``dim`` by ``dim``). Scales, grouped layers and
    gradients that are already written out have no two sides to project and take the dense
    projection to ``dim * dim`` entries where they are larger.

    Args:
        name: The layer's name.
        gradient: Gradients of any kind.
        projection: Dimension and seed.

    Returns:
        The projected gradients.
    """
    if isinstance(gradient, SumGradient):
        if any(isinstance(part, DenseGradient) for part in gradient.parts):
            return project_dense(name, gradient, projection, dim=projection.dim**2)
        parts = tuple(project_factored(name, part, projection) for part in gradient.parts)
        return SumGradient(parts)
    if isinstance(gradient, EmbeddingFactors):
        return _project_table(name, gradient, projection)
    if isinstance(gradient, LinearFactors) and gradient.groups == 1:
        return _project_linear(name, gradient, projection)
    return project_dense(name, gradient, projection, dim=projection.dim**2)


def _project_linear(name: str, x: LinearFactors, projection: Projection) -> LinearFactors:
    a_bsi, g_bso = widen(x.activation_bsi, x.output_gradient_bso)
    width = a_bsi.shape[2] + int(x.has_bias)
    has_bias = x.has_bias
    if width > projection.dim:
        p_ki = _matrix(name, "input", width, projection).to(a_bsi)
        a_bsi, has_bias = _affine(a_bsi, p_ki, x.has_bias), False
    if g_bso.shape[2] > projection.dim:
        p_ko = _matrix(name, "output", g_bso.shape[2], projection).to(g_bso)
        g_bso = _projected(g_bso, p_ko)
    return LinearFactors(a_bsi, g_bso, has_bias)


def _affine(a_bsi: Tensor, p_ki: Tensor, has_bias: bool) -> Tensor:  # noqa: FBT001
    """Multiply ``[a, 1]`` by the matrix without joining the one."""
    if not has_bias:
        return _projected(a_bsi, p_ki)
    return _projected(a_bsi, p_ki[:, :-1]).add_(p_ki[:, -1])


def _projected(x_bsm: Tensor, p_km: Tensor) -> Tensor:
    return product(x_bsm.flatten(0, 1), p_km.t()).view(*x_bsm.shape[:2], p_km.shape[0])


def _project_table(name: str, x: EmbeddingFactors, projection: Projection) -> LayerGradient:
    """Project a table as the linear layer it may share its weight with: rows are the outputs."""
    (g_bso,) = widen(x.output_gradient_bso)
    if x.padding_idx is not None:
        g_bso = g_bso * (x.index_bs != x.padding_idx).unsqueeze(-1)
    if g_bso.shape[2] > projection.dim:
        g_bso = _projected(g_bso, _matrix(name, "input", g_bso.shape[2], projection).to(g_bso))
    if x.num_embeddings <= projection.dim:
        return EmbeddingFactors(x.index_bs, g_bso, x.num_embeddings)
    p_vk = _matrix(name, "output", x.num_embeddings, projection).to(g_bso).t()
    return LinearFactors(g_bso, p_vk[x.index_bs])


def _matrix(name: str, side: str, size: int, projection: Projection) -> Tensor:
    """One side's matrix ``[k, size]``, drawn once and kept while layers are being projected."""
    return _cached_matrix(name, side, size, projection.dim, projection.seed)


@lru_cache(maxsize=1024)
def _cached_matrix(name: str, side: str, size: int, dim: int, seed: int) -> Tensor:
    return gaussian(dim, size, generator_for(seed, name, side))
