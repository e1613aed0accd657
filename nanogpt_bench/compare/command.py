"""`nanogpt-bench compare`: plan, train in worker processes, report."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from rich.console import Console

from nanogpt_bench.compare.board import Board
from nanogpt_bench.compare.closing import print_results
from nanogpt_bench.compare.demonstration import Demonstration
from nanogpt_bench.compare.plan import PlannedRun, check_count, choose_rows, longest_first, plan_runs
from nanogpt_bench.compare.pool import Pool
from nanogpt_bench.compare.record import Record
from nanogpt_bench.errors import BenchError
from nanogpt_bench.signals import RESUMABLE, StopRequest, stop_requests

DEFAULTS = Demonstration()
SECONDS_BETWEEN_PAGES = 20.0
# The largest share of one core that goes into rewriting the page: with many long runs it takes seconds.
PAGE_SHARE = 0.05


def main_compare(args: argparse.Namespace) -> int:
    """The command line's entry: see `compare`."""
    return compare(
        data_dir=args.data_dir,
        formats=args.formats,
        rules=args.rules,
        max_steps=args.max_steps,
        seeds=args.seeds or 1,
        out=args.out,
    )


def compare(
    *,
    data_dir: Path | None = None,
    formats: Sequence[str] | None = None,
    rules: Sequence[str] | None = None,
    max_steps: int | None = None,
    seeds: int = 1,
    out: Path | None = None,
    demonstration: Demonstration = DEFAULTS,
) -> int:
    """Train every row at every seed, write the report and print the table; the last line is the report's path.

    Returns 0, 1 when not one run finished, 75 when a signal ended it (the report then covers what there is).

    Raises:
        BenchError: an unknown format or rule, a corpus that can't be used, or an output folder that is taken.
    """
    rows = choose_rows(formats, rules, demonstration)
    check_count(len(rows) * seeds, f"{len(rows)} rows at --seeds {seeds:,}")
    if data_dir is not None:
        _check_corpus(data_dir, demonstration)
    folder = _new_folder(out)
    planned = plan_runs(
        rows,
        demonstration,
        seeds=seeds,
        max_steps=max_steps or demonstration.max_steps,
        data_dir=folder / "corpus" if data_dir is None else data_dir,
    )
    record = Record(folder, planned)
    whole = _train(record, prepare=data_dir is None, workers=demonstration.workers)
    return _finish(record, whole)


def _check_corpus(data_dir: Path, demonstration: Demonstration) -> None:
    """Refuse a corpus that no run could use before anything is written."""
    from nanogpt_bench.data import load_corpus
    from nanogpt_bench.model import SIZES

    load_corpus(data_dir, SIZES[demonstration.size].block_size)


def _new_folder(out: Path | None) -> Path:
    """Make the output folder; it must not hold anything yet, lest two comparisons mix."""
    folder = out or Path("runs") / f"compare-{datetime.now():%Y%m%d-%H%M%S}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        taken = any(folder.iterdir())
    except OSError as error:
        raise BenchError(f"--out {str(folder)!r} can't be used: {error.strerror or error}") from None
    if taken:
        raise BenchError(f"--out {str(folder)!r} is not empty; give a new folder or remove it first")
    return folder


def _train(record: Record, *, prepare: bool, workers: int) -> bool:
    """Run everything planned; False when it was interrupted before the end."""
    size = max(1, min(workers, len(record.planned), _cores()))
    pool = Pool(size)
    # The workers import torch while this process prepares the corpus.
    with pool, Board(record.planned, Console(stderr=True)) as board:
        if prepare:
            _prepare(record.folder, board)
        with stop_requests(pool.kill) as stop:
            _follow(record, pool, board, stop)
            if stop.asked:
                board.say(f"{stop.name}: stopping the runs and writing the report over what there is")
                pool.stop(patient=True)
                record.note_interruption()
                return False
    return True


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _prepare(folder: Path, board: Board) -> None:
    """Prepare the standard library's prose inside the output folder; on any failure leave no folder behind."""
    from nanogpt_bench.corpus import prepare_stdlib

    board.say("preparing the standard library's prose")
    try:
        prepare_stdlib(folder / "corpus")
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _follow(record: Record, pool: Pool, board: Board, stop: StopRequest) -> None:
    """Show and record what the pool reports until a stop is asked for, and rewrite the page every so often."""
    jobs = [_job(record, run) for run in record.planned]
    written, pause = time.monotonic(), SECONDS_BETWEEN_PAGES
    for event in pool.run(jobs, longest_first(record.planned)):
        if stop.asked:
            return
        if event.kind == "failed" and event.job is not None:
            record.note_failure(record.planned[event.job], event.data["error"])
        board.show(event)
        begun = time.monotonic()
        if begun - written > pause:
            record.write(running=True)
            written = time.monotonic()
            pause = max(SECONDS_BETWEEN_PAGES, (written - begun) / PAGE_SHARE)


def _job(record: Record, run: PlannedRun) -> dict[str, object]:
    return {"settings": run.settings, "run_dir": str(record.run_dir(run)), "argv": sys.argv}


def _finish(record: Record, whole: bool) -> int:
    page = record.write(running=False)
    results = record.results()
    print_results(results, Console())
    print(page, flush=True)
    if not whole:
        return RESUMABLE
    return 0 if any(run.status == "finished" for result in results for run in result.row.runs) else 1
