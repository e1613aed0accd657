"""What the terminal shows while runs go on: a live table, or plain lines where there is no terminal."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from nanogpt_bench.compare.plan import PlannedRun
from nanogpt_bench.compare.pool import Event
from nanogpt_bench.errors import printable

STATES = {"waiting": "dim", "running": "cyan", "done": "green", "failed": "red"}


@dataclass
class Entry:
    """One run on the board."""

    name: str
    state: str = "waiting"
    note: str = ""
    progress: Mapping[str, Any] = field(default_factory=dict)


class Board:
    """Follows the events of a pool and shows them; a context manager, since a live table has to be left properly."""

    def __init__(self, planned: Sequence[PlannedRun], console: Console) -> None:
        several = len({run.seed for run in planned}) > 1
        self.entries = [Entry(f"{run.label} · seed {run.seed}" if several else run.label) for run in planned]
        self._console = console
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

    def add(self, name: str) -> None:
        """Put one more run at the end of the table."""
        self.entries.append(Entry(name))

    def say(self, text: str) -> None:
        """Print one line above the table."""
        self._console.print(Text(f"[{self.elapsed():5.0f} s] {printable(text)}"), soft_wrap=True)

    def elapsed(self) -> float:
        return time.monotonic() - self._begun

    def show(self, event: Event) -> None:
        """Take an event in and bring the display up to date."""
        if event.job is not None:
            entry = self.entries[event.job]
            validated = event.data.get("val_loss") != entry.progress.get("val_loss")
            _apply(entry, event)
            if self._live is None and (event.kind != "progress" or validated):
                self.say(_line(entry))
        if self._live is not None:
            self._live.update(self.table(), refresh=True)

    def table(self) -> Table:
        """The table as it stands."""
        ended = sum(entry.state in ("done", "failed") for entry in self.entries)
        title = f"{ended} of {len(self.entries)} runs ended · {self.elapsed():.0f} s"
        table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
        table.add_column("run", no_wrap=True)
        table.add_column("state", no_wrap=True)
        table.add_column("", width=12)
        for heading in ("step", "train", "val", "mean stall", "mean arrived", "tokens/s"):
            table.add_column(heading, justify="right", no_wrap=True)
        shown = self._in_view()
        for entry in shown:
            table.add_row(*_cells(entry))
        if len(shown) < len(self.entries):
            table.caption = f"and {len(self.entries) - len(shown)} runs more"
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


def _cells(entry: Entry) -> list[Text | ProgressBar]:
    seen = entry.progress
    done, total = seen.get("step", 0), seen.get("max_steps", 1)
    return [
        Text(printable(entry.name)),
        Text(entry.state, style=STATES[entry.state]),
        ProgressBar(total=total, completed=done, width=12),
        Text(f"{done}/{total}" if seen else ""),
        Text(number(seen.get("train_loss"), ".3f")),
        Text(number(seen.get("val_loss"), ".3f")),
        Text(number(seen.get("stall"), ".1%")),
        Text(number(seen.get("arrived"), ".1%")),
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
