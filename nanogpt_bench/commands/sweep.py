"""`nanogpt-bench sweep`: training the runs of a sweep file that are left.

A report follows.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from nanogpt_bench.commands import add_executor, positive
from nanogpt_bench.system.errors import BenchError

TEXTS = {
    "usage": (
        "nanogpt-bench sweep FILE.yaml [--sensitivity] [--reference ROW] [--smoke]\n"
        "                           [--workers N] [--out DIR] [--section.key VALUE ...]"
    ),
    "description": (
        "Train one run for every point of FILE.yaml's axes, several at a time, and write a "
        "report. With\n"
        "tune and confirm in the file: find the best learning rate of every point first, then "
        "train it on other\n"
        "seeds. The same command continues an interrupted sweep."
    ),
    "epilog": (
        "examples:\n"
        "  nanogpt-bench sweep formats.yaml\n"
        "  nanogpt-bench sweep my_sweep.yaml --workers 2 --out runs/mine --train.max_steps 500\n"
        "  nanogpt-bench sweep sensitivity.yaml --sensitivity --data.dir data/book"
    ),
}


def add_options(parser: Any) -> None:
    parser.add_argument(
        "file", nargs="?", metavar="FILE.yaml", help="a sweep file, or the name of a shipped one"
    )
    parser.add_argument(
        "--sensitivity", action="store_true", help="quantise one layer pattern at a time: loss gaps"
    )
    parser.add_argument(
        "--reference", metavar="ROW", help="row to measure against (default: the file's, or BF16)"
    )
    parser.add_argument(
        "--smoke", action="store_true", help="the file's small version, as its section smoke says"
    )
    parser.add_argument(
        "--workers",
        type=positive,
        metavar="N",
        help="runs at a time (default: the file's, or cores)",
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder of the results (default: runs/sweep-FILE)"
    )
    add_executor(parser)


def main(args: argparse.Namespace) -> int:
    """Run the sweep in its mode, see `nanogpt_bench.sweep.session`."""
    if args.file is None:
        raise BenchError("FILE.yaml is missing: a sweep file, or the name of a shipped one")
    from nanogpt_bench.sweep.file import find_sweep, read_sweep
    from nanogpt_bench.sweep.record import SweepMode
    from nanogpt_bench.sweep.session import MODES, sweep_grid
    from nanogpt_bench.sweep.workers import check_executor, check_workers, executor_of
    from nanogpt_bench.system.files import locked

    sweep = read_sweep(find_sweep(args.file), args.overrides, smoke=args.smoke)
    if args.reference is not None:
        sweep = replace(sweep, reference=args.reference)
    check_executor(args.executor, args.address)
    if args.executor == "local":
        check_workers(args.workers, "--workers")
    workers = args.workers or sweep.workers
    if args.sensitivity:
        mode = SweepMode.SENSITIVITY
    elif sweep.tune is not None:
        mode = SweepMode.TUNE
    else:
        mode = SweepMode(sweep.search)
    folder = f"{mode}-smoke" if args.smoke else mode
    out = args.out or Path("runs") / f"sweep-{sweep.path.stem}" / folder
    # `MODES` has only the modes that are no grid.
    if sweep.rows and mode in MODES:
        raise BenchError(
            f"rows in {sweep.path.name} go with a grid; {mode} takes axes, such as rule and "
            f"model.format"
        )
    with locked(out, "--out"), executor_of(args.executor, args.address, out) as executor:
        return MODES.get(mode, sweep_grid)(sweep, out, workers, executor)
