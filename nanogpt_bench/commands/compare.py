"""`nanogpt-bench compare`: plan, train in worker processes, report."""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from rich.console import Console

from nanogpt_bench.compare.board import Board
from nanogpt_bench.compare.closing import print_results
from nanogpt_bench.compare.demonstration import Demonstration
from nanogpt_bench.compare.executor import Executor
from nanogpt_bench.compare.executors import check_executor, executor_of
from nanogpt_bench.compare.overrides import as_typed, check_given, put_into, read_given, steps_of
from nanogpt_bench.compare.plan import PlannedRun, baseline_of, check_count, choose_rows, longest_first, plan_runs
from nanogpt_bench.compare.pool import Local, Pool
from nanogpt_bench.compare.record import Record
from nanogpt_bench.report.build import PAGE_SHARE, SECONDS_BETWEEN_PAGES
from nanogpt_bench.runs.earlier import (
    PASSING,
    check_same,
    drop_checkpoints,
    make_ready,
    plain,
    read_earlier,
    summary_of,
    why_again,
)
from nanogpt_bench.system.errors import BenchError, printable
from nanogpt_bench.system.lock import locked, new_folder
from nanogpt_bench.system.signals import RESUMABLE, StopRequest, stop_requests

DEFAULTS = Demonstration()


def main_compare(args: argparse.Namespace) -> int:
    """The command line's entry: see `compare`."""
    return compare(
        data_dir=args.data_dir,
        formats=args.formats,
        rules=args.rules,
        max_steps=args.max_steps,
        seeds=args.seeds or 1,
        out=args.out,
        reference=args.reference,
        overrides=[*args.overrides, *(() if args.draws is None else ("--optimizer.draws", args.draws))],
        executor=args.executor,
        address=args.address,
    )


def compare(
    *,
    data_dir: Path | None = None,
    formats: Sequence[str] | None = None,
    rules: Sequence[str] | None = None,
    max_steps: int | None = None,
    seeds: int = 1,
    out: Path | None = None,
    reference: str | None = None,
    overrides: Sequence[str] = (),
    demonstration: Demonstration = DEFAULTS,
    executor: str = "local",
    address: str | None = None,
) -> int:
    """Train every row at every seed, write the report and print the table; the last line is the report's path.

    With an `out` that holds the same comparison it goes on: runs that have ended stay as they are, those that were
    interrupted go on from their newest whole checkpoint, the others begin. `overrides` are settings as `run` takes
    them, `--section.key VALUE`, for every row that they mean something for. Gaps are measured against the row called
    `reference`, by its label or its format and rule; without it against the first BF16 row. `executor` is local, or ray
    for the cluster at `address`.

    Returns 0, 1 when not one run finished or one was ended from outside (a full disk, a kill, a crash), 75 when a
    signal ended it (the report then covers what there is).

    Raises:
        BenchError: an unknown format, rule or row, a corpus that can't be used, or an output folder that holds
            something else.
    """
    check_executor(executor, address)
    rows = choose_rows(formats, rules, demonstration)
    check_count(len(rows) * seeds, f"{len(rows)} rows at --seeds {seeds:,}")
    given = read_given(overrides)
    steps = steps_of(given, max_steps) or demonstration.max_steps
    demonstration = replace(demonstration, first_seed=given.pop("seed", demonstration.first_seed))

    def plan(corpus: Path) -> list[PlannedRun]:
        return plan_runs(
            rows,
            demonstration,
            seeds=seeds,
            max_steps=steps,
            data_dir=corpus,
            put=lambda settings: put_into(settings, given),
        )

    baseline = baseline_of(reference, plan(Path("corpus")))
    length = check_given(given, plan(data_dir or Path("corpus")), _say) if overrides else None
    if data_dir is not None:
        _check_corpus(data_dir, demonstration, length, given.get("task", "language"))
    elif given.get("task") == "classify":
        raise BenchError("--task classify needs --data.dir: the standard library's prose has no labels")
    asked = {
        **as_typed(overrides),
        "--data.dir": None if data_dir is None else str(data_dir),
        "--formats": None if formats is None else list(formats),
        "--rules": None if rules is None else list(rules),
        "--max-steps": steps,
        "--seeds": seeds,
        "--reference": reference,
    }
    default = Path("runs") / f"compare-{datetime.now():%Y%m%d-%H%M%S}"
    with nullcontext(out) if out is not None else new_folder(default) as folder, locked(folder, "--out"):
        corpus = folder / "corpus" if data_dir is None else data_dir
        record = _open_record(Record(folder, plan(corpus), baseline=baseline, asked=asked, corpus=corpus))
        with executor_of(executor, address, folder) as found:
            whole = _train(record, demonstration.workers, found)
        return _finish(record, whole)


def _say(line: str) -> None:
    print(printable(line), file=sys.stderr)


