"""The command `prepare`: which options go with which source, and what is printed at the end."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from nanogpt_bench.config.schema import DEFAULT_DATA_DIR
from nanogpt_bench.data.dataset import prepare_eurlex, prepare_hub
from nanogpt_bench.data.stdlib import prepare_stdlib
from nanogpt_bench.data.text import prepare_text
from nanogpt_bench.system.errors import BenchError
from nanogpt_bench.system.words import counted

#: the sources an option means something to, by the option's name in the parsed arguments
GOES_WITH = {
    "task": ("eurlex",),
    "input": ("text",),
    "data_dir": ("eurlex", "hub"),
    "revision": ("eurlex", "hub"),
    "dataset": ("hub",),
    "config": ("hub",),
    "column": ("hub",),
}
NEEDS = {"text": {"input": "--input FILE"}, "hub": {"dataset": "--dataset ID", "column": "--column COL"}}


def main_prepare(args: argparse.Namespace) -> int:
    """Prepare what the command line says and print what came of it."""
    _check_options(args)
    out = args.out or default_folder(args)
    meta = _prepare(args, out)
    counts = meta["splits"]
    print(
        f"{out}: {counts['train']['tokens']:,} tokens for training, {counts['val']['tokens']:,} for validation, "
        f"{meta['tokenizer']} tokenizer, vocabulary {meta['vocab_size']}{_labels(meta)}"
    )
    return 0


def _labels(meta: dict[str, Any]) -> str:
    """What is said of documents that have labels."""
    if "labels" not in meta:
        return ""
    train, val = (f"{meta['splits'][split]['documents']:,}" for split in ("train", "val"))
    return f"; {counted(len(meta['labels']), 'label')}, {train} documents for training, {val} for validation"


def _check_options(args: argparse.Namespace) -> None:
    for option, sources in GOES_WITH.items():
        value = getattr(args, option)
        if value is not None and args.source not in sources:
            spelling = f"--{option.replace('_', '-')} {str(value)!r}"
            raise BenchError(f"{spelling} goes with prepare {' and '.join(sources)}, not with prepare {args.source}")
    for option, spelling in NEEDS.get(args.source, {}).items():
        if getattr(args, option) is None:
            raise BenchError(f"prepare {args.source} needs {spelling}")
    if args.revision is not None and args.data_dir is not None:
        raise BenchError(f"--revision {args.revision!r} goes with the hub, not with --data-dir; leave one of them out")


def default_folder(args: argparse.Namespace) -> Path:
    """Return where a corpus goes when nobody says: a folder of data/ named for the text."""
    if args.source == "stdlib":
        return Path(DEFAULT_DATA_DIR)
    made = "" if args.task in (None, "text") else f"-{args.task}"
    names = {"eurlex": f"eurlex{made}", "hub": (args.dataset or "").rpartition("/")[2]}
    return Path("data") / (names.get(args.source) or args.input.stem)


def _prepare(args: argparse.Namespace, out: Path) -> dict[str, Any]:
    options: dict[str, Any] = {
        "tokenizer": args.tokenizer,
        "limit": args.limit_tokens,
        "progress": sys.stderr.isatty(),
    }
    if args.source == "stdlib":
        return prepare_stdlib(out, **options)
    if args.source == "text":
        return prepare_text(args.input, out, **options)
    options |= {"revision": args.revision, "data_dir": args.data_dir}
    if args.source == "eurlex":
        return prepare_eurlex(out, **options, task=args.task or "text")
    return prepare_hub(out, args.dataset, args.column, config=args.config, **options)
