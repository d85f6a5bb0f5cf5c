"""Which entries of a layer a trajectory follows: all of them, or several random draws.

Suffixes: m mask, b example, k followed entry, d entry of the layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gradtrail.attribution.trajectory import Coupling
from gradtrail.factors import Projection, mask_coordinates

__all__ = ["Cut", "drawn_cuts", "kept_cuts", "whole_cuts"]


@dataclass(frozen=True, eq=False)
class Cut:
    """The followed entries of one layer.

    Attributes:
        size: Entries ``d`` of the layer.
        index_mk: Numbers of the followed ones, by mask; None for all, in one.
        is_stored: Whether the gradients hold these entries alone already, scaled.
        is_corrected: Whether the curvature is corrected for the entries that are not followed.
    """

    size: int
    index_mk: Tensor | None = None
    is_stored: bool = False
    is_corrected: bool = True

    @property
    def scale(self) -> float:
        """What the followed entries of a gradient are multiplied with."""
        return (self.size / self.num_kept) ** 0.5

    def part(self, start: int, size: int) -> tuple[slice | Tensor, slice | Tensor]:
        """Find the entries of one parameter of the layer among those of the first draw.

        Args:
            start: Number of its first entry in the layer.
            size: How many it has.

        Returns:
            Places among the followed entries, and the numbers of these within the parameter.
        """
        if self.index_mk is None:
            return slice(start, start + size), slice(None)
        numbers_k = self.index_mk[0] - start
        places = ((numbers_k >= 0) & (numbers_k < size)).nonzero()[:, 0]
        return places, numbers_k[places]

    @property
    def coupling(self) -> Coupling | None:
        """How the entries stand for the layer's in the curvature, or None where all are there."""
        if self.num_kept == self.size or not self.is_corrected:
            return None
        return Coupling(self.size, self.num_kept)

    @property
    def num_masks(self) -> int:
        """Number of draws ``m``."""
        return 1 if self.index_mk is None else self.index_mk.shape[0]

    @property
    def num_kept(self) -> int:
        """Followed entries ``k``."""
        return self.size if self.index_mk is None else self.index_mk.shape[1]

    @property
    def stored_size(self) -> int:
        """Entries of a stored gradient of the layer."""
        return self.num_kept if self.is_stored else self.size

    def gradients(self, values_bd: Tensor) -> Tensor:
        """Take the followed entries of gradients, scaled so that products are unbiased.

        Args:
            values_bd: Gradients as they are stored.

        Returns:
            Shape ``[m, b, k]``.
        """
        if self.index_mk is None or self.is_stored:
            return values_bd.unsqueeze(0)
        return values_bd[:, self.index_mk.to(values_bd.device)].transpose(0, 1) * self.scale

    def entries(self, values_d: Tensor) -> Tensor:
        """Take the followed entries of a vector of the layer, as they are. Shape ``[m, 1, k]``."""
        if self.index_mk is None:
            return values_d.view(1, 1, -1)
        return values_d[self.index_mk.to(values_d.device)].unsqueeze(1)


def whole_cuts(sizes: Mapping[str, int]) -> dict[str, Cut]:
    """Follow every entry.

    Args:
        sizes: Entries by layer.

    Returns:
        By layer.
    """
    return {name: Cut(size) for name, size in sizes.items()}


def drawn_cuts(sizes: Mapping[str, int], masks: int, dim: int, seed: int) -> dict[str, Cut]:
    """Draw entries of each layer, several times.

    Args:
        sizes: Entries by layer.
        masks: Number of draws.
        dim: Entries a draw; a layer with no more is followed whole.
        seed: Seed of the draws; draw ``j`` has the random numbers of the projection
            ``Projection(kind="mask", dim=dim, seed=seed + j)``.

    Returns:
        By layer.
    """
    draws = [Projection(kind="mask", dim=dim, seed=seed + number) for number in range(masks)]
    return {
        name: Cut(size, torch.stack([mask_coordinates(name, size, draw) for draw in draws]))
        for name, size in sizes.items()
    }


def kept_cuts(
    sizes: Mapping[str, int], projection: Projection, *, corrected: bool = True
) -> dict[str, Cut]:
    """Follow the entries that a projection of kind ``"mask"`` kept.

    Args:
        sizes: Entries by layer.
        projection: The projection of the stored gradients.
        corrected: Whether the curvature is corrected for the other entries.

    Returns:
        By layer.
    """
    return {
        name: Cut(
            size,
            mask_coordinates(name, size, projection).unsqueeze(0),
            is_stored=True,
            is_corrected=corrected,
        )
        for name, size in sizes.items()
    }
