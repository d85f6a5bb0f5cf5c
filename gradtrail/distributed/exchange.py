"""Every collective opens with a few numbers from each rank, by which an error reaches all ranks.

A rank that fails inside ``guarded()`` says so at its next exchange, the end of the section. The
others learn of it at theirs, whichever that is: all raise, none waits for a part that will not
come. The numbers also tell ranks that have come to different places, where plain collectives would
mix up or hang.

Where the model itself communicates (FSDP gathers weights), ranks wait in collectives that are not
ours. There a rank that fails leaves its error in the job's store and gives the process group up,
unless all the others fail at the same time, as they do where a call is refused.
With gloo the others' collectives fail once its connections are closed, at the latest when the
process ends, and they find the error in the store. The same goes for a rank that is gone, but
without an error to find. With nccl both show when the watchdog's time is up
(``init_process_group(timeout=...)``, or ``TORCH_NCCL_PROPAGATE_ERROR=1`` sooner).
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from gradtrail.distributed.ranks import rank, wire_device, world_size

__all__ = [
    "RankError",
    "agree",
    "barrier",
    "checksum",
    "connected",
    "exchange",
    "guarded",
    "send_all",
]

_LONGEST = 1 << 14
_TOLD = "_gradtrail_told"
_CPU = torch.device("cpu")
_FAILED, _READ = "gradtrail/failed", "gradtrail/read"  # keys of the job's store
_ERRORS = "gradtrail/errors"
_PATIENCE = 1.0  # seconds in which others should have failed too, or have read an error
_SIGNS = ("gloo", "Connection closed", "Connection reset", "NCCL")


class RankError(RuntimeError):
    """Another rank has failed, is gone, or has come to another place of the program."""


@contextmanager
def guarded(section: str, *, model_communicates: bool = False) -> Iterator[None]:
    """Let an error on one rank end a section on every rank.

    A rank that fails raises its own error, the others a ``RankError`` with that error's text.
    Sections may lie in one another. With one process nothing happens.

    Args:
        section: What is done inside, for the message: ``"scoring"``.
        model_communicates: Whether collectives of others than this package run inside. An error
            that not every rank has then costs the process group: the program has to be started
            again.

    Yields:
        Nothing.
    """
    with ExitStack() as stack:
        if world_size() > 1:
            stack.push(partial(_end, section, model_communicates))
        yield


def barrier(section: str) -> None:
    """Wait for every rank.

    Args:
        section: What they wait for, the same on every rank.
    """
    exchange(section)


def agree(what: str, value: Any) -> None:  # noqa: ANN401
    """Refuse ranks that were called with different values.

    Args:
        what: The argument, as the user wrote it.
        value: Its value, of what JSON can hold.

    Raises:
        ValueError: On every rank, if they differ.
    """
    text = json.dumps(value, sort_keys=True)
    if world_size() == 1:
        return
    digests = [found[0] for found in exchange(f"value of {what}", checksum(text))]
    if len(set(digests)) == 1:
        return
    texts = send_all(text.encode()[:_LONGEST])
    listed = ", ".join(f"{json_text.decode()} on rank {place}" for place, json_text in texts)
    try:
        raise ValueError(f"{what} must be the same on every rank, got {listed}.")
    except ValueError as error:
        vars(error)[_TOLD] = True
        raise


def exchange(place: str, *numbers: int) -> list[tuple[int, ...]]:
    """Come together with the other ranks and tell each other some numbers.

    Args:
        place: Where in the program this is, the same on every rank.
        *numbers: Whole numbers, as many on every rank.

    Returns:
        Every rank's numbers, by rank.

    Raises:
        RankError: If a rank has failed, is gone, or is at another place.
    """
    if world_size() == 1:
        return [numbers]
    heads = _heads(0, place, numbers)
    failed = [number for number, head in enumerate(heads) if head[0]]
    if failed:
        texts = dict(send_all(b""))
        raise RankError(texts[failed[0]].decode(errors="replace"))
    if any(head[1] != heads[0][1] or head[2] != len(numbers) for head in heads):
        places = send_all(place.encode()[:_LONGEST])
        listed = ", ".join(f"rank {number} at {text.decode()!r}" for number, text in places)
        raise RankError(f"Ranks must come to the same place of the program, got {listed}.")
    return [tuple(head[3 : 3 + len(numbers)]) for head in heads]


def send_all(text: bytes) -> list[tuple[int, bytes]]:
    """Give every rank's bytes to every rank.

    Args:
        text: This rank's.

    Returns:
        Pairs of rank and its bytes.
    """
    lengths = [int(length) for length in _gathered(torch.tensor([len(text)])).flatten()]
    padded = torch.zeros(max(*lengths, 1), dtype=torch.uint8)
    padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else 0
    rows = _gathered(padded)
    return [
        (place, bytes(row[:length].tolist()))
        for place, (row, length) in enumerate(zip(rows, lengths, strict=True))
    ]


def _end(
    section: str,
    model_communicates: bool,  # noqa: FBT001  # bound by place
    _kind: type[BaseException] | None,
    error: BaseException | None,
    _trace: TracebackType | None,
) -> None:
    """End a section: meet the others, or tell them of the error on its way out."""
    if error is None:
        exchange(f"end of {section}")
    elif isinstance(error, Exception) and not isinstance(error, RankError):
        _raise_if_lost(error)
        (_leave if model_communicates else _tell)(error, section)


def _tell(error: Exception, section: str) -> None:
    """Tell the other ranks of an error, unless they know of it or cannot be reached."""
    if _TOLD in vars(error):
        return
    vars(error)[_TOLD] = True
    with suppress(RankError):
        _heads(1, section, ())
        send_all(_text(error, section))


def _leave(error: Exception, section: str) -> None:
    """Leave an error where the others will look, and break the collectives they wait in."""
    if _TOLD in vars(error):
        return
    vars(error)[_TOLD] = True
    others = world_size() - 1
    store = dist.distributed_c10d._get_default_store()  # noqa: SLF001  # torch has no public way
    if _is_everybodys(store):
        return
    store.compare_set(_FAILED, "", _text(error, section))
    dist.distributed_c10d._abort_process_group()  # noqa: SLF001  # nor here
    deadline = time.monotonic() + _PATIENCE  # the store may be this process's own
    while time.monotonic() < deadline and store.add(_READ, 0) < others:
        time.sleep(0.02)


def _is_everybodys(store: dist.Store) -> bool:
    """Whether every rank has an error of its own: none waits then, and the group is as it was."""
    # ranks have had the same number of errors as long as the group lives
    key = f"{_ERRORS}/{store.add(f'{_ERRORS} of {rank()}', 1)}"
    failed, deadline = store.add(f"{key}/ranks", 1), time.monotonic() + _PATIENCE
    while failed < world_size() and time.monotonic() < deadline:
        time.sleep(0.02)
        failed = store.add(f"{key}/ranks", 0)
    # the first one that knows decides for all
    found = "all" if failed == world_size() else "some"
    return store.compare_set(f"{key}/found", "", found) == b"all"


def _text(error: Exception, section: str) -> bytes:
    """What the others are told."""
    text = f"Rank {rank()} failed in {section}: {type(error).__name__}: {error}"
    return text.encode()[:_LONGEST]


def _heads(state: int, place: str, numbers: Sequence[int]) -> list[list[int]]:
    """Every rank's state, place and numbers; of the numbers there are at most 5."""
    head = [state, checksum(place), len(numbers), *numbers, *[0] * (5 - len(numbers))]
    return _gathered(torch.tensor(head, dtype=torch.int64)).tolist()


