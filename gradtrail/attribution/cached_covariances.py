"""Covariances that are accumulated while gradients are stored, and kept beside them."""

from __future__ import annotations

import torch

from gradtrail.attribution.data import Rows
from gradtrail.attribution.kronecker import KroneckerMethod
from gradtrail.attribution.method import AbstractAttributor
from gradtrail.attribution.pass_cache import Attached, Batch
from gradtrail.attribution.session import Session
from gradtrail.distributed import barrier, is_main
from gradtrail.factors import LayerGradient
from gradtrail.kronecker import CovarianceAccumulator, joined_sums
from gradtrail.kronecker.covariance_file import COVARIANCES, covariance_state
from gradtrail.store import GradientStore, records_digest

__all__ = ["CovarianceWatch", "watch_for"]


class CovarianceWatch:
    """Accumulates covariances of the layers that have Kronecker structure."""

    def __init__(self, layers: frozenset[str], max_side: int) -> None:
        """Start empty.

        Args:
            layers: The layers to accumulate; others are passed over.
            max_side: Longest side of a covariance that may be allocated.
        """
        self._layers = layers
        self._max_side = max_side
        self._sums = CovarianceAccumulator(max_side=max_side)

    def add(self, place: Batch, name: str, gradient: LayerGradient) -> None:
        """Take one layer of one batch.

        Args:
            place: The batch.
            name: The layer.
            gradient: Its gradients, as factors.
        """
        del place
        if name in self._layers:
            self._sums.add(name, gradient)

    def close(self, place: Batch) -> None:
        """End a batch."""
        del place
        self._sums.end_backward()

    def attach_to(self, store: GradientStore, rows: Rows, device: torch.device) -> Attached:
        """Keep the sums beside the gradients they are of.

        Args:
            store: The store, whole and flushed on every rank.
            rows: The rows it is of, or this rank's share of them.
            device: Where sums are made that this rank lacks.

        Returns:
            What was attached.
        """
        if rows.whole is not None:
            joined = joined_sums(self._sums.sums(), device)
            self._sums = CovarianceAccumulator(max_side=self._max_side)
            self._sums.restore(joined)
        is_common = rows.whole is not None and not store.is_temporary
        covers = _covered(store, is_common=is_common)
        tensors, metadata = covariance_state(self._sums, rows.total, covers)
        if is_main() or not is_common:
            store.attach(COVARIANCES, tensors, metadata)
        if is_common:
            barrier("attached covariances")
        return tensors, metadata


def _covered(store: GradientStore, *, is_common: bool) -> str:
    """Digest of the records of a store, those that other ranks wrote too."""
    if not is_common:
        return records_digest(store.records)
    with GradientStore(store.path, mode="read") as whole:
        return records_digest(whole.records)


def watch_for(attributor: AbstractAttributor, session: Session) -> CovarianceWatch | None:
    """Give what accumulates the covariances that a method fits with.

    Args:
        attributor: The method.
        session: The session.

    Returns:
        A watch; None for a method whose curvature, if any, is not of the data's own gradients.
    """
    if not isinstance(attributor, KroneckerMethod) or attributor.fisher != "empirical":
        return None
    found = attributor.treatments(session)
    layers = frozenset(name for name, kind in found.items() if kind == "kronecker")
    return CovarianceWatch(layers, attributor.max_factor_dim) if layers else None
