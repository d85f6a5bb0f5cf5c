"""``GradientStore``: blocks of per-example gradients that outlast the pass that captured them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gradtrail.errors import StoreError
from gradtrail.factors import GradientBlock
from gradtrail.options import check_choice
from gradtrail.store.attached import read_attached, write_attached
from gradtrail.store.blocks import LazyLayers, StoredBlock, join_blocks, unknown
from gradtrail.store.codec import BlockKind, gather
from gradtrail.store.disk import Entry
from gradtrail.store.facts import (
    BlockRecord,
    LayerFacts,
    StoreFacts,
    as_json,
    check_same,
    make_facts,
    read_facts,
    read_layer,
)
from gradtrail.store.held import check_tensor, settled
from gradtrail.store.index import AbstractIndexedStore
from gradtrail.store.options import LogOptions, Residency
from gradtrail.store.place import Mode, attachment_name

__all__ = ["GradientStore"]

Attached: TypeAlias = tuple[dict[str, Tensor], dict[str, str]]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class GradientStore(AbstractIndexedStore):
    """Blocks of per-example gradients, in memory, in a folder, or in both.

    ``residency="disk"`` writes them to a folder, ``"memory"`` holds them, ``"tiered"`` holds what
    fits the budget; with a path it writes everything as well, without one it writes only the
    rest. Without a path the folder is temporary and goes with the store.

    With ``mode="create"`` the folder must be new or empty, ``"resume"`` goes on with a store,
    ``"overwrite"`` deletes one first, and ``"read"`` writes nothing. A store is for one writer at
    a time; readers see what was journalled when they opened it.

    A record that ``append`` took is readable at once and outlasts the process once its shard is
    closed: when it has ``shard_bytes``, and on ``flush`` and ``close``.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        residency: Residency = "disk",
        budget: int | float | None = None,
        mode: Mode = "create",
        dtype: str | torch.dtype | None = None,
        shard_bytes: int = 64 << 20,
    ) -> None:
        """Open or make a store.

        Args:
            path: Its folder, or None.
            residency: Where tensors rest.
            budget: Bytes in memory, or a share of what is free; None: half of that.
            mode: What to do with what lies in the folder.
            dtype: What floating tensors are cast to; None keeps them.
            shard_bytes: Size at which a shard is closed.

        Raises:
            StoreError: If the store was written with another dtype.
        """
        wanted = _dtype_name(dtype)
        options = LogOptions(
            path=path, residency=residency, budget=budget, mode=mode, shard_bytes=shard_bytes
        )
        super().__init__(BlockKind(), options)
        self._facts: StoreFacts | None = None
        self._attached: dict[str, Attached] = {}
        try:
            self._take_over(wanted)
        except StoreError:
            self.log.close()
            raise

    # ------------------------------------------------------------ what it is

    @property
    def dtype(self) -> torch.dtype | None:
        """What floating tensors are cast to, or None."""
        name = self.log.manifest.dtype
        return None if name is None else _DTYPES[name]

    @property
    def is_writable(self) -> bool:
        """Whether blocks may be appended."""
        return self.log.is_writable

    @property
    def facts(self) -> StoreFacts | None:
        """What it declared, or None before ``define``."""
        return self._facts

    @property
    def layers(self) -> Mapping[str, LayerFacts]:
        """What is known of each layer that was stored, by name."""
        return {name: read_layer(entry) for name, entry in self.log.layouts.layers.items()}

    # ------------------------------------------------------------ writing

    def define(self, **facts: Any) -> None:  # noqa: ANN401
        """Declare what the gradients are of, before the first block; ``StoreFacts`` lists it.

        In a store that has facts they must be the same: one that differs is an error with both.

        Args:
            **facts: Fields of ``StoreFacts``; ``id_scheme`` is needed.
        """
        made = make_facts(facts)
        self.log.check_writable()
        if self._facts is not None:
            check_same(self.path, self._facts, made)
            return
        self._facts = made
        self.log.declare(asdict(made))

    def append(
        self,
        block: GradientBlock,
        *,
        meta: Mapping[str, Any] | None = None,
        consume: bool = False,
    ) -> None:
        """Add a block; when this returns it can be read, and its tensors are let go.

        With residency ``"memory"`` and ``"tiered"`` a tensor that is contiguous, alone in its
        storage and on the CPU is held as it is: nobody may write into it any more.

        Args:
            block: Layer gradients of a batch.
            meta: What to record with it, fit for JSON.
            consume: Whether to empty ``block.layers``, a dict, so that a tensor which nobody else
                refers to is freed as soon as it is written, and not when all are.

        Raises:
            StoreError: If the store was not told what it holds.
            ValueError: If ids and rows do not fit each other.
        """
        self.log.check_writable()
        if self._facts is None:
            raise StoreError(
                "A store must be told what it holds, got a block before define(). Call "
                "define(id_scheme=...) first."
            )
        ids = _checked_ids(block, self._facts.id_scheme)
        gathered = gather(block.layers, self.dtype)
        for name in block.layers:
            rows = gathered.rows(name)
            if rows != {len(ids)}:
                raise ValueError(
                    f"ids must be one a row, got {len(ids)} where layer {name!r} has "
                    f"{sorted(rows)} rows."
                )
        noted = None if meta is None else as_json("meta", dict(meta))
        facts = {"step": block.step, "ids": ids, "meta": noted}
        if consume:
            block.layers.clear()
        self.log.append(gathered.layout, gathered.tensors, facts)

    def discard(self, step: int) -> None:
        """Let what is stored of a step so far count no more, such as one that was skipped."""
        self.log.discard(step)

    def attach(self, name: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        """Keep tensors beside the blocks under a name, in place of what it held before.

        Args:
            name: Lower-case letters, digits and underscores.
            tensors: The tensors.
            metadata: Strings to record with them.
        """
        attachment_name(name)
        self.log.check_writable()
        for key, tensor in tensors.items():
            check_tensor(key, tensor, files=True)
        noted = {str(key): str(value) for key, value in metadata.items()}
        if self.path is None:
            host = torch.device("cpu")
            kept = {key: settled(tensor, host).clone() for key, tensor in tensors.items()}
            self._attached[name] = (kept, noted)
        else:
            write_attached(self.path, name, tensors, noted)

    # ------------------------------------------------------------ reading

    def blocks(
        self,
        *,
        steps: Sequence[int] | None = None,
        layers: Sequence[str] | None = None,
        rows: Sequence[int] | None = None,
        device: torch.device | str | None = None,
        prefetch: bool = True,
        reverse: bool = False,
    ) -> Iterator[StoredBlock]:
        """Go through blocks in store order; none is kept here when the next is asked for.

        Args:
            steps: Which steps; None for all.
            layers: Which layers; None for all.
            rows: Row numbers, ascending, to which blocks are cut; None for all.
            device: Where tensors are brought; None leaves them on the CPU.
            prefetch: Whether a thread fetches the next block meanwhile.
            reverse: Whether the last block comes first.

        Returns:
            The blocks.
        """
        self.log.check_open()
        plan = self._plan(steps, rows)
        names = self._layer_names(layers)
        if reverse:
            plan.reverse()
        target = None if device is None else torch.device(device)
        entries = [self.log.entries[number] for number, _ in plan]
        records = [self.records[number] for number, _ in plan]
        return (
            self._block(entry, record, taken, names, target)
            for entry, record, (_, taken) in zip(
                self.log.fetched(entries, prefetch=prefetch), records, plan, strict=True
            )
        )

    def get(self, rows: Sequence[int]) -> GradientBlock:
        """Read rows in any order into one block, padded to one number of positions.

        Args:
            rows: Row numbers, at least one.

        Returns:
            The block, with the first row's step.

        Raises:
            ValueError: If there is no row.
        """
        self.log.check_open()
        runs = self._runs(rows)
        if not runs:
            raise ValueError("rows must hold at least one row, got none.")
        blocks = [
            self._block(self.log.entries[number], self.records[number], taken, None, None).block
            for number, taken in runs
        ]
        return join_blocks(blocks)

    def attached(self, name: str) -> tuple[dict[str, Tensor], dict[str, str]] | None:
        """Give tensors and metadata that were attached under a name, or None."""
        attachment_name(name)
        self.log.check_open()
        if self.path is not None:
            return read_attached(self.path, name)
        if name not in self._attached:
            return None
        tensors, metadata = self._attached[name]
        return {key: tensor.clone() for key, tensor in tensors.items()}, dict(metadata)

    # ------------------------------------------------------------ inside

    def _take_over(self, dtype: str | None) -> None:
        """Check what an existing store declares."""
        manifest = self.log.manifest
        if manifest.facts is not None:
            self._facts = read_facts(self.path, manifest.facts)
        elif self.mode != "read":
            manifest.dtype = dtype
        if dtype != manifest.dtype and (dtype is not None or self.mode == "resume"):
            raise StoreError(
                f"dtype must be that of the store, got {dtype!r} where {str(self.path)!r} was "
                f"written with {manifest.dtype!r}. Pass that, or another folder."
            )

    def _layer_names(self, layers: Sequence[str] | None) -> frozenset[str] | None:
        if layers is None:
            return None
        for name in layers:
            if name not in self.log.layouts.layers:
                raise unknown("layers", name, list(self.log.layouts.layers))
        return frozenset(layers)

    def _block(
        self,
        entry: Entry,
        record: BlockRecord,
        taken: list[int] | None,
        names: frozenset[str] | None,
        device: torch.device | None,
    ) -> StoredBlock:
        kept = [name for name in entry.layout.form if names is None or name in names]
        whole = taken is None or taken == list(range(len(record.ids)))
        index = None if whole else taken
        ids = record.ids if index is None else tuple(record.ids[place] for place in index)
        layers = LazyLayers(self.log, entry, kept, index, device)
        row = record.number + (index[0] if index else 0)
        shown = None if index is None else tuple(index)
        return StoredBlock(GradientBlock(record.step, ids, layers), record.meta, row, shown)


def _dtype_name(dtype: str | torch.dtype | None) -> str | None:
    """Name of the dtype that a store casts to."""
    name = str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype
    check_choice("dtype", name, (None, *_DTYPES))
    return name


def _checked_ids(block: GradientBlock, scheme: str) -> list[int | str]:
    """The ids as plain numbers and strings, of the kind that the scheme has."""
    if isinstance(block.step, bool) or not isinstance(block.step, int):
        raise TypeError(f"step must be an int, got {block.step!r}.")
    allowed = {"index": (int,), "content": (str,)}.get(scheme.split(":")[0], (int, str))
    ids = list(block.ids)
    for identity in ids:
        if isinstance(identity, bool) or not isinstance(identity, allowed):
            kinds = " or ".join(kind.__name__ for kind in allowed)
            raise TypeError(
                f"ids must be {kinds} in a store with id_scheme={scheme!r}, got {identity!r}. Ids "
                "of two kinds may not be mixed."
            )
    return ids
