"""What a capture covers: every parameter of the model, and why it is in or out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

__all__ = ["Coverage", "ParameterCoverage"]


@dataclass(frozen=True)
class ParameterCoverage:
    """One parameter's place in a capture.

    Attributes:
        name: Dotted name, the first of a shared parameter.
        numel: Number of entries.
        status: ``"covered"``, ``"left out"`` (by choice) or ``"unsupported"``.
        layer: The captured layer it belongs to, or None.
        reason: Why it is not covered; empty where it is.
    """

    name: str
    numel: int
    status: Literal["covered", "left out", "unsupported"]
    layer: str | None = None
    reason: str = ""


@dataclass(frozen=True)
class Coverage:
    """Every parameter of a model with its status; prints as a table.

    Attributes:
        entries: One a parameter, in the model's order.
    """

    entries: tuple[ParameterCoverage, ...]

    @property
    def share(self) -> float:
        """Covered share of all parameter entries, between 0 and 1."""
        total = sum(entry.numel for entry in self.entries)
        return self.count("covered") / total if total else 1.0

    def count(self, status: str) -> int:
        """Number of parameter entries with one status."""
        return sum(entry.numel for entry in self.entries if entry.status == status)

    def with_status(self, status: str) -> tuple[ParameterCoverage, ...]:
        """The parameters with one status."""
        return tuple(entry for entry in self.entries if entry.status == status)

    def without_layers(
        self, reasons: dict[str, str], status: Literal["left out", "unsupported"] = "unsupported"
    ) -> Coverage:
        """Mark layers that turned out not to be covered.

        Args:
            reasons: By layer name, why.
            status: What they are instead.

        Returns:
            A new coverage.
        """
        entries = [
            replace(entry, status=status, layer=None, reason=reasons[entry.layer])
            if entry.layer in reasons
            else entry
            for entry in self.entries
        ]
        return Coverage(tuple(entries))

    def to_records(self) -> list[dict[str, object]]:
        """One plain dictionary a parameter."""
        return [
            {
                "name": entry.name,
                "numel": entry.numel,
                "status": entry.status,
                "layer": entry.layer,
                "reason": entry.reason,
            }
            for entry in self.entries
        ]

    @classmethod
    def from_records(cls, records: Iterable[dict[str, object]]) -> Coverage:
        """Rebuild a coverage from ``to_records``."""
        return cls(tuple(ParameterCoverage(**record) for record in records))

    def __str__(self) -> str:
        """A table of parameters, covered ones summed by layer, then the totals."""
        rows = [("parameter", "entries", "status", "reason")]
        rows += [
            (entry.name, f"{entry.numel:,}", entry.status, entry.reason) for entry in self.entries
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = [
            f"{name:<{widths[0]}}  {numel:>{widths[1]}}  {status:<{widths[2]}}  {reason}".rstrip()
            for name, numel, status, reason in rows
        ]
        counts = ", ".join(
            f"{status} {self.count(status):,}" for status in ("covered", "left out", "unsupported")
        )
        return "\n".join([*lines, f"covered share {self.share:.1%} ({counts} entries)"])
