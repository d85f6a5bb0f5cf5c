"""What a data selection remembers of every backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Record", "averaged", "record_of"]

_QUANTILES = {"score_min": 0.0, "score_q25": 0.25, "score_median": 0.5, "score_q75": 0.75}
_NAMES = ("kept_share", *_QUANTILES, "score_max")


@dataclass(frozen=True, slots=True)
class Record:
    """One backward.

    Attributes:
        step: Number of the backward, as its ``GradientBlock`` has it.
        num_examples: Examples of its batch.
        kept_share: Share of them that was kept; with ``layer_wise``, the mean over layers.
        score_min: Lowest score.
        score_q25: Lower quartile.
        score_median: Median.
        score_q75: Upper quartile.
        score_max: Highest score.
    """

    step: int
    num_examples: int
    kept_share: float
    score_min: float
    score_q25: float
    score_median: float
    score_q75: float
    score_max: float


def record_of(step: int, scores_b: Tensor, dropped: Sequence[Tensor]) -> Record:
    """Sum one backward up.

    Args:
        step: Its number.
        scores_b: Scores over all layers, on the CPU. Shape ``[b]``.
        dropped: True where an example was rejected: one tensor ``[b]``, or one a layer.

    Returns:
        The record.
    """
    at = torch.tensor([*_QUANTILES.values(), 1.0], dtype=scores_b.dtype)
    values = torch.quantile(scores_b, at).tolist()
    share = sum(float((~mask).double().mean()) for mask in dropped) / len(dropped)
    named = dict(zip((*_QUANTILES, "score_max"), values, strict=True))
    return Record(step=step, num_examples=len(scores_b), kept_share=share, **named)


def averaged(records: Sequence[Record]) -> Mapping[str, float]:
    """Average records for a loop's log."""
    if not records:
        return {}
    return {
        f"selection_{name}": sum(getattr(record, name) for record in records) / len(records)
        for name in _NAMES
    }
