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


# Multiplications that take as long as moving one number to or from memory: a CPU core that
# multiplies 70e9 float32 pairs a second streams about 4e9 of them, and a GPU has a like ratio.
_MOVE = 16


def accumulation_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """Give the dtype products are formed and summed in: float32, or float64 where one is."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def cheaper_route(x: LinearFactors, y: LinearFactors) -> Route:
    """Choose how to form the inner products between two sets of factors.

    Factored costs ``b1 b2 s1 s2 (i + o)`` multiplications, materialised
    ``(b1 s1 + b2 s2) i o + b1 b2 i o``; a number that is written and read again weighs as much as
    32 of them.

    Args:
        x: First factors.
        y: Second factors.

    Returns:
        The cheaper route.
    """
    b1, s1, b2, s2 = x.num_examples, x.num_positions, y.num_examples, y.num_positions
    i, o = _sides(x)
    pairs = b1 * b2 * s1 * s2
    factored = pairs * (i * x.groups + o) + 2 * _MOVE * 2 * pairs
    written = (b1 * s1 + b2 * s2 + b1 * b2) * i * o + 2 * _MOVE * (b1 + b2) * i * o
    return "factored" if factored < written else "materialized"


def cheaper_norm_route(x: LinearFactors) -> Route:
    """Choose how to form squared norms: ``s^2 (i + o)`` against ``s i o`` an example."""
    i, o, s = x.activation_bsi.shape[2], x.output_gradient_bso.shape[2], x.num_positions
    return "factored" if s * (i + o) < (i // x.groups) * o else "materialized"


def prefers_dense(gradient: LayerGradient, *, num_train: int, num_query: int) -> bool:
    """Tell whether queries like these are better written out before many examples meet them.

    Counts what every batch of training examples like these costs against each form:
    multiplications, and numbers moved through memory. Written-out queries are read again for
    every batch, which decides for short sequences.

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
    b = max(1, min(gradient.num_examples, num_train))
    q, batches = num_query, max(1.0, num_train / b)
    written = factored = 0.0
    for part in parts:
        s, (i, o) = part.num_positions, _sides(part)
        if isinstance(part, EmbeddingFactors):
            written += b * s * q * o * (1 + _MOVE)
        else:
            written += b * (s + q) * i * o + _MOVE * (2 * b + q) * i * o
            written += q * (s + 2 * _MOVE) * i * o / batches
        for other in parts:
            pairs = b * q * s * other.num_positions
            tables = isinstance(part, EmbeddingFactors) and isinstance(other, EmbeddingFactors)
            factored += pairs * ((o if tables else sum(_sides(other))) + 2 * _MOVE * 2)
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
