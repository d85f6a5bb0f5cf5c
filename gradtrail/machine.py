"""What the machine is and has to spare."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch

__all__ = ["cpu_vendor", "free_bytes", "group_bytes"]

_UNKNOWN = 8 << 30
_NO_LIMIT = 1 << 62  # version 1 says "none" by the largest number of whole pages


def free_bytes(device: torch.device) -> int:
    """Say how much memory may still be taken on a device.

    For the CPU this is what the system can hand out without swapping, file caches that it would
    drop included, or the room left in this process's control group where that is less.

    Args:
        device: The device.

    Returns:
        Bytes, at least 0.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    room = _system_bytes()
    within = group_bytes()
    return room if within is None else min(room, within)


def group_bytes(root: Path = Path("/")) -> int | None:
    """Say how much memory the control groups of this process leave it, on Linux.

    Every group from the process's own up to the topmost may set a limit, in version 2
    (``memory.max``) or 1 (``memory.limit_in_bytes``); the tightest counts. Pages of files that the
    kernel would drop first are not counted as used.

    Args:
        root: Where ``proc`` and ``sys`` are found.

    Returns:
        Bytes, at least 0; None where no group has a limit.
    """
    rooms = []
    for folder, limit_name, usage_name, cache_name in _groups(root):
        limit = _number(folder / limit_name)
        used = _number(folder / usage_name)
        if limit is not None and limit < _NO_LIMIT and used is not None:
            dropped = _field(folder / "memory.stat", cache_name) or 0
            rooms.append(max(0, limit - max(0, used - dropped)))
    return min(rooms, default=None)


def _groups(root: Path) -> Iterator[tuple[Path, str, str, str]]:
    """Every group's folder with the names of its limit, its usage and its droppable pages."""
    mounts = root / "sys" / "fs" / "cgroup"
    for line in _text(root / "proc" / "self" / "cgroup").splitlines():
        _, controllers, place = line.split(":", 2)
        if not controllers:
            bases = [mounts, mounts / "unified"]
            names = ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            bases = [mounts / "memory"]
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        parts = [part for part in place.split("/") if part]
        for base in bases:
            for depth in range(len(parts), -1, -1):
                yield (base.joinpath(*parts[:depth]), *names)


def _system_bytes() -> int:
    """Memory of the whole machine that is free or can be freed at once."""
    available = _field(Path("/proc/meminfo"), "MemAvailable:")
    if available is not None:
        return available * 1024
    if "SC_AVPHYS_PAGES" in getattr(os, "sysconf_names", ()):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return _UNKNOWN


def _text(path: Path) -> str:
    """Text of a file of the kernel; empty where this system has none."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    """The number a file holds; None for ``max`` and where there is no file."""
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _field(path: Path, name: str) -> int | None:
    """The number after a name, in a file of one name a line."""
    for line in _text(path).splitlines():
        words = line.split()
        if words and words[0] == name:
            return int(words[1])
    return None


def cpu_vendor(root: Path = Path("/")) -> str | None:
    """Say who made the processor, on Linux.

    Args:
        root: Where ``proc`` is found.

    Returns:
        The name it gives itself, as ``"GenuineIntel"`` or ``"AuthenticAMD"``; None where the
        system does not tell.
    """
    for line in _text(root / "proc" / "cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "vendor_id":
            return value.strip() or None
    return None
