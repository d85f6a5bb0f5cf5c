"""Random numbers of projections: drawn on the CPU from a layer's name and a seed."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

__all__ = ["coordinates", "gaussian", "generator_for", "signs"]


def generator_for(seed: int, *names: object) -> torch.Generator:
    """Make a private CPU generator that depends on a seed and on names only."""
    text = "\x1f".join([str(seed), *(str(name) for name in names)])
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def gaussian(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Draw ``P`` with ``E[P^T P] = I``: independent normal entries of variance 1 / rows."""
    return torch.randn(rows, columns, generator=generator) / math.sqrt(rows)


def signs(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Draw independent signs; successive calls continue one stream row by row."""
    bits = torch.randint(0, 2, (rows, columns), generator=generator, dtype=torch.int8)
    return bits.to(torch.float32).mul_(2).sub_(1)


def coordinates(count: int, size: int, generator: torch.Generator) -> Tensor:
    """Draw ``count`` different entry numbers below ``size``, sorted."""
    if count >= size:
        return torch.arange(size)
    if size <= 1 << 24:
        return torch.randperm(size, generator=generator)[:count].sort().values
    drawn = torch.empty(0, dtype=torch.int64)
    while drawn.numel() < count:
        more = torch.randint(0, size, (2 * count,), generator=generator)
        drawn = torch.cat([drawn, more]).unique()
    keep = torch.randperm(drawn.numel(), generator=generator)[:count]
    return drawn[keep].sort().values
