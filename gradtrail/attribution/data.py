"""Rows and batches: what a user passes as ``train`` and ``query``, in order and untouched."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler
from torch.utils.data import default_collate as torch_collate

__all__ = ["Collate", "Rows", "as_rows", "move_batch", "pad_rows"]

Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True, eq=False)
class Rows:
    """A data set that is read in its own order.

    Attributes:
        dataset: Anything with a length and rows by number.
        collate: Makes a batch of a list of rows.
    """

    dataset: Any
    collate: Collate

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.dataset)

    def batch(self, numbers: Sequence[int]) -> Any:  # noqa: ANN401  # any batch a model takes
        """Make one batch of the rows with these numbers."""
        return self.collate([self.dataset[number] for number in numbers])

    def batches(self, size: int) -> Iterator[tuple[int, int, Any]]:
        """Read all rows in order.

        Args:
            size: Rows a batch; the last may be smaller.

        Yields:
            Number of the first row, number of rows, batch.
        """
        for start in range(0, len(self), size):
            stop = min(len(self), start + size)
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
        ValueError: If a loader shuffles or leaves rows out.
        TypeError: If the rows cannot be read by number.
    """
    if isinstance(data, DataLoader):
        batches = data.batch_sampler
        sampler = batches.sampler if type(batches) is BatchSampler else data.sampler
        custom = batches is not None and type(batches) is not BatchSampler
        if custom or type(sampler) is not SequentialSampler:
            raise ValueError(
                f"{option} must be read in order, got a DataLoader with "
                f"{type(batches if custom else sampler).__name__}: row numbers would mean nothing. "
                "Pass shuffle=False or the data set itself."
            )
        if data.drop_last and len(data.dataset) % (data.batch_size or 1):
            raise ValueError(
                f"{option} must keep every row, got a DataLoader with drop_last=True. "
                "Pass drop_last=False or the data set itself."
            )
        return Rows(data.dataset, collate or data.collate_fn)
    readable = callable(getattr(data, "__getitem__", None)) and callable(
        getattr(data, "__len__", None)
    )
    if isinstance(data, (IterableDataset, Mapping, str)) or not readable:
        raise TypeError(
            f"{option} must have a length and rows by number, got {type(data).__name__}. "
            "Pass a Dataset, a list of rows or list(your_iterable)."
        )
    return Rows(data, collate or _default_collate(option, pad_id))


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
        rows: Mappings with ``input_ids`` of any length. Fields of that length are padded too
            (``labels`` with -100, others with 0); numbers and equal shapes are stacked; other
            fields are kept as lists.
        pad_id: What to pad ``input_ids`` with.

    Returns:
        The batch, with an ``attention_mask`` where the rows had none.
    """
    columns = {name: [row[name] for row in rows] for name in rows[0] if _in_all(rows, name)}
    lengths = [len(row["input_ids"]) for row in rows]
    if "attention_mask" not in columns:
        columns["attention_mask"] = [torch.ones(length, dtype=torch.long) for length in lengths]
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
    longest = max(value.shape[0] for value in values)
    batch = values[0].new_full((len(values), longest), fill)
    for row, value in zip(batch, values, strict=True):
        row[: value.shape[0]] = value
    return batch


def _numeric(value: Any) -> bool:  # noqa: ANN401
    if isinstance(value, (bool, int, float, Tensor)):
        return True
    if isinstance(value, (list, tuple)):
        return all(_numeric(entry) for entry in value)
    return type(value).__module__ == "numpy" and type(value).__name__ in ("ndarray", "int64")


def move_batch(batch: Any, device: torch.device) -> Any:  # noqa: ANN401
    """Bring every tensor of a batch to a device, cut off any graph.

    Args:
        batch: Tensors in mappings, tuples, lists or dataclasses; other fields are kept.
        device: Where to.

    Returns:
        A batch of the same structure.
    """
    if isinstance(batch, Tensor):
        return batch.detach().to(device)
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