def _check_corpus(data_dir: Path, demonstration: Demonstration, block_size: int | None, task: str) -> None:
    """Refuse a corpus that no run could use before anything is written."""
    from nanogpt_bench.data.batches import label_names, load_corpus
    from nanogpt_bench.model.gpt import SIZES

    if task == "classify":
        label_names(load_corpus(data_dir, 0))
    else:
        load_corpus(data_dir, block_size or SIZES[demonstration.size].block_size)


def _open_record(record: Record) -> Record:
    """Begin the record, or take up what an earlier start of the same comparison left in the folder."""
    before = read_earlier(record.folder)
    if before is not None:
        settings = {run.name: plain(run.settings) for run in record.planned}
        check_same(record.folder, before, record.asked, settings, record.corpus_digests())
        record = replace(record, started=before.started)
    record.write_manifest()  # so that a start that is killed from here on can be gone on with
    return record


def _train(record: Record, workers: int, executor: Executor) -> bool:
    """Run what is left of the plan; False when it was interrupted before the end."""
    todo = record.left()
    record.drop_checkpoints()
    if not todo:
        print(f"all runs of {record.folder} have ended; its report is written again", file=sys.stderr)
        return True
    most = workers if isinstance(executor, Local) else executor.cores()
    size = max(1, min(most, len(todo), executor.cores()))
    pool = Pool(size, executor=executor)
    # The workers import torch while this process prepares the corpus.
    with pool, Board(todo, Console(stderr=True), size) as board:
        _prepare(record, board)
        if len(todo) < len(record.planned):
            board.say(f"runs left: {len(todo)}; ended before: {len(record.planned) - len(todo)}")
        board.say_again(_again(record, todo))
        with stop_requests(pool.kill) as stop:
            _follow(record, todo, pool, board, stop)
            if stop.asked:
                board.say(f"{stop.name}: stopping the runs and writing the report over what there is")
                pool.stop(patient=True)
                record.note_interruption()
                return False
    return True


def _again(record: Record, todo: Sequence[PlannedRun]) -> dict[str, str]:
    """Why runs are tried again that an earlier start had noted as failed, by name."""
    summaries = {run.name: summary_of(record.run_dir(run)) for run in todo}
    return {name: why_again(summary) for name, summary in summaries.items() if summary.get("status") == "failed"}


def _prepare(record: Record, board: Board) -> None:
    """Prepare the standard library's prose inside the output folder; on any failure leave no folder behind."""
    if record.corpus is None or record.corpus.exists():
        return
    from nanogpt_bench.data import prepare_stdlib

    board.say("preparing the standard library's prose")
    try:
        prepare_stdlib(record.corpus)
    except BaseException:
        if not any(record.run_dir(run).exists() for run in record.planned):
            shutil.rmtree(record.folder, ignore_errors=True)
        raise
    record.write_manifest()


def _follow(record: Record, todo: Sequence[PlannedRun], pool: Pool, board: Board, stop: StopRequest) -> None:
    """Show and record what the pool reports until a stop is asked for, and rewrite the page every so often."""
    jobs = [_job(record, run) for run in todo]
    written, pause = time.monotonic(), SECONDS_BETWEEN_PAGES
    for event in pool.run(jobs, longest_first(todo)):
        if stop.asked:
            return
        if event.kind == "failed" and event.job is not None:
            record.note_failure(todo[event.job], event.data["error"])
        if event.kind == "done" and event.job is not None:
            drop_checkpoints(record.run_dir(todo[event.job]), todo[event.job].settings)
        board.show(event)
        begun = time.monotonic()
        if begun - written > pause:
            record.write(running=True)
            written = time.monotonic()
            pause = max(SECONDS_BETWEEN_PAGES, (written - begun) / PAGE_SHARE)


def _job(record: Record, run: PlannedRun) -> dict[str, object]:
    run_dir = record.run_dir(run)
    return {
        "settings": {**PASSING, **run.settings},
        "run_dir": str(run_dir),
        "argv": sys.argv,
        "resume": make_ready(run_dir),
    }


def _finish(record: Record, whole: bool) -> int:
    page = record.write(running=False)
    results = record.results()
    print_results(results, Console())
    print(page, flush=True)
    if not whole:
        print(f"to go on: {_command(record)}", file=sys.stderr)
        return RESUMABLE
    if left := record.left():
        print(f"runs not brought to their end: {len(left)}; to go on: {_command(record)}", file=sys.stderr)
        return 1
    return 0 if any(run.status == "finished" for result in results for run in result.row.runs) else 1


def _command(record: Record) -> str:
    """The command that goes on with a comparison."""
    words = ["nanogpt-bench", "compare"]
    for option, value in {**record.asked, "--out": record.folder}.items():
        if value is not None:
            words += [option, ",".join(value) if isinstance(value, list) else str(value)]
    return shlex.join(words)
