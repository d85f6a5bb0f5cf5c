"""Scoring factors that were kept: layer by layer, all training examples at once.

Suffixes: n training example, q query, g group, o output, j input with the constant of the bias, d
entry.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from gradtrail.attribution.kept import KeptFactors
from gradtrail.attribution.session import Batch
from gradtrail.distributed import reduce_sum
from gradtrail.factors import (
    DenseGradient,
    GramMemo,
    LayerGradient,
    LinearFactors,
    cross_gram,
    dense_size,
    squared_norm,
    widen,
    write_dense,
)
from gradtrail.kronecker import (
    CorrectedMoments,
    Damping,
    EKFACCurvature,
    KroneckerFit,
    Scratch,
)

__all__ = ["ScoreTable", "score_kept", "score_kept_turned"]

_WRITTEN = 1 << 24  # bytes of written-out gradients at a time, read at once from the cache
_TURNED = 1 << 29  # of turned ones, which must wait until the eigenvalues are whole
_Pieces: TypeAlias = Sequence[tuple[Batch, LayerGradient]]


@dataclass(frozen=True, eq=False)
class ScoreTable:
    """Scores that are being added up.

    Attributes:
        values_nq: The scores. Shape ``[n, q]``.
        squared_n: Squared norms of the training gradients. Shape ``[n]``.
    """

    values_nq: Tensor
    squared_n: Tensor

    @classmethod
    def zeros(cls, shape: tuple[int, int], like: Tensor) -> ScoreTable:
        """Start at zero.

        Args:
            shape: Numbers of training examples and of columns.
            like: Gives the device; a float64 tensor makes scores float64.

        Returns:
            The table.
        """
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        return cls(like.new_zeros(shape, dtype=dtype), like.new_zeros(shape[0], dtype=dtype))

    def add(self, start: int, shares_bq: Tensor) -> None:
        """Add shares of scores of the examples from ``start`` on."""
        self.values_nq[start : start + shares_bq.shape[0]] += shares_bq

    def add_squares(self, start: int, gradient: LayerGradient) -> None:
        """Add a layer's squared norms of the examples from ``start`` on."""
        squares = squared_norm(gradient)
        self.squared_n[start : start + squares.shape[0]] += squares


def score_kept(
    kept: KeptFactors,
    queries: Mapping[str, LayerGradient],
    shape: tuple[int, int],
    *,
    norms: bool,
    last: bool,
) -> ScoreTable:
    """Score kept factors against queries that are ready.

    Args:
        kept: Factors of the whole training data.
        queries: The queries' gradients by layer.
        shape: Numbers of training examples and of columns.
        norms: Whether squared norms are wanted.
        last: Whether the factors may be let go, layer by layer.

    Returns:
        The scores.
    """
    table = ScoreTable.zeros(shape, kept.like)
    memo, scratch = GramMemo(), Scratch()
    for name, pieces in kept.take() if last else kept.items():
        query = queries.get(name)
        if isinstance(query, DenseGradient) and _is_linear(pieces):
            for start, dense in _written(pieces, scratch):
                table.add(start, cross_gram(dense, query))
                if norms:
                    table.add_squares(start, dense)
            continue
        for place, gradient in pieces:
            if query is not None:
                table.add(place.start, cross_gram(gradient, query, memo=memo))
            if norms:
                table.add_squares(place.start, gradient)
        memo.clear()
    return table


