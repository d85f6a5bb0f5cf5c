"""Bags of lookup-table rows, summed or averaged.

Suffixes: b bag, s place in the bag, o layer output, n read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

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
    statistics_dtype,
)

__all__ = ["EmbeddingBagRule"]

_ARGUMENTS = ("input", "offsets", "per_sample_weights")


class EmbeddingBagRule(AbstractLayerRule):
    """Rule of ``nn.EmbeddingBag`` with modes sum and mean.

    Bags given by offsets are brought into one row each when they are kept, filled up to the
    longest, so that the bag is the first axis whatever the call looked like.
    """

    def refusal(self, module: nn.EmbeddingBag) -> str | None:
        """Say which options have no rule."""
        if module.mode == "max":
            return "mode 'max' has no rule, only 'sum' and 'mean'"
        if module.max_norm is not None:
            return "max_norm changes the weight in every forward"
        if module.scale_grad_by_freq:
            return "scale_grad_by_freq makes the gradient depend on the rest of the batch"
        return None

    def keep(
        self, module: nn.EmbeddingBag, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> LayerCall:
        """Keep the rows read, bag by bag, and their weights where they are not all one."""
        given = {**dict(zip(_ARGUMENTS, args, strict=False)), **kwargs}
        index, weights = given["input"], given.get("per_sample_weights")
        if index.dim() == 1:
            ends = given["offsets"]
            if not module.include_last_offset:
                ends = torch.cat([ends, ends.new_full((1,), index.shape[0])])
            index, weights = _rows(index, ends, weights if weights is None else weights.detach())
        return LayerCall(index, {} if weights is None else {"weights": weights})

    def layer_gradient(
        self, module: nn.EmbeddingBag, call: LayerCall, output_gradient: Tensor, roles: Roles
    ) -> EmbeddingFactors:
        """Give every row of a bag the bag's gradient, times its weight or share."""
        del roles
        index, weights = call.inputs.long(), call.extras.get("weights")
        weights = weights if weights is None else weights.reshape_as(index)
        if module.mode == "mean":
            weights = _shares(module, index, weights, statistics_dtype(output_gradient.dtype))
        g = output_gradient.unsqueeze(-2)
        if weights is None:
            g = g.expand(*index.shape, -1)
        else:
            g = g.to(statistics_dtype(g.dtype)) * weights.unsqueeze(-1)
        return EmbeddingFactors(
            index.flatten(1), g.flatten(1, -2), module.num_embeddings, module.padding_idx
        )

    def to_parameters(self, module: nn.Module, dense: DenseGradient) -> dict[str, Tensor]:
        """The table as it stands, ``[v, o]``."""
        del module
        return {"weight": split_linear(dense)[0]}

    def cases(self) -> Iterable[LayerCase]:
        """Both modes, both forms of the input, weights, a padding row and empty bags."""
        for mode in ("sum", "mean"):
            for padding in (None, 2):
                options = {"mode": mode, "padding_idx": padding}
                label = f"embedding_bag-{mode}-padding={padding}"
                yield _case(label, options, lambda: (torch.randint(0, 4, (3, 5)),))
                yield _case(f"{label}-offsets", options, lambda: (_reads(), _offsets()))
                last = {**options, "include_last_offset": True}
                yield _case(
                    f"{label}-last", last, lambda: (_reads(), torch.cat([_offsets(), _end()]))
                )
        options = {"mode": "sum"}
        yield _case(
            "embedding_bag-weights",
            options,
            lambda: (torch.randint(0, 4, (3, 5)), None, torch.randn(3, 5, dtype=torch.float64)),
        )
        yield _case(
            "embedding_bag-weights-offsets",
            {**options, "padding_idx": 2},
            lambda: (_reads(), _offsets(), torch.randn(8, dtype=torch.float64)),
        )


def _case(label: str, options: Mapping[str, Any], inputs: Any) -> LayerCase:  # noqa: ANN401
    def build() -> nn.Module:
        return nn.EmbeddingBag(7, 4, dtype=torch.float64, **options)

    return LayerCase(label, build, inputs)


def _reads() -> Tensor:
    return torch.randint(0, 4, (8,))


def _offsets() -> Tensor:
    """Bags of 3, 0, 4 and 1 reads."""
    return torch.tensor([0, 3, 3, 7])


def _end() -> Tensor:
    return torch.tensor([8])


def _rows(index_n: Tensor, ends: Tensor, weights_n: Tensor | None) -> tuple[Tensor, Tensor]:
    """Cut reads into one row a bag; the length of the longest costs a host synchronisation."""
    starts_b, lengths_b = ends[:-1].long(), ends.diff().long()
    longest = int(lengths_b.max()) if lengths_b.numel() else 0
    place_s = torch.arange(longest, device=index_n.device)
    inside_bs = place_s < lengths_b.unsqueeze(1)
    read_bs = torch.where(inside_bs, starts_b.unsqueeze(1) + place_s, 0)
    if weights_n is None:
        return index_n[read_bs], inside_bs.to(torch.float32)
    return index_n[read_bs], weights_n[read_bs] * inside_bs


def _shares(
    module: nn.EmbeddingBag, index: Tensor, inside: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Share of every read in its bag's mean; the padding row does not count."""
    counted = torch.ones_like(index, dtype=dtype) if inside is None else inside.to(dtype)
    if module.padding_idx is not None:
        counted = counted * (index != module.padding_idx)
    return counted / counted.sum(-1, keepdim=True).clamp(min=1)


LAYERS.register(nn.EmbeddingBag)(EmbeddingBagRule())
