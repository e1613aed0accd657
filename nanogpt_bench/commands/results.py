"""`nanogpt-bench results`: a sweep as one small file, tables of such files, and rows of them trained again."""

from __future__ import annotations

import argparse
import math
import re
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from nanogpt_bench.commands.arguments import braced, natural, one_of
from nanogpt_bench.config.metrics import VAL_LOSS
from nanogpt_bench.config.settings import build_config
from nanogpt_bench.data.batches import open_corpus
from nanogpt_bench.data.text import prepare_default
from nanogpt_bench.report.results import Result, measure
from nanogpt_bench.report.results_file import MISSING, RUN, Exported, export, is_of_kind, read_export, to_json
from nanogpt_bench.report.rows import Row, find_reference
from nanogpt_bench.report.tables import padded, to_csv, to_markdown, tuning_table
from nanogpt_bench.runs.environment import DECIDING, MINOR, differing, environment, settings_of
from nanogpt_bench.runs.load import Run, load_run
from nanogpt_bench.setup.resolve import resolve
from nanogpt_bench.setup.start import start_facts
from nanogpt_bench.sweep.plan import PlannedRun, baseline_of
from nanogpt_bench.sweep.record import SweepRecord
from nanogpt_bench.sweep.session import Session
from nanogpt_bench.system.errors import BenchError, counted, printable
from nanogpt_bench.system.files import holds, refuse_to_replace, write_text
from nanogpt_bench.system.lock import locked
from nanogpt_bench.system.signals import RESUMABLE

WORDS = ("export", "show", "rerun")
TABLES = {"markdown": to_markdown, "csv": to_csv}
#: options, and the words that they go with
GO_WITH = {
    "out": ("export", "rerun"),
    "reference": ("show",),
    "table": ("show",),
    **dict.fromkeys(("row", "seed", "data_dir", "anyway"), ("rerun",)),
}
MODE = "rerun"
#: what the same loss to three decimals may differ by
SAME = 5e-4


def add_parser(commands: Any, text: str) -> Any:
    """Add the command and return its parser."""
    parser = commands.add_parser(
        "results",
        help=text,
        usage="nanogpt-bench results export SWEEP --out FILE.json\n"
        "       nanogpt-bench results show FILE.json [--reference ROW] [--table markdown|csv]\n"
        "       nanogpt-bench results rerun FILE.json --row ROW [--seed N] [--data.dir DIR] [--anyway] [--out DIR]",
        description="export: write what the runs of a sweep or a comparison have come to, their settings, their\n"
        "environments and what was tuned into one JSON file. show: print the tables of such a file, whose page\n"
        "report draws. rerun: train a row of it again, and print the recorded losses, those found and their\n"
        "differences.",
        epilog="examples:\n  nanogpt-bench results export runs/sweep-my_study/tune --out my_study.json\n"
        "  nanogpt-bench results show my_study.json --reference muon\n"
        "  nanogpt-bench results rerun my_study.json --row 'E4M3 stochastic' --seed 42\n"
        "  nanogpt-bench report my_study.json --out report",
    )
    parser.add_argument("word", type=one_of(WORDS), metavar=braced(WORDS), help="which of these")
    parser.add_argument("path", type=Path, metavar="SWEEP|FILE.json", help="export: a sweep's folder")
    parser.add_argument(
        "--out", type=Path, metavar="FILE.json|DIR", help="export: file to write; rerun: folder of runs"
    )
    parser.add_argument("--reference", metavar="ROW", help="show: row to measure against (default: the file's)")
    parser.add_argument(
        "--table", type=one_of(TABLES), metavar=braced(TABLES), help="show: this form of the table alone"
    )
    parser.add_argument("--row", metavar="ROW", help="rerun: the row, by its label, or by its format and rule")
    parser.add_argument("--seed", type=natural, metavar="N", help="rerun: this seed alone (default: all of the row's)")
    parser.add_argument("--data.dir", dest="data_dir", type=Path, metavar="DIR", help="rerun: where its text lies here")
    parser.add_argument("--anyway", action="store_true", help="rerun: though torch, GPU or text differ")
    return parser


def main(args: argparse.Namespace) -> int:
    """The command line's entry: export a folder, show a file, or make a row of it again.

    Raises:
        BenchError: a folder or a file that holds no results, or options that belong to another word.
    """
    for option, words in GO_WITH.items():
        if getattr(args, option) not in (None, False) and args.word not in words:
            told = "; show prints, and report FILE.json --out DIR draws" * (option == "out")
            raise BenchError(f"--{option.replace('_', '.')} goes with results {' and '.join(words)}{told}")
    path = args.path
    if args.word == "rerun":
        return rerun(path, args)
    if args.word == "show":
        return _show(read_export(path), args.reference, args.table)
    if args.out is None:
        raise BenchError("--out is missing: results export SWEEP --out FILE.json")
    return _export(path, args.out)


def _export(folder: Path, out: Path) -> int:
    if out.suffix != ".json":
        raise BenchError(f"--out {str(out)!r} is not allowed; give a name that ends in .json")
    refuse_to_replace("--out", out, holds(is_of_kind), "a name of its own")
    content = export(folder)
    write_text(out, to_json(content))
    ended, missing = (sum(entry["kind"] == kind for entry in content) for kind in (RUN, MISSING))
    partial = f" of {ended + missing}; {missing} are missing, and every table of the file says so" if missing else ""
    print(f"{out}: {counted(ended, 'run')}{partial}", file=sys.stderr)
    return 0


