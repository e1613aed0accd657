"""A sweep from its plan to its report.

Each mode has a function: `sweep_grid` for grid or random points, `tune_and_confirm` for
rates, `measure_sensitivity` for layers. All of them go the same way:

    plan -> runs             `sweep.plan`, `sweep.tuning`, `sweep.sensitivity`
    check                    all that may be refused is, before anything is written
    Session.train            runs in worker processes, with one progress bar
        a run ends -> record, and the runs that follow from it are enqueued
    close                    the report, the tables, the exit code

A signal, or a text that changes meanwhile, stops the workers. The same command then
goes on with the runs that are left.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from nanogpt_bench.config.endings import RunStatus
from nanogpt_bench.config.schema import DEFAULT_DATA_DIR
from nanogpt_bench.config.settings import load_config
from nanogpt_bench.data import prepare_default
from nanogpt_bench.data.batches import TextChangedError
from nanogpt_bench.evaluation.measurement import gaps_table
from nanogpt_bench.report.tables import to_text, tuning_table
from nanogpt_bench.runs.load import SWEEP_DEFAULTS, has_ended
from nanogpt_bench.sweep.file import SweepFile
from nanogpt_bench.sweep.plan import (
    PlannedRun,
    baseline_of,
    check_inputs,
    left_out_of_reference,
    plan_sweep,
)
from nanogpt_bench.sweep.record import SweepMode, SweepRecord
from nanogpt_bench.sweep.sensitivity import measure_gaps, plan_study, write_gaps
from nanogpt_bench.sweep.tuning import Tuning
from nanogpt_bench.sweep.workers import (
    Job,
    JobEvent,
    JobEventKind,
    Local,
    Pool,
    check_workers,
    divide,
    torch_threads,
)
from nanogpt_bench.system.errors import BenchError, counted, one_line, printable, rough_time
from nanogpt_bench.system.signals import RESUMABLE, StopRequest, stop_requests

# Without a terminal, estimates of the time left are lines of their own.
#: seconds before the first of them
FIRST_ESTIMATE = 20.0
#: least seconds between two of them, and least share of the elapsed time
NEXT_ESTIMATE = 60.0
ESTIMATE_SHARE = 1 / 6
#: a function that is called with a run that has ended, and returns the runs that follow
#: from it
OnEnd = Callable[[PlannedRun], Iterable[PlannedRun]]


@dataclass
class Entry:
    """A run of the progress bar."""

    name: str
    #: in the unit of the other runs' sizes
    size: float = 1.0
    #: share that is done, 0 to 1
    done: float = 0.0
    ended: bool = False
    #: newest validation loss
    loss: float | None = None


class _Start(NamedTuple):
    """Time and share of the work at the first steps, before which processes start."""

    seconds: float
    share: float


class Bar:
    """The progress bar, which shows the events of a pool.

    It is a context manager, since the terminal has to be restored.
    """

    def __init__(self, console: Console) -> None:
        self.entries: list[Entry] = []
        #: returns the sizes of the runs that will be added, as far as they are known;
        #: `tuple` returns none
        self.to_come: Callable[[], Sequence[float]] = tuple
        self._console = console
        self._next_estimate = FIRST_ESTIMATE
        self._started = time.monotonic()
        self._first_steps: _Start | None = None
        self._bar = Progress(
            BarColumn(),
            TextColumn("{task.description}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
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
        """Return the seconds since the bar was made."""
        return time.monotonic() - self._started

    def show(self, event: JobEvent) -> None:
        """Apply an event, print a line about a run that has ended, and move the bar."""
        if event.job is not None:
            self._apply(event, self.entries[event.job])
        self._bar.update(self._task, completed=self.share(), description=self.words())
        elapsed = self.elapsed()
        if (
            not self._console.is_terminal
            and elapsed >= self._next_estimate
            and self.remaining_time()
        ):
            self._next_estimate = elapsed + max(NEXT_ESTIMATE, elapsed * ESTIMATE_SHARE)
            self.say(self.words())

    def _apply(self, event: JobEvent, entry: Entry) -> None:
        if event.kind == JobEventKind.PROGRESS:
            entry.done = event.data["step"] / event.data["max_steps"]
            entry.loss = event.data.get("val_loss")
            if self._first_steps is None:
                self._first_steps = _Start(self.elapsed(), self.share())
        elif event.kind in (JobEventKind.DONE, JobEventKind.FAILED):
            entry.ended = True
            entry.done = 1.0
            if event.kind == JobEventKind.FAILED:
                ending = f"failed  {one_line(event.data['error']['message'])}"
            elif entry.loss is None:
                ending = "done"
            else:
                ending = f"done  val {entry.loss:.3f}"
            self.say(f"{entry.name}: {ending}")

    def share(self) -> float:
        """Return the share of all work that is done; runs to come count as work."""
        sizes = [*(entry.size for entry in self.entries), *self.to_come()]
        if not sizes:
            return 0.0
        return sum(entry.size * entry.done for entry in self.entries) / sum(sizes)

    def words(self) -> str:
        """Return how far the runs have come, as the bar says it."""
        ended = sum(entry.ended for entry in self.entries)
        return f"{ended} of {len(self.entries)} runs ended{self.remaining_time()}"

    def remaining_time(self) -> str:
        """Estimate the remaining time from the pace so far, as words after a comma.

        It underestimates by about one run. It is "" if unknown.
        """
        # Before the first step nothing is done, and the time is unknown.
        start = self._first_steps or _Start(0.0, self.share())
        share = self.share()
        finished_share = share - start.share
        rest = 1.0 - share
        if finished_share <= 0 or rest <= 0:
            return ""
        return f", {rough_time((self.elapsed() - start.seconds) * rest / finished_share)} left"


def text_of(run: PlannedRun) -> str:
    """Return the folder of the corpus that a run is trained on."""
    return str(run.settings.get("data.dir", DEFAULT_DATA_DIR))


def texts_of(run: PlannedRun) -> list[str]:
    """Return the folders of all corpora that a run reads."""
    texts = [text_of(run)]
    also = run.settings.get("eval.also")
    if also is not None:
        texts.append(str(also))
    return texts


def threads_set(runs: Iterable[PlannedRun]) -> int | None:
    """Return the most threads that a run's settings name; None if no run's do."""
    threads = [run.settings.get("runtime.threads") or 0 for run in runs]
    return max(threads, default=0) or None


def check_machine(runs: Sequence[PlannedRun], executor: Local) -> None:
    """Refuse runs that the machines can't train.

    They need a device that the executor does not have, or more memory than is free on
    this machine. `prepare_run` checks both again in the process that trains a run: that
    may be on another machine, and hours later. Here a sweep is refused as a whole,
    before its first run.
    """
    from nanogpt_bench.setup.memory import DECIDING, check_fits

    for device in {str(run.settings.get("runtime.device")) for run in runs}:
        executor.check_device(device)
    keys = tuple(DECIDING)
    different_runs = {}
    for run in runs:
        deciding = [item for item in run.settings.items() if item[0].startswith(keys)]
        different_runs[repr(deciding)] = run
    for run in different_runs.values():
        check_fits(run.config)


class Session:
    """Trains the runs that a record does not have yet, several at a time."""

    def __init__(
        self,
        record: SweepRecord,
        workers: int | None,
        executor: Local,
        to_come: Callable[[], Sequence[float]] = tuple,
    ) -> None:
        """Have `workers` at a time, None for all that fit; `to_come` as in `Bar`."""
        self._record = record
        self._workers = workers
        self._executor = executor
        #: the jobs of the pool, and their runs in the same order
        self._jobs: list[Job] = []
        self._runs: list[PlannedRun] = []
        #: indices of jobs that no worker has yet
        self._waiting: deque[int] = deque()
        self._bar = Bar(Console(stderr=True))
        self._bar.to_come = to_come
        self.say = self._bar.say
        self._threads = 1

    def train(self, planned: Sequence[PlannedRun], on_end: OnEnd = lambda _: ()) -> bool:
        """Train the runs, which `_check_runs` has checked, and those that follow from them.

        Returns False if a signal ended it early.
        """
        to_train: list[PlannedRun] = []
        for run in planned:
            to_train += self._add(run, on_end)
        # What follows from runs that ended at an earlier start is planned only now.
        checked_names = {run.name for run in planned}
        following = [run for run in to_train if run.name not in checked_names]
        check_machine(following, self._executor)
        self._record.write_manifest()
        if not to_train:
            print(
                f"all runs of {self._record.folder} have ended; there is nothing to train",
                file=sys.stderr,
            )
            return True
        division = divide(
            self._workers,
            len(to_train),
            threads_set(to_train),
            torch_threads(),
            self._executor.cores(),
        )
        self._threads = division.threads
        pool = Pool(division.workers, division.threads, self._executor)
        with pool, self._bar:
            ended_count = len(self._record.planned) - len(to_train)
            earlier = f", {ended_count} done already" if ended_count else ""
            self.say(
                f"{counted(len(to_train), 'run')}{earlier}; {division.workers} at a time, "
                f"{counted(division.threads, 'thread')} each"
            )
            with stop_requests(pool.kill) as stop:
                self._enqueue(to_train)
                try:
                    self._follow(pool, on_end, stop)
                except TextChangedError as error:
                    self.say("stopping the runs: their text has changed")
                    self._stop(pool)
                    raise self._changed_text(error) from None
                if stop.asked:
                    self.say(f"{stop.name}: stopping the runs; the same command continues")
                    self._stop(pool)
                    return False
        return True

    def _stop(self, pool: Pool) -> None:
        pool.stop(patient=True)
        self._record.interrupt()

    def _changed_text(self, error: TextChangedError) -> BenchError:
        """Return the error of a corpus that has changed, and what is left to do."""
        folder = self._record.folder
        planned = self._record.planned
        ended = sum(self._record.ended(run) for run in planned)
        return BenchError(
            f"{error}: {ended} of {len(planned)} runs in {str(folder)!r} have ended on the text as "
            f"it was; put that text back, and the same command with --out {str(folder)!r} "
            "continues"
        )

    def _add(self, run: PlannedRun, on_end: OnEnd) -> list[PlannedRun]:
        """Add a run to the record; return the runs to be trained.

        They are the run itself or, if it has ended already, those that follow from it.
        """
        if not self._record.add(run):
            return [run]
        return self._add_following(run, on_end)

    def _add_following(self, run: PlannedRun, on_end: OnEnd) -> list[PlannedRun]:
        """Add the runs that follow from an ended one; return those to be trained."""
        to_train: list[PlannedRun] = []
        for following in on_end(run):
            to_train += self._add(following, on_end)
        return to_train

    def _enqueue(self, runs: Iterable[PlannedRun]) -> None:
        for run in runs:
            self._waiting.append(len(self._jobs))
            self._jobs.append(self._job(run))
            self._runs.append(run)
            self._bar.entries.append(Entry(f"{run.label} · seed {run.seed}", run.cost))
        order = sorted(self._waiting, key=lambda job: _turn(self._runs[job]))
        # The pool takes its next jobs from this object.
        self._waiting.clear()
        self._waiting.extend(order)

    def _job(self, run: PlannedRun) -> Job:
        run_dir = self._record.run_dir(run)
        resume = self._record.resumes(run)
        threads = self._threads
        config = run_dir / "config.yaml"
        if resume and config.is_file():
            # With as many threads as before it gives the same numbers.
            threads = load_config(config).runtime.threads or threads
        digests = self._record.texts
        return {
            "settings": {"runtime.threads": threads, **SWEEP_DEFAULTS, **run.settings},
            "run_dir": str(run_dir),
            "argv": sys.argv,
            "resume": resume,
            "texts": {folder: digests[folder] for folder in texts_of(run) if folder in digests},
        }

    def _follow(self, pool: Pool, on_end: OnEnd, stop: StopRequest) -> None:
        """Show and record the pool's events until all runs have ended, or a stop."""
        for event in pool.run(self._jobs, self._waiting):
            if stop.asked:
                return
            if event.job is None:
                self._bar.show(event)
                continue
            run = self._runs[event.job]
            if event.kind == JobEventKind.DONE:
                event = self._with_outcome(event, run)
            error = event.data["error"] if event.kind == JobEventKind.FAILED else None
            if error is not None and error["kind"] == TextChangedError.__name__:
                # It is no failure of this run, which has not begun: no other can begin
                # either.
                raise TextChangedError(error["message"])
            self._bar.show(event)
            if event.kind in (JobEventKind.DONE, JobEventKind.FAILED):
                self._record.end(run, error)
                # Nothing follows from a run that was ended from outside.
                if self._record.ended(run):
                    self._enqueue(self._add_following(run, on_end))

    def _with_outcome(self, event: JobEvent, run: PlannedRun) -> JobEvent:
        """Return the event of a worker that is done; failed if its training has."""
        summary = self._record.summary(run)
        if summary.get("status") == RunStatus.FAILED and summary.get("failure"):
            return JobEvent(event.job, JobEventKind.FAILED, {"error": summary["failure"]})
        return event