def _gathered(own: Tensor) -> Tensor:
    """Every rank's tensor of one shape: ``[ranks, *shape]``, on the CPU.

    Args:
        own: This rank's.

    Returns:
        The tensors, by rank.
    """
    device = wire_device(_CPU)
    own = own.to(device)
    rows = [torch.empty_like(own) for _ in range(world_size())]
    with connected():
        dist.all_gather(rows, own)
    return torch.stack(rows).cpu()


@contextmanager
def connected() -> Iterator[None]:
    """Say clearly what a collective that failed means.

    Yields:
        Nothing.

    Raises:
        RuntimeError: As it was, if it is no lost connection.
    """
    try:
        yield
    except RuntimeError as error:
        _raise_if_lost(error)
        raise


def _raise_if_lost(error: Exception) -> None:
    """Raise what a lost connection means: the error of the rank that left, or that one is gone.

    Args:
        error: What was raised; nothing happens where it is no matter of connections.

    Raises:
        RankError: If it is.
    """
    reason = next(iter(str(error).splitlines()), "")
    network = isinstance(error, (dist.DistNetworkError, dist.DistBackendError))
    if not network and not any(sign in reason for sign in _SIGNS):
        return
    raise RankError(
        _left_behind()
        or f"Rank {rank()} must reach all {world_size()}, got a lost connection ({reason}). A "
        "process has ended or hangs: look at its own output, and start all of them again."
    ) from error


def _left_behind() -> str | None:
    """The error that another rank left in the store, if there is one and the store still is."""
    with suppress(RuntimeError):
        store = dist.distributed_c10d._get_default_store()  # noqa: SLF001  # torch has no public way
        if store.check([_FAILED]):
            text = store.get(_FAILED).decode(errors="replace")
            store.add(_READ, 1)
            return text
    return None


def checksum(text: str) -> int:
    """Checksum of a text, the same in every process."""
    return zlib.crc32(text.encode())
