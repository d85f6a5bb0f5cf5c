"""What a user says about a random projection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gradtrail.options import check_choice, check_positive

__all__ = ["Projection"]


@dataclass(frozen=True, kw_only=True)
class Projection:
    """A seeded random compression of every layer's gradient.

    Inner products of projected gradients are unbiased layer by layer. The numbers depend
    on the layer's name and the seed alone, so they are the same on every device and rank.

    Attributes:
        kind: ``"factored"`` projects both sides (LoGra, https://arxiv.org/abs/2405.13954);
            ``"dense"`` multiplies all entries by one sign matrix, in blocks;
            ``"mask"`` keeps randomly chosen entries.
        dim: Outputs a side for ``"factored"`` (``dim * dim`` entries a layer), entries a layer
            otherwise. A side or layer that is no larger is kept as it is.
        seed: Seed of the random numbers.
        block_mib: Most MiB of projection matrix that exist at once for ``"dense"``.
    """

    kind: Literal["factored", "dense", "mask"] = "factored"
    dim: int = 64
    seed: int = 0
    block_mib: int = 64

    def __post_init__(self) -> None:
        """Check the options."""
        check_choice("kind", self.kind, ("factored", "dense", "mask"))
        check_positive("dim", self.dim)
        check_positive("block_mib", self.block_mib)
