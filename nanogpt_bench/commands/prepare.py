"""`nanogpt-bench prepare`: which options go with which source, and the closing line."""

import argparse
import sys
from enum import StrEnum
from pathlib import Path
from typing import Any

from nanogpt_bench.commands import braced, one_of, parse_names, positive, tokenizer
from nanogpt_bench.config.schema import DEFAULT_DATA_DIR
from nanogpt_bench.system.errors import BenchError, counted
from nanogpt_bench.system.files import check_place


class Source(StrEnum):
    """Where a text comes from."""

    #: help topics and docstrings of the standard library
    STDLIB = "stdlib"
    #: documentation and comments of packages
    PACKAGES = "packages"
    #: English EU legislation
    EURLEX = "eurlex"
    #: a data set of the Hugging Face hub
    HUB = "hub"
    #: a file
    TEXT = "text"
    #: a folder of nanoGPT
    NANOGPT = "nanogpt"


#: the sources that take an option, by the option's name in the parsed arguments
GOES_WITH = {
    "task": (Source.EURLEX,),
    "input": (Source.TEXT, Source.NANOGPT),
    "packages": (Source.PACKAGES,),
    "data_dir": (Source.EURLEX, Source.HUB, Source.PACKAGES),
    "revision": (Source.EURLEX, Source.HUB),
    "dataset": (Source.HUB,),
    "config": (Source.HUB,),
    "column": (Source.HUB,),
}
NEEDS = {
    Source.TEXT: {"input": "--input FILE"},
    Source.HUB: {"dataset": "--dataset ID", "column": "--column COL"},
    Source.NANOGPT: {
        "input": "--input FOLDER",
        "tokenizer": "--tokenizer {byte,char,gpt2}, since its meta.pkl is never unpickled",
    },
}
TEXT_SOURCES = tuple(source.value for source in Source)
PREPARED = ("text", "labels")

TEXTS = {
    "description": "Turn a text into train.bin, val.bin (uint16 tokens) and meta.json.",
    "epilog": (
        "examples:\n"
        "  nanogpt-bench prepare stdlib\n"
        "  nanogpt-bench prepare packages --tokenizer gpt2\n"
        "  nanogpt-bench prepare text --input book.txt --tokenizer char --out data/book\n"
        "  nanogpt-bench prepare nanogpt --input nanoGPT/data/openwebtext --tokenizer gpt2\n"
        "  nanogpt-bench prepare eurlex --tokenizer gpt2 --limit-tokens 10000000\n"
        "  nanogpt-bench prepare eurlex --data-dir lex_glue --out data/eurlex\n"
        "  nanogpt-bench prepare eurlex --task labels\n"
        "  nanogpt-bench prepare hub --dataset Salesforce/wikitext --config wikitext-2-raw-v1 "
        "--column text"
    ),
}


