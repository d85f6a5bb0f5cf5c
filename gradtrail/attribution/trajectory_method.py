"""What a method is that scores from stores and other records of a training run."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradtrail.attribution.method import AbstractAttributor
from gradtrail.distributed import is_main, rank, world_size
from gradtrail.store import GradientStore, StepStore

__all__ = ["AbstractStoredMethod", "StoredTask"]


@dataclass(frozen=True, kw_only=True, eq=False)
class StoredTask:
    """What is to be scored from records.

    Attributes:
        train: Gradients captured while the model trained.
        query: The queries' gradients.
        optimizer_states: What the optimizer was and did, step by step, or None.
        selected_steps: Optimizer steps whose examples are scored, or None for every one.
        layers: Names of the stored layers that count.
        device: Where products are computed, or None for where the stores hand tensors out.
        progress: Whether a bar is shown.
        is_shared: Whether many processes divide the work between them; else each does all of it.
    """

    train: GradientStore
    query: GradientStore
    optimizer_states: StepStore | None
    selected_steps: tuple[int, ...] | None
    layers: tuple[str, ...]
    device: torch.device | None = None
    progress: bool = True
    is_shared: bool = True

    @property
    def place(self) -> tuple[int, int]:
        """Which share of the work is done here, and among how many it is divided."""
        return (rank(), world_size()) if self.is_shared else (0, 1)

    @property
    def shows_bar(self) -> bool:
        """Whether a bar is shown here; of many processes by the first."""
        return self.progress and is_main()


class AbstractStoredMethod(AbstractAttributor):
    """A method that scores what a training run recorded.

    Attributes:
        shares_rows: True: many processes divide the work.
    """

    shares_rows: ClassVar[bool] = True

    @abc.abstractmethod
    def score_stored(self, task: StoredTask) -> Tensor:
        """Score the examples of the selected steps against every query.

        Args:
            task: The records and what of them counts.

        Returns:
            Rows in the order of the store, on the CPU; of many processes that divide the work, on
            each of them. Shape ``[n, q]``.
        """
