"""The command lines of `evaluate`, `compare`, `sweep`, `results`, whose needs are imported when they run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from nanogpt_bench.commands.arguments import (
    at_least_0,
    names,
    natural,
    positive,
    positives,
)


def add_sample(commands: Any) -> Any:
    """Add the command `sample` and return its parser."""
    parser = commands.add_parser(
        "sample",
        help="text that a run's weights write, as they are and rounded to formats",
        usage="nanogpt-bench sample RUN [--checkpoint best|last|step-N] [--formats A,B] [--prompt TEXT] [--tokens N]\n"
        "                            [--temperature T] [--top-k K] [--seed S] [--out FILE] [--section.key VALUE ...]",
        description="Let the weights that a run has trained go on with a text, as they are and rounded to each\n"
        "format, side by side and with the same draws.",
        epilog='examples:\n  nanogpt-bench sample runs/e4m3 --prompt "The function returns"\n'
        "  nanogpt-bench sample runs/bf16_baseline --formats E4M3,E7M0 --temperature 0.8 --top-k 40 --seed 3",
    )
    parser.add_argument("run", metavar="RUN", help="a run's folder")
    parser.add_argument("--checkpoint", metavar="WHICH", help="best, last (the default) or step-N")
    parser.add_argument(
        *("--formats", "--format"), type=names, metavar="A,B", help="formats of all weights, a text each; none: floats"
    )
    parser.add_argument("--prompt", default="", metavar="TEXT", help="what to go on with (default: a text's beginning)")
    parser.add_argument("--tokens", type=positive, default=200, metavar="N", help="at most so many (default: 200)")
    parser.add_argument(
        "--temperature", type=at_least_0, default=1.0, metavar="T", help="0: always the likeliest token (default: 1)"
    )
    parser.add_argument("--top-k", type=positive, metavar="K", help="choose among the K likeliest (default: all)")
    parser.add_argument("--seed", type=natural, default=0, metavar="S", help="of the draws (default: 0)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the texts as JSON as well")
    parser.set_defaults(handler=_sample)
    return parser


def add_finetune(commands: Any) -> Any:
    """Add the command `finetune` and return its parser."""
    parser = commands.add_parser(
        "finetune",
        help="train all weights of a pretrained language model further",
        usage="nanogpt-bench finetune --model PATH --data.dir DIR [--rule RULE] [--name NAME] [--resume] [--save DIR] "
        "[--layout LAYOUT] [--section.key VALUE ...]",
        description="Train all weights of a causal language model of transformers further, as finetune.yaml says,\n"
        "with the loop, checkpoints, monitors and report of run; every setting of run can be overridden.",
        epilog="examples:\n"
        "  nanogpt-bench prepare text --input law.txt --tokenizer models/smollm2 --out data/law\n"
        "  nanogpt-bench finetune --model models/smollm2 --data.dir data/law --rule muon-stochastic\n"
        "  nanogpt-bench finetune --model models/smollm2 --data.dir data/law --train.step_in_backward true "
        "--optimizer.clip_by previous --train.recompute true --train.precision bf16-mixed --save models/law",
    )
    parser.add_argument("--model", required=True, metavar="PATH", help="a folder, a .gguf file, or an id on the hub")
    parser.add_argument("--name", help="results go to runs/NAME (default: finetune, numbered)")
    parser.add_argument("--resume", action="store_true", help="go on from the newest whole checkpoint of runs/NAME")
    parser.add_argument("--save", type=Path, metavar="DIR", help="write the model as save_pretrained does")
    parser.add_argument(
        "--layout",
        choices=("float", "compressed-tensors", "torchao", "fp8"),
        help="of --save: floats (default), codes and scales in the layout of compressed-tensors or torchao, or fp8: in "
        "that of DeepSeek-V3, squares of 128 x 128",
    )
    parser.set_defaults(handler=_finetune)
    return parser


def add_compare(commands: Any) -> Any:
    """Add the command `compare` and return its parser."""
    parser = commands.add_parser(
        "compare",
        help="train formats x rules on one corpus and report (the main job)",
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
        "--draws", choices=("independent", "dither"), help="of the rules that round stochastically (--optimizer.draws)"
    )
    _add_executor(parser)
    parser.set_defaults(handler=_compare)
    return parser


def add_sweep(commands: Any) -> Any:
    """Add the command `sweep` and return its parser."""
    parser = commands.add_parser(
        "sweep",
        help="train over any settings: grid, random, tuned rates, learning rate limits, sensitivity of layers",
        usage="nanogpt-bench sweep FILE.yaml [--lr-limits | --sensitivity] [--reference ROW] [--smoke]\n"
        "                           [--data-sizes A,B] [--workers N] [--out DIR]\n"
        "                           [--section.key VALUE ...]",
        description="Train one run for every point of FILE.yaml's axes, several at a time, and write a report. With\n"
        "tune and confirm in the file: find the best learning rate of every point first, then train it on other\n"
        "seeds. The same command goes on where an interrupted one was.",
        epilog="examples:\n  nanogpt-bench sweep formats.yaml\n"
        "  nanogpt-bench sweep my_sweep.yaml --workers 2 --out runs/mine --train.max_steps 500\n"
        "  nanogpt-bench sweep lr_limits.yaml --lr-limits\n"
        "  nanogpt-bench sweep sensitivity.yaml --sensitivity --data.dir data/book\n"
        "  nanogpt-bench sweep formats.yaml --data-sizes 100000,300000,900000\n",
    )
    parser.add_argument("file", nargs="?", metavar="FILE.yaml", help="a sweep file, or the name of a shipped one")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--lr-limits", action="store_true", help="largest stable learning rate of every point")
    mode.add_argument("--sensitivity", action="store_true", help="quantise one layer pattern at a time: loss gaps")
    parser.add_argument("--reference", metavar="ROW", help="row to measure against (default: the file's, or BF16)")
    parser.add_argument(
        "--data-sizes",
        type=positives,
        metavar="A,B",
        help="train every point on the first A, B, ... tokens of the text, once through: where does a gap appear?",
    )
    parser.add_argument("--smoke", action="store_true", help="with what the file's section smoke says: the same, small")
    parser.add_argument("--workers", type=positive, metavar="N", help="runs at a time (default: the file's, or cores)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of the results (default: runs/sweep-FILE)")
    _add_executor(parser)
    parser.set_defaults(handler=_sweep)
    return parser


def _add_executor(parser: Any) -> None:
    parser.add_argument(
        "--executor",
        default="local",
        metavar="local|ray",
        help="where runs train: processes of this machine (default), or of a Ray cluster",
    )
    parser.add_argument("--address", metavar="HOST:PORT", help="ray: a running cluster (default: one of these cores)")


def add_results(commands: Any) -> Any:
    """Add the command `results` and return its parser."""
    parser = commands.add_parser(
        "results",
        help="results of a sweep as one small JSON file; its tables, and any row of it made again",
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
    words = ("export", "show", "rerun")
    parser.add_argument("word", choices=words, metavar="{" + ",".join(words) + "}", help="which of these")
    parser.add_argument("path", type=Path, metavar="SWEEP|FILE.json", help="export: a sweep's folder")
    parser.add_argument(
        "--out", type=Path, metavar="FILE.json|DIR", help="export: file to write; rerun: folder of runs"
    )
    parser.add_argument("--reference", metavar="ROW", help="show: row to measure against (default: the file's)")
    parser.add_argument("--table", choices=("markdown", "csv"), help="show: this form of the table alone")
    parser.add_argument("--row", metavar="ROW", help="rerun: the row, by its label, or by its format and rule")
    parser.add_argument("--seed", type=natural, metavar="N", help="rerun: this seed alone (default: all of the row's)")
    parser.add_argument("--data.dir", dest="data_dir", type=Path, metavar="DIR", help="rerun: where its text lies here")
    parser.add_argument("--anyway", action="store_true", help="rerun: though torch, GPU or text differ")
    parser.set_defaults(handler=_results)
    return parser


def _results(args: argparse.Namespace) -> int:
    from nanogpt_bench.commands.results import main_results

    return main_results(args)


def _sample(args: argparse.Namespace) -> int:
    from nanogpt_bench.commands.sample import Draw, sample_command

    draw = Draw(args.prompt, args.tokens, args.temperature, args.top_k, args.seed)
    options = {"checkpoint": args.checkpoint, "formats": args.formats or (), "overrides": args.overrides}
    return sample_command(args.run, draw, **options, out=args.out)


def _finetune(args: argparse.Namespace) -> int:
    from nanogpt_bench.commands.finetune import main_finetune

    return main_finetune(args)


def _compare(args: argparse.Namespace) -> int:
    from nanogpt_bench.commands.compare import main_compare

    return main_compare(args)


def _sweep(args: argparse.Namespace) -> int:
    from nanogpt_bench.commands.sweep import main_sweep

    return main_sweep(args)
