"""The terminal while runs train: a live table, or plain lines where there is no terminal, and the time left."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from nanogpt_bench.system.errors import printable
from nanogpt_bench.system.words import counted, rough_time
from nanogpt_bench.workers.pool import Event

#: most lines of a printed list
MOST_LINES = 10
#: seconds before the first estimate of the time left, and between two estimates, where there is no terminal; in long
#: runs two estimates are this share of the elapsed time apart
FIRST_ESTIMATE, NEXT_ESTIMATE, ESTIMATE_SHARE = 20.0, 60.0, 1 / 6
ENDED = ("done", "failed")
#: columns that are left out while no run has them
SHARES = ("stall", "arrived")
STATES = {"waiting": "dim", "running": "cyan", "done": "green", "failed": "red"}


@dataclass
class Entry:
    """One run on the board."""

    name: str
    lr: float | None = None
    state: str = "waiting"
    note: str = ""
    #: size of the whole run, in the unit of the other runs
    size: float = 1.0
    progress: Mapping[str, Any] = field(default_factory=dict)


class Board:
    """Follows the events of a pool and shows them; a context manager, since a live table has to be left properly."""

    def __init__(self, console: Console, workers: int = 1) -> None:
        self.entries: list[Entry] = []
        #: number of runs that train at a time
        self.workers = workers
        #: sizes of the runs that will be added, as far as they are known
        self.to_come: Callable[[], Sequence[float]] = lambda: ()
        self._console = console
        self._next_estimate = FIRST_ESTIMATE
        self._begun = time.monotonic()
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None

    def __enter__(self) -> Board:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def add(self, name: str, size: float = 1.0, lr: float | None = None) -> None:
        """Put one more run at the end of the table."""
        self.entries.append(Entry(name, lr, size=size))

    def say(self, text: str) -> None:
        """Print one line above the table."""
        self._console.print(Text(f"[{self.elapsed():5.0f} s] {printable(text)}"), soft_wrap=True)

    def say_again(self, again: Mapping[str, str]) -> None:
        """Print which runs are done once more, and why; the first of them where they are many."""
        for name in list(again)[:MOST_LINES]:
            self.say(f"{name} is trained again: {again[name]}")
        if len(again) > MOST_LINES:
            self.say(f"and {len(again) - MOST_LINES} more are trained again")

    def elapsed(self) -> float:
        return time.monotonic() - self._begun

    def show(self, event: Event) -> None:
        """Apply an event, and update the display."""
        if event.job is not None:
            entry = self.entries[event.job]
            validated = event.data.get("val_loss") != entry.progress.get("val_loss")
            _apply(entry, event)
            if self._live is None and (event.kind != "progress" or validated):
                self.say(_line(entry))
        if self._live is not None:
            self._live.update(self.table(), refresh=True)
        else:
            self._say_left_if_due()

    def left(self) -> str:
        """The time left in words, "" while nothing is known of it."""
        runs = [*map(_work, self.entries), *map(Work, self.to_come())]
        seconds = seconds_left(runs, self.workers)
        return "" if seconds is None else f"{rough_time(seconds)} left"

    def _say_left_if_due(self) -> None:
        elapsed = self.elapsed()
        if elapsed >= self._next_estimate and (left := self.left()):
            self._next_estimate = elapsed + max(NEXT_ESTIMATE, elapsed * ESTIMATE_SHARE)
            self.say(f"{self._ended()}, {left}")

    def _ended(self) -> str:
        return f"{sum(entry.state in ENDED for entry in self.entries)} of {len(self.entries)} runs ended"

    def table(self) -> Table:
        """The table as it stands."""
        title = " · ".join(filter(None, (self._ended(), f"{self.elapsed():.0f} s", self.left())))
        table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
        table.add_column("run", no_wrap=True)
        table.add_column("lr", justify="right", no_wrap=True)
        table.add_column("state", no_wrap=True)
        table.add_column("", width=12)
        shown = self._in_view()
        unknown = {name for name in SHARES if all(entry.progress.get(name) is None for entry in self.entries)}
        shares = [f"mean {name}" for name in SHARES if name not in unknown]
        for heading in ("step", "train", "val", *shares, "tokens/s"):
            table.add_column(heading, justify="right", no_wrap=True)
        for entry in shown:
            table.add_row(*_cells(entry, unknown))
        if len(shown) < len(self.entries):
            table.caption = f"and {counted(len(self.entries) - len(shown), 'run')} more"
        return table

    def _in_view(self) -> list[Entry]:
        """The runs that fit on the terminal: those that go on, the failures, some that ended, what comes next."""
        room = max(5, self._console.height - 4)
        if len(self.entries) <= room:
            return self.entries
        order = ("running", "failed", "done", "waiting")
        ranked = sorted(range(len(self.entries)), key=lambda place: order.index(self.entries[place].state))
        return [self.entries[place] for place in sorted(ranked[:room])]


def _apply(entry: Entry, event: Event) -> None:
    if event.kind == "progress":
        entry.progress = event.data
    elif event.kind == "failed":
        entry.state, entry.note = "failed", " ".join(str(event.data["error"]["message"]).split())
    else:
        entry.state = {"started": "running", "done": "done"}[event.kind]


def _work(entry: Entry) -> Work:
    seen = entry.progress
    done = seen["step"] / seen["max_steps"] if seen else 0.0
    running, ended = entry.state == "running", entry.state in ENDED
    return Work(entry.size, done, seen.get("elapsed_s", 0.0), running=running, ended=ended)


def _cells(entry: Entry, left_out: Collection[str]) -> list[Text | ProgressBar]:
    seen = entry.progress
    done, total = seen.get("step", 0), seen.get("max_steps", 1)
    return [
        Text(printable(entry.name)),
        Text(number(entry.lr, "g")),
        Text(entry.state, style=STATES[entry.state]),
        ProgressBar(total=total, completed=done, width=12),
        Text(f"{done}/{total}" if seen else ""),
        Text(number(seen.get("train_loss"), ".3f")),
        Text(number(seen.get("val_loss"), ".3f")),
        *(Text(number(seen.get(name), ".1%")) for name in SHARES if name not in left_out),
        Text(number(seen.get("tokens_per_s"), ",.0f")),
    ]


def _line(entry: Entry) -> str:
    seen = entry.progress
    parts = [f"{entry.name}: {entry.state}"]
    if entry.note:
        parts.append(entry.note)
    elif seen:
        parts += [f"step {seen['step']}/{seen['max_steps']}", f"val {number(seen.get('val_loss'), '.3f')}"]
        parts += [f"mean {k} {seen[k]:.1%}" for k in ("stall", "arrived") if seen.get(k) is not None]
    return "  ".join(parts)


def number(value: float | None, spec: str) -> str:
    """The number in that format, or a dash when there is none yet."""
    return "-" if value is None else format(value, spec)


@dataclass(frozen=True)
class Work:
    """One run as far as it is known: its size beside the others', and what has been done of it in how many seconds."""

    #: size of the whole run, in a unit that all runs share
    size: float = 1.0
    #: share of its steps that have been taken
    done: float = 0.0
    #: seconds that these steps took
    seconds: float = 0.0
    running: bool = False
    ended: bool = False


def seconds_left(runs: Sequence[Work], workers: int) -> float | None:
    """Return about how many seconds `workers` need for what is left, None before the first step of any run.

    A run that goes on keeps its own pace. One that waits takes its size times the mean seconds a unit of all that has
    been done, on the worker that is free first, the largest ones first.

    >>> first, second = Work(done=1.0, seconds=60.0, ended=True), Work(done=0.5, seconds=40.0, running=True)
    >>> seconds_left([first, second, Work()], workers=1), seconds_left([Work()], workers=1)
    (106.66666666666667, None)
    """
    done = sum(run.size * run.done for run in runs)
    if done <= 0.0:
        return None
    pace = sum(run.seconds for run in runs if run.done > 0.0) / done
    free = [_rest(run, pace) for run in runs if run.running and not run.ended]
    free += [0.0] * (workers - len(free))
    heapq.heapify(free)
    waiting = (run.size for run in runs if not (run.running or run.ended))
    for size in sorted(waiting, reverse=True):
        heapq.heapreplace(free, free[0] + size * pace)
    return max(free)


def _rest(run: Work, pace: float) -> float:
    return run.seconds / run.done * (1.0 - run.done) if run.done > 0.0 else run.size * pace
