"""Which process this is, and what share of the work it does.

Without an initialised process group there is one process, rank 0 of 1, and nothing communicates.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import distributed as dist

__all__ = ["cost_shards", "is_main", "rank", "shard_of", "wire_device", "world_size"]


def rank() -> int:
    """Number of this process among all, from 0."""
    return dist.get_rank() if _is_initialized() else 0


def world_size() -> int:
    """Number of processes, 1 without a process group."""
    return dist.get_world_size() if _is_initialized() else 1


def is_main() -> bool:
    """Whether this is the process that writes what is written once."""
    return rank() == 0


def shard_of(count: int, place: int, world: int) -> range:
    """Give one rank's share of some rows: contiguous, without duplicates, no row left out.

    Args:
        count: Number of rows, 0 or more.
        place: The rank.
        world: Number of ranks.

    Returns:
        Row numbers. Shares differ by one row at most, the longer ones first; with fewer rows than
        ranks the last ranks have none.

    Raises:
        ValueError: If there is no such share.
    """
    if count < 0 or not 0 <= place < world:
        raise ValueError(
            "shard_of must be asked for a share of 0 or more rows by a rank below the number of "
            f"ranks, got {count} rows and rank {place} of {world}."
        )
    size, longer = divmod(count, world)
    start = place * size + min(place, longer)
    return range(start, start + size + (place < longer))


def cost_shards(costs: Sequence[float], world: int) -> list[list[int]]:
    """Spread pieces of unequal cost over ranks, the dearest first to whoever has the least.

    Args:
        costs: Cost of every piece, in any unit.
        world: Number of ranks.

    Returns:
        By rank, numbers of its pieces, ascending; the same on every rank.
    """
    shares: list[list[int]] = [[] for _ in range(world)]
    loads = [0.0] * world
    for piece in sorted(range(len(costs)), key=lambda number: (-costs[number], number)):
        place = min(range(world), key=lambda one: (loads[one], len(shares[one]), one))
        shares[place].append(piece)
        loads[place] += costs[piece]
    return [sorted(share) for share in shares]


def wire_device(device: torch.device) -> torch.device:
    """Say where a tensor must lie to be sent.

    Args:
        device: Where it lies.

    Returns:
        The same device where the process group has a backend of its own for it, else one where
        it has.
    """
    entries = (entry.split(":") for entry in dist.get_backend_config().split(","))
    served = {kind: backend for kind, backend, *_ in entries}
    if device.type in served and (device.type == "cpu" or served[device.type] != "gloo"):
        return device
    if "cpu" in served:  # gloo would copy there itself, and not for every operation
        return torch.device("cpu")
    kind = next(iter(served))
    return torch.device(kind, torch.get_device_module(kind).current_device())


def _is_initialized() -> bool:
    return dist.is_available() and dist.is_initialized()
