"""Where a log lies and how it is opened."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from gradtrail.options import check_choice, check_positive
from gradtrail.store.place import MODES, Mode

__all__ = ["RESIDENCIES", "LogOptions", "Residency"]

Residency = Literal["disk", "memory", "tiered"]
RESIDENCIES: tuple[Residency, ...] = get_args(Residency)


@dataclass(frozen=True, kw_only=True)
class LogOptions:
    """Where a log lies and how it is opened.

    Attributes:
        path: Its folder; None for a temporary one, or none at all.
        residency: Where its tensors rest.
        budget: Bytes held in memory, or a share of what is free; None: half of it.
        mode: What is done with what lies in the folder.
        shard_bytes: Size at which a shard is closed.
    """

    path: str | Path | None = None
    residency: Residency = "disk"
    budget: int | float | None = None
    mode: Mode = "create"
    shard_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        """Check the options together.

        Raises:
            TypeError: If ``path`` is no path.
            ValueError: If an option has no effect with the others.
        """
        check_choice("residency", self.residency, RESIDENCIES)
        check_choice("mode", self.mode, MODES)
        check_positive("shard_bytes", self.shard_bytes)
        if self.path is not None and not isinstance(self.path, (str, Path)):
            raise TypeError(
                f"path must be a str or a Path, got {type(self.path).__name__}. Pass a folder, or "
                "None for a temporary one."
            )
        if self.path is not None and self.residency == "memory":
            raise ValueError(
                f"path must be None with residency 'memory', which writes nothing, got "
                f"{str(self.path)!r}. Leave it out, or choose 'disk' or 'tiered'."
            )
        if self.path is None and self.mode != "create":
            raise ValueError(
                f"mode must be 'create' without a path, where a new store is made, got "
                f"{self.mode!r}. Pass the folder of a store, or leave mode out."
            )
        if self.budget is not None and self.residency == "disk":
            raise ValueError(
                f"budget must be None with residency 'disk', which holds nothing in memory, got "
                f"{self.budget!r}. Leave it out, or choose 'tiered'."
            )
