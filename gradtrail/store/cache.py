"""Named tensors kept where they fit: on the device, in host memory, in files, or in both of these.

Large intermediate results, such as the curvature of every layer, are needed one at a time. The
cache holds them all and brings one to the device when it is asked for.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Literal

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from gradtrail.options import check_choice, near_names
from gradtrail.store.folder import PrivateFolder
from gradtrail.store.held import Held, budget_bytes, check_tensor, settled, tensor_state

__all__ = ["RESIDENCIES", "Residency", "TensorCache"]

Residency = Literal["device", "memory", "disk", "tiered"]
RESIDENCIES: tuple[Residency, ...] = ("device", "memory", "disk", "tiered")

_HOST = torch.device("cpu")


class TensorCache:
    """Holds tensors by name and gives them back bit by bit as they were, contiguous and detached.

    ``"device"`` and ``"memory"`` keep them on the device or in host memory, ``"disk"`` in
    safetensors files, and ``"tiered"`` in host memory until the budget is used and the rest in
    files. What is in memory stays there; whoever goes through the names in turn, time and again,
    would gain nothing from moving the oldest out.

    **Sharing of memory.** A tensor that already lies where it is to be held, contiguous and alone
    in its storage, is held as it is, and a held tensor that is asked for where it lies is handed
    out as it is: nothing is copied, and nobody may write into it any more. A write through torch
    is noticed, and ``get`` then refuses; memory that NumPy writes to as well is out of its sight.
    Everything else is copied: parts of a larger storage (the rest of which is not kept), other
    layouts, tensors of inference mode, and all that goes to another device or to a file. What
    comes from a file or another device is the caller's own.

    A tensor put again unchanged, under its own or another name, is neither copied nor written
    again, be it what was put or what ``get`` handed out. Replacing a name frees what it held.

    Use it as a context manager or call ``close``; files are deleted then, and at the latest when
    the cache is forgotten or the interpreter ends.
    """

    def __init__(
        self,
        residency: Residency,
        *,
        directory: str | Path | None = None,
        budget: int | float | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        """Make an empty cache.

        Args:
            residency: Where tensors rest.
            directory: Where the folder with the files is made; None: the temporary folder.
                Only ``"disk"`` and ``"tiered"`` write files.
            budget: Bytes that may be held in memory as an int, or a share of what is free now as
                a float in (0, 1]; None: half of it. Not with ``"disk"``.
            device: Where ``get`` brings tensors, and where ``"device"`` keeps them.

        Raises:
            ValueError: If an option has no effect with this residency.
        """
        check_choice("residency", residency, RESIDENCIES)
        if directory is not None and residency in {"device", "memory"}:
            raise ValueError(
                f"directory must be None with residency {residency!r}, which writes no files, got "
                f"{str(directory)!r}. Leave it out, or choose 'disk' or 'tiered'."
            )
        if budget is not None and residency == "disk":
            raise ValueError(
                f"budget must be None with residency 'disk', which holds nothing in memory, got "
                f"{budget!r}. Leave it out, or choose 'tiered'."
            )
        self.residency = residency
        self.device = torch.device(device)
        self._place = self.device if residency == "device" else _HOST
        self.budget = 0 if residency == "disk" else budget_bytes(budget, self._place)
        self._folder = PrivateFolder(directory) if residency in {"disk", "tiered"} else None
        self._entries: dict[str, _Entry] = {}
        self._seen = WeakTensorKeyDictionary()
        self._held_bytes = 0
        self._file_bytes = 0
        self._closed = False

    @property
    def device_bytes(self) -> int:
        """Bytes held with residency ``"device"``."""
        return self._held_bytes if self.residency == "device" else 0

    @property
    def memory_bytes(self) -> int:
        """Bytes held in host memory."""
        return 0 if self.residency == "device" else self._held_bytes

    @property
    def disk_bytes(self) -> int:
        """Bytes of the files, their headers included."""
        return self._file_bytes

    def names(self) -> list[str]:
        """Names of the tensors, in the order in which they first came."""
        self._check_open()
        return list(self._entries)

    def put(self, name: str, tensor: Tensor) -> None:
        """Keep a tensor under a name, in place of what the name held before.

        If it cannot be kept, the cache is as it was.

        Args:
            name: Its name.
            tensor: A dense tensor; its values are kept, not its graph.

        Raises:
            MemoryError: If it does not fit the budget and may not go to a file.
        """
        self._check_open()
        check_tensor(name, tensor, files=self._folder is not None)
        old = self._entries.get(name)
        entry = self._unchanged(tensor)
        if entry is not None and entry is old:
            return
        if entry is None:
            leaving = old.held_bytes if old is not None and old.num_names == 1 else 0
            room = self.budget - self._held_bytes + leaving
            if self.residency != "disk" and tensor.nbytes <= room:
                entry = _Entry(tensor.nbytes, held=settled(tensor, self._place))
            elif self._folder is not None:
                self._folder.check_room(name, tensor.nbytes)
                path = self._folder.write(name, settled(tensor, _HOST))
                entry = _Entry(tensor.nbytes, path=path)
            else:
                raise MemoryError(
                    f"{name!r} must fit the budget of residency {self.residency!r}, got "
                    f"{tensor.nbytes} bytes where {room} of {self.budget} are left. Raise budget=, "
                    "or choose residency 'tiered' or 'disk'. What was stored before is still there."
                )
            self._held_bytes += entry.held_bytes
            self._file_bytes += entry.file_bytes
            self._remember(tensor, entry)
        entry.num_names += 1
        self._entries[name] = entry
        if old is not None:
            self._release(old)

    def get(self, name: str, device: torch.device | str | None = None) -> Tensor:
        """Bring one tensor to a device.

        Args:
            name: Its name.
            device: Where to; None: the cache's device.

        Returns:
            The tensor, contiguous and without a graph. Where it lies there already it is the held
            one itself, which must not be written into; else it is a copy.
        """
        entry = self._entry(name)
        target = self.device if device is None else torch.device(device)
        with torch.inference_mode(mode=False), torch.no_grad():
            if entry.path is not None and self._folder is not None:
                tensor = self._folder.read(name, entry.path)
            else:
                tensor = entry.checked(name).detach()
            tensor = tensor.to(target)
        self._remember(tensor, entry)
        return tensor

    def pop(self, name: str, device: torch.device | str | None = None) -> Tensor:
        """Bring one tensor to a device and forget it.

        Args:
            name: Its name.
            device: Where to; None: the cache's device.

        Returns:
            The tensor, the caller's own unless other names hold it.
        """
        tensor = self.get(name, device)
        self.delete(name)
        return tensor

    def delete(self, name: str) -> None:
        """Forget one tensor, and free its memory or its file."""
        entry = self._entry(name)
        del self._entries[name]
        self._release(entry)

    def close(self) -> None:
        """Forget all tensors and delete the files. Closing twice is fine."""
        self._closed = True
        for entry in self._entries.values():
            entry.held = None
        self._entries.clear()
        self._seen.clear()
        self._held_bytes = self._file_bytes = 0
        if self._folder is not None:
            self._folder.close()

    def __contains__(self, name: object) -> bool:
        """Whether a tensor has this name."""
        self._check_open()
        return name in self._entries

    def __len__(self) -> int:
        """Count the names."""
        self._check_open()
        return len(self._entries)

    def __enter__(self) -> TensorCache:
        """Enter a block at whose end the cache is closed."""
        self._check_open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the cache."""
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError(
                "TensorCache must be open, got one that was closed and has let its tensors go. "
                "Make a new one."
            )

    def _entry(self, name: str) -> _Entry:
        self._check_open()
        if name not in self._entries:
            raise KeyError(
                f"name must be one that was put, got {name!r}. Near it: "
                f"{near_names(name, self._entries)}."
            )
        return self._entries[name]

    def _unchanged(self, tensor: Tensor) -> _Entry | None:
        """The entry that holds this very tensor, if neither was written into since."""
        if tensor.is_inference() or tensor not in self._seen:
            return None
        entry, state = self._seen[tensor]
        intact = entry.num_names > 0 and state == tensor_state(tensor)
        return entry if intact and not entry.was_written() else None

    def _remember(self, tensor: Tensor, entry: _Entry) -> None:
        if not tensor.is_inference():
            self._seen[tensor] = (entry, tensor_state(tensor))

    def _release(self, entry: _Entry) -> None:
        """Take one name from an entry; free it with the last."""
        entry.num_names -= 1
        if entry.num_names:
            return
        self._held_bytes -= entry.held_bytes
        self._file_bytes -= entry.file_bytes
        entry.held = None
        if entry.path is not None and self._folder is not None:
            self._folder.remove(entry.path)


class _Entry:
    """One tensor where it rests, under one or more names."""

    def __init__(
        self, num_bytes: int, *, held: Tensor | None = None, path: Path | None = None
    ) -> None:
        self.held = None if held is None else Held(held)
        self.path = path
        self.num_names = 0
        self.held_bytes = 0 if held is None else num_bytes
        self.file_bytes = 0 if path is None else path.stat().st_size

    def was_written(self) -> bool:
        """Whether the held tensor was written into since it was put."""
        return self.held is not None and self.held.was_written()

    def checked(self, name: str) -> Tensor:
        """The held tensor, unless it was written into."""
        return self.held.checked(name, "cache")
