"""The cost rule: which exact route to an inner product needs fewer multiplications."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch

from gradtrail.factors.types import (
    DenseGradient,
    EmbeddingFactors,
    LayerGradient,
    LinearFactors,
    ScaleFactors,
    SumGradient,
)

__all__ = [
    "Route",
    "accumulation_dtype",
    "cheaper_norm_route",
    "cheaper_route",
    "dense_size",
    "prefers_dense",
]

Route: TypeAlias = Literal["factored", "materialized"]


def accumulation_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """Give the dtype products are formed and summed in: float32, or float64 where one is."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def cheaper_route(x: LinearFactors, y: LinearFactors, *, num_train: int | None = None) -> Route:
    """Choose how to form the inner products between two sets of factors.

    Factored costs ``b1 b2 s1 s2 (i + o)`` multiplications, materialised
    ``(b1 s1 + b2 s2) i o + b1 b2 i o``.

    Args:
        x: First factors.
        y: Second factors.
        num_train: How many examples like those of ``x`` will meet ``y``; its
            materialisation is shared by them. None means those of ``x`` alone.

    Returns:
        The cheaper route.
    """
    i = x.activation_bsi.shape[2] // x.groups + int(x.has_bias)
    o = x.output_gradient_bso.shape[2]
    total_i = i * x.groups
    b1, s1 = x.num_examples if num_train is None else num_train, x.num_positions
    b2, s2 = y.num_examples, y.num_positions
    factored = b1 * b2 * s1 * s2 * (total_i + o)
    materialized = (b1 * s1 + b2 * s2) * i * o + b1 * b2 * i * o
    return "factored" if factored < materialized else "materialized"


def cheaper_norm_route(x: LinearFactors) -> Route:
    """Choose how to form squared norms: ``s^2 (i + o)`` against ``s i o`` an example."""
    i, o, s = x.activation_bsi.shape[2], x.output_gradient_bso.shape[2], x.num_positions
    return "factored" if s * (i + o) < (i // x.groups) * o else "materialized"


def prefers_dense(gradient: LayerGradient, *, num_train: int, num_query: int) -> bool:
    """Tell whether queries like these are better written out before many examples meet them.

    Counts the multiplications of ``num_train`` examples like the queries against each form.

    Args:
        gradient: Some of the queries' gradients of one layer.
        num_train: Number of training examples that will meet the queries.
        num_query: Number of queries in all.

    Returns:
        Whether writing out is no dearer.
    """
    if isinstance(gradient, (DenseGradient, ScaleFactors)):
        return True
    parts = gradient.parts if isinstance(gradient, SumGradient) else (gradient,)
    written = factored = 0
    for part in parts:
        s, (i, o) = part.num_positions, _sides(part)
        table = isinstance(part, EmbeddingFactors)
        written += num_train * (s * num_query * o if table else (s + num_query) * i * o)
        written += 0 if table else num_query * s * i * o
        for other in parts:
            pairs = num_train * num_query * s * other.num_positions
            both_tables = table and isinstance(other, EmbeddingFactors)
            factored += pairs * (o if both_tables else sum(_sides(other)))
    return written <= factored


def _sides(part: LayerGradient) -> tuple[int, int]:
    """Input and output width of factors, the input's of one group."""
    if isinstance(part, LinearFactors):
        width = part.activation_bsi.shape[2] // part.groups + int(part.has_bias)
        return width, part.output_gradient_bso.shape[2]
    if isinstance(part, EmbeddingFactors):
        return 1, part.output_gradient_bso.shape[2]
    return 1, 1


def dense_size(gradient: LayerGradient) -> int:
    """Number of entries of one example's gradient when it is written out."""
    if isinstance(gradient, SumGradient):
        return dense_size(gradient.parts[0])
    if isinstance(gradient, DenseGradient):
        return gradient.values_bd.shape[1]
    if isinstance(gradient, ScaleFactors):
        return gradient.activation_bsd.shape[2] * (1 + int(gradient.has_bias))
    if isinstance(gradient, EmbeddingFactors):
        return gradient.num_embeddings * gradient.output_gradient_bso.shape[2]
    i, o = _sides(gradient)
    return i * o
