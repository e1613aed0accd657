"""`nanogpt-bench compare`: the packaged sweep `compare.yaml`, changed by options."""

import argparse
import shlex
from contextlib import nullcontext
from datetime import datetime
from pathlib import Path
from typing import Any

from nanogpt_bench.commands import add_executor, parse_names, positive
from nanogpt_bench.config.schema import Task
from nanogpt_bench.system.errors import BenchError, say
from nanogpt_bench.system.files import locked, new_folder

MODE = "compare"

TEXTS = {
    "description": (
        "Train every format under every rule on one corpus, with the same seeds and batches, and "
        "write a\nreport. Without arguments: a demonstration on the standard library's prose, two "
        "to seven minutes on two\nCPU cores, with an estimate of the time left after the first "
        "minute. The same command with the same --out\ncontinues an interrupted comparison. "
        "Settings are those of run; if a setting does not apply to all rows,\ncompare prints "
        "those that take it."
    ),
    "usage": (
        "nanogpt-bench compare [--formats A,B] [--rules A,B|all] [--max-steps N] [--seeds N] "
        "[--data.dir DIR]\n"
        "                             [--reference ROW] [--out DIR] [--section.key VALUE ...]"
    ),
    "epilog": (
        "examples:\n"
        "  nanogpt-bench compare\n"
        "  nanogpt-bench compare --formats E4M3,E7M0 --rules bf16-mixed,nearest,stochastic "
        "--max-steps 500\n"
        "  nanogpt-bench compare --data.dir data/book --rules all --seeds 3 --out runs/book\n"
        "  nanogpt-bench compare --formats E4M3 --model.size 10M --optimizer.lr 1e-3 "
        "--optimizer.weight_decay 0"
    ),
}


def add_options(parser: Any) -> None:
    parser.add_argument(
        "--data.dir", dest="data_dir", type=Path, metavar="DIR", help="prepared corpus"
    )
    parser.add_argument(
        "--formats", type=parse_names, metavar="A,B", help="formats, for the rules that quantise"
    )
    parser.add_argument(
        "--rules", type=parse_names, metavar="A,B|all", help="update rules, or all of them"
    )
    parser.add_argument(
        "--max-steps", dest="max_steps", type=positive, metavar="N", help="steps of every run"
    )
    parser.add_argument(
        "--seeds",
        type=positive,
        metavar="N",
        help="number of runs per row, with one seed each (default: 1)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder for the results (default: runs/compare-DATE)",
    )
    parser.add_argument(
        "--reference", metavar="ROW", help="row to compare with (default: the BF16 row)"
    )
    add_executor(parser)


def main(args: argparse.Namespace) -> int:
    """Train every row with every seed, write the report and print the table.

    The last line is the report's path.
    """
    from nanogpt_bench.runs.environment import command_line
    from nanogpt_bench.sweep.comparison import comparison, partly_used, read_overrides
    from nanogpt_bench.sweep.session import sweep_grid
    from nanogpt_bench.sweep.workers import check_executor, executor_of, most_workers

    check_executor(args.executor, args.address)
    settings = read_overrides(args.overrides)
    if args.data_dir is None and settings.get("task") == Task.CLASSIFY:
        raise BenchError(
            "--task classify needs --data.dir: the standard library's prose has no labels"
        )
    sweep = comparison(
        formats=args.formats,
        rules=args.rules,
        max_steps=args.max_steps,
        seeds=args.seeds or 1,
        data_dir=args.data_dir,
        reference=args.reference,
        settings=settings,
    )
    for line in partly_used(settings, sweep):
        say(line)
    default = Path("runs") / f"compare-{datetime.now():%Y%m%d-%H%M%S}"
    with (
        nullcontext(args.out) if args.out is not None else new_folder(default) as folder,
        locked(folder, "--out"),
        executor_of(args.executor, args.address, folder) as executor,
    ):
        workers = most_workers(1, executor.cores())
        if args.executor == "local":
            workers = min(sweep.workers or workers, workers)
        continuation = None
        if args.out is None:
            continuation = f"{command_line()} --out {shlex.quote(str(folder))}"
        return sweep_grid(sweep, folder, workers, executor, mode=MODE, again=continuation)
