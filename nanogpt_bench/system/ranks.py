"""Processes that train one run: which of them this is, what they agree on, and how one line is said by one of them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from nanogpt_bench.system.errors import BenchError, one_line


class Ranks:
    """This process among those of a run; alone, every answer is its own.

    `store` is torch's store of words that all of them see, and that outlives each.

    >>> alone = Ranks()
    >>> alone.first, alone.any(False), alone.mean(0.5), alone.told("runs/a")
    (True, False, 0.5, 'runs/a')
    """

    def __init__(self, rank: int = 0, size: int = 1, store: Any = None) -> None:
        self.rank, self.size = rank, size
        self._store, self._asked = store, 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Ranks:
        """Itself: a group can't be copied."""
        return self

    @property
    def first(self) -> bool:
        """Whether this is the process that writes files and prints."""
        return self.rank == 0

    def any(self, flag: bool) -> bool:
        """Whether it is so in one of the processes."""
        return flag if self.size == 1 else bool(self.largest(int(flag)))

    def largest(self, number: float) -> float:
        """The largest of the processes' numbers."""
        return number if self.size == 1 else max(self.each(number))

    def mean(self, number: float) -> float:
        """The mean of the processes' numbers; NaN where one is."""
        return number if self.size == 1 else sum(self.each(number)) / self.size

    def each(self, number: float) -> list[float]:
        """The number of every process, in their order."""
        own = [0.0] * self.size
        own[self.rank] = number
        return self.total(own)

    def total(self, numbers: Sequence[float]) -> list[float]:
        """The sum of each of some numbers over the processes, in float64."""
        if self.size == 1:
            return list(numbers)
        import torch

        sums = torch.tensor(numbers, dtype=torch.float64)
        torch.distributed.all_reduce(sums)
        return [float(number) for number in sums]

    def told(self, text: str) -> str:
        """What the first process says, in all of them."""
        if self.size == 1:
            return text
        self._asked += 1
        key = f"told/{self._asked}"
        if self.first:
            self._store.set(key, text)
        self.any(False)  # by now it is there: who waited for a process that has ended would wait long
        return str(self._store.get(key).decode())

    @contextmanager
    def together(self, kind: type[BenchError] = BenchError) -> Iterator[None]:
        """What fails in one process fails in all: on the disk with the same OSError, else with the same line.

        The others raise `kind`. Nothing in it may wait for other processes.
        """
        failure: OSError | BenchError | None = None
        try:
            yield
        except (OSError, BenchError) as error:
            failure = error
        failed = [rank for rank, flag in enumerate(self.each(float(failure is not None))) if flag]
        if failure is not None and self.size == 1:
            raise failure
        if failed:
            raise self._shared(failure, failed[0], kind)

    def _shared(self, failure: OSError | BenchError | None, source: int, kind: type[BenchError]) -> Exception:
        """What to raise here of what failed in the first of them that failed."""
        self._asked += 1
        key = f"failed/{self._asked}"
        if self.rank == source:
            told = [failure.errno, failure.strerror, failure.filename] if isinstance(failure, OSError) else [failure]
            self._store.set(key, "\n".join(one_line(str(part)) for part in told))
        self.any(False)
        if failure is not None:
            return failure
        number, *rest = self._store.get(key).decode().split("\n")
        return OSError(int(number), *rest) if rest else kind(number)

    def say_once(self, line: str) -> None:
        """Print a line beside the results, unless another process has said one."""
        if self.size == 1:
            print(line, file=sys.stderr)
        elif self._store.add("said", 1) == 1:
            print(line, file=sys.__stderr__, flush=True)


ALONE = Ranks()