def _show(content: Exported, reference: str | None, table: str | None) -> int:
    """Print the table, and unless one form of it is asked for, what was tuned."""
    results = results_of(content, reference)
    if table is not None:
        print(TABLES[table](results), end="")
        return 0
    print(to_markdown(results))
    if content.tuning:
        print(tuning_table(content.tuning))
    return 0


def results_of(content: Exported, reference: str | None = None) -> list[Result]:
    """Return the table of a results file, measured against a row of that name, else against the file's own.

    Raises:
        BenchError: no such row; names the nearest one.
    """
    baseline = content.baseline if reference is None else baseline_of(reference, content.rows)
    rows: list[Row] = list(content.rows)
    return measure(rows, find_reference(rows, baseline))


def rerun(path: Path, args: argparse.Namespace) -> int:
    """Train the runs of a row again, with the settings, device and threads that they had, and print both losses.

    Returns 0 where every final loss is the recorded one to three decimals, 1 where one is not, 75 when a signal ended
    it: the same command goes on.

    Raises:
        BenchError: no such row or seed; another torch, GPU or text than the row's, unless `--anyway`: it names them.
    """
    rows = read_export(path).rows
    if args.row is None:
        known = ", ".join(repr(row.label) for row in rows)
        raise BenchError(f"--row is missing: results rerun FILE.json --row ROW; the rows of {path.name}: {known}")
    row = next(row for row in rows if row.label == baseline_of(args.row, rows, "--row"))
    runs = _chosen(row, args.seed)
    planned = [_planned(row, run, args.data_dir) for run in runs]
    _compare(runs, planned, anyway=args.anyway)
    folder = args.out or Path("runs") / f"rerun-{path.stem}-{re.sub(r'[^A-Za-z0-9._=+-]+', '-', row.label)}"
    with locked(folder, "--out"):
        record = SweepRecord(folder, MODE)
        for run in planned:
            record.check(run)
        if not Session(record, None).train(planned):
            return RESUMABLE
        again = [load_run(record.run_dir(run)) for run in planned]
    print(padded(list(_cells(runs, again))), end="")
    return _verdict(row, runs, again)


def _chosen(row: Row, seed: int | None) -> list[Run]:
    """The runs of a row that are to be made again."""
    runs = [run for run in row.runs if run.status == "finished" and seed in (None, run.seed)]
    if not runs:
        there = ", ".join(str(run.seed) for run in row.runs if run.status == "finished") or "none"
        raise BenchError(f"--seed {seed}: {row.label!r} has no finished run of it; finished seeds: {there}")
    return runs


def _planned(row: Row, run: Run, data_dir: Path | None) -> PlannedRun:
    """The same training once more: every setting as recorded, and the threads that it had."""
    settings = settings_of(run.config) | ({} if data_dir is None else {"data.dir": str(data_dir)})
    settings["runtime.threads"] = run.environment.get("threads") or settings.get("runtime.threads")
    if run.environment.get("gpu") is None:
        settings["runtime.device"] = "cpu"
    name = f"seed={run.seed}"
    return PlannedRun(row.label, row.rule, row.format, int(run.seed or 0), name, settings)


def _compare(runs: Sequence[Run], planned: Sequence[PlannedRun], *, anyway: bool) -> None:
    """Refuse what would give other numbers, and say what may."""
    prepare_default(str(planned[0].settings["data.dir"]))
    config = resolve(build_config(planned[0].settings))
    here = environment(open_corpus(config), config.runtime.threads) | start_facts(config)
    deciding, minor = (
        dict.fromkeys(line for run in runs for line in differing(run.environment, here, facts))
        for facts in (DECIDING, MINOR)
    )
    if deciding and not anyway:
        raise BenchError(f"not the same row: {'; '.join(deciding)}; --anyway trains it all the same")
    for line in (*deciding, *minor):
        print(printable(f"differs: {line}"), file=sys.stderr)


def _cells(runs: Sequence[Run], again: Sequence[Run]) -> Iterator[list[str]]:
    """Yield the table's lines: every validation of every seed, and the row's own number where there are several."""
    yield ["seed", "step", "recorded", "here", "difference"]
    for run, other in zip(runs, again, strict=True):
        here = dict(zip(*other.curve(VAL_LOSS.name), strict=True))
        for step, loss in zip(*run.curve(VAL_LOSS.name), strict=True):
            yield [str(run.seed), f"{step:g}", *_numbers(loss, here.get(step))]
    if len(runs) > 1:
        yield ["mean", "final", *_numbers(*(_mean(each) for each in (runs, again)))]


def _mean(runs: Sequence[Run]) -> float | None:
    losses = [run.number("final_val_loss") for run in runs]
    known = [loss for loss in losses if loss is not None]
    return statistics.fmean(known) if len(known) == len(losses) else None


def _numbers(loss: float | None, here: float | None) -> list[str]:
    shown = ["-" if value is None else f"{value:.6f}" for value in (loss, here)]
    return [*shown, "-" if loss is None or here is None else f"{here - loss:+z.6f}"]


def _verdict(row: Row, runs: Sequence[Run], again: Sequence[Run]) -> int:
    """Say whether the numbers are those of the file."""
    losses = [[run.number("final_val_loss") for run in each] for each in (runs, again)]
    apart = [
        math.inf if then is None or now is None or other.status != "finished" else abs(now - then)
        for then, now, other in zip(*losses, again, strict=True)
    ]
    same = max(apart) < SAME
    words = "the recorded number" if same else "NOT the recorded number"
    bits = ", to the bit" if not any(apart) else ""
    print(printable(f"{row.label}: {words} to three decimals{bits}"))
    return 0 if same else 1
