"""Lookup tables.

Suffixes: b example, s position, o layer output.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from gradtrail.factors import DenseGradient, EmbeddingFactors
from gradtrail.hooks.layers._base import (
    LAYERS,
    AbstractLayerRule,
    LayerCall,
    LayerCase,
    Roles,
    split_linear,
    to_positions,
)

__all__ = ["EmbeddingRule"]


class EmbeddingRule(AbstractLayerRule):
    """Rule of ``nn.Embedding`` on indices of any number of axes."""

    def refusal(self, module: nn.Embedding) -> str | None:
        """Two options make a row's gradient depend on other examples or change the weight."""
        if module.max_norm is not None:
            return "max_norm changes the weight in every forward"
        if module.scale_grad_by_freq:
            return "scale_grad_by_freq makes the gradient depend on the rest of the batch"
        return None

    def layer_gradient(
        self, module: nn.Embedding, call: LayerCall, output_gradient: Tensor, roles: Roles
    ) -> EmbeddingFactors:
        """Pair the rows read with the gradients there."""
        del roles
        index = call.inputs.long()
        return EmbeddingFactors(
            index.flatten(1) if index.dim() > 1 else index.unsqueeze(1),
            to_positions(output_gradient),
            module.num_embeddings,
            module.padding_idx,
        )

    def to_parameters(self, module: nn.Module, dense: DenseGradient) -> dict[str, Tensor]:
        """The table as it stands, ``[v, o]``."""
        del module
        return {"weight": split_linear(dense)[0]}

    def cases(self) -> Iterable[LayerCase]:
        """One to three axes, with and without a padding row, dense and sparse gradients."""
        for label, options in (("plain", {}), ("padding", {"padding_idx": 2})):
            for shape in ((3,), (3, 4), (3, 2, 4)):
                yield LayerCase(
                    f"embedding-{label}-{len(shape)}d",
                    lambda options=options: nn.Embedding(7, 5, dtype=torch.float64, **options),
                    lambda shape=shape: (torch.randint(0, 7, shape),),
                )


LAYERS.register(nn.Embedding)(EmbeddingRule())
