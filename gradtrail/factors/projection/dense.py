"""One sign matrix over all entries of a layer, generated and applied in blocks.

Suffixes: b example, d gradient entry, k projected entry.
"""

from __future__ import annotations

import math

from gradtrail.factors.materialize import to_dense, widen
from gradtrail.factors.projection._random import generator_for, signs
from gradtrail.factors.projection.options import Projection
from gradtrail.factors.types import DenseGradient, LayerGradient

__all__ = ["project_dense"]


def project_dense(
    name: str, gradient: LayerGradient, projection: Projection, *, dim: int | None = None
) -> DenseGradient:
    """Multiply every entry of one layer's gradients by a random sign matrix.

    The matrix ``[k, d]`` is drawn again for every batch, in blocks of columns of at most
    ``projection.block_mib`` MiB; nothing larger is ever held.

    Args:
        name: The layer's name.
        gradient: Gradients of any kind.
        projection: Dimension, seed and block size.
        dim: Number of outputs; None means ``projection.dim``.

    Returns:
        ``[b, k]``, or the gradients written out where they have no more entries than that.
    """
    dim = projection.dim if dim is None else dim
    dense = to_dense(gradient)
    (values_bd,) = widen(dense.values_bd)
    size = values_bd.shape[1]
    if size <= dim:
        return DenseGradient(values_bd, dense.shape, dense.has_bias)
    columns = max(1, projection.block_mib * (1 << 20) // (4 * dim))
    generator = generator_for(projection.seed, name, "dense")
    projected_bk = values_bd.new_zeros(values_bd.shape[0], dim)
    for start in range(0, size, columns):
        # one stream, row after row: the numbers do not depend on the size of a block
        block_dk = signs(min(columns, size - start), dim, generator)
        projected_bk.addmm_(values_bd[:, start : start + columns], block_dk.to(values_bd))
    return DenseGradient(projected_bk.div_(math.sqrt(dim)), (dim,))
