"""`nanogpt-bench evaluate --model PATH`: a language model in several formats, and which layer bears which."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from nanogpt_bench.commands.post_training import Measurement, check_folder, report, spread
from nanogpt_bench.commands.run import say
from nanogpt_bench.config.settings import build_config, parse_overrides
from nanogpt_bench.data.batches import Corpus, load_corpus
from nanogpt_bench.data.own_tokenizer import check_tokens, own_tokenizer
from nanogpt_bench.data.text import read_text
from nanogpt_bench.model.causal import Outline, load_causal, outline
from nanogpt_bench.runs.environment import environment
from nanogpt_bench.step.runtime import runtime
from nanogpt_bench.system.errors import BenchError
from nanogpt_bench.system.lock import locked

#: settings of `run` that mean something here
SETTINGS = (
    *("data.dir", "model.block_size", "model.formats", "model.tied", "model.headroom"),
    *("train.batch_size", "runtime.threads", "runtime.device"),
)
#: tokens of a window, and windows, where nobody says how many
BLOCK, WINDOWS, BATCH = 256, 24, 4


def main_evaluate_model(args: argparse.Namespace) -> int:
    """The command line's entry: measure, print the tables, write the folder, and print the path of its page.

    Raises:
        BenchError: a model, a text or options that can't be used.
    """
    given = _settings(args.overrides)
    config = build_config({key: value for key, value in given.items() if key != "model.formats"})
    out = args.out or Path("runs") / f"evaluate-{Path(args.model).resolve().stem}"
    with locked(out, "--out"), runtime(config) as device, torch.no_grad():
        check_folder(out)
        found = outline(args.model)
        corpus = _text(args, config.data.dir if "data.dir" in given else None, found, config.model.block_size)
        block = config.model.block_size or min(BLOCK, found.positions, len(corpus.val) - 1)
        model = load_causal(args.model).to(device)
        windows = spread(corpus.val, args.windows or WINDOWS, block).to(device)
        batch = config.train.batch_size if "train.batch_size" in given else BATCH
        options = {"tied": config.model.tied or "leave", "headroom": config.model.headroom, "seed": config.seed}
        calibration = spread(corpus.train, args.calibrate, block).to(device) if args.calibrate else None
        say(f"{args.model}: {found.kind}, {found.parameters:,} parameters; {len(windows)} windows of {block} tokens")
        at = Measurement(args.model, model, windows, corpus.val_tokens_per_byte, batch, options, calibration, args.save)
        report(at, args, dict(given.get("model.formats") or {}), out, environment(corpus, config.runtime.threads))
    return 0


def _settings(overrides: Sequence[str]) -> dict[str, Any]:
    given = parse_overrides(overrides)
    for key in given:
        if key not in SETTINGS:
            raise BenchError(f"--{key} means nothing to a pretrained model; allowed: {', '.join(SETTINGS)}")
    return given


def _text(args: argparse.Namespace, folder: str | None, found: Outline, block: int | None) -> Corpus:
    """Return the text to measure on, as tokens of the model's own."""
    if (args.input is None) == (folder is None):
        raise BenchError(
            "--model needs a text: --input FILE, or --data.dir DIR, prepared with --tokenizer and the model"
        )
    if args.calibrate and folder is None:
        raise BenchError("--calibrate needs a training text: --data.dir DIR, prepared with --tokenizer and the model")
    if block is not None and block > found.positions:
        raise BenchError(f"model.block_size: {block} is more than the {found.positions} positions of {args.model!r}")
    if folder is not None:
        corpus = load_corpus(Path(folder), block or 1)
        check_tokens(str(corpus.meta["tokenizer"]), args.model, found.vocab_size, folder, int(corpus.val.max()))
        return corpus
    text, tokenizer = read_text(args.input), own_tokenizer(args.model)
    tokens = tokenizer.encode(text)
    check_tokens(tokenizer.name, args.model, found.vocab_size, str(args.input), int(tokens.max(initial=0)))
    if len(tokens) <= (block or 1):
        raise BenchError(f"--input {str(args.input)!r} has {len(tokens)} tokens, a window needs {(block or 1) + 1}")
    counts = {"tokens": len(tokens), "bytes": len(text.encode("utf-8"))}
    meta = {**tokenizer.meta(), "source": {"kind": "text", "file": args.input.name}, "splits": {"val": counts}}
    return Corpus(args.input, tokens, tokens, meta)
