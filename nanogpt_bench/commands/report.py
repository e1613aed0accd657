"""`nanogpt-bench report`: the page, figures and tables of runs on disk, made again."""

import argparse
from pathlib import Path
from typing import Any

TEXTS = {
    "description": (
        "Rebuild the report of runs on disk: report.html, figures, results.csv and tables."
    ),
    "epilog": (
        "examples:\n"
        "  nanogpt-bench report runs/compare-20260101-120000 --out report\n"
        "  nanogpt-bench report runs/bf16_baseline runs/e4m3 --out report\n"
        "  nanogpt-bench report runs/book --out report --baseline fp32"
    ),
}


def add_options(parser: Any) -> None:
    parser.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUNS",
        help="run folders, folders that contain them at any depth, or results files",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write")
    parser.add_argument(
        *("--reference", "--baseline"),
        dest="baseline",
        metavar="ROW",
        help="row to compare with (default: the BF16 autocast row)",
    )


def main(args: argparse.Namespace) -> int:
    """Write the report and print the page's path."""
    from nanogpt_bench.report import check_report_folder, report
    from nanogpt_bench.system.errors import say

    check_report_folder(args.out)
    print(report(args.runs, out=args.out, baseline=args.baseline, say=say))
    return 0
