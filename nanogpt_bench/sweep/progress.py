"""The terminal while runs train: one bar over all of them, a line for each that ends, and the time left."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from nanogpt_bench.system.errors import printable, rough_time
from nanogpt_bench.workers.pool import Event

#: seconds before the first estimate of the time left, and between two estimates, where there is no terminal; in long
#: runs two estimates are this share of the elapsed time apart
FIRST_ESTIMATE, NEXT_ESTIMATE, ESTIMATE_SHARE = 20.0, 60.0, 1 / 6


@dataclass
class Entry:
    """One run under the bar: its size in the unit of the other runs, and the share of it that has been done."""

    name: str
    size: float = 1.0
    done: float = 0.0
    ended: bool = False
    loss: float | None = None


class Bar:
    """Follows the events of a pool and shows them; a context manager, since a bar on a terminal has to be left."""

    def __init__(self, console: Console) -> None:
        self.entries: list[Entry] = []
        #: sizes of the runs that will be added, as far as they are known
        self.to_come: Callable[[], Sequence[float]] = tuple
        self._console = console
        self._next_estimate, self._begun = FIRST_ESTIMATE, time.monotonic()
        #: time and share of the first steps, before which processes were started
        self._first: tuple[float, float] | None = None
        words = TextColumn("{task.description}")
        self._bar = Progress(BarColumn(), words, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task("", total=1.0)

    def __enter__(self) -> Bar:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def add(self, name: str, size: float = 1.0) -> None:
        """Take one more run in."""
        self.entries.append(Entry(name, size))

    def say(self, text: str) -> None:
        """Print one line above the bar."""
        self._console.print(Text(f"[{self.elapsed():5.0f} s] {printable(text)}"), soft_wrap=True)

    def elapsed(self) -> float:
        return time.monotonic() - self._begun

    def show(self, event: Event) -> None:
        """Apply an event, print a line of a run that has ended, and move the bar."""
        if event.job is not None:
            entry = self.entries[event.job]
            if event.kind == "progress":
                entry.done, entry.loss = event.data["step"] / event.data["max_steps"], event.data.get("val_loss")
                self._first = self._first or (self.elapsed(), self.share())
            elif event.kind != "started":
                entry.ended, entry.done = True, 1.0
                self.say(_line(entry, event))
        self._bar.update(self._task, completed=self.share(), description=self.words())
        elapsed = self.elapsed()
        if not self._console.is_terminal and elapsed >= self._next_estimate and self.left():
            self._next_estimate = elapsed + max(NEXT_ESTIMATE, elapsed * ESTIMATE_SHARE)
            self.say(self.words())

    def share(self) -> float:
        """The share of all work that has been done, that of the runs to come included."""
        sizes = [*(entry.size for entry in self.entries), *self.to_come()]
        return sum(entry.size * entry.done for entry in self.entries) / sum(sizes) if sizes else 0.0

    def words(self) -> str:
        """How many runs have ended, and the time left."""
        return f"{sum(entry.ended for entry in self.entries)} of {len(self.entries)} runs ended{self.left()}"

    def left(self) -> str:
        """About how long the rest takes at the pace since the first steps, in words; "" while nothing is known of it.

        The last runs keep fewer workers busy, so that this is too little by about a run's length.
        """
        since, before = self._first or (0.0, self.share())
        done = self.share() - before
        rest = 1.0 - self.share()
        return f", {rough_time((self.elapsed() - since) * rest / done)} left" if done > 0 and rest > 0 else ""


def _line(entry: Entry, event: Event) -> str:
    if event.kind == "failed":
        return f"{entry.name}: failed  {' '.join(str(event.data['error']['message']).split())}"
    return f"{entry.name}: done" + ("" if entry.loss is None else f"  val {entry.loss:.3f}")