class _Turn(NamedTuple):
    """The sort key of runs.

    Trials come first, then one seed of all rows before the next seed, long runs before
    short ones.
    """

    is_counted: bool
    seed: int
    negative_cost: int


def _turn(run: PlannedRun) -> _Turn:
    return _Turn(not run.is_trial, run.seed, -run.cost)


def close(
    record: SweepRecord,
    *,
    whole: bool,
    table: str | None = None,
    rows: bool = False,
    command: str | None = None,
) -> int:
    """Write the report, print the tables and return the exit code.

    The last line is the page's path. Standard error names the runs that are left.

    Args:
        record: the runs.
        whole: whether all runs were trained, and none was stopped by a signal.
        table: a table to be printed first.
        rows: whether the table of all runs is printed after `table`.
        command: the command that continues the sweep, if not the same one.
    """
    page = record.write_page()
    if table is not None:
        print("".join(f"{printable(line)}\n" for line in table.splitlines()))
    if table is None or rows:
        print(to_text(record.results()))
    print(page, flush=True)
    if not whole:
        if command is not None:
            print(f"to continue: {command}", file=sys.stderr)
        return RESUMABLE
    unfinished = record.unfinished()
    if unfinished:
        continuation = "the same command continues them"
        if command is not None:
            continuation = f"to continue: {command}"
        print(f"runs that did not end: {len(unfinished)}; {continuation}", file=sys.stderr)
        return 1
    for run in record.planned:
        if record.summary(run).get("status") == RunStatus.FINISHED:
            return 0
    return 1


