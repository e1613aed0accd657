"""`nanogpt-bench sample`: text written by a run's weights, also in other formats."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanogpt_bench.commands import at_least_0, natural, parse_names, positive
from nanogpt_bench.config.schema import Task
from nanogpt_bench.system.errors import BenchError, counted, printable, refusals
from nanogpt_bench.system.files import json_test, refuse_to_replace, rows_with, write_json

if TYPE_CHECKING:
    import torch

    from nanogpt_bench.data.batches import Corpus
    from nanogpt_bench.data.tokenizers import Tokenizer
    from nanogpt_bench.loop.trainer import Trainer

#: characters that a text needs to be printed beside another one
_COLUMN = 36


@dataclass(frozen=True)
class Draw:
    """Choice of the next tokens.

    They are drawn from the `top_k` likeliest, by softmax(logits / temperature).
    """

    prompt: str = ""
    tokens: int = 200
    temperature: float = 1.0
    top_k: int | None = None
    seed: int = 0


@dataclass(frozen=True)
class Sample:
    """The text that one set of weights wrote after the prompt."""

    format: str
    text: str
    #: number of tokens; fewer than `Draw.tokens` after an end-of-text token
    tokens: int
    checkpoint: str


TEXTS = {
    "usage": (
        "nanogpt-bench sample RUN [--checkpoint best|last|step-N] [--formats A,B] [--prompt "
        "TEXT] [--tokens N]\n"
        "                            [--temperature T] [--top-k K] [--seed S] [--out FILE] "
        "[--section.key VALUE ...]"
    ),
    "description": (
        "Continue a text with a run's weights, first as they were trained and then rounded to "
        "each format, side\nby side and with the same random draws."
    ),
    "epilog": (
        "examples:\n"
        '  nanogpt-bench sample runs/e4m3 --prompt "The function returns"\n'
        "  nanogpt-bench sample runs/bf16_baseline --formats E4M3,E7M0 --temperature 0.8 --top-k "
        "40 --seed 3"
    ),
}


def add_options(parser: Any) -> None:
    parser.add_argument("run", metavar="RUN", help="a run's folder")
    parser.add_argument(
        "--checkpoint",
        metavar="WHICH",
        help="checkpoint of the run: best, last (default) or step-N",
    )
    parser.add_argument(
        *("--formats", "--format"),
        type=parse_names,
        metavar="A,B",
        help="formats to round all weights to, a text each; none: the weights as floats",
    )
    parser.add_argument(
        "--prompt",
        default="",
        metavar="TEXT",
        help="text to continue (default: begin a text)",
    )
    parser.add_argument(
        "--tokens", type=positive, default=200, metavar="N", help="tokens at most (default: 200)"
    )
    parser.add_argument(
        "--temperature",
        type=at_least_0,
        default=1.0,
        metavar="T",
        help="sampling temperature; 0: always the likeliest token (default: 1)",
    )
    parser.add_argument(
        "--top-k",
        type=positive,
        metavar="K",
        help="sample from the K likeliest tokens (default: all)",
    )
    parser.add_argument(
        "--seed", type=natural, default=0, metavar="S", help="seed of the random draws (default: 0)"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the texts as JSON as well")


def sample_run(
    run_dir: Path,
    draw: Draw,
    checkpoint: str = "last",
    formats: Sequence[str] = (),
    overrides: Sequence[str] = (),
) -> list[Sample]:
    """Return the texts of a run's weights: as trained, then rounded to each format.

    All have the same draws. A prompt of "" stands for the end-of-text token, or without
    one for the validation text's first token. Each format is used for all weights, in
    place of the run's; `none` stands for float weights. `overrides` are settings of the
    rows in a format, and `data.dir`.
    """
    from rich.console import Console
    from rich.progress import Progress

    from nanogpt_bench.data.tokenizers import tokenizer_from_meta
    from nanogpt_bench.evaluation.weights import (
        RunWeights,
        checked_overrides,
        folder_of,
        named_formats,
    )
    from nanogpt_bench.runs.trained import choose, load
    from nanogpt_bench.setup.runtime import runtime

    names = named_formats(formats)
    trained = load(choose(run_dir, checkpoint))
    if trained.config.task != Task.LANGUAGE:
        raise BenchError(
            f"{folder_of(trained.path)} was trained with task {trained.config.task!r}, so its "
            "weights can't write text; to measure them: nanogpt-bench evaluate "
            f"{shlex.quote(str(run_dir))}"
        )
    weights = RunWeights(trained, checked_overrides(overrides))
    corpus = weights.open_text()
    tokenizer = tokenizer_from_meta(corpus.meta)
    prompt = _encoded(draw.prompt, tokenizer, corpus)
    bar = Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
    with runtime(weights.config) as device, bar as progress:
        task = progress.add_task("sample", total=(1 + len(names)) * draw.tokens)
        samples = []
        for name, trainer in weights.trainers(names, corpus, device):
            progress.update(task, description=name)
            tokens = []
            for token in _generated_tokens(name, trainer, prompt.to(device), draw):
                progress.advance(task)
                if token == tokenizer.end_of_text:
                    break
                tokens.append(token)
            samples.append(
                Sample(
                    format=name,
                    text=tokenizer.decode(tokens),
                    tokens=len(tokens),
                    checkpoint=folder_of(trained.path),
                )
            )
    return samples


def _encoded(prompt: str, tokenizer: Tokenizer, corpus: Corpus) -> torch.Tensor:
    """Return the prompt's tokens (1, T)."""
    import torch

    if prompt:
        with refusals("--prompt"):
            tokens = tokenizer.encode(prompt).tolist()
    elif tokenizer.end_of_text is None:
        tokens = [int(corpus.val[0])]
    else:
        tokens = [tokenizer.end_of_text]
    return torch.tensor([tokens])


