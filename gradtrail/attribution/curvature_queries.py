"""The query side of a curvature: the damped inverse applied once, in the form that scores cheapest.

Suffixes: q query, o output, j input with the constant of the bias, r rank, d entry.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gradtrail.attribution.memory import large_zeros
from gradtrail.attribution.queries import compact_form
from gradtrail.factors import (
    DenseGradient,
    LayerGradient,
    LinearFactors,
    SumGradient,
    accumulation_dtype,
    concatenate,
    dense_size,
    merge_uses,
    prefers_dense,
    squared_norm,
    tensors_of,
    to_dense,
    write_dense,
)
from gradtrail.kronecker import Damping, KroneckerFit, to_matrices

__all__ = [
    "PreparedQueries",
    "QueryOptions",
    "compact_queries",
    "num_parts",
    "precondition_queries",
    "query_chunks",
]


@dataclass(frozen=True, kw_only=True)
class QueryOptions:
    """What is done with the queries.

    Attributes:
        rank: Rank every preconditioned query is cut to, layer by layer, or None.
        refine: ``"cg"`` refines the inverse, None leaves the fit's.
        tolerance: Relative residual at which the refinement stops, or None for its default.
        max_iterations: Most iterations of the refinement, or None for its default.
    """

    rank: int | None = None
    refine: Literal["cg"] | None = None
    tolerance: float | None = None
    max_iterations: int | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the queries are preconditioned and nothing else."""
        return self.rank is None and self.refine is None


@dataclass(frozen=True, eq=False)
class PreparedQueries:
    """Queries that are ready for inner products.

    Attributes:
        layers: Gradients by layer, one set a damping, set after set.
        energy: Share of the squared norm that a cut to a rank kept, by set and query, or None.
    """

    layers: dict[str, LayerGradient]
    energy: Tensor | None = None


def query_chunks(
    layers: Mapping[str, LayerGradient],
    corrected: Mapping[str, bool],
    options: QueryOptions,
    sets: int,
    budget: int,
) -> int:
    """Say in how many parts queries must be scored so that each fits.

    Args:
        layers: The raw gradients by layer.
        corrected: By layer, whether preconditioning writes its gradients out.
        options: What is done with the queries.
        sets: Number of dampings.
        budget: Bytes that preconditioned queries may take.

    Returns:
        At least 1; every part is a pass over train.
    """
    total, count = 0, 1
    for name, gradient in layers.items():
        count = max(1, gradient.num_examples)
        if name not in corrected:
            continue
        dtype = accumulation_dtype(*(tensor.dtype for tensor in tensors_of(gradient)))
        if options.rank is not None and _has_one_matrix(gradient):
            total += _sides(gradient) * options.rank * count * dtype.itemsize
        elif corrected[name]:
            total += dense_size(gradient) * count * dtype.itemsize
        else:
            total += sum(tensor.nbytes for tensor in tensors_of(gradient))
    return num_parts(total * sets, count, budget)


