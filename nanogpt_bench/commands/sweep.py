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
        "report. If the\nfile has sections tune and confirm, first find the best learning rate of "
        "every point, then train it on other\nseeds. The same command continues an interrupted "
        "sweep."
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
        "--sensitivity",
        action="store_true",
        help="quantise one layer pattern at a time and measure its gap",
    )
    parser.add_argument(
        "--reference", metavar="ROW", help="row to compare with (default: the file's, or BF16)"
    )
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="run the small version that the file's section smoke describes",
    )
    parser.add_argument(
        "--workers",
        type=positive,
        metavar="N",
        help="runs at a time (default: as the file says, or one per core)",
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder of the results (default: runs/sweep-FILE)"
    )
    add_executor(parser)


def main(args: argparse.Namespace) -> int:
    """Run the sweep in its mode, see `nanogpt_bench.sweep.session`."""
    if args.file is None:
        raise BenchError("FILE.yaml is missing; give a sweep file, or the name of a shipped one")
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
            f"{sweep.path.name} has rows, which only a grid can have; {mode} takes axes, such as "
            "rule and model.format"
        )
    with locked(out, "--out"), executor_of(args.executor, args.address, out) as executor:
        return MODES.get(mode, sweep_grid)(sweep, out, workers, executor)