def _generated_tokens(
    name: str, trainer: Trainer, prompt: torch.Tensor, draw: Draw
) -> Iterator[int]:
    """Yield the tokens one by one.

    Every row has the same seed, so that differences come from the weights.
    """
    import torch

    tokens = trainer.model.generate(
        prompt,
        draw.tokens,
        temperature=draw.temperature,
        top_k=draw.top_k,
        generator=torch.Generator().manual_seed(draw.seed),
    )
    try:
        while True:
            # Not around the `yield`: the caller must not run in this precision.
            with trainer.precision():
                token = next(tokens, None)
            if token is None:
                return
            yield int(token)
    except FloatingPointError as error:
        raise BenchError(f"{name}: {error}; these weights can't write text") from None


def main(args: argparse.Namespace) -> int:
    """Print the texts of `sample_run`, and with `--out` write them as JSON."""
    from nanogpt_bench.runs.trained import run_folder

    try:
        args.prompt.encode("utf-8")
    except UnicodeEncodeError:
        raise BenchError(f"--prompt {args.prompt!r} is not UTF-8; give UTF-8 text") from None
    draw = Draw(
        prompt=args.prompt,
        tokens=args.tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        seed=args.seed,
    )
    run_dir = run_folder(args.run)
    if run_dir is None:
        raise BenchError(
            f"{args.run!r} is not a run's folder; give one that run wrote, such as runs/e4m3"
        )
    if args.out:
        refuse_to_replace(
            "--out", args.out, json_test(rows_with("draw", "text", "format")), "another name"
        )
    samples = sample_run(
        run_dir, draw, args.checkpoint or "last", args.formats or (), args.overrides
    )
    _print_samples(samples, draw.prompt)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        write_json(args.out, [{**asdict(sample), "draw": asdict(draw)} for sample in samples])
    return 0


def _print_samples(rows: Sequence[Sample], prompt: str) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    texts = [Text.assemble((_on_terminal(prompt), "bold"), _on_terminal(row.text)) for row in rows]
    if console.is_terminal and len(rows) > 1 and console.width >= _COLUMN * len(rows):
        table = Table(*(row.format for row in rows), expand=True)
        table.add_row(*texts)
        console.print(table)
        return
    for row, text in zip(rows, texts, strict=True):
        print(f"--- {row.format}, {counted(row.tokens, 'token')} ---")
        print(f"{text.plain}\n")


def _on_terminal(text: str) -> str:
    """Return a text with control characters replaced by their escapes.

    Line breaks stay.
    """
    return "\n".join(printable(line) for line in text.split("\n"))