def score_kept_turned(
    fit: KroneckerFit,
    kept: KeptFactors,
    raw: Mapping[str, LayerGradient],
    dampings: Sequence[Damping],
    shape: tuple[int, int],
    *,
    norms: bool,
) -> ScoreTable:
    """Correct the eigenvalues of EK-FAC and score, turning each kept gradient once.

    In its eigenbasis a layer's curvature is diagonal, so that the turned training gradients
    give the eigenvalues by their squares and then the scores by inner products.

    Args:
        fit: A fit without corrected eigenvalues, completed here.
        kept: Factors of the whole training data, or of every rank's share; let go layer by layer.
        raw: The queries' gradients by layer.
        dampings: One set of columns each.
        shape: Numbers of training examples and of columns.
        norms: Whether squared norms are wanted.

    Returns:
        The scores and, where wanted, the squared norms.
    """
    table, scratch = ScoreTable.zeros(shape, kept.like), Scratch()
    for name, pieces in kept.take(fit.records if kept.is_share else ()):
        query = raw.get(name)
        if fit.records[name].kind != "ekfac":
            curvature = fit.curvature(name)
            sets = [] if query is None else [curvature.precondition(query, d) for d in dampings]
            del curvature  # before the next layer comes to the device
            _score_pieces(table, pieces, sets, norms=norms)
            continue
        bases = fit.bases(name)
        moments = CorrectedMoments.like(bases)
        blocks = _blocks(pieces, bases.eigenvalues_goj.numel(), _TURNED)
        for block in blocks:
            turned = _turned(bases, block, scratch)
            moments.add_turned(turned)
        if kept.is_share:
            reduce_sum([moments.sum_goj], f"eigenvalues of {name}")
        fit.add_eigenvalues(name, moments.sum_goj.div_(fit.num_examples))
        curvature = replace(bases, eigenvalues_goj=moments.sum_goj)
        ready = None if query is None else _turned_queries(curvature, query, dampings)
        for block in blocks:
            if len(blocks) > 1:
                turned = _turned(curvature, block, scratch)
            dense = DenseGradient(turned.flatten(1), (turned[0].numel(),))
            if norms:
                table.add_squares(block[0][0].start, dense)
            if ready is not None:
                table.add(block[0][0].start, cross_gram(dense, ready))
        del bases, curvature
    return table


def _score_pieces(
    table: ScoreTable, pieces: _Pieces, sets: Sequence[LayerGradient], *, norms: bool
) -> None:
    """Score a layer without Kronecker structure, batch by batch."""
    for place, gradient in pieces:
        if norms:
            table.add_squares(place.start, gradient)
        if sets:
            shares = [cross_gram(gradient, one) for one in sets]
            table.add(place.start, torch.cat(shares, 1))


def _turned_queries(
    curvature: EKFACCurvature, query: LayerGradient, dampings: Sequence[Damping]
) -> DenseGradient:
    """Queries in the eigenbasis, divided by each damped spectrum."""
    turned = curvature.turned(query)
    sets = [(turned * curvature.inverse(damping)).flatten(1) for damping in dampings]
    values = sets[0] if len(sets) == 1 else torch.cat(sets)
    return DenseGradient(values, (values.shape[1],))


def _turned(curvature: EKFACCurvature, block: _Pieces, scratch: Scratch) -> Tensor:
    """Write a block of gradients out in the eigenbasis, in the scratch space: ``[b, g, o, j]``."""
    shape = curvature.eigenvalues_goj.shape
    count = sum(place.size for place, _ in block)
    turned = scratch.take("turned", (count, *shape), curvature.activation_basis_gjj)
    done = 0
    for place, gradient in block:
        curvature.turned(gradient, out=turned[done : done + place.size], scratch=scratch)
        done += place.size
    return turned


def _written(pieces: _Pieces, scratch: Scratch) -> Iterator[tuple[int, DenseGradient]]:
    """Write linear factors out, block by block, in the scratch space."""
    first = pieces[0][1]
    o, i = first.output_gradient_bso.shape[2], first.activation_bsi.shape[2] // first.groups
    (like,) = widen(first.output_gradient_bso.new_empty(0))
    width = dense_size(first)
    for block in _blocks(pieces, width, _WRITTEN):
        count = sum(place.size for place, _ in block)
        rows = scratch.take("written", (count, width), like)
        done = 0
        for place, gradient in block:
            write_dense(gradient, rows[done : done + place.size])
            done += place.size
        yield block[0][0].start, DenseGradient(rows, (o, i), first.has_bias)


def _blocks(pieces: _Pieces, width: int, room: int) -> list[list[tuple[Batch, LayerGradient]]]:
    """Group batches that follow each other, as many rows as so many bytes take."""
    limit = max(1, room // (4 * max(1, width)))
    blocks: list[list[tuple[Batch, LayerGradient]]] = []
    count, stop = 0, None
    for place, gradient in pieces:
        if place.start != stop or count + place.size > limit:
            blocks.append([])
            count = 0
        blocks[-1].append((place, gradient))
        count += place.size
        stop = place.start + place.size
    return blocks


def _is_linear(pieces: _Pieces) -> bool:
    return all(isinstance(gradient, LinearFactors) for _, gradient in pieces)
