"""Sums of tensors over ranks, and tensors joined from their ranks' rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch import distributed as dist

from gradtrail.distributed.exchange import checksum, connected, exchange, guarded
from gradtrail.distributed.objects import gather_json
from gradtrail.distributed.ranks import rank, wire_device, world_size

__all__ = ["broadcast_tensor", "gather_rows", "merge_topk", "reduce_named", "reduce_sum"]

_WIDE = (torch.float32, torch.float64, torch.int64)
_AT_ONCE = 256 << 20  # bytes of one message


def reduce_sum(tensors: Sequence[Tensor], what: str = "sums") -> None:
    """Add tensors up over all ranks, in place.

    Args:
        tensors: Of float32, float64 or int64, with the same shapes on every rank, in the same
            order.
        what: What they are, for messages.

    Raises:
        TypeError: If a dtype is too narrow to add up in.
    """
    narrow = [tensor.dtype for tensor in tensors if tensor.dtype not in _WIDE]
    if narrow:
        raise TypeError(
            f"{what} must be summed over ranks in float32, float64 or int64, got {narrow[0]}. "
            "Accumulate in float32 or wider."
        )
    if world_size() == 1:
        return
    exchange(f"shapes of {what}: {_layout(tensors)}")
    for tensor in tensors:
        _in_place(tensor.detach(), dist.all_reduce)


def reduce_named(
    tensors: Mapping[str, Tensor], device: torch.device, what: str = "sums"
) -> dict[str, Tensor]:
    """Add up over all ranks what some of them may not have, by name.

    Args:
        tensors: This rank's sums, changed in place; a name that another rank lacks is zero there.
        device: Where sums are made that this rank lacks.
        what: What they are, for messages.

    Returns:
        The sums, in an order that is the same on every rank: rank 0's names first.
    """
    if world_size() == 1:
        return dict(tensors)
    own = {
        name: [list(tensor.shape), str(tensor.dtype).removeprefix("torch.")]
        for name, tensor in tensors.items()
    }
    layouts: dict[str, Any] = {}
    for found in gather_json(own):
        layouts |= {name: layout for name, layout in found.items() if name not in layouts}
    sums = {}
    for name, (shape, dtype) in layouts.items():
        mine = tensors.get(name)
        kind = getattr(torch, dtype)
        sums[name] = torch.zeros(shape, dtype=kind, device=device) if mine is None else mine
    reduce_sum(list(sums.values()), what)
    return sums


def broadcast_tensor(tensor: Tensor, source: int) -> None:
    """Give one rank's tensor to every rank, in place.

    Args:
        tensor: The tensor, or room for it: of the same shape and dtype on every rank.
        source: The rank whose tensor counts.
    """
    if world_size() > 1:
        _in_place(tensor.detach(), partial(dist.broadcast, src=source))


def gather_rows(
    rows: Tensor, *, to: Literal["all", "rank0"] = "all", what: str = "rows"
) -> Tensor | None:
    """Join the rows of all ranks, rank 0's first: contiguous shares come back in their order.

    Args:
        rows: This rank's, as many as it has; a rank without any passes none of the same width.
            Shape ``[n_r, ...]``.
        to: Whether every rank receives them, or rank 0 alone.
        what: What they are, for messages.

    Returns:
        The rows on the device of this rank's, or None where it receives none. No rank holds more
        than this and its own. Shape ``[sum of n_r, ...]``.

    Raises:
        ValueError: If ``to`` is neither.
    """
    if to not in ("all", "rank0"):
        raise ValueError(f"to must be one of 'all', 'rank0', got {to!r}.")
    if world_size() == 1:
        return rows
    layout = f"{rows.dtype} {tuple(rows.shape[1:])}"
    place = f"width of {what}: {layout}, for {to}"
    counts = [count for (count,) in exchange(place, len(rows))]
    receives = to == "all" or rank() == 0
    with guarded(f"making room for {what}"):
        own = rows.detach().to(wire_device(rows.device)).contiguous()
        total = (sum(counts) if receives else 0, *rows.shape[1:])
        joined = torch.empty(total, dtype=own.dtype, device=own.device)
    start = 0
    for source, count in enumerate(counts):
        part = joined[start : start + count] if receives else own
        if source == rank():
            part.copy_(own)
        start += count
        if count and part.numel():
            _send(part, source, to)
    return joined.to(rows.device) if receives else None


def merge_topk(
    values_kq: Tensor, index_kq: Tensor, count: int, *, largest: bool = True
) -> tuple[Tensor, Tensor]:
    """Merge every rank's best rows of a matrix that no rank holds.

    Args:
        values_kq: The best values of this rank's rows for each column, in any order; fewer than
            ``count`` only where the rank has fewer rows. Shape ``[k_r, q]``.
        index_kq: Their row numbers among all rows. Shape ``[k_r, q]``.
        count: Number of rows wanted, ``k``.
        largest: Whether large values are the best.

    Returns:
        Values and row numbers, the best first and the lower row number first among equals;
        the same on every rank. Shapes ``[min(k, n), q]``.
    """
    values_nq = gather_rows(values_kq, what="best values")
    index_nq = gather_rows(index_kq, what="numbers of best rows")
    order_nq = index_nq.argsort(dim=0, stable=True)
    values_nq, index_nq = values_nq.gather(0, order_nq), index_nq.gather(0, order_nq)
    last = -math.inf if largest else math.inf  # NaN ranks nowhere
    ranked_nq = torch.where(values_nq.isnan(), last, values_nq)
    order_kq = ranked_nq.argsort(dim=0, descending=largest, stable=True)[:count]
    return values_nq.gather(0, order_kq), index_nq.gather(0, order_kq)


def _send(part: Tensor, source: int, to: str) -> None:
    """Bring one rank's rows to the others, or to rank 0, where they already have their place."""
    me = rank()
    for piece in _pieces(part):
        with connected():
            if to == "all":
                dist.broadcast(piece, source)
            elif source and me == source:
                dist.send(piece, 0)
            elif source and me == 0:
                dist.recv(piece, source)


def _pieces(part: Tensor) -> Iterator[Tensor]:
    """The bytes of contiguous rows: any dtype travels as what it is."""
    yield from part.flatten().view(torch.uint8).split(_AT_ONCE)


def _in_place(tensor: Tensor, collective: Callable[[Tensor], object]) -> None:
    """Run a collective on a tensor where it may lie, and put the result back."""
    sent = tensor.to(wire_device(tensor.device)).contiguous()
    with connected():
        collective(sent)
    if sent.data_ptr() != tensor.data_ptr() or sent.device != tensor.device:
        tensor.copy_(sent)


def _layout(tensors: Sequence[Tensor]) -> str:
    """Number of tensors, their entries and a checksum of their shapes."""
    shapes = ";".join(f"{tensor.dtype}{tuple(tensor.shape)}" for tensor in tensors)
    entries = sum(math.prod(tensor.shape) for tensor in tensors)
    return f"{len(tensors)} tensors, {entries} entries, {checksum(shapes):08x}"
