"""What a cache of training gradients is asked to be, checked before anything runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import torch

from gradtrail.options import check_choice

__all__ = ["CacheOptions", "CacheResidency", "CaptureForm", "cache_options", "stored_dtype"]

CacheResidency: TypeAlias = Literal["memory", "disk", "tiered"]
CaptureForm: TypeAlias = Literal["factored", "materialized", "auto"]

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheOptions:
    """Where the training gradients of a call are kept, and in which form.

    Attributes:
        residency: Where they rest.
        folder: Folder that stays, or None for a place that goes away with the call.
        capture: Factors as they are, written out, or whichever is smaller.
        dtype: Dtype of what is kept; None keeps the model's.
    """

    residency: CacheResidency
    folder: Path | None = None
    capture: CaptureForm = "factored"
    dtype: torch.dtype | None = None


def cache_options(
    residency: CacheResidency | None,
    cache_dir: str | Path | None,
    capture: CaptureForm,
    dtype: str | torch.dtype | None,
    *,
    per_token: bool = False,
) -> CacheOptions | None:
    """Read the options of an entry point that concern its cache.

    Args:
        residency: The user's ``gradient_cache_residency``.
        cache_dir: The user's folder, or None.
        capture: The user's form.
        dtype: The user's ``cache_dtype``.
        per_token: Whether every position is scored on its own.

    Returns:
        The options, or None where nothing is kept.

    Raises:
        ValueError: If an option is unknown, or would do nothing beside the others.
    """
    check_choice("gradient_cache_residency", residency, (None, "memory", "disk", "tiered"))
    check_choice("capture", capture, ("factored", "materialized", "auto"))
    wanted = stored_dtype("cache_dtype", dtype)
    if residency is None:
        given = {"cache_dir": cache_dir, "cache_dtype": dtype}
        idle = [option for option, value in given.items() if value is not None]
        idle += ["capture"] if capture != "factored" else []
        if idle:
            raise ValueError(
                f"{idle[0]} must go with gradient_cache_residency, got None. Pass "
                f"gradient_cache_residency='disk' or leave {idle[0]} out."
            )
        return None
    if residency == "memory" and cache_dir is not None:
        raise ValueError(
            "cache_dir must go with gradient_cache_residency='disk' or 'tiered', got "
            f"{str(cache_dir)!r} with 'memory', which writes nothing. Pass 'tiered', or leave "
            "cache_dir out."
        )
    if per_token and capture != "factored":
        raise ValueError(
            f"capture must be 'factored' with granularity='token', got {capture!r}: a gradient "
            "that is written out has no positions left. Leave it out."
        )
    folder = None if cache_dir is None else Path(cache_dir)
    return CacheOptions(residency=residency, folder=folder, capture=capture, dtype=wanted)


def stored_dtype(option: str, dtype: str | torch.dtype | None) -> torch.dtype | None:
    """Read a dtype that gradients are kept in.

    Args:
        option: Name of the option as the user wrote it.
        dtype: A name, a dtype, or None.

    Returns:
        The dtype, or None.
    """
    if dtype is None:
        return None
    name = dtype if isinstance(dtype, str) else str(dtype).removeprefix("torch.")
    check_choice(option, name, _DTYPES)
    return _DTYPES[name]
