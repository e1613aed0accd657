"""`nanogpt-bench results`: what a sweep has come to as one small file, and tables of such files."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from nanogpt_bench.report.exported import Exported, export, read_export, to_json
from nanogpt_bench.report.length import by_length, length_cells
from nanogpt_bench.report.results import Result, Row, find_reference, measure
from nanogpt_bench.report.tables import padded, to_csv, to_latex, to_markdown
from nanogpt_bench.report.tuned import tuning_table
from nanogpt_bench.runs.ends import has_ended
from nanogpt_bench.sweep.plan import baseline_of
from nanogpt_bench.system.errors import BenchError
from nanogpt_bench.system.files import write_text

TABLES = {"markdown": to_markdown, "latex": to_latex, "csv": to_csv}


def main_results(args: argparse.Namespace) -> int:
    """The command line's entry: export a folder, or show a file.

    Raises:
        BenchError: a folder or a file that holds no results, or options that belong to the other word.
    """
    if args.word == "export":
        if args.out is None:
            raise BenchError("--out is missing: results export SWEEP --out FILE.json")
        if args.reference is not None or args.table is not None:
            raise BenchError("--reference and --table go with results show")
        return _export(args.path, args.out)
    if args.out is not None:
        raise BenchError("--out goes with results export; results show prints, and report FILE.json --out DIR draws")
    return _show(read_export(args.path), args.reference, args.table)


def _export(folder: Path, out: Path) -> int:
    if out.suffix != ".json":
        raise BenchError(f"--out {str(out)!r} is not allowed; give a name that ends in .json")
    content: dict[str, Any] = export(folder)
    write_text(out, to_json(content))
    runs = [run for row in content["rows"] for run in row["runs"]]
    left = sum(not has_ended(run) for run in runs)
    unfinished = f", {left} of them not ended" if left else ""
    print(f"{out}: {len(runs)} runs{unfinished}", file=sys.stderr)
    return 0


def _show(content: Exported, reference: str | None, table: str | None) -> int:
    """Print the table, and unless one form of it is asked for, the gaps by length and what was tuned."""
    results = results_of(content, reference)
    if table is not None:
        print(TABLES[table](results), end="")
        return 0
    print(to_markdown(results))
    if found := by_length(results):
        print(padded(length_cells(found)))
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
