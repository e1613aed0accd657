"""`nanogpt-bench evaluate`: losses of one set of weights in several formats.

Nothing is trained. With some options a report is written in place of the table.
"""

import argparse
from pathlib import Path
from typing import Any

from nanogpt_bench.commands import above_0, one_of, parse_names, positive
from nanogpt_bench.system.errors import BenchError, unknown
from nanogpt_bench.system.files import (
    check_place,
    json_test,
    refuse_to_replace,
    rows_with,
    write_json,
)

#: options that ask for a report
OF_REPORT = ("scales", "embeddings", "sensitivity", "budget")
#: options that need --model
ONLY_MODEL = ("input", "windows")
#: options that can't be used with --model
NOT_MODEL = ("run", "checkpoint")
GRANULARITIES = ("tensor", "channel", "block", "square")
#: width of the table in characters, without a terminal
_TABLE_WIDTH = 120

TEXTS = {
    "usage": (
        "nanogpt-bench evaluate RUN [--checkpoint best|last|step-N] [--formats A,B] "
        "[--section.key VALUE ...]\n"
        "       nanogpt-bench evaluate RUN|--model PATH [--input FILE|--data.dir DIR] [--formats "
        "A,B|all]\n"
        "                              [--scales A,B] [--sensitivity [kinds|blocks|layers]]\n"
        "                              [--budget BYTES] [--save DIR] [--out DIR]"
    ),
    "description": (
        "Measure the loss of a run's weights, first as they were trained and then rounded to each "
        "format.\nWith --scales, --sensitivity, --budget or --formats all, write a report about a "
        "run's weights; with --model,\nabout those of any causal language model of transformers, "
        "with the model's own tokenizer."
    ),
    "epilog": (
        "examples:\n"
        "  nanogpt-bench evaluate runs/bf16_baseline --formats E4M3,E5M2,E3M4\n"
        "  nanogpt-bench evaluate runs/e4m3 --checkpoint best --formats E7M0 "
        "--model.formats.lm_head none\n"
        "  nanogpt-bench evaluate runs/fp32 --formats all --scales channel,block --budget 1.5\n"
        "  nanogpt-bench evaluate --model SmolLM2-135M.gguf --input law.txt --scales "
        "tensor,channel,block\n"
        "  nanogpt-bench evaluate --model models/smollm2 --data.dir data/law --sensitivity "
        "--budget 1.2"
    ),
}


def add_options(parser: Any) -> None:
    parser.add_argument("run", nargs="?", metavar="RUN", help="a run's folder")
    parser.add_argument(
        "--model",
        metavar="PATH",
        help="a folder of save_pretrained or published in FP8, a .gguf file, or an id on the hub",
    )
    parser.add_argument(
        "--checkpoint",
        metavar="WHICH",
        help="checkpoint of the run: best, last (default) or step-N",
    )
    parser.add_argument(
        "--formats",
        type=parse_names,
        metavar="A,B",
        help="formats to round all weights to, one row each; all: every format of eight bits",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="file for the table as JSON; for a report, its folder",
    )
    parser.add_argument(
        "--save",
        type=Path,
        metavar="DIR",
        help="write every row's weights to DIR/FORMAT.safetensors",
    )
    report = parser.add_argument_group("a report, about RUN or --model PATH")
    report.add_argument(
        "--input",
        type=Path,
        metavar="FILE",
        help="with --model: text to measure on, any UTF-8 file",
    )
    report.add_argument(
        "--windows",
        type=positive,
        metavar="N",
        help="with --model: number of windows of the text (default: 24)",
    )
    report.add_argument(
        "--scales",
        type=parse_names,
        metavar="A,B",
        help="scales to round with, a row for each: tensor, channel, block, square",
    )
    report.add_argument(
        "--embeddings",
        action="store_true",
        help="round the embeddings too, to the format of each row",
    )
    report.add_argument(
        "--sensitivity",
        nargs="?",
        const="kinds",
        type=one_of(("kinds", "blocks", "layers")),
        metavar="BY",
        help="round each kind of layer (default), block or layer, and the embeddings, alone to "
        "each format: a map of gaps",
    )
    report.add_argument(
        "--budget",
        type=above_0,
        metavar="X",
        help="print the mixture of the map's formats with the least gap in X bytes per parameter",
    )


def main(args: argparse.Namespace) -> int:
    """Measure losses, or write a report if one of its options is given."""
    _check(args)
    if args.model is not None:
        from nanogpt_bench.evaluation.report import report_model

        return report_model(args)
    from nanogpt_bench.runs.trained import run_folder

    run_dir = run_folder(args.run)
    if run_dir is None:
        raise BenchError(_no_run(Path(args.run)))
    if _asks_for_report(args):
        from nanogpt_bench.evaluation.report import report_run

        return report_run(run_dir, args)
    return _losses(run_dir, args)


def _asks_for_report(args: argparse.Namespace) -> bool:
    if "all" in (args.formats or ()):
        return True
    return any(getattr(args, name) not in (None, False) for name in OF_REPORT)


def _check(args: argparse.Namespace) -> None:
    for name in NOT_MODEL if args.model else ONLY_MODEL:
        value = getattr(args, name)
        if value is not None:
            word = repr(value) if name == "run" else f"--{name}"
            if args.model:
                raise BenchError(f"{word} can't be used with --model; leave one of them out")
            raise BenchError(f"{word} needs --model PATH; give that, or leave {word} out")
    for option in ("out", "save"):
        path = getattr(args, option)
        if path is not None:
            check_place(f"--{option}", path)
    if args.save is not None and args.save.exists() and not args.save.is_dir():
        raise BenchError(f"--save {str(args.save)!r} is a file; give a folder")
    if not args.model and args.run is None:
        raise BenchError("evaluate needs RUN, a run's folder, or --model PATH")
    for scale in args.scales or ():
        if scale not in GRANULARITIES:
            raise unknown("--scales", scale, GRANULARITIES)


def _losses(run_dir: Path, args: argparse.Namespace) -> int:
    from rich.console import Console

    from nanogpt_bench.evaluation.measurement import rows_table
    from nanogpt_bench.evaluation.weights import EVALUATION_FIELDS, evaluate_run

    if args.out:
        refuse_to_replace(
            "--out", args.out, json_test(rows_with("format", "storage", "val_loss")), "another name"
        )
    rows = evaluate_run(
        run_dir, args.checkpoint or "last", args.formats or (), args.overrides, save=args.save
    )
    console = Console()
    console.width = console.width if console.is_terminal else _TABLE_WIDTH
    console.print(rows_table(rows, "gap to trained weights"))
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        write_json(args.out, [row.facts(EVALUATION_FIELDS) for row in rows])
    return 0


def _no_run(path: Path) -> str:
    """Return the message about a path that is no run's folder."""
    from nanogpt_bench.runs.trained import is_checkpoint, is_run

    if path.is_file() and path.suffix == ".yaml":
        return (
            f"{str(path)!r} is not a run's folder; train and validate a run first: nanogpt-bench "
            f"run {path}"
        )
    if is_checkpoint(path):
        return f"{str(path)!r} is a checkpoint; give its run's folder and --checkpoint {path.stem}"
    message = f"{str(path)!r} is not a run's folder"
    children = sorted(path.glob("*")) if path.is_dir() else []
    runs = [str(child) for child in children if is_run(child)]
    return f"{message}; it contains: {', '.join(runs)}" if runs else message