def num_parts(num_bytes: int, count: int, budget: int) -> int:
    """Say in how many parts of equal size, but for the last, so many queries fit.

    Args:
        num_bytes: What all of them take.
        count: How many there are.
        budget: What a part may take; a part of one query may take more.

    Returns:
        At least 1.
    """
    wanted = min(max(1, count), max(1, -(-num_bytes // max(1, budget))))
    size = -(-max(1, count) // wanted)
    return -(-max(1, count) // size)


def precondition_queries(
    fit: KroneckerFit,
    layers: Mapping[str, LayerGradient],
    dampings: Sequence[Damping],
    options: QueryOptions,
    *,
    num_train: int,
    budget: int,
) -> PreparedQueries:
    """Apply the damped inverses, layer by layer.

    Args:
        fit: The fit.
        layers: Raw gradients by layer.
        dampings: One set of columns each.
        options: Rank to cut to.
        num_train: Training examples that will meet the queries.
        budget: Bytes that written-out queries may take; beyond it factors stay factors.

    Returns:
        The queries.
    """
    found: dict[str, LayerGradient] = {}
    kept = total = None
    for name, gradient in layers.items():
        if name not in fit.records:
            continue
        curvature = fit.curvature(name)
        sets = [curvature.precondition(gradient, damping) for damping in dampings]
        del curvature  # before anything else comes to the device
        if options.rank is not None:
            cut = [_cut(one, fit.groups(name), options.rank) for one in sets]
            sets = [factors for factors, _, _ in cut]
            own = torch.cat([share for _, share, _ in cut])
            whole = torch.cat([norm for _, _, norm in cut])
            kept = own if kept is None else kept + own
            total = whole if total is None else total + whole
        found[name], taken = _in_best_form(concatenate(sets), num_train, budget)
        budget -= taken
    energy = None if total is None else torch.where(total > 0, kept / total, torch.ones_like(kept))
    return PreparedQueries(found, energy)


def compact_queries(
    fit: KroneckerFit,
    name: str,
    gradients: Iterable[LayerGradient],
    damping: Damping,
    rank: int | None,
) -> Iterator[LayerGradient]:
    """Apply one layer's damped inverse to batch after batch of queries, for keeping.

    Args:
        fit: The fit.
        name: The layer.
        gradients: Raw gradients of each batch.
        damping: What is added to the spectrum.
        rank: Rank to cut to, or None.

    Yields:
        Each batch's result, in the smaller form.
    """
    curvature = fit.curvature(name)
    for gradient in gradients:
        done = curvature.precondition(gradient, damping)
        if rank is not None:
            done, _, _ = _cut(done, fit.groups(name), rank)
        count = done.num_examples
        yield to_dense(done) if compact_form(done, 0, count, 0)[0] else done


def _in_best_form(
    gradient: LayerGradient, num_train: int, budget: int
) -> tuple[LayerGradient, int]:
    """Write factors out where that scores cheaper and fits."""
    size = dense_size(gradient) * gradient.num_examples * 4
    if isinstance(gradient, DenseGradient):
        return gradient, size
    queries = gradient.num_examples
    if size > budget or not prefers_dense(gradient, num_train=num_train, num_query=queries):
        return gradient, 0
    parts = gradient.parts if isinstance(gradient, SumGradient) else (gradient,)
    merged = merge_uses(gradient)
    first = parts[0]
    width = first.activation_bsi.shape[2] // first.groups
    o = first.output_gradient_bso.shape[2]
    dtype = accumulation_dtype(first.output_gradient_bso.dtype)
    like = first.output_gradient_bso.new_empty(0, dtype=dtype)
    rows = large_zeros((queries, o * (width + int(first.has_bias))), like=like)
    write_dense(merged, rows)
    return DenseGradient(rows, (o, width), first.has_bias), size


def _cut(gradient: LayerGradient, groups: int, rank: int) -> tuple[LayerGradient, Tensor, Tensor]:
    """Keep the leading singular directions of every query's matrix.

    Args:
        gradient: Preconditioned gradients of one layer.
        groups: Groups of the layer; 0 where it has no matrix.
        rank: How many.

    Returns:
        Factors whose positions are the directions, the squared norms kept, and all of them, by
        query; gradients without a matrix stay whole.
    """
    if groups != 1:
        norms = squared_norm(gradient)
        return gradient, norms, norms
    dense = to_dense(gradient)
    matrices_qoj = to_matrices(dense, 1)[:, 0]
    left_qor, values_qr, right_qrj = torch.linalg.svd(matrices_qoj, full_matrices=False)
    squares = values_qr.square()
    a_qrj = right_qrj[:, :rank]
    g_qro = (left_qor * values_qr.unsqueeze(1)).transpose(1, 2)[:, :rank].contiguous()
    if dense.has_bias:
        factors = LinearFactors(
            a_qrj[..., :-1].contiguous(), g_qro, has_bias=True, constant_bs=a_qrj[..., -1]
        )
    else:
        factors = LinearFactors(a_qrj.contiguous(), g_qro)
    return factors, squares[:, :rank].sum(1), squares.sum(1)


def _has_one_matrix(gradient: LayerGradient) -> bool:
    """Whether a cut to a rank makes a gradient smaller; one of several groups stays whole."""
    part = gradient.parts[0] if isinstance(gradient, SumGradient) else gradient
    if isinstance(part, LinearFactors):
        return part.groups == 1
    return isinstance(part, DenseGradient) and len(part.shape) == 2


def _sides(gradient: LayerGradient) -> int:
    """Input, with the constant of the bias, and output width of a layer with one matrix."""
    part = gradient.parts[0] if isinstance(gradient, SumGradient) else gradient
    if isinstance(part, DenseGradient):
        return sum(part.shape) + int(part.has_bias)
    return part.activation_bsi.shape[2] + int(part.has_bias) + part.output_gradient_bso.shape[2]
