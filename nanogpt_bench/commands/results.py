"""`nanogpt-bench results`: a sweep's results as one small file, and as tables."""

import argparse
import sys
from pathlib import Path
from typing import Any

from nanogpt_bench.commands import braced, one_of
from nanogpt_bench.system.errors import BenchError, counted
from nanogpt_bench.system.files import json_test, refuse_to_replace, write_text

ACTIONS = ("export", "show")
TABLE_FORMATS = ("markdown", "csv")
#: options, and the word with which they can be used
GO_WITH = {"out": "export", "reference": "show", "table": "show"}

TEXTS = {
    "usage": (
        "nanogpt-bench results export SWEEP --out FILE.json\n"
        "       nanogpt-bench results show FILE.json [--reference ROW] [--table markdown|csv]"
    ),
    "description": (
        "export: write the results of a sweep or a comparison, with settings, environments and "
        "tuned\nvalues, to one JSON file. show: print the tables of such a file.\nTo draw its "
        "page, use report FILE.json."
    ),
    "epilog": (
        "examples:\n"
        "  nanogpt-bench results export runs/sweep-my_study/tune --out my_study.json\n"
        "  nanogpt-bench results show my_study.json --reference muon\n"
        "  nanogpt-bench report my_study.json --out report"
    ),
}


def add_options(parser: Any) -> None:
    parser.add_argument(
        "word", type=one_of(ACTIONS), metavar=braced(ACTIONS), help="export or show"
    )
    parser.add_argument(
        "path",
        type=Path,
        metavar="SWEEP|FILE.json",
        help="for export, a sweep's folder; for show, a results file",
    )
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="export: file to write")
    parser.add_argument(
        "--reference", metavar="ROW", help="show: row to compare with (default: the file's)"
    )
    parser.add_argument(
        "--table",
        type=one_of(TABLE_FORMATS),
        metavar=braced(TABLE_FORMATS),
        help="show: print the table only, in this format",
    )


def main(args: argparse.Namespace) -> int:
    """Export a folder, or show a file."""
    for option, word in GO_WITH.items():
        if getattr(args, option) is not None and args.word != word:
            message = f"--{option} is an option of results {word}"
            if option == "out":
                message += "; to draw a page, use report FILE.json --out DIR"
            raise BenchError(message)
    if args.word == "show":
        return _print_results(args.path, args.reference, args.table)
    if args.out is None:
        raise BenchError("--out is missing; give results export SWEEP --out FILE.json")
    return _export(args.path, args.out)


def _export(folder: Path, out: Path) -> int:
    from nanogpt_bench.report.results_file import (  # imports torch
        EntryKind,
        export,
        has_known_kinds,
        to_json,
    )

    if out.suffix != ".json":
        raise BenchError(f"--out {str(out)!r} is not allowed; give a name that ends in .json")
    refuse_to_replace("--out", out, json_test(has_known_kinds), "another name")
    content = export(folder)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, to_json(content))
    kinds = [entry["kind"] for entry in content]
    ended, missing = kinds.count(EntryKind.RUN), kinds.count(EntryKind.MISSING)
    line = f"{out}: {counted(ended, 'run')}"
    if missing:
        line += f" of {ended + missing}; {missing} are missing, and every table of the file says so"
    print(line, file=sys.stderr)
    return 0


def _print_results(path: Path, reference: str | None, table: str | None) -> int:
    """Print the table, measured against `reference` or else the file's.

    Without `table` also that of the tuning.
    """
    from nanogpt_bench.report.results import measure
    from nanogpt_bench.report.results_file import read_export
    from nanogpt_bench.report.rows import find_reference
    from nanogpt_bench.report.tables import to_csv, to_markdown, tuning_table
    from nanogpt_bench.sweep.plan import baseline_of

    content = read_export(path)
    baseline = content.baseline if reference is None else baseline_of(reference, content.rows)
    results = measure(content.rows, find_reference(content.rows, baseline))
    if table is not None:
        text = to_csv(results) if table == "csv" else to_markdown(results)
        print(text, end="")
        return 0
    print(to_markdown(results))
    if content.tuning:
        print(tuning_table(content.tuning))
    return 0
