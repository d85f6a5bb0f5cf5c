r"""The features of TRAK: their outer products over all training examples, and the solve with them.

Suffixes: n training example, q query, b example of a batch, k feature.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gradtrail.attribution.memory import free_bytes
from gradtrail.attribution.session import Batch
from gradtrail.distributed import gather_json, reduce_sum
from gradtrail.errors import CurvatureError
from gradtrail.factors import (
    DenseGradient,
    LayerGradient,
    accumulation_dtype,
    to_dense,
    widen,
)
from gradtrail.kronecker import Damping

__all__ = ["SOLVE_BYTES", "Features", "check_fits", "solve_features"]

SOLVE_BYTES = 20  # an entry: the sum in float32, and in float64 the sum and its factor
_ROWS_AT_ONCE = 256  # the matrix of features is read and written once for so many
_ROUNDING = 100  # units in the last place of the largest eigenvalue


def solve_features(
    gram_kk: Tensor, phi_qk: Tensor, damping: Damping, num_examples: int
) -> tuple[Tensor, Tensor]:
    r"""Solve :math:`(\Phi^T \Phi + \lambda I) x = \phi_q` in float64.

    Args:
        gram_kk: The sum over training examples of their features' outer products.
        phi_qk: Right-hand sides.
        damping: What is added to the spectrum.
        num_examples: Number of training examples ``n``.

    Returns:
        Solutions ``[q, k]``, and the lower Cholesky factor ``[k, k]``; both float64.

    Raises:
        CurvatureError: If the matrix is not finite, or singular to working precision.
    """
    where = torch.device("cpu") if gram_kk.device.type == "mps" else gram_kk.device
    damped_kk = gram_kk.to(device=where, dtype=torch.float64, copy=True)
    k = gram_kk.shape[0]
    mean = float(damped_kk.diagonal().mean()) if k else 0.0
    if not torch.isfinite(damped_kk).all():
        raise CurvatureError(
            "train must have finite features for method 'trak', got NaN or infinite ones. Find the "
            "examples with method='graddot', which names them."
        )
    strength = damping.absolute(mean)
    if mean == 0:
        strength = strength or 1.0  # no example has a gradient, and every score is 0
    damped_kk.diagonal().add_(strength)
    factor_kk, failed = torch.linalg.cholesky_ex(damped_kk)
    pivots = factor_kk.diagonal().square()
    floor = _ROUNDING * k * torch.finfo(torch.float64).eps
    if int(failed) or (k and float(pivots.min()) <= floor * float(pivots.max())):
        raise CurvatureError(
            f"damping must make the {k} x {k} matrix of features regular, got "
            f"{damping.strength} with {num_examples} training examples. Pass a larger damping or "
            "a projection to fewer entries."
        )
    phi_qk = phi_qk.to(device=where, dtype=torch.float64)
    return torch.cholesky_solve(phi_qk.t(), factor_kk).t(), factor_kk


class Features:
    """Adds up the features' outer products while layers of batches come in any order.

    Columns are in the order in which their layers were first reached.
    """

    def __init__(self) -> None:
        """Start with no features."""
        self._columns: dict[str, tuple[slice, DenseGradient]] = {}
        self._open: dict[int, dict[str, DenseGradient]] = {}
        self._waiting: list[Tensor] = []
        self._gram: Tensor | None = None

    def add(self, place: Batch, name: str, gradient: LayerGradient) -> None:
        """Take one layer of one batch."""
        self._open.setdefault(place.start, {})[name] = _wide(gradient)

    def close(self, place: Batch) -> None:
        """Add a finished batch."""
        self._waiting.append(self.take(place))
        if sum(rows.shape[0] for rows in self._waiting) >= _ROWS_AT_ONCE:
            self._fold()

    def take(self, place: Batch) -> Tensor:
        """Give the features of a finished batch, ``[b, k]``, in the order of the columns."""
        layers = self._open.pop(place.start, {})
        for name, dense in layers.items():
            if name not in self._columns:
                values = dense.values_bd.new_zeros(0, dense.values_bd.shape[1])
                self._add_columns(name, DenseGradient(values, dense.shape, dense.has_bias))
        return self._joined(layers, place.size)

    def join(self, device: torch.device) -> None:
        """Add up what all ranks found, with one order of columns; every one must ask.

        Args:
            device: Where the sum is made of a rank that has none.
        """
        own = self.gram()
        told = [
            [name, like.values_bd.shape[1], like.shape, like.has_bias, str(like.values_bd.dtype)]
            for name, (_, like) in self._columns.items()
        ]
        layers: dict[str, list[Any]] = {}
        for found in gather_json(told):
            for name, *facts in found:
                layers.setdefault(name, facts)
        before = {name: columns for name, (columns, _) in self._columns.items()}
        self._columns = {}
        for name, (width, shape, has_bias, dtype) in layers.items():
            values = torch.empty(
                0, width, dtype=getattr(torch, dtype.removeprefix("torch.")), device=device
            )
            self._add_columns(name, DenseGradient(values, tuple(shape), has_bias))
        if not layers:
            return
        check_fits(self.size, device)
        self._gram = self._laid_out(own, before)
        reduce_sum([self._gram], "outer products of features")

    @property
    def size(self) -> int:
        """Number of features ``k``."""
        return sum(columns.stop - columns.start for columns, _ in self._columns.values())

    def solve(
        self, queries: Mapping[str, LayerGradient], damping: Damping, num_examples: int
    ) -> dict[str, LayerGradient]:
        """Turn the queries' features into what scores by inner products, layer by layer."""
        dense = {name: _wide(gradient) for name, gradient in queries.items()}
        if not dense or not self._columns:
            return {}
        q = next(iter(dense.values())).num_examples
        phi_qk = self._joined(dense, q)
        solved_qk = solve_features(self.gram(), phi_qk, damping, num_examples)[0].to(phi_qk)
        return {
            name: DenseGradient(solved_qk[:, columns].contiguous(), like.shape, like.has_bias)
            for name, (columns, like) in self._columns.items()
        }

    def gram(self) -> Tensor:
        """The sum of outer products, ``[k, k]``."""
        self._fold()
        return self._gram if self._gram is not None else torch.zeros(0, 0)

    def _add_columns(self, name: str, like: DenseGradient) -> None:
        """Give a layer the columns behind the others."""
        start = self.size
        self._columns[name] = (slice(start, start + like.values_bd.shape[1]), like)

    def _laid_out(self, own: Tensor, before: Mapping[str, slice]) -> Tensor:
        """Bring a sum of outer products from an order of columns to the one that is kept now."""
        now = {name: columns for name, (columns, _) in self._columns.items()}
        if dict(before) == now:
            return own
        likes = [like.values_bd for _, like in self._columns.values()]
        dtype = accumulation_dtype(*(like.dtype for like in likes))
        gram_kk = torch.zeros(self.size, self.size, dtype=dtype, device=likes[0].device)
        if before:
            runs = [torch.arange(now[name].start, now[name].stop) for name in before]
            places_k = torch.cat(runs).to(gram_kk.device)
            gram_kk[places_k.unsqueeze(1), places_k] = own.to(gram_kk)
        return gram_kk

    def _joined(self, layers: Mapping[str, DenseGradient], rows: int) -> Tensor:
        """Put layers side by side, zeros where one was not reached."""
        if not self._columns:
            return torch.zeros(rows, 0)
        return torch.cat(
            [
                layers[name].values_bd
                if name in layers
                else like.values_bd.new_zeros(rows, like.values_bd.shape[1])
                for name, (_, like) in self._columns.items()
            ],
            dim=1,
        )

    def _fold(self) -> None:
        """Add the waiting rows' outer products."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        k = self.size
        if self._gram is None or self._gram.shape[0] < k:
            check_fits(k, waiting[0].device)
        rows_nk = torch.cat([F.pad(rows, (0, k - rows.shape[1])) for rows in waiting])
        if self._gram is None:
            self._gram = rows_nk.new_zeros(k, k)
        elif self._gram.shape[0] < k:
            more = k - self._gram.shape[0]
            self._gram = F.pad(self._gram, (0, more, 0, more))
        self._gram.addmm_(rows_nk.t(), rows_nk)


def _wide(gradient: LayerGradient) -> DenseGradient:
    """Features, written out in a dtype that their products may be added up in."""
    dense = to_dense(gradient)
    (values_bd,) = widen(dense.values_bd)
    return replace(dense, values_bd=values_bd)


def check_fits(k: int, device: torch.device) -> None:
    """Refuse a matrix of features that does not fit.

    Args:
        k: Number of features.
        device: Where it would be.

    Raises:
        ValueError: If it does not.
    """
    needed, free = SOLVE_BYTES * k * k, free_bytes(device)
    if needed > free:
        raise ValueError(
            f"projection must leave features whose matrix fits the memory ({free / 1e9:.1f} GB "
            f"free), got {k} of them, {needed / 1e9:.1f} GB. Pass a smaller projection dim, or "
            "fewer layers."
        )
