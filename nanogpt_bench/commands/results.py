"""`nanogpt-bench results`: what a sweep has come to as one small file, and tables of such files."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

from nanogpt_bench.report.ladders import LADDERS, cells_of, climbed
from nanogpt_bench.report.predictors import FEWEST, Point, early_points, predictor_table, rank_predictors
from nanogpt_bench.report.results import Result, measure
from nanogpt_bench.report.results_file import TENTH, Exported, export, read_export, to_json
from nanogpt_bench.report.rows import Row, find_reference
from nanogpt_bench.report.tables import padded, to_csv, to_latex, to_markdown, tuning_table
from nanogpt_bench.sweep.plan import baseline_of
from nanogpt_bench.system.errors import BenchError
from nanogpt_bench.system.files import write_text
from nanogpt_bench.system.words import counted

TABLES = {"markdown": to_markdown, "latex": to_latex, "csv": to_csv}
#: when figures are taken, as a share of a run's steps
TIMES = {"tenth": TENTH, "end": 1.0}
#: options, and the words that they go with
GO_WITH = {
    "out": ("export", "rerun"),
    "reference": ("show", "monitors"),
    "table": ("show",),
    **dict.fromkeys(("at", "over"), ("monitors",)),
    **dict.fromkeys(("row", "seed", "data_dir", "anyway"), ("rerun",)),
}


def main_results(args: argparse.Namespace) -> int:
    """The command line's entry: export a folder, show a file, make a row of it again, or judge its monitors.

    Raises:
        BenchError: a folder or a file that holds no results, or options that belong to another word.
    """
    for option, words in GO_WITH.items():
        if getattr(args, option) not in (None, False) and args.word not in words:
            told = "; show prints, and report FILE.json --out DIR draws" * (option == "out")
            raise BenchError(f"--{option.replace('_', '.')} goes with results {' and '.join(words)}{told}")
    if args.word == "monitors":
        return monitors(args.paths, args.reference, at=args.at or "tenth", over=args.over or "row")
    path, *more = args.paths
    if more:
        raise BenchError(f"results {args.word} takes one path, not {len(args.paths)}: {str(more[0])!r} is one too many")
    if args.word == "rerun":
        return _rerun(path, args)
    if args.word == "show":
        return _show(read_export(path), args.reference, args.table)
    if args.out is None:
        raise BenchError("--out is missing: results export SWEEP --out FILE.json")
    return _export(path, args.out)


def _rerun(path: Path, args: argparse.Namespace) -> int:
    from nanogpt_bench.commands.rerun import rerun  # brings torch along

    if args.row is None:
        rows = ", ".join(repr(row.label) for row in read_export(path).rows)
        raise BenchError(f"--row is missing: results rerun FILE.json --row ROW; the rows of {path.name}: {rows}")
    return rerun(path, args.row, args.seed, args.data_dir, args.out, anyway=args.anyway)


def _export(folder: Path, out: Path) -> int:
    if out.suffix != ".json":
        raise BenchError(f"--out {str(out)!r} is not allowed; give a name that ends in .json")
    content: dict[str, Any] = export(folder)
    write_text(out, to_json(content))
    ended, planned = content["runs"]["ended"], content["runs"]["planned"]
    partial = (
        f" of {planned}; {planned - ended} are missing, and every table of the file says so" if planned > ended else ""
    )
    print(f"{out}: {counted(ended, 'run')}{partial}", file=sys.stderr)
    return 0


def _show(content: Exported, reference: str | None, table: str | None) -> int:
    """Print the table, and unless one form of it is asked for, the gaps by length and what was tuned."""
    results = results_of(content, reference)
    if table is not None:
        print(TABLES[table](results), end="")
        return 0
    print(to_markdown(results))
    for ladder in LADDERS:
        if found := climbed(ladder, results):
            print(padded(cells_of(ladder, found)))
    if content.tuning:
        print(tuning_table(content.tuning))
    return 0


def monitors(paths: Sequence[Path], reference: str | None = None, *, at: str = "tenth", over: str = "row") -> int:
    """Print what each figure at a tenth of the training, or at its end, tells of the final gap, over all runs.

    Raises:
        BenchError: a file that holds no results, no such row, or too few runs with figures and a reference.
    """
    found: dict[Hashable, Point] = {}
    for file in map(read_export, paths):
        baseline = file.baseline if reference is None else baseline_of(reference, file.rows)
        found |= early_points(file.rows, find_reference(file.rows, baseline), at=TIMES[at], over=over)
    told = rank_predictors(list(found.values()))
    if not told:
        raise BenchError(
            f"too few runs: {len(found)} have figures at the {at} of their steps and a reference, {FEWEST} are "
            "needed at least; monitor.interval says when monitors look"
        )
    print(predictor_table(told, f"at {'a tenth' if at == 'tenth' else 'the end'}"), end="")
    return 0


def results_of(content: Exported, reference: str | None = None) -> list[Result]:
    """Return the table of a results file, measured against a row of that name, else against the file's own.

    Raises:
        BenchError: no such row; names the nearest one.
    """
    baseline = content.baseline if reference is None else baseline_of(reference, content.rows)
    rows: list[Row] = list(content.rows)
    return measure(rows, find_reference(rows, baseline))
