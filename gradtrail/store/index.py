"""The rows of a store of gradients: which block holds each, and where an id or a step is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Integral
from typing import TypeVar

from gradtrail.store.base import AbstractStore
from gradtrail.store.blocks import unknown
from gradtrail.store.facts import BlockRecord

__all__ = ["AbstractIndexedStore"]

T = TypeVar("T")


class AbstractIndexedStore(AbstractStore):
    """A store of blocks whose examples are its rows, in store order."""

    _version = -1
    _views: dict[str, object]

    @property
    def records(self) -> tuple[BlockRecord, ...]:
        """The blocks in store order."""
        return self._view("records", self._make_records)

    @property
    def ids(self) -> tuple[int | str, ...]:
        """Id of every row."""
        return self._view("ids", lambda: tuple(i for r in self.records for i in r.ids))

    @property
    def steps(self) -> tuple[int, ...]:
        """Step of every row."""
        return self._view("steps", lambda: tuple(r.step for r in self.records for _ in r.ids))

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors of all blocks."""
        return self._view("nbytes", lambda: sum(record.num_bytes for record in self.records))

    def __len__(self) -> int:
        """Number of examples."""
        return len(self.ids)

    def has(self, step: int, ids: Sequence[int | str]) -> bool:
        """Whether a block of this step with these ids is stored."""
        self.log.check_open()
        return (step, tuple(ids)) in self.log.index

    def find(self, *, id: int | str | None = None, step: int | None = None) -> tuple[int, ...]:  # noqa: A002
        """Look rows up.

        Args:
            id: Id of the example, or None for all of a step.
            step: Its step, or None for all.

        Returns:
            Row numbers, ascending; none where there is no such row.

        Raises:
            ValueError: If neither is given.
            TypeError: If an id is of a kind that no row has, or a step is no int.
        """
        if id is None and step is None:
            raise ValueError("find() must be told what to find, got neither id nor step.")
        if step is not None and not _is_number(step):
            raise TypeError(f"step must be an int, got {step!r}. store.steps has that of each row.")
        if id is not None:
            self._check_kind(id)
        if id is None:
            return self._view("rows by step", lambda: _rows_by(self.steps)).get(step, ())
        rows = self._view("rows by id", lambda: _rows_by(self.ids)).get(id, ())
        return rows if step is None else tuple(row for row in rows if self.steps[row] == step)

    def _check_kind(self, identity: object) -> None:
        """Refuse an id that is none of this store's kind, and would be found nowhere."""
        kinds = self._view("kinds", lambda: sorted({type(name).__name__ for name in self.ids}))
        found = "int" if _is_number(identity) else type(identity).__name__
        if kinds and found not in kinds:
            raise TypeError(
                f"id must be {' or '.join(kinds)}, as the ids of this store are, got {identity!r}. "
                "store.ids has that of each row."
            )

    def _plan(
        self, steps: Sequence[int] | None, rows: Sequence[int] | None
    ) -> list[tuple[int, list[int] | None]]:
        """Numbers of the records to read, and which of their examples."""
        wanted = None if steps is None else set(steps)
        for step in sorted(wanted or ()):
            if not self.find(step=step):
                raise unknown("steps", step, self.steps)
        if rows is None:
            return [
                (number, None)
                for number, record in enumerate(self.records)
                if wanted is None or record.step in wanted
            ]
        numbers = self._checked_rows(rows)
        if numbers != sorted(set(numbers)):
            raise ValueError("rows must ascend, got rows in another order. Use get() for those.")
        plan: dict[int, list[int]] = {}
        owners = self._owners()
        for row in numbers:
            record = self.records[owners[row]]
            if wanted is None or record.step in wanted:
                plan.setdefault(owners[row], []).append(row - record.number)
        return list(plan.items())

    def _runs(self, rows: Sequence[int]) -> list[tuple[int, list[int]]]:
        """Cut rows in any order into runs, each of one record with its examples."""
        numbers, owners = self._checked_rows(rows), self._owners()
        runs: list[tuple[int, list[int]]] = []
        for row in numbers:
            if not runs or runs[-1][0] != owners[row]:
                runs.append((owners[row], []))
            runs[-1][1].append(row - self.records[owners[row]].number)
        return runs

    def _checked_rows(self, rows: Sequence[int]) -> list[int]:
        """Row numbers that exist."""
        numbers, count = [int(row) for row in rows], len(self)
        for row in numbers:
            if not 0 <= row < count:
                raise ValueError(f"rows must be from 0 to {count - 1}, got {row}.")
        return numbers

    def _owners(self) -> list[int]:
        """Number of the record that each row is of."""
        return self._view(
            "owners", lambda: [n for n, record in enumerate(self.records) for _ in record.ids]
        )

    def _make_records(self) -> tuple[BlockRecord, ...]:
        found, row = [], 0
        for entry in self.log.entries:
            facts, ids = entry.facts, tuple(entry.facts["ids"])
            size = entry.layout.num_bytes
            found.append(BlockRecord(facts["step"], ids, facts["meta"], size, row))
            row += len(ids)
        return tuple(found)

    def _view(self, name: str, make: Callable[[], T]) -> T:
        """Make something of the records, once for as long as they stay the same."""
        self.log.check_open()
        if self._version != self.log.version:
            self._views, self._version = {}, self.log.version
        if name not in self._views:
            self._views[name] = make()
        return self._views[name]


def _is_number(value: object) -> bool:
    """Whether this is a whole number, of this language or of a library; a truth value is none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _rows_by(values: Sequence[int | str]) -> dict[int | str, tuple[int, ...]]:
    found: dict[int | str, list[int]] = {}
    for row, value in enumerate(values):
        found.setdefault(value, []).append(row)
    return {value: tuple(rows) for value, rows in found.items()}
