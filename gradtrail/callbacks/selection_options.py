"""The options of data selection: how examples are scored, and which of them are rejected."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from gradtrail.options import check_choice, near_names

__all__ = ["ScoringOptions", "SelectionOptions", "options_from"]

_Options = TypeVar("_Options")
_MODES = ("hard", "bottom_fraction", "negative_bottom_fraction")


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoringOptions:
    """How the inner products with the target gradient are formed; the scores are equal.

    Attributes:
        score_mode: ``"ghost"`` from a layer's factors, without writing an example's gradient out;
            ``"materialized"`` by writing it out, one layer at a time.
    """

    score_mode: Literal["ghost", "materialized"] = "ghost"

    def __post_init__(self) -> None:
        """Check the choice."""
        check_choice("score_mode", self.score_mode, ("ghost", "materialized"))


@dataclass(frozen=True, kw_only=True, slots=True)
class SelectionOptions:
    """Which examples of a batch are rejected, given their scores.

    Attributes:
        threshold: Scores below it are rejected (``"hard"``), or the share of the batch that is.
        threshold_mode: ``"hard"``: scores below the threshold; ``"bottom_fraction"``: that share of
            the batch, rounded down, with the lowest scores; ``"negative_bottom_fraction"``:
            those of that share whose score is negative.
        layer_wise: Whether every layer scores and rejects on its own.
    """

    threshold: float = 0.0
    threshold_mode: Literal["hard", "bottom_fraction", "negative_bottom_fraction"] = "hard"
    layer_wise: bool = False

    def __post_init__(self) -> None:
        """Check that the threshold fits its mode.

        Raises:
            ValueError: If it does not, or would reject nothing.
            TypeError: If ``layer_wise`` is no bool.
        """
        check_choice("threshold_mode", self.threshold_mode, _MODES)
        if not isinstance(self.layer_wise, bool):
            raise TypeError(f"layer_wise must be True or False, got {self.layer_wise!r}.")
        number = isinstance(self.threshold, (int, float)) and not isinstance(self.threshold, bool)
        if not number or not math.isfinite(self.threshold):
            raise ValueError(f"threshold must be a finite number, got {self.threshold!r}.")
        if self.threshold_mode == "hard":
            return
        top = 1 if self.threshold_mode == "negative_bottom_fraction" else math.nextafter(1, 0)
        if not 0 < self.threshold <= top:
            rule = "at most 1" if top == 1 else "below 1"
            raise ValueError(
                f"threshold must be a share of the batch above 0 and {rule} with threshold_mode="
                f"{self.threshold_mode!r}, got {self.threshold!r}. A share of 0 rejects nothing."
            )

    def rejected(self, scores_b: Tensor) -> Tensor:
        """Decide which examples are rejected.

        Args:
            scores_b: Scores of one batch, all finite. Shape ``[b]``.

        Returns:
            True where rejected; among equal scores at the border the later rows are kept.
            Shape ``[b]``.
        """
        if self.threshold_mode == "hard":
            return scores_b < self.threshold
        count = self.count(scores_b.shape[0])
        lowest = torch.argsort(scores_b, stable=True)[:count]
        rejected = torch.zeros_like(scores_b, dtype=torch.bool)
        rejected[lowest] = True
        if self.threshold_mode == "negative_bottom_fraction":
            rejected &= scores_b < 0
        return rejected

    def count(self, batch: int) -> int:
        """Number of examples that the share of a batch comes to, rounded down."""
        return math.floor(self.threshold * batch + 1e-9)


def options_from(
    name: str, kind: type[_Options], given: Mapping[str, Any] | _Options | None
) -> _Options:
    """Make options of a mapping, or pass them on.

    Args:
        name: Name of the argument as the user wrote it.
        kind: The options class.
        given: Its fields by name, an instance, or None for the defaults.

    Returns:
        The options.

    Raises:
        ValueError: If a key is unknown.
        TypeError: If it is no mapping.
    """
    if given is None:
        return kind()
    if isinstance(given, kind):
        return given
    if not isinstance(given, Mapping):
        raise TypeError(f"{name} must be a mapping, got {type(given).__name__}.")
    allowed = [field.name for field in fields(kind)]
    for key in given:
        if key not in allowed:
            listed = ", ".join(repr(entry) for entry in allowed)
            raise ValueError(
                f"{name} must hold no other keys than {listed}, got {key!r}. "
                f"Near names: {near_names(str(key), allowed)}."
            )
    return kind(**given)
