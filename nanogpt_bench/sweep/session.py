"""A sweep from its plan to its report: grid or random points, rates tuned and
confirmed, the sensitivity of layers.

Runs train in worker processes, with one progress bar.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from nanogpt_bench.config.schema import DEFAULT_DATA_DIR
from nanogpt_bench.config.settings import build_config, load_config
from nanogpt_bench.data import prepare_default
from nanogpt_bench.data.batches import TextChangedError
from nanogpt_bench.evaluation.measurement import gaps_table
from nanogpt_bench.report.tables import to_text, tuning_table
from nanogpt_bench.runs.load import PASSING, has_ended
from nanogpt_bench.setup.resolve import resolve
from nanogpt_bench.sweep.file import SweepFile
from nanogpt_bench.sweep.plan import (
    PlannedRun,
    baseline_of,
    check_inputs,
    left_out_of_reference,
    plan_sweep,
)
from nanogpt_bench.sweep.record import SweepRecord
from nanogpt_bench.sweep.sensitivity import measure_gaps, plan_study, write_gaps
from nanogpt_bench.sweep.tuning import Tuning
from nanogpt_bench.sweep.workers import Event, Local, Pool, check_workers, divide, threads_asked
from nanogpt_bench.system.errors import BenchError, counted, one_line, printable, rough_time
from nanogpt_bench.system.signals import RESUMABLE, StopRequest, stop_requests

#: without a terminal: seconds before the first estimate of the time left, and the least
#: between two of them, which are at least this share of the elapsed time apart
FIRST_ESTIMATE, NEXT_ESTIMATE, ESTIMATE_SHARE = 20.0, 60.0, 1 / 6
#: a function that is called with a run that has ended, and returns the runs that follow
#: from it
OnEnd = Callable[[PlannedRun], Iterable[PlannedRun]]


@dataclass
class Entry:
    """One run of the progress bar: its size, in the unit of the other runs' sizes, and
    the share that is done.
    """

    name: str
    size: float = 1.0
    done: float = 0.0
    ended: bool = False
    loss: float | None = None


class Bar:
    """The progress bar, which shows the events of a pool; a context manager, since the
    terminal has to be restored.
    """

    def __init__(self, console: Console) -> None:
        self.entries: list[Entry] = []
        #: returns the sizes of the runs that will be added, as far as they are known
        self.to_come: Callable[[], Sequence[float]] = tuple
        self._console = console
        self._next_estimate, self._begun = FIRST_ESTIMATE, time.monotonic()
        #: time and share at the first steps; before, processes were starting
        self._first: tuple[float, float] | None = None
        words = TextColumn("{task.description}")
        self._bar = Progress(
            BarColumn(), words, console=console, transient=True, disable=not console.is_terminal
        )
        self._task = self._bar.add_task("", total=1.0)

    def __enter__(self) -> Bar:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def say(self, text: str) -> None:
        """Print one line above the bar."""
        self._console.print(Text(f"[{self.elapsed():5.0f} s] {printable(text)}"), soft_wrap=True)

    def elapsed(self) -> float:
        return time.monotonic() - self._begun

    def show(self, event: Event) -> None:
        """Apply an event, print a line about a run that has ended, and move the bar."""
        if event.job is not None:
            entry = self.entries[event.job]
            if event.kind == "progress":
                entry.done, entry.loss = (
                    event.data["step"] / event.data["max_steps"],
                    event.data.get("val_loss"),
                )
                self._first = self._first or (self.elapsed(), self.share())
            elif event.kind != "started":
                entry.ended, entry.done = True, 1.0
                loss = "" if entry.loss is None else f"  val {entry.loss:.3f}"
                failed = (
                    f"failed  {one_line(event.data['error']['message'])}"
                    if event.kind == "failed"
                    else None
                )
                self.say(f"{entry.name}: {failed or f'done{loss}'}")
        self._bar.update(self._task, completed=self.share(), description=self.words())
        elapsed = self.elapsed()
        if not self._console.is_terminal and elapsed >= self._next_estimate and self.left():
            self._next_estimate = elapsed + max(NEXT_ESTIMATE, elapsed * ESTIMATE_SHARE)
            self.say(self.words())

    def share(self) -> float:
        """Return the share of all work that is done; runs to come count as work."""
        sizes = [*(entry.size for entry in self.entries), *self.to_come()]
        return sum(entry.size * entry.done for entry in self.entries) / sum(sizes) if sizes else 0.0

    def words(self) -> str:
        return f"{sum(entry.ended for entry in self.entries)} of {len(self.entries)} runs ended{self.left()}"

    def left(self) -> str:
        """Return the time left in words, at the pace since the first steps; too short
        by about a run; "" if unknown.
        """
        since, before = self._first or (0.0, self.share())
        done = self.share() - before
        rest = 1.0 - self.share()
        return (
            f", {rough_time((self.elapsed() - since) * rest / done)} left"
            if done > 0 and rest > 0
            else ""
        )


def text_of(run: PlannedRun) -> str:
    """Return the folder of the corpus that a run is trained on."""
    return str(run.settings.get("data.dir", DEFAULT_DATA_DIR))


def texts_of(run: PlannedRun) -> list[str]:
    """Return the folders of all corpora that a run reads."""
    also = run.settings.get("eval.also")
    return [text_of(run)] if also is None else [text_of(run), str(also)]


def threads_set(runs: Iterable[PlannedRun]) -> int | None:
    """Return the most threads that a run's settings name; None if no run's do."""
    return max((run.settings.get("runtime.threads") or 0 for run in runs), default=0) or None


def check_machine(runs: Sequence[PlannedRun], executor: Local) -> None:
    """Refuse a device that the executor does not have, or runs that need more memory
    than is free on this machine.
    """
    from nanogpt_bench.setup.memory import DECIDING, check_fits

    for device in {str(run.settings.get("runtime.device")) for run in runs}:
        executor.check_device(device)
    keys = tuple(DECIDING)
    different = {
        repr([item for item in run.settings.items() if item[0].startswith(keys)]): run
        for run in runs
    }
    for run in different.values():
        check_fits(resolve(build_config(run.settings)))


class Session:
    """Trains the runs that a record does not have yet, several at a time; `to_come` as
    in `Bar`.
    """

    def __init__(
        self,
        record: SweepRecord,
        workers: int | None,
        executor: Local,
        to_come: Callable[[], Sequence[float]] = tuple,
    ) -> None:
        self._record, self._workers, self._executor = record, workers, executor
        self._jobs: list[dict[str, Any]] = []
        self._runs: list[PlannedRun] = []
        self._waiting: deque[int] = deque()
        self._bar = Bar(Console(stderr=True))
        self._bar.to_come = to_come
        self.say = self._bar.say
        self._threads = 1

    def train(self, planned: Iterable[PlannedRun], on_end: OnEnd = lambda _: ()) -> bool:
        """Train the runs and those that follow from them; return False if a signal
        ended it early.
        """
        todo = [run for first in planned for run in self._left(first, on_end)]
        check_machine(todo, self._executor)
        self._record.write_manifest()
        if not todo:
            print(
                f"all runs of {self._record.folder} have ended; nothing is trained", file=sys.stderr
            )
            return True
        size, self._threads = divide(
            self._workers, len(todo), threads_set(todo), threads_asked(), self._executor.cores()
        )
        pool = Pool(size, self._threads, self._executor)
        with pool, self._bar:
            done = len(self._record.planned) - len(todo)
            before = f", {done} done before" if done else ""
            threads = counted(self._threads, "thread")
            self.say(f"{counted(len(todo), 'run')}{before}; {size} at a time, {threads} each")
            with stop_requests(pool.kill) as stop:
                self._enqueue(todo)
                try:
                    self._follow(pool, on_end, stop)
                except TextChangedError as error:
                    self.say("stopping the runs: their text has changed")
                    pool.stop(patient=True)
                    self._record.interrupt()
                    raise self._changed(error) from None
                if stop.asked:
                    self.say(f"{stop.name}: stopping the runs; the same command goes on from here")
                    pool.stop(patient=True)
                    self._record.interrupt()
                    return False
        return True

    def _changed(self, error: TextChangedError) -> BenchError:
        """The error of a corpus that has changed, with what is left of the sweep."""
        folder, planned = self._record.folder, self._record.planned
        ended = sum(self._record.ended(run) for run in planned)
        return BenchError(
            f"{error}: {ended} of {len(planned)} runs in {str(folder)!r} have ended on the text "
            f"as it was; with that text there again, the same command with --out {str(folder)!r} "
            f"goes on"
        )

    def _left(self, run: PlannedRun, on_end: OnEnd) -> list[PlannedRun]:
        """Return the run if it has to be trained; else those to be trained of the runs
        that follow from it.
        """
        if not self._record.add(run):
            return [run]
        return [left for following in on_end(run) for left in self._left(following, on_end)]

    def _enqueue(self, runs: Iterable[PlannedRun]) -> None:
        for run in runs:
            run_dir, resume = self._record.run_dir(run), self._record.resumes(run)
            threads = self._threads
            if (
                resume and (before := run_dir / "config.yaml").is_file()
            ):  # as many threads give the same numbers
                threads = load_config(before).runtime.threads or threads
            settings = {"runtime.threads": threads, **PASSING, **run.settings}
            self._waiting.append(len(self._jobs))
            texts = self._record.texts
            self._jobs.append(
                {
                    "settings": settings,
                    "run_dir": str(run_dir),
                    "argv": sys.argv,
                    "resume": resume,
                    "texts": {folder: texts[folder] for folder in texts_of(run) if folder in texts},
                }
            )
            self._runs.append(run)
            self._bar.entries.append(Entry(f"{run.label} · seed {run.seed}", run.cost))
        order = sorted(self._waiting, key=lambda job: _turn(self._runs[job]))
        self._waiting.clear()
        self._waiting.extend(order)

    def _follow(self, pool: Pool, on_end: OnEnd, stop: StopRequest) -> None:
        for event in pool.run(self._jobs, self._waiting):
            if stop.asked:
                return
            run = None if event.job is None else self._runs[event.job]
            if (
                run is not None and event.kind == "done"
            ):  # the worker is done, but the training may have failed
                summary = self._record.summary(run)
                if summary.get("status") == "failed" and summary.get("failure"):
                    event = Event(event.job, "failed", {"error": summary["failure"]})
            if event.kind == "failed" and event.data["error"]["kind"] == TextChangedError.__name__:
                # no failure of this run: it has not begun, and the others can't either
                raise TextChangedError(event.data["error"]["message"])
            self._bar.show(event)
            if run is not None and event.kind in ("done", "failed"):
                self._record.end(run, event.data["error"] if event.kind == "failed" else None)
                if self._record.ended(
                    run
                ):  # nothing follows from a run that was ended from outside
                    self._enqueue(
                        left for following in on_end(run) for left in self._left(following, on_end)
                    )


def _turn(run: PlannedRun) -> tuple[bool, int, float]:
    """The sort key of runs: trials, then one seed of all rows before the next seed,
    long runs before short ones.
    """
    return (not run.is_trial, run.seed, -run.cost)


def close(
    record: SweepRecord,
    *,
    whole: bool,
    table: str | None = None,
    rows: bool = False,
    command: str | None = None,
) -> int:
    """Write the report, print `table` and, without it or with `rows`, that of all runs;
    return the exit code.

    The last line is the page's path. Standard error names the runs that are left, and
    the `command` to continue.
    """
    page = record.write_page()
    if table is not None:
        print("".join(f"{printable(line)}\n" for line in table.splitlines()))
    if table is None or rows:
        print(to_text(record.results()))
    print(page, flush=True)
    if not whole:
        if command is not None:
            print(f"to go on: {command}", file=sys.stderr)
        return RESUMABLE
    if left := record.left():
        going_on = "the same command continues them" if command is None else f"to go on: {command}"
        print(f"runs that did not reach their end: {len(left)}; {going_on}", file=sys.stderr)
        return 1
    return (
        0 if any(record.summary(run).get("status") == "finished" for run in record.planned) else 1
    )


def sweep_grid(
    sweep: SweepFile,
    out: Path,
    workers: int | None,
    executor: Local,
    *,
    mode: str | None = None,
    again: str | None = None,
) -> int:
    """Train every point of the file and report; the last printed line is the report's
    path.

    `mode` replaces the search in sweep.json. `again` is the command that continues the
    sweep, if not the same one.
    """
    planned = plan_sweep(sweep)
    record = SweepRecord(out, mode or sweep.search, baseline_of(sweep.reference, planned))
    _check(sweep, record, planned, workers, executor)
    whole = Session(record, workers, executor).train(planned)
    return close(record, whole=whole, command=again)


def _check(
    sweep: SweepFile,
    record: SweepRecord,
    planned: Sequence[PlannedRun],
    workers: int | None,
    executor: Local,
) -> None:
    """Refuse runs that can't be trained before anything is written, except the default
    corpus.
    """
    check_workers(workers, "workers", threads_set(planned), executor.cores())
    for run in planned:
        record.check(run)
    check_machine([run for run in planned if not has_ended(record.summary(run))], executor)
    for run in planned:
        prepare_default(text_of(run))
    check_inputs(planned)
    record.check_texts({folder for run in planned for folder in texts_of(run)})
    if said := left_out_of_reference(sweep):
        print(said, file=sys.stderr)


def tune_and_confirm(sweep: SweepFile, out: Path, workers: int | None, executor: Local) -> int:
    """Search the best rates of every point, train it at these with other seeds, report,
    and write tuning.json.
    """
    record = SweepRecord(out, "tune")
    tuning = Tuning(sweep, record)
    record.order, record.baseline = tuning.labels, tuning.baseline
    _check(sweep, record, tuning.checked(), workers, executor)
    session = Session(record, workers, executor, tuning.to_come)
    tuning.say = session.say
    whole = session.train(tuning.first(), tuning.after)
    tuning.write()
    return close(record, whole=whole, table=tuning_table(tuning.rows()), rows=True)


def measure_sensitivity(sweep: SweepFile, out: Path, workers: int | None, executor: Local) -> int:
    """Quantise one layer pattern at a time, print the gaps and write sensitivity.json."""
    study = plan_study(sweep)
    record = SweepRecord(out, "sensitivity", study.reference[0].label)
    _check(
        replace(sweep, reference=sweep.reference or {}), record, study.planned, workers, executor
    )

    def after(_: PlannedRun) -> Iterable[PlannedRun]:
        write_gaps(study, record)
        return ()

    whole = Session(record, workers, executor).train(study.planned, after)
    write_gaps(study, record)
    return close(record, whole=whole, table=gaps_table(measure_gaps(study, record)))


MODES = {"tune": tune_and_confirm, "sensitivity": measure_sensitivity}
