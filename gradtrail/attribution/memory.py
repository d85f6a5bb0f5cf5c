"""How much memory may be used without being asked for."""

from __future__ import annotations

import os

import torch

__all__ = ["free_bytes", "query_budget"]


def free_bytes(device: torch.device) -> int:
    """Free memory of a device in bytes; the machine's for the CPU."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    names = os.sysconf_names
    if "SC_AVPHYS_PAGES" not in names:
        return 8 << 30
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def query_budget(device: torch.device) -> int:
    """Bytes that written-out query gradients may take: half of what is free."""
    return free_bytes(device) // 2
