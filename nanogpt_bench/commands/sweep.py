"""`nanogpt-bench sweep`: read the file, train what is left of it, report."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from nanogpt_bench.commands.arguments import add_executor, positive
from nanogpt_bench.config.schema import DEFAULT_DATA_DIR
from nanogpt_bench.data.stdlib import prepare_default
from nanogpt_bench.evaluation.sensitivity import gaps_table
from nanogpt_bench.report.tables import tuning_table
from nanogpt_bench.runs.find import has_ended
from nanogpt_bench.sweep.file import SweepFile, find_sweep, read_sweep
from nanogpt_bench.sweep.lr_limits import Searches, limits_table
from nanogpt_bench.sweep.plan import PlannedRun, baseline_of, check_inputs, left_out_of_reference, plan_sweep
from nanogpt_bench.sweep.record import SweepRecord
from nanogpt_bench.sweep.sensitivity import measure_gaps, plan_study, write_gaps
from nanogpt_bench.sweep.session import Session, check_machine, close, threads_set
from nanogpt_bench.sweep.tuning import Tuning
from nanogpt_bench.system.errors import BenchError
from nanogpt_bench.system.lock import locked
from nanogpt_bench.workers.executors import check_executor, executor_of
from nanogpt_bench.workers.pool import Executor, Local, check_workers


def add_parser(commands: Any, text: str) -> Any:
    """Add the command and return its parser."""
    parser = commands.add_parser(
        "sweep",
        help=text,
        usage="nanogpt-bench sweep FILE.yaml [--lr-limits | --sensitivity] [--reference ROW] [--smoke]\n"
        "                           [--workers N] [--out DIR] [--section.key VALUE ...]",
        description="Train one run for every point of FILE.yaml's axes, several at a time, and write a report. With\n"
        "tune and confirm in the file: find the best learning rate of every point first, then train it on other\n"
        "seeds. The same command goes on where an interrupted one was.",
        epilog="examples:\n  nanogpt-bench sweep formats.yaml\n"
        "  nanogpt-bench sweep my_sweep.yaml --workers 2 --out runs/mine --train.max_steps 500\n"
        "  nanogpt-bench sweep lr_limits.yaml --lr-limits\n"
        "  nanogpt-bench sweep sensitivity.yaml --sensitivity --data.dir data/book",
    )
    parser.add_argument("file", nargs="?", metavar="FILE.yaml", help="a sweep file, or the name of a shipped one")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--lr-limits", action="store_true", help="largest stable learning rate of every point")
    mode.add_argument("--sensitivity", action="store_true", help="quantise one layer pattern at a time: loss gaps")
    parser.add_argument("--reference", metavar="ROW", help="row to measure against (default: the file's, or BF16)")
    parser.add_argument("--smoke", action="store_true", help="with what the file's section smoke says: the same, small")
    parser.add_argument("--workers", type=positive, metavar="N", help="runs at a time (default: the file's, or cores)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of the results (default: runs/sweep-FILE)")
    add_executor(parser)
    return parser


def main(args: argparse.Namespace) -> int:
    """The command line's entry: see `sweep_grid`, `tune_and_confirm` and what the other options stand for.

    Raises:
        BenchError: options that don't go together, or no file where one is needed.
    """
    if args.file is None:
        raise BenchError("FILE.yaml is missing: a sweep file, or the name of a shipped one")
    sweep = read_sweep(find_sweep(args.file), args.overrides, smoke=args.smoke)
    if args.reference is not None:
        sweep = replace(sweep, reference=args.reference)
    check_executor(args.executor, args.address)
    if args.executor == "local":
        check_workers(args.workers, "--workers")
    workers = args.workers or sweep.workers
    plain = sweep.search if sweep.tune is None else "tune"
    mode = "lr-limits" if args.lr_limits else "sensitivity" if args.sensitivity else plain
    out = args.out or Path("runs") / f"sweep-{sweep.path.stem}" / (mode + "-smoke" * args.smoke)
    if sweep.rows and mode in MODES:
        raise BenchError(f"rows in {sweep.path.name} go with a grid; {mode} takes axes, such as rule and model.format")
    with locked(out, "--out"), executor_of(args.executor, args.address, out) as executor:
        return MODES.get(mode, sweep_grid)(sweep, out, workers, executor)


def sweep_grid(
    sweep: SweepFile,
    out: Path,
    workers: int | None = None,
    executor: Executor | None = None,
    *,
    mode: str | None = None,
    again: str | None = None,
) -> int:
    """Train every point of the file and report; the last line is the report's path.

    `mode` is told in sweep.json in place of the search. `again` is the command that goes on, where it is not the same.

    Returns 0, 1 when not one run finished or one was ended from outside (a full disk, a kill, a crash), 75 when a
    signal ended it (the report then covers what there is).

    Raises:
        BenchError: a file, corpus or output folder that can't be used; nothing is trained.
    """
    planned = plan_sweep(sweep)
    record = SweepRecord(out, mode or sweep.search, baseline_of(sweep.reference, planned))
    _check(sweep, record, planned, workers, executor)
    whole = Session(record, workers, executor=executor).train(planned)
    return close(record, whole=whole, command=again)


def _check(
    sweep: SweepFile,
    record: SweepRecord,
    planned: Sequence[PlannedRun],
    workers: int | None,
    executor: Executor | None,
) -> None:
    """Refuse what can't be trained before anything is written, the default corpus apart; open the results file."""
    check_workers(workers, "workers", threads_set(planned), None if executor is None else executor.cores())
    for run in planned:
        record.check(run)
    check_machine([run for run in planned if not has_ended(record.summary(run))], executor or Local())
    for folder in {str(run.settings.get("data.dir", DEFAULT_DATA_DIR)) for run in planned}:
        prepare_default(folder)
    check_inputs(planned)
    if said := left_out_of_reference(sweep):
        print(said, file=sys.stderr)


