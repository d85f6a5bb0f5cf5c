"""Whether what runs is a plain forward that autograd records, or something transforms it."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

__all__ = ["is_transformed"]


def is_transformed() -> bool:
    """Tell whether a transform of ``torch.func``, forward mode or a tracer is at work.

    Returns:
        Whether. Autograd functions that only know a backward cannot run then.
    """
    functorch = torch._C._are_functorch_transforms_active()  # noqa: SLF001
    return functorch or forward_ad._current_level >= 0 or torch.jit.is_tracing()  # noqa: SLF001