def sweep_grid(
    sweep: SweepFile,
    out: Path,
    workers: int | None,
    executor: Local,
    *,
    mode: str | None = None,
    again: str | None = None,
) -> int:
    """Train every point of the file and report.

    The last printed line is the report's path. `mode` replaces the search in
    sweep.json. `again` is the command that continues the sweep, if not the same one.
    """
    planned = plan_sweep(sweep)
    record = SweepRecord(out, mode or sweep.search, baseline_of(sweep.reference, planned))
    _check_runs(sweep, record, planned, workers, executor)
    whole = Session(record, workers, executor).train(planned)
    return close(record, whole=whole, command=again)


def _check_runs(
    sweep: SweepFile,
    record: SweepRecord,
    planned: Sequence[PlannedRun],
    workers: int | None,
    executor: Local,
) -> None:
    """Refuse runs that can't be trained; only the default corpus is written before."""
    check_workers(workers, "workers", threads_set(planned), executor.cores())
    for run in planned:
        record.check(run)
    check_machine([run for run in planned if not has_ended(record.summary(run))], executor)
    for run in planned:
        prepare_default(text_of(run))
    check_inputs(planned)
    folders: set[str] = set()
    for run in planned:
        folders.update(texts_of(run))
    record.check_texts(folders)
    line = left_out_of_reference(sweep)
    if line:
        print(line, file=sys.stderr)