def tune_and_confirm(sweep: SweepFile, out: Path, workers: int | None = None, executor: Executor | None = None) -> int:
    """Search the best rates of every point, train it at these on other seeds, report and write tuning.json.

    Returns and raises as `sweep_grid` does.
    """
    record = SweepRecord(out, "tune")
    tuning = Tuning(sweep, record)
    record.order, record.baseline = tuning.labels, tuning.baseline
    _check(sweep, record, tuning.checked(), workers, executor)
    session = Session(record, workers, tuning.to_come, executor)
    tuning.say = session.say
    whole = session.train(tuning.first(), tuning.after)
    tuning.write()
    return close(record, whole=whole, table=tuning_table(tuning.rows()), rows=True)


def find_lr_limits(sweep: SweepFile, out: Path, workers: int | None = None, executor: Executor | None = None) -> int:
    """Find the largest stable learning rate of every point of the axes, print the table and write lr_limits.json.

    Returns and raises as `sweep_grid` does.
    """
    record = SweepRecord(out, "lr-limits")
    searches = Searches(sweep, record)
    first = searches.first()
    _check(sweep, record, first, workers, executor)
    whole = Session(record, workers, executor=executor).train(first, searches.after)
    searches.write()
    return close(record, whole=whole, table=limits_table(searches.rows()))


def measure_sensitivity(
    sweep: SweepFile, out: Path, workers: int | None = None, executor: Executor | None = None
) -> int:
    """Quantise one layer pattern at a time, print the gaps and write sensitivity.json.

    Returns and raises as `sweep_grid` does.
    """
    study = plan_study(sweep)
    record = SweepRecord(out, "sensitivity", study.reference[0].label)
    _check(replace(sweep, reference=sweep.reference or {}), record, study.planned, workers, executor)

    def after(_: PlannedRun) -> Iterable[PlannedRun]:
        write_gaps(study, record)
        return ()

    whole = Session(record, workers, executor=executor).train(study.planned, after)
    write_gaps(study, record)
    return close(record, whole=whole, table=gaps_table(measure_gaps(study, record)))


MODES = {"tune": tune_and_confirm, "lr-limits": find_lr_limits, "sensitivity": measure_sensitivity}
