"""`nanogpt-bench compare`: plan, train in worker processes, report."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from nanogpt_bench.commands.arguments import add_executor, braced, names, one_of, positive
from nanogpt_bench.config.schema import DRAWS
from nanogpt_bench.sweep.comparison import (
    ComparisonRecord,
    Demonstration,
    as_typed,
    check_given,
    choose_rows,
    plan_runs,
    read_given,
    steps_of,
)
from nanogpt_bench.sweep.plan import PlannedRun, baseline_of, check_count
from nanogpt_bench.sweep.session import Session, close, threads_set
from nanogpt_bench.system.errors import BenchError
from nanogpt_bench.system.lock import locked, new_folder
from nanogpt_bench.system.words import counted, say
from nanogpt_bench.workers.executors import check_executor, executor_of
from nanogpt_bench.workers.pool import Executor, Local, most_workers

DEFAULTS = Demonstration()


def add_parser(commands: Any, text: str) -> Any:
    """Add the command and return its parser."""
    parser = commands.add_parser(
        "compare",
        help=text,
        description="Train formats x rules on one corpus, same seeds and batches, and write a report. Without\n"
        "arguments: a demonstration on the standard library's prose, two to seven minutes on two CPU cores, with an\n"
        "estimate of the time left from the first minute on. The same command with the same --out goes on where an\n"
        "interrupted one was. Settings are those of run, each for every row that it means something for; compare says\n"
        "which, where that is not all.",
        usage="nanogpt-bench compare [--formats A,B] [--rules A,B|all] [--max-steps N] [--seeds N] [--data.dir DIR]\n"
        "                             [--reference ROW] [--out DIR] [--section.key VALUE ...]",
        epilog="examples:\n  nanogpt-bench compare\n"
        "  nanogpt-bench compare --formats E4M3,E7M0 --rules bf16-mixed,nearest,stochastic --max-steps 500\n"
        "  nanogpt-bench compare --data.dir data/book --rules all --seeds 3 --out runs/book\n"
        "  nanogpt-bench compare --formats E4M3 --model.size 10M --optimizer.lr 1e-3 --optimizer.weight_decay 0",
    )
    parser.add_argument("--data.dir", dest="data_dir", type=Path, metavar="DIR", help="prepared corpus")
    parser.add_argument("--formats", type=names, metavar="A,B", help="formats of the quantised rules")
    parser.add_argument("--rules", type=names, metavar="A,B|all", help="update rules, or all of them")
    parser.add_argument("--max-steps", dest="max_steps", type=positive, metavar="N", help="steps of every run")
    parser.add_argument("--seeds", type=positive, metavar="N", help="runs of every row (default: 1)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of the results (default: runs/compare-DATE)")
    parser.add_argument("--reference", metavar="ROW", help="row to measure against (default: the BF16 row)")
    parser.add_argument(
        "--draws",
        type=one_of(DRAWS),
        metavar=braced(DRAWS),
        help="of the rules that round stochastically (--optimizer.draws)",
    )
    add_executor(parser)
    return parser


def main(args: argparse.Namespace) -> int:
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
    check_count(len(rows) * seeds, f"{counted(len(rows), 'row')} at --seeds {seeds:,}")
    given = read_given(overrides)
    steps = steps_of(given, max_steps) or demonstration.max_steps
    demonstration = replace(demonstration, first_seed=given.pop("seed", demonstration.first_seed))

    def plan(corpus: Path) -> list[PlannedRun]:
        return plan_runs(rows, demonstration, seeds=seeds, max_steps=steps, data_dir=corpus, given=given)

    baseline = baseline_of(reference, plan(Path("corpus")))
    length = check_given(given, plan(data_dir or Path("corpus")), say) if overrides else None
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
        planned = plan(corpus)
        record = ComparisonRecord(folder, planned, corpus, asked, baseline)
        with executor_of(executor, address, folder) as found:
            workers = _workers(demonstration.workers, planned, found)
            whole = Session(record, workers, executor=found).train(planned)
        return close(record, whole=whole, command=_command(record, executor, address))


def _check_corpus(data_dir: Path, demonstration: Demonstration, block_size: int | None, task: str) -> None:
    """Refuse a corpus that no run could use before anything is written."""
    from nanogpt_bench.data.batches import label_names, load_corpus
    from nanogpt_bench.model.gpt import SIZES

    if task == "classify":
        label_names(load_corpus(data_dir, 0))
    else:
        load_corpus(data_dir, block_size or SIZES[demonstration.size].block_size)


def _workers(workers: int, planned: Sequence[PlannedRun], executor: Executor) -> int:
    """The runs to train at a time: as many as there are cores for, on this machine at most `workers`."""
    most = most_workers(threads_set(planned), executor.cores())
    return min(workers, most) if isinstance(executor, Local) else most


def _command(record: ComparisonRecord, executor: str, address: str | None) -> str:
    """The command that goes on with a comparison, where it was."""
    words = ["nanogpt-bench", "compare"]
    where = {} if executor == "local" else {"--executor": executor, "--address": address}
    for option, value in {**record.asked, "--out": record.folder, **where}.items():
        if value is not None:
            words += [option, ",".join(value) if isinstance(value, list) else str(value)]
    return shlex.join(words)
