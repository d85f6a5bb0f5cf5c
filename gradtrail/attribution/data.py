"""Rows and batches: what a user passes as ``train`` and ``query``, in order and untouched."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, Subset
from torch.utils.data import default_collate as torch_collate

from gradtrail.distributed import rank, shard_of, world_size

__all__ = ["Collate", "Rows", "as_rows", "move_batch", "pad_rows"]

Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True, eq=False)
class Rows:
    """A data set that is read in its own order.

    Attributes:
        dataset: Anything with a length and rows by number.
        collate: Makes a batch of a list of rows.
        whole: The rows of all ranks together, where these are one rank's share; else None.
        first: Number of the first row among all.
    """

    dataset: Any
    collate: Collate
    whole: Rows | None = field(default=None, kw_only=True)
    first: int = field(default=0, kw_only=True)

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.dataset)

    @property
    def total(self) -> int:
        """Number of rows of all ranks together."""
        return len(self if self.whole is None else self.whole)

    def share(self) -> Rows:
        """Take this rank's share: contiguous, without duplicates.

        Returns:
            The same rows where there is one process.
        """
        world = world_size()
        if world == 1 or self.whole is not None:
            return self
        numbers = shard_of(len(self), rank(), world)
        part = Subset(self.dataset, numbers)
        return replace(self, dataset=part, whole=self, first=numbers.start)

    def batch(self, numbers: Sequence[int]) -> Any:  # noqa: ANN401  # any batch a model takes
        """Make one batch of the rows with these numbers."""
        return self.collate([self.dataset[number] for number in numbers])

    def batches(self, size: int, run: range | None = None) -> Iterator[tuple[int, int, Any]]:
        """Read rows in order.

        Args:
            size: Rows a batch; the last may be smaller.
            run: Numbers of the rows, or None for all.

        Yields:
            Number of the first row, number of rows, batch.
        """
        run = range(len(self)) if run is None else run
        for start in range(run.start, run.stop, size):
            stop = min(run.stop, start + size)
            yield start, stop - start, self.batch(range(start, stop))


def as_rows(data: Any, option: str, collate: Collate | None, pad_id: int) -> Rows:  # noqa: ANN401
    """Accept what a user passes as a data set.

    Args:
        data: A ``Dataset``, list, Hugging Face data set, or ``DataLoader`` that does not shuffle.
        option: ``"train"`` or ``"query"``, for errors.
        collate: The user's collator, or None.
        pad_id: What to pad ``input_ids`` with.

    Returns:
        The rows.

    Raises:
        TypeError: If the rows cannot be read by number; a ``DataLoader`` that shuffles or leaves
            rows out raises ``ValueError``.
    """
    if isinstance(data, DataLoader):
        _check_loader(data, option)
        if data.collate_fn is not torch_collate:
            collate = collate or data.collate_fn
        data = data.dataset
    readable = callable(getattr(data, "__getitem__", None)) and callable(
        getattr(data, "__len__", None)
    )
    if isinstance(data, (IterableDataset, Mapping, str)) or not readable:
        raise TypeError(
            f"{option} must have a length and rows by number, got {type(data).__name__}. "
            "Pass a Dataset, a list of rows or list(your_iterable)."
        )
    return Rows(data, collate or _default_collate(option, pad_id))


def _check_loader(loader: DataLoader, option: str) -> None:
    """Refuse a loader whose rows are not those of its data set, in order."""
    if isinstance(loader.dataset, IterableDataset):
        return  # refused with every other data set that has no row numbers
    batches = loader.batch_sampler
    if batches is None:
        raise ValueError(
            f"{option} must give rows, got a DataLoader with batch_size=None, whose data set gives "
            "batches. Pass a list of rows."
        )
    sampler = batches.sampler if type(batches) is BatchSampler else batches
    if type(sampler) is not SequentialSampler:
        raise ValueError(
            f"{option} must be read in order, got a DataLoader with {type(sampler).__name__}: row "
            "numbers would mean nothing. Pass shuffle=False or the data set itself."
        )
    if loader.drop_last and len(loader.dataset) % loader.batch_size:
        raise ValueError(
            f"{option} must keep every row, got a DataLoader with drop_last=True. "
            "Pass drop_last=False or the data set itself."
        )


def _default_collate(option: str, pad_id: int) -> Collate:
    def collate(rows: list[Any]) -> Any:  # noqa: ANN401
        if rows and all(isinstance(row, Mapping) and "input_ids" in row for row in rows):
            return pad_rows(rows, pad_id)
        try:
            return torch_collate(rows)
        except (TypeError, RuntimeError, ValueError) as error:
            raise ValueError(
                f"{option} must have rows that torch's default collator can stack, got "
                f"{type(rows[0]).__name__} rows ({str(error).splitlines()[0][:120]}). "
                "Pass collate_fn."
            ) from error

    return collate


def pad_rows(rows: Sequence[Mapping[str, Any]], pad_id: int) -> dict[str, Any]:
    """Pad rows of ``input_ids`` on the right and stack them.

    Args:
        rows: Mappings with ``input_ids`` of any length. Fields of one axis are padded too
            (``labels`` with -100, others with 0); numbers and equal shapes are stacked; other
            fields are kept as lists.
        pad_id: What to pad ``input_ids`` with.

    Returns:
        The batch, with an ``attention_mask`` of ones where a row had none.

    Raises:
        ValueError: If a row's ``input_ids`` have more axes than one.
    """
    shapes = {tuple(torch.as_tensor(row["input_ids"]).shape) for row in rows}
    if any(len(shape) != 1 for shape in shapes):
        raise ValueError(
            "Rows must have input_ids of one axis, one row an example, got shapes "
            f"{sorted(shapes)[:3]}. Leave out return_tensors or pass collate_fn."
        )
    masks = [row.get("attention_mask", None) for row in rows]
    columns = {name: [row[name] for row in rows] for name in rows[0] if _in_all(rows, name)}
    columns["attention_mask"] = [
        torch.ones(len(row["input_ids"]), dtype=torch.long) if mask is None else mask
        for row, mask in zip(rows, masks, strict=True)
    ]
    fills = {"input_ids": pad_id, "labels": -100}
    return {name: _stack(column, fills.get(name, 0)) for name, column in columns.items()}


def _in_all(rows: Sequence[Mapping[str, Any]], name: str) -> bool:
    return all(name in row for row in rows)


def _stack(column: list[Any], fill: int) -> Any:  # noqa: ANN401
    if not all(_numeric(value) for value in column):
        return column
    values = [torch.as_tensor(value) for value in column]
    if any(value.dim() != 1 for value in values):
        same = len({value.shape for value in values}) == 1
        return torch.stack(values) if same else column
    # an empty list has no dtype of its own
    dtype = next((value.dtype for value in values if value.numel()), torch.long)
    longest = max(1, *(value.shape[0] for value in values))  # models refuse sequences of length 0
    batch = torch.full((len(values), longest), fill, dtype=dtype, device=values[0].device)
    for row, value in zip(batch, values, strict=True):
        row[: value.shape[0]] = value
    return batch


def _numeric(value: Any) -> bool:  # noqa: ANN401
    if isinstance(value, (list, tuple)):
        return all(_numeric(entry) for entry in value)
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "biuf"
    return isinstance(value, (bool, int, float, Tensor, np.number, np.bool_))


def move_batch(batch: Any, device: torch.device) -> Any:  # noqa: ANN401
    """Bring every tensor of a batch to a device, cut off any graph.

    Args:
        batch: Tensors in mappings, tuples, lists or dataclasses; other fields are kept.
        device: Where to.

    Returns:
        A batch of the same structure.
    """
    if isinstance(batch, Tensor):
        # a tensor made in inference mode cannot be saved for a backward, a copy can
        return (batch.clone() if batch.is_inference() else batch.detach()).to(device)
    if isinstance(batch, Mapping):
        return {name: move_batch(value, device) for name, value in batch.items()}
    if isinstance(batch, tuple) and type(batch) is not tuple:
        return type(batch)(*(move_batch(value, device) for value in batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(move_batch(value, device) for value in batch)
    if is_dataclass(batch) and not isinstance(batch, type):
        moved = {f.name: move_batch(getattr(batch, f.name), device) for f in fields(batch)}
        return replace(batch, **moved)
    return batch
