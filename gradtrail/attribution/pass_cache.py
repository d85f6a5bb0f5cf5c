"""One pass over data as a request, and who may answer it instead of the model."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from gradtrail.attribution.data import Rows
from gradtrail.attribution.losses import AbstractLoss
from gradtrail.factors import LayerGradient

__all__ = ["AbstractPassCache", "Attached", "Batch", "BatchSink", "CapturePass", "LiveCapture"]


@dataclass(frozen=True)
class Batch:
    """Where a batch stands in its data set.

    Attributes:
        start: Number of its first row.
        size: Number of rows.
        tokens: Positions of every row, padding included.
        padding_left: Masked positions before the first valid one, by row, or None.
        lengths: Valid positions by row. Shape ``[b]``.
    """

    start: int
    size: int
    tokens: int
    padding_left: Tensor | None
    lengths: Tensor


BatchSink: TypeAlias = Callable[[Batch, str, LayerGradient], None]


@dataclass(frozen=True, kw_only=True, eq=False)
class CapturePass:
    """One pass over data.

    Attributes:
        rows: The data.
        loss: One value an example, or several for a backward each.
        batch_size: Rows a batch; None takes the blocks of a store as they are.
        phase: What the bar says.
        sink: Receives ``(batch, layer name, gradient)``, layer by layer of each batch.
        done: Called after the layers of a batch, or None.
    """

    rows: Rows
    loss: AbstractLoss
    batch_size: int | None
    phase: str
    sink: BatchSink
    done: Callable[[Batch], None] | None = None


# ``live(request, runs)`` runs the model on some rows, gives their digest
LiveCapture: TypeAlias = Callable[[CapturePass, Sequence[range]], str]
# tensors and metadata of covariances that were accumulated while gradients were stored
Attached: TypeAlias = tuple[Mapping[str, Tensor], Mapping[str, str]]


class AbstractPassCache(abc.ABC):
    """Holds gradients of passes, so that a session need not run the model for them."""

    @abc.abstractmethod
    def covers(self, request: CapturePass) -> bool:
        """Tell whether this cache answers a pass, from what it holds or by capturing it now.

        Args:
            request: The pass.

        Returns:
            Whether ``capture`` may be called with it; other passes run the model.
        """

    @abc.abstractmethod
    def capture(self, request: CapturePass, live: LiveCapture) -> str:
        """Answer a pass: every row once, in order.

        Args:
            request: The pass.
            live: Runs the model on rows that are not held.

        Returns:
            Digest of the data, as ``DataDigest`` gives it for the same rows.
        """

    @abc.abstractmethod
    def covariances(self, request: CapturePass) -> Attached | None:
        """Give the covariances of a pass that were accumulated while its gradients were stored.

        Args:
            request: The pass.

        Returns:
            Tensors and metadata, or None where there are none that cover every row.
        """
