"""Which backwards of a training capture are recorded, and under which number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gradtrail.callbacks.checks import warn_gap
from gradtrail.errors import StoreError
from gradtrail.hooks import HookManager
from gradtrail.options import check_choice, check_positive
from gradtrail.store import GradientStore

__all__ = ["Placement", "RecordedSteps"]

_CHOICES = ("per_example", "per_block")


@dataclass(frozen=True)
class Placement:
    """Where one backward belongs.

    Attributes:
        step: Number of the optimizer step.
        place: Which backward of it this is, from 0.
        is_wanted: Whether steps of this number are recorded.
        stored: Ids of the examples that the store holds of it already, or None.
    """

    step: int
    place: int
    is_wanted: bool
    stored: tuple[int | str, ...] | None

    @property
    def is_new(self) -> bool:
        """Whether it is to be recorded now."""
        return self.is_wanted and self.stored is None

    @property
    def block_id(self) -> str:
        """Id of a backward that is recorded as one: ``"<step>.<place>"``."""
        return f"{self.step}.{self.place}"


class RecordedSteps:
    """Numbers the backwards of one capture by optimizer step, and picks every k-th step."""

    def __init__(
        self,
        *,
        every: int,
        recording: Literal["per_example", "per_block"],
        gradient_accumulation_steps: int,
    ) -> None:
        """Check the options.

        Args:
            every: Steps whose number this divides are recorded.
            recording: One record an example or one a backward.
            gradient_accumulation_steps: Backwards a step, where no optimizer is announced.
        """
        check_positive("every", every)
        check_positive("gradient_accumulation_steps", gradient_accumulation_steps)
        check_choice("recording", recording, _CHOICES)
        self.every = every
        self.recording = recording
        self._backwards = gradient_accumulation_steps
        self._manager: HookManager | None = None
        self._stored: dict[int, list[tuple[int | str, ...]]] = {}
        self._count = 0
        self._last: tuple[int, Placement] | None = None

    def start(self, manager: HookManager, store: GradientStore) -> None:
        """Begin a capture; what is missing between the store's end and its start is warned of.

        Args:
            manager: What captures.
            store: Where to; what it holds is not recorded again.

        Raises:
            ValueError: If backwards are to be counted where the optimizer's steps are announced.
        """
        if manager.optimizer is not None and self._backwards != 1:
            raise ValueError(
                "gradient_accumulation_steps must be 1 where the loop announces its optimizer, got "
                f"{self._backwards}: its steps are counted as they come. Leave it out."
            )
        self._manager, self._count, self._last = manager, 0, None
        self._stored = {}
        rank = store.log.manifest.rank
        for record, entry in zip(store.records, store.log.entries, strict=True):
            if entry.rank != rank:  # what other processes store is not met here
                continue
            ids = tuple(record.meta["members"]) if "members" in record.meta else tuple(record.ids)
            self._stored.setdefault(record.step, []).append(ids)
        start = manager.steps // self._backwards
        if manager.optimizer is not None:
            start = manager.optimizer_steps
        warn_gap("OffloadCallback", store, self._stored, start, self.every)

    def stop(self) -> None:
        """End it."""
        self._manager, self._last = None, None
        self._stored = {}

    def placement(self, number: int) -> Placement:
        """Tell where a backward belongs, while it runs or right after it.

        Args:
            number: Its number among the captured backwards, as in ``GradientBlock.step``.

        Returns:
            The same for the same number; one that raised is followed by another with its number.
        """
        if self._last is None or self._last[0] != number:
            if self._manager.optimizer is None:
                step, place = divmod(number, self._backwards)
            else:
                step, place = self._manager.optimizer_steps, self._count
                self._count += 1
            known = self._stored.get(step, [])
            stored = known[place] if place < len(known) else None
            self._last = (number, Placement(step, place, step % self.every == 0, stored))
        return self._last[1]

    def end_step(self) -> None:
        """Begin to count anew: the optimizer has stepped."""
        self._count, self._last = 0, None


def check_same(placement: Placement, ids: tuple[int | str, ...]) -> None:
    """Refuse to take other examples for those that are stored.

    Args:
        placement: A backward that the store holds.
        ids: Ids of its examples now.

    Raises:
        StoreError: If they are not the stored ones.
    """
    if placement.stored is not None and placement.stored != ids:
        raise StoreError(
            f"A resumed training must meet the examples that are stored, got {_shown(ids)} in "
            f"backward {placement.place} of step {placement.step} where the store holds "
            f"{_shown(placement.stored)}. Resume with the same data, seed and batch size, or start "
            "another store."
        )


def _shown(ids: tuple[int | str, ...]) -> str:
    return f"{list(ids[:2])}{' and more' if len(ids) > 2 else ''} ({len(ids)})"