def tune_and_confirm(sweep: SweepFile, out: Path, workers: int | None, executor: Local) -> int:
    """Search the best rates of every point, then train it at these with other seeds.

    The report and tuning.json are written.
    """
    record = SweepRecord(out, SweepMode.TUNE)
    tuning = Tuning(sweep, record)
    record.order = tuning.labels
    record.baseline = tuning.baseline
    _check_runs(sweep, record, tuning.runs_to_check(), workers, executor)
    session = Session(record, workers, executor, tuning.to_come)
    tuning.say = session.say
    whole = session.train(tuning.first_trials(), tuning.runs_after)
    tuning.write()
    return close(record, whole=whole, table=tuning_table(tuning.entries()), rows=True)


def measure_sensitivity(sweep: SweepFile, out: Path, workers: int | None, executor: Local) -> int:
    """Quantise one layer pattern at a time; print and write the gaps."""
    study = plan_study(sweep)
    record = SweepRecord(out, SweepMode.SENSITIVITY, study.reference[0].label)
    # The study has a reference, also where the file names none.
    with_reference = replace(sweep, reference=sweep.reference or {})
    _check_runs(with_reference, record, study.planned, workers, executor)

    def write_after(_: PlannedRun) -> Iterable[PlannedRun]:
        write_gaps(study, record)
        return ()

    whole = Session(record, workers, executor).train(study.planned, write_after)
    write_gaps(study, record)
    return close(record, whole=whole, table=gaps_table(measure_gaps(study, record)))


#: the functions of the modes that are not trained by `sweep_grid`
MODES = {
    SweepMode.TUNE: tune_and_confirm,
    SweepMode.SENSITIVITY: measure_sensitivity,
}
