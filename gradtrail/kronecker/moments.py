r"""Second moments of full per-example gradients: corrected eigenvalues, dense Fishers, diagonals.

.. math:: \Lambda = \frac1N \sum_b (Q_S^T G_b Q_A)^2

Suffixes: b example, g group, o output, j input, d entry, v table row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradtrail.errors import CurvatureError
from gradtrail.factors import (
    EmbeddingFactors,
    LayerGradient,
    dense_size,
    select,
    tensors_of,
    to_dense,
    widen,
)
from gradtrail.kronecker.curvature import EKFACCurvature
from gradtrail.kronecker.matrices import Scratch

__all__ = ["CorrectedMoments", "DenseMoments", "DiagonalMoments"]

_CHUNK_ENTRIES = 1 << 24  # entries of written-out gradients at a time: 64 MiB in float32


@dataclass(eq=False)
class CorrectedMoments:
    """Sum of squares of one layer's gradients in its eigenbasis.

    Attributes:
        sum_goj: The sum. Shape ``[g, o, j]``.
    """

    sum_goj: Tensor

    @classmethod
    def like(cls, bases: EKFACCurvature) -> CorrectedMoments:
        """Start at zero for a layer with these eigenbases."""
        zeros = torch.zeros_like(
            bases.eigenvalues_goj, memory_format=torch.contiguous_format, requires_grad=False
        )
        return cls(zeros)

    def add(self, bases: EKFACCurvature, gradient: LayerGradient, scratch: Scratch) -> None:
        """Take gradients, a few at a time.

        Args:
            bases: The layer's eigenbases.
            gradient: Its gradients.
            scratch: Space to write them out in.
        """
        step = max(1, _CHUNK_ENTRIES // max(1, self.sum_goj.numel()))
        for start in range(0, gradient.num_examples, step):
            part = gradient
            if gradient.num_examples > step:
                part = select(gradient, slice(start, start + step))
            shape = (part.num_examples, *self.sum_goj.shape)
            out = scratch.take("turned", shape, self.sum_goj)
            self.add_turned(bases.turned(part, out=out, scratch=scratch))

    def add_turned(self, turned_bgoj: Tensor) -> None:
        """Take gradients that are in the eigenbasis already. Shape ``[b, g, o, j]``."""
        for turned_goj in turned_bgoj:
            self.sum_goj.addcmul_(turned_goj, turned_goj)


class DenseMoments:
    """Sum of outer products of one layer's gradients."""

    def __init__(self, layer: str, *, max_params: int) -> None:
        """Start empty.

        Args:
            layer: The layer's name.
            max_params: Most entries a gradient may have.
        """
        self._layer = layer
        self._max_params = max_params
        self.sum_dd: Tensor | None = None

    def add(self, gradient: LayerGradient) -> None:
        """Take gradients.

        Args:
            gradient: The layer's gradients.

        Raises:
            CurvatureError: If they have too many entries.
        """
        if self.sum_dd is None:
            size = dense_size(gradient)
            if size > self._max_params:
                raise CurvatureError(
                    f"{self._layer} must have at most direct_fisher_max_params={self._max_params} "
                    f"entries for a dense Fisher, got {size} (it would take "
                    f"{4 * size * size / 2**30:,.1f} GiB). Leave it out with exclude=, give it "
                    "diagonal= treatment, or raise direct_fisher_max_params."
                )
        (values_bd,) = widen(to_dense(gradient).values_bd)
        if self.sum_dd is None:
            self.sum_dd = values_bd.new_zeros(values_bd.shape[1], values_bd.shape[1])
        self.sum_dd.addmm_(values_bd.t(), values_bd)


class DiagonalMoments:
    """Sum of squares of the entries of one layer's gradients."""

    def __init__(self) -> None:
        """Start empty."""
        self.sum_d: Tensor | None = None

    def add(self, gradient: LayerGradient) -> None:
        """Take gradients; of a table, only the rows that were read are touched.

        Args:
            gradient: The layer's gradients.
        """
        (like,) = widen(_any_gradient(gradient))
        if self.sum_d is None:
            self.sum_d = like.new_zeros(dense_size(gradient))
        if isinstance(gradient, EmbeddingFactors):
            self._add_rows(gradient)
            return
        step = max(1, _CHUNK_ENTRIES // max(1, self.sum_d.numel()))
        for start in range(0, gradient.num_examples, step):
            values_bd = to_dense(select(gradient, slice(start, start + step))).values_bd
            for values_d in values_bd:
                self.sum_d.addcmul_(values_d, values_d)

    def _add_rows(self, gradient: EmbeddingFactors) -> None:
        (g_bso,) = widen(gradient.output_gradient_bso)
        sum_vo = self.sum_d.view(gradient.num_embeddings, -1)
        for index_s, g_so in zip(gradient.index_bs, g_bso, strict=True):
            rows, place_s = torch.unique(index_s, return_inverse=True)
            read_vo = g_so.new_zeros(rows.shape[0], g_so.shape[1]).index_add_(0, place_s, g_so)
            if gradient.padding_idx is not None:
                read_vo[rows == gradient.padding_idx] = 0
            sum_vo.index_add_(0, rows, read_vo.square_())


def _any_gradient(gradient: LayerGradient) -> Tensor:
    """A tensor whose dtype and device the sums follow."""
    return next(tensor for tensor in tensors_of(gradient) if tensor.is_floating_point())
