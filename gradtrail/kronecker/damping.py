"""Damping: what is added to a spectrum before it is inverted."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Damping", "inverted", "unseen_below"]

_DEFAULT = 0.1
_ROUNDING = 100  # units in the last place of the largest eigenvalue


@dataclass(frozen=True)
class Damping:
    """Strength of the damping, and whether it is relative.

    Attributes:
        strength: At least 0. Relative: a multiple of the mean eigenvalue of whatever it is added
            to. Absolute: in the units of that spectrum.
        relative: Whether ``strength`` is relative.
    """

    strength: float = _DEFAULT
    relative: bool = True

    @classmethod
    def of(cls, damping: float | None, *, relative: bool) -> Damping:
        """Read the options ``damping`` and ``relative_damping``.

        Args:
            damping: The strength; None means 0.1, relative.
            relative: Whether a given strength is relative.

        Returns:
            The damping.

        Raises:
            ValueError: If the strength is negative or no number, or None goes with
                ``relative_damping=False``.
        """
        if damping is None:
            if not relative:
                raise ValueError(
                    "damping must be given with relative_damping=False, got None. The default, "
                    f"{_DEFAULT} of the mean eigenvalue, is relative."
                )
            return cls()
        number = isinstance(damping, (int, float)) and not isinstance(damping, bool)
        if not number or not math.isfinite(damping) or damping < 0:
            raise ValueError(f"damping must be a finite number of at least 0, got {damping!r}.")
        return cls(float(damping), relative)

    def absolute(self, mean_eigenvalue: float) -> float:
        """Give what is added to a spectrum with this mean."""
        return self.strength * mean_eigenvalue if self.relative else self.strength


def inverted(eigenvalues: Tensor, damping: float) -> Tensor:
    """Invert a damped spectrum; directions that neither data nor damping reach give 0.

    Args:
        eigenvalues: At least 0 but for rounding. Any shape.
        damping: Absolute damping.

    Returns:
        ``1 / (eigenvalues + damping)``, or its pseudo-inverse where that would divide by rounding
        errors: entries below the spectrum's own precision count as 0.
    """
    damped = eigenvalues.clamp(min=0) + damping
    floor = unseen_below(eigenvalues) if damping == 0 else 0.0
    return torch.where(damped > floor, 1 / damped, torch.zeros_like(damped))


def unseen_below(eigenvalues: Tensor) -> Tensor:
    """Value below which eigenvalues are rounding errors of the largest. Shape ``[]``."""
    if not eigenvalues.numel():
        return eigenvalues.new_zeros(())
    wide = eigenvalues.dtype == torch.float64
    return eigenvalues.max() * _ROUNDING * torch.finfo(torch.float64 if wide else torch.float32).eps
