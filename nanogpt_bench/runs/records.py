"""The records of a run as columns of numbers: what a file says in fifty bytes a figure takes eight or twelve."""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Iterator, Mapping
from typing import Any

from nanogpt_bench.runs.read import finite

#: figures with a name of their own; a run of fifty layers has some thousands
MOST_NAMES = 100_000


class _Column:
    """The values of one figure, and the rows they are in; `rows` is None while no row was without one."""

    __slots__ = ("rows", "values")

    def __init__(self) -> None:
        self.rows: array[int] | None = None
        self.values = array("d")

    def add(self, row: int, value: float) -> None:
        if self.rows is None and row != len(self.values):
            self.rows = array("I", range(len(self.values)))
        if self.rows is not None:
            self.rows.append(row)
        self.values.append(value)

    def items(self) -> Iterator[tuple[int, float | None]]:
        """Row and value, None for what is not finite."""
        rows = range(len(self.values)) if self.rows is None else self.rows
        for row, value in zip(rows, self.values, strict=True):
            yield row, value if math.isfinite(value) else None


class Records:
    """The figures of a run's records, by name and row; texts and nested values are left out.

    >>> records = Records([{"step": 0, "val/loss": 2.0}, {"step": 1, "lr": 0.1}, {"step": 2, "val/loss": None}])
    >>> records.names, records.curve("val/loss")
    (('step', 'val/loss', 'lr'), ([0.0, 2.0], [2.0, None]))
    """

    def __init__(self, records: list[dict[str, Any]] | None = None) -> None:
        self._columns: dict[str, _Column] = {}
        self._rows = 0
        #: whether a figure was left out because there were too many names
        self.cut = False
        for record in records or []:
            self.add(record)

    def __len__(self) -> int:
        return self._rows

    def __iter__(self) -> Iterator[dict[str, float | None]]:
        """The records one by one, made anew from the columns."""
        cursors = {name: column.items() for name, column in self._columns.items()}
        waiting = {name: next(cursor) for name, cursor in cursors.items()}
        for row in range(self._rows):
            found = {name: value for name, (at, value) in waiting.items() if at == row}
            yield found
            for name in found:
                following = next(cursors[name], None)
                if following is None:
                    del waiting[name]
                else:
                    waiting[name] = following

    def add(self, record: Mapping[str, Any]) -> None:
        """Take in the figures of one more record."""
        for name, value in record.items():
            if value is not None and not isinstance(value, int | float):
                continue
            column = self._columns.get(name) or self._new(name)
            if column is not None:
                known = float(value) if isinstance(value, bool) else finite(value)
                column.add(self._rows, math.nan if known is None else known)
        self._rows += 1

    def _new(self, name: str) -> _Column | None:
        if len(self._columns) >= MOST_NAMES:
            self.cut = True
            return None
        return self._columns.setdefault(sys.intern(name), _Column())

    @property
    def names(self) -> tuple[str, ...]:
        """Names of everything recorded, in order of first appearance."""
        return tuple(self._columns)

    @property
    def last_step(self) -> int | None:
        steps = self._columns.get("step")
        return int(steps.values[-1]) if steps is not None and steps.values else None

    def rows(self, name: str) -> Iterator[tuple[int, float | None]]:
        """The number of every record that has this figure, and its value, None where it is not finite."""
        column = self._columns.get(name)
        return iter(()) if column is None else column.items()

    def values(self, name: str) -> list[float]:
        """The finite values of a figure."""
        return [value for _, value in self.rows(name) if value is not None]

    def curve(self, name: str, against: str = "step") -> tuple[list[float], list[float | None]]:
        """A figure over another, where that is known; a value that is not finite is None."""
        places = self._columns.get(against)
        if places is None:
            return [], []
        if places.rows is None:
            at = places.values
            points = [(at[row], value) for row, value in self.rows(name) if row < len(at) and math.isfinite(at[row])]
        else:
            known = {row: place for row, place in places.items() if place is not None}
            points = [(known[row], value) for row, value in self.rows(name) if row in known]
        return [x for x, _ in points], [y for _, y in points]
