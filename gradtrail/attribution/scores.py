"""The result of an attribution: scores with what they mean, on screen and on disk."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from gradtrail.hooks import Coverage
from gradtrail.options import check_positive

__all__ = ["AttributionScores", "TopK"]

_FORMAT = "gradtrail-scores-1"
_SIGN = "positive: training more on the example lowers the query's loss"


class TopK(NamedTuple):
    """The highest or lowest scores of every query.

    Attributes:
        indices: Rows of ``train``. Shape ``[q, k]``.
        values: Their scores. Shape ``[q, k]``.
        ids: Their ids, a list of ``k`` a query.
    """

    indices: Tensor
    values: Tensor
    ids: list[list[int | str]]


@dataclass(frozen=True, eq=False, repr=False)
class AttributionScores:
    """Scores of training examples against queries.

    Attributes:
        values: Raw inner products, float32 on the CPU. Shape ``[n, q]``, or ``[n, s, q]`` with
            one share a position.
        train_ids: One id a row of ``train``.
        query_ids: One id a query.
        method: Name of the method.
        options: What the scores were computed with, loss included.
        coverage: Which parameters they cover.
        lengths: Valid positions of each training example, with one share a position. Shape
            ``[n]``.
        train_steps: Step of the training run that each row was stored in, or None.
    """

    values: Tensor
    train_ids: tuple[int | str, ...]
    query_ids: tuple[int | str, ...]
    method: str
    options: Mapping[str, Any] = field(default_factory=dict)
    coverage: Coverage = field(default_factory=lambda: Coverage(()))
    lengths: Tensor | None = None
    train_steps: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        """Check that ids and values fit.

        Raises:
            ValueError: If they do not.
        """
        n, q = self.values.shape[0], self.values.shape[-1]
        if n != len(self.train_ids) or q != len(self.query_ids):
            raise ValueError(
                f"values must be [train_ids, ..., query_ids], got {tuple(self.values.shape)} for "
                f"{len(self.train_ids)} and {len(self.query_ids)} ids."
            )
        if self.train_steps is not None and len(self.train_steps) != n:
            raise ValueError(
                f"train_steps must be one a row of values ({n}), got {len(self.train_steps)}."
            )

    @property
    def example_values(self) -> Tensor:
        """One score an example and query, positions summed. Shape ``[n, q]``."""
        return self.values if self.values.dim() == 2 else self.values.sum(1)

    def topk(self, k: int, *, largest: bool = True) -> TopK:
        """Find the training examples that helped each query most.

        Args:
            k: How many; more than there are gives all.
            largest: Whether the highest scores are wanted, else the lowest.

        Returns:
            Indices, values and ids, best first.
        """
        check_positive("k", k)
        values = self.example_values.t()
        last = torch.full_like(values, -torch.inf if largest else torch.inf)
        ranked = torch.where(values.isnan(), last, values)  # NaN ranks nowhere
        indices = ranked.topk(min(k, values.shape[1]), dim=1, largest=largest).indices
        ids = [[self.train_ids[number] for number in row] for row in indices.tolist()]
        return TopK(indices, values.gather(1, indices), ids)

    def bottomk(self, k: int) -> TopK:
        """Find the training examples that hurt each query most: the lowest scores first."""
        return self.topk(k, largest=False)

    def to_numpy(self) -> np.ndarray:
        """The values as an array, sharing memory."""
        return self.values.numpy()

    def to_pandas(self) -> Any:  # noqa: ANN401  # pandas is optional
        """One row a training example, one column a query.

        Returns:
            A ``pandas.DataFrame`` of summed scores.

        Raises:
            ImportError: If pandas is not installed.
        """
        try:
            pandas = import_module("pandas")
        except ImportError as error:
            raise ImportError("to_pandas needs pandas. Install it: pip install pandas") from error
        return pandas.DataFrame(
            self.example_values.numpy(), index=list(self.train_ids), columns=list(self.query_ids)
        )

    def save(self, path: str | Path) -> None:
        """Write one safetensors file with everything needed to read the scores.

        Args:
            path: Where to; a file that exists is replaced whole.
        """
        path = Path(path)
        tensors = {"values": self.values.contiguous()}
        if self.lengths is not None:
            tensors["lengths"] = self.lengths
        axes = ["train", "query"] if self.values.dim() == 2 else ["train", "position", "query"]
        header = {
            "format": _FORMAT,
            "axes": axes,
            "shape": list(self.values.shape),
            "sign": _SIGN,
            "method": self.method,
            "options": dict(self.options),
            "train_ids": list(self.train_ids),
            "query_ids": list(self.query_ids),
            "coverage": self.coverage.to_records(),
            "train_steps": None if self.train_steps is None else list(self.train_steps),
        }
        metadata = {name: json.dumps(value) for name, value in header.items()}
        partial = path.with_name(path.name + ".partial")
        try:
            save_file(tensors, partial, metadata=metadata)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | Path) -> AttributionScores:
        """Read a file written by ``save``.

        Args:
            path: The file.

        Returns:
            The scores.

        Raises:
            ValueError: If the file is not one of ours.
        """
        try:
            opened = safe_open(str(path), framework="pt")
        except SafetensorError as error:
            raise ValueError(_foreign(path, str(error))) from error
        with opened as file:
            header = {name: json.loads(value) for name, value in _ours(file.metadata()).items()}
            if header.get("format") != _FORMAT:
                raise ValueError(_foreign(path, f"format {header.get('format')!r}"))
            lengths = file.get_tensor("lengths") if "lengths" in file.keys() else None  # noqa: SIM118
            steps = header.get("train_steps")
            return cls(
                file.get_tensor("values"),
                tuple(header["train_ids"]),
                tuple(header["query_ids"]),
                header["method"],
                header["options"],
                Coverage.from_records(header["coverage"]),
                lengths,
                None if steps is None else tuple(steps),
            )

    def describe(self) -> str:
        """Say in a few lines what the scores are and how they are spread."""
        values = self.example_values
        lines = [
            f"{self.method}: {values.shape[0]} training examples x {values.shape[1]} queries",
            f"score > 0 is {_SIGN.partition(': ')[2]}",
            f"covered share of parameters: {self.coverage.share:.1%}",
        ]
        if values.numel():
            cuts = torch.tensor([0.0, 0.05, 0.5, 0.95, 1.0])
            marks = ", ".join(f"{mark:.3g}" for mark in _quantiles(values, cuts))
            lines.append(f"min, 5%, median, 95%, max: {marks}")
            lines.append(f"positive share: {(values > 0).float().mean().item():.1%}")
        lines += [f"{name}: {value}" for name, value in self.options.items() if value is not None]
        return "\n".join(lines)

    def __repr__(self) -> str:
        """Method, sizes and the covered share."""
        shape = " x ".join(str(side) for side in self.values.shape)
        return f"AttributionScores({self.method}, {shape}, covered {self.coverage.share:.1%})"

    def _repr_html_(self) -> str:
        """A table of the best examples of the first queries, for notebooks."""
        head = f"<p><b>{escape(repr(self))}</b></p>"
        if not self.values.numel():
            return head
        found = self.topk(min(5, self.values.shape[0]))
        rows = []
        for number, query in enumerate(self.query_ids[:10]):
            cells = "".join(
                f"<td>{escape(str(name))} ({value:.3g})</td>"
                for name, value in zip(
                    found.ids[number], found.values[number].tolist(), strict=True
                )
            )
            rows.append(f"<tr><th>query {escape(str(query))}</th>{cells}</tr>")
        return f"{head}<table>{''.join(rows)}</table>"


def _foreign(path: str | Path, what: str) -> str:
    return (
        f"path must be a file written by AttributionScores.save ({_FORMAT}), got {str(path)!r}: "
        f"{what}."
    )


def _ours(metadata: Mapping[str, str] | None) -> Mapping[str, str]:
    """Keep the metadata entries that are written as JSON."""
    wanted = ("format", "method", "options", "train_ids", "query_ids", "coverage", "train_steps")
    found = {name: value for name, value in (metadata or {}).items() if name in wanted}
    return found if found.get("format", "").startswith('"gradtrail') else {}


def _quantiles(values: Tensor, cuts: Tensor) -> list[float]:
    """Quantiles of any number of values (``torch.quantile`` stops at 16 million)."""
    ordered = values.flatten().sort().values
    places = (cuts * (ordered.numel() - 1)).round().long()
    return ordered[places].tolist()