def add_options(parser: Any) -> None:
    parser.add_argument(
        "source",
        type=one_of(TEXT_SOURCES),
        metavar=braced(TEXT_SOURCES),
        help="stdlib: the help topics and docstrings of the Python standard library; packages: "
        "documentation and comments in fixed versions of packages of PyPI and Debian; eurlex: "
        "English EU legislation; hub: any text data set of the Hugging Face hub; text: any "
        "UTF-8 file; nanogpt: train.bin and val.bin of nanoGPT",
    )
    # `main` checks which option goes with which source
    parser.add_argument(
        "--task",
        type=one_of(PREPARED),
        metavar=braced(PREPARED),
        help="eurlex: text, or documents with their EUROVOC labels (labels) (default: text)",
    )
    parser.add_argument(
        "--input", type=Path, metavar="FILE", help="the UTF-8 file (text), or the folder (nanogpt)"
    )
    parser.add_argument(
        "--dataset", metavar="ID", help="the data set's id on the hub, such as OWNER/NAME (hub)"
    )
    parser.add_argument(
        "--config", metavar="C", help="the data set's configuration (hub; default: its only one)"
    )
    parser.add_argument("--column", metavar="COL", help="the data set's column of text (hub)")
    parser.add_argument(
        "--revision", metavar="REV", help="branch, tag or commit on the hub (eurlex, hub)"
    )
    parser.add_argument(
        "--packages",
        type=parse_names,
        metavar="A,B",
        help="read these packages only (packages; default: all)",
    )
    parser.add_argument(
        "--data-dir",
        type=Path,
        metavar="DIR",
        help="read a local copy instead: DIR/CONFIG/SPLIT-*.parquet or DIR/SPLIT-*.parquet "
        "(eurlex, hub), or the packages' archives in DIR (packages)",
    )
    parser.add_argument(
        "--limit-tokens",
        type=positive,
        metavar="N",
        help="stop after N tokens of training text, and N/10 of validation text",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder to write (default: data/ and the text's name)",
    )
    parser.add_argument(
        "--replace",
        action="store_true",
        help="replace the corpus in --out even if it is of another text (default: only if it is of "
        "this one)",
    )
    parser.add_argument(
        "--tokenizer",
        type=tokenizer,
        metavar="{byte,char,gpt2,bpe-N,MODEL}",
        help="byte: 256 bytes and an end of text; char: the text's own characters; gpt2: GPT-2's "
        "50257 byte pairs; bpe-N: N tokens of the text's own byte pairs, such as bpe-4096; "
        "folder/of/a_model, model.gguf or an id on the hub: that model's tokenizer (default: "
        "byte)",
    )


def main(args: argparse.Namespace) -> int:
    """Prepare a corpus and print a line about it."""
    _check_options(args)
    out = args.out or default_folder(args)
    check_place("--out", out)
    meta = _prepare(args, out)
    train, val = meta["splits"]["train"], meta["splits"]["val"]
    labels = ""
    if "labels" in meta:
        labels = (
            f"; {counted(len(meta['labels']), 'label')}, {train['documents']:,} documents for "
            f"training, {val['documents']:,} for validation"
        )
    print(
        f"{out}: {train['tokens']:,} tokens for training, {val['tokens']:,} for validation, "
        f"{meta['tokenizer']} tokenizer, vocabulary {meta['vocab_size']}{labels}"
    )
    return 0


def _check_options(args: argparse.Namespace) -> None:
    for option, sources in GOES_WITH.items():
        value = getattr(args, option)
        if value is not None and args.source not in sources:
            spelling = f"--{option.replace('_', '-')} {str(value)!r}"
            raise BenchError(
                f"{spelling} is an option of prepare {' and '.join(sources)}, not of prepare "
                f"{args.source}"
            )
    for option, spelling in NEEDS.get(args.source, {}).items():
        if getattr(args, option) is None:
            raise BenchError(f"prepare {args.source} needs {spelling}")
    if args.revision is not None and args.data_dir is not None:
        raise BenchError(
            f"--revision {args.revision!r} names a revision on the hub, but --data-dir reads a "
            "local copy; leave one of them out"
        )


def default_folder(args: argparse.Namespace) -> Path:
    """Return the default folder of a corpus, in data/ with the name of the text."""
    if args.source == Source.STDLIB:
        return Path(DEFAULT_DATA_DIR)
    if args.source == Source.NANOGPT:
        return Path("data") / f"nanogpt-{args.input.resolve().name}"
    if args.source == Source.EURLEX:
        name = "eurlex" if args.task in (None, "text") else f"eurlex-{args.task}"
    elif args.source == Source.HUB:
        name = args.dataset.rpartition("/")[2]
    elif args.source == Source.PACKAGES:
        name = "packages"
    else:
        name = args.input.stem
    folder = Path("data") / name
    if folder == Path(DEFAULT_DATA_DIR):
        # run and compare would take it for the standard library's prose
        raise BenchError(
            f"prepare {args.source} would write to {str(folder)!r}, the folder of prepare stdlib; "
            "give another one with --out"
        )
    return folder


def _prepare(args: argparse.Namespace, out: Path) -> dict[str, Any]:
    from nanogpt_bench.data.dataset import prepare_eurlex, prepare_hub
    from nanogpt_bench.data.packages import prepare_packages
    from nanogpt_bench.data.text import prepare_nanogpt, prepare_stdlib, prepare_text

    options: dict[str, Any] = {
        "tokenizer": args.tokenizer or "byte",
        "limit": args.limit_tokens,
        "progress": sys.stderr.isatty(),
        "replace": args.replace,
    }
    for option in ("data_dir", "revision"):
        if args.source in GOES_WITH[option]:
            options[option] = getattr(args, option)
    if args.source == Source.STDLIB:
        return prepare_stdlib(out, **options)
    if args.source == Source.TEXT:
        return prepare_text(args.input, out, **options)
    if args.source == Source.NANOGPT:
        return prepare_nanogpt(args.input, out, **options)
    if args.source == Source.PACKAGES:
        return prepare_packages(out, **options, packages=args.packages)
    if args.source == Source.EURLEX:
        return prepare_eurlex(out, **options, task=args.task or "text")
    return prepare_hub(out, args.dataset, args.column, config=args.config, **options)
