"""`nanogpt-bench evaluate --model PATH`: a language model in several formats, and which layer bears which."""

from __future__ import annotations

import argparse
import math
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress as Bar
from rich.table import Table
from torch import Tensor, nn

import fp8manifold as fm
from nanogpt_bench.commands.run import say
from nanogpt_bench.compare.remaining import in_words
from nanogpt_bench.config.settings import build_config, parse_overrides
from nanogpt_bench.data.batches import Corpus, load_corpus
from nanogpt_bench.data.own_tokenizer import check_tokens, own_tokenizer
from nanogpt_bench.data.text import read_text
from nanogpt_bench.model.causal import Outline, load_causal, outline, window_losses
from nanogpt_bench.report.build import facts_of, write_report
from nanogpt_bench.report.results import group_rows
from nanogpt_bench.runs.environment import environment
from nanogpt_bench.runs.load import Run
from nanogpt_bench.step.formats import format_name
from nanogpt_bench.step.rounding import EMBEDDINGS, rounded
from nanogpt_bench.step.runtime import runtime
from nanogpt_bench.step.trainer import mean_and_error
from nanogpt_bench.sweep.mixture import best_mixture
from nanogpt_bench.sweep.sensitivity import FILE, gaps_table
from nanogpt_bench.system.errors import BenchError, printable
from nanogpt_bench.system.files import write_json
from nanogpt_bench.system.lock import is_unused, locked

ROWS = "evaluation.json"
FORMATS = ("E2M5", "E3M4", "E4M3", "E1M6", "E5M2", "E7M0")
#: settings of `run` that mean something here
SETTINGS = ("data.dir", "model.block_size", "model.formats", "model.tied", "model.headroom")
SETTINGS += ("train.batch_size", "runtime.threads", "runtime.device")
#: tokens of a window, and windows, where nobody says how many
BLOCK, WINDOWS, BATCH = 256, 24, 4
#: a layer's block and its name there
_IN_BLOCK = re.compile(r"(.*?\.\d+)\.(.+)")
#: seconds between two lines of progress
_EVERY = 15.0
_WIDTH = 130


@dataclass(frozen=True)
class Row:
    """The model in one set of formats; losses in nats a token, `gap` to its weights as floats, window by window."""

    format: str
    scale: str
    formats: Mapping[str, Any]
    val_loss: float
    val_loss_se: float | None
    gap: float | None
    gap_se: float | None
    perplexity: float | None
    bits_per_byte: float
    bytes_per_parameter: float
    quantized_parameters: int
    seconds: float


@dataclass
class Measurement:
    """A model on windows of a text: rows are measured one after the other, on the same weights."""

    model: Any
    outline: Outline
    windows: Tensor
    tokens_per_byte: float
    batch: int
    options: Mapping[str, Any]
    #: loss of each window with float weights
    floats: list[float] = field(default_factory=list)
    #: what was not quantised in the row before, and why
    left: list[str] = field(default_factory=list)

    def row(self, name: str, formats: Mapping[str, Any], scale: str = "") -> Row:
        """Measure one set of formats; the first of all has none.

        Raises:
            BenchError: formats that can't be used with this model.
        """
        begun = time.perf_counter()
        options = {**self.options, **({"granularity": scale} if scale else {})}
        with rounded(self.model, formats, **options) as size:
            losses = window_losses(self.model, self.windows, self.batch)
            report = fm.quantization_report(self.model)
        self.floats = self.floats or losses
        tables = list(self.model.modules()) if formats.get(EMBEDDINGS, "none") != "none" else []
        also = {id(table.weight): table.weight.numel() for table in tables if isinstance(table, nn.Embedding)}
        others = [layer for layer in report.left if id(self.model.get_submodule(layer.name).weight) not in also]
        self.left = [f"{layer.name} ({layer.parameters:,}): {layer.detail}" for layer in others]
        differences = [one - other for one, other in zip(losses, self.floats, strict=True)]
        loss, error = mean_and_error(losses)
        gap, gap_error = mean_and_error(differences) if formats else (None, None)
        return Row(
            format=name,
            scale=scale,
            formats=dict(formats),
            val_loss=loss,
            val_loss_se=error,
            gap=gap,
            gap_se=gap_error,
            perplexity=math.exp(loss) if loss < 700 else None,
            bits_per_byte=loss / math.log(2) * self.tokens_per_byte,
            bytes_per_parameter=size / self.outline.parameters,
            quantized_parameters=report.quantized_parameters + sum(also.values()),
            seconds=time.perf_counter() - begun,
        )


def main_evaluate_model(args: argparse.Namespace) -> int:
    """The command line's entry: measure, print the tables, write the folder, and print the path of its page.

    Raises:
        BenchError: a model, a text or options that can't be used.
    """
    given = _settings(args.overrides)
    config = build_config({key: value for key, value in given.items() if key != "model.formats"})
    formats = list(dict.fromkeys(format_name(name, "--formats") for name in args.formats or ()))
    if "none" in formats:
        raise BenchError("--formats: 'none' is what the gaps are measured against; leave it out")
    if args.budget is not None and not args.sensitivity:
        args.sensitivity = "kinds"
    out = args.out or Path("runs") / f"evaluate-{Path(args.model).resolve().stem}"
    with locked(out, "--out"), runtime(config) as device, torch.no_grad():
        _check_folder(out)
        found = outline(args.model)
        corpus = _text(args, config.data.dir if "data.dir" in given else None, found, config.model.block_size)
        block = config.model.block_size or min(BLOCK, found.positions, len(corpus.val) - 1)
        model = load_causal(args.model).to(device)
        windows = _windows(corpus.val, args.windows or WINDOWS, block).to(device)
        batch = config.train.batch_size if "train.batch_size" in given else BATCH
        options = {"tied": config.model.tied or "leave", "headroom": config.model.headroom, "seed": config.seed}
        at = Measurement(model, found, windows, corpus.val_tokens_per_byte, batch, options)
        say(f"{args.model}: {found.kind}, {found.parameters:,} parameters; {len(windows)} windows of {block} tokens")
        rows, table = _measure(at, args, formats, dict(given.get("model.formats") or {}))
        facts = environment(corpus, config.runtime.threads)
        page = _write(out, args.model, rows, table, facts, block)
    Console(width=None if sys.stdout.isatty() else _WIDTH).print(_table(rows))
    if table is not None:
        print("".join(f"{printable(line)}\n" for line in gaps_table(table).splitlines()))
    print(page)
    return 0


def _settings(overrides: Sequence[str]) -> dict[str, Any]:
    given = parse_overrides(overrides)
    for key in given:
        if key not in SETTINGS:
            raise BenchError(f"--{key} means nothing to a pretrained model; allowed: {', '.join(SETTINGS)}")
    return given


def _check_folder(out: Path) -> None:
    if not is_unused(out) and not (out / ROWS).is_file():
        raise BenchError(f"--out {str(out)!r} is in use and holds no evaluation of a model; give a new folder")


def _text(args: argparse.Namespace, folder: str | None, found: Outline, block: int | None) -> Corpus:
    """Return the text to measure on, as tokens of the model's own."""
    if (args.input is None) == (folder is None):
        raise BenchError(
            "--model needs a text: --input FILE, or --data.dir DIR, prepared with --tokenizer and the model"
        )
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


def _windows(tokens: Any, count: int, block: int) -> Tensor:
    """Return windows spread evenly over a text, (N, T + 1); as many as there are without overlap where it is short."""
    if len(tokens) <= block:
        raise BenchError(f"the text has {len(tokens)} tokens, a window of {block} needs {block + 1}")
    count = max(1, min(count, (len(tokens) - 1) // block))
    starts = np.linspace(0, len(tokens) - block - 1, count).astype(np.int64)
    return torch.from_numpy(np.asarray(tokens)[starts[:, None] + np.arange(block + 1)].astype(np.int64))


def _measure(
    at: Measurement, args: argparse.Namespace, formats: Sequence[str], own: Mapping[str, Any]
) -> tuple[list[Row], dict[str, Any] | None]:
    """Return the rows of the table and, where one is asked for, the content of sensitivity.json."""
    names = list(formats) or ([] if own else list(FORMATS))
    scales = args.scales or ["channel"]
    embeddings = ["none"] if args.embeddings else []
    plans: list[tuple[str, dict[str, Any], str]] = [("none", {}, "")]
    plans += [("mixed", own, scale) for scale in scales if own and not formats]
    for name in names:
        plans += [(name, {"*": name, **dict.fromkeys([EMBEDDINGS] * len(embeddings), name), **own}, s) for s in scales]
    patterns = _patterns(at.outline, args.sensitivity) if args.sensitivity else []
    if patterns and not names:
        names = list(FORMATS)
    cells = [(pattern, name) for pattern in patterns for name in names]
    with _progress(len(plans) + len(cells)) as tick:
        rows = []
        for plan in plans:
            rows.append(at.row(*plan))
            tick(f"{' '.join(filter(None, (plan[0], plan[2])))}: {rows[-1].val_loss:.4f}")
            if len(rows) == 2:
                say(f"not quantised: {'; '.join(at.left) or 'nothing'}")
        if not patterns:
            return rows, None
        found: dict[tuple[str, str], Row] = {}
        for cell in cells:
            found[cell] = at.row(cell[1], {cell[0]: cell[1]}, scales[0])
            tick(f"{cell[0]} in {cell[1]}: {found[cell].gap:+.4f}")
        if args.budget is not None:
            mixture = _mixture(at, rows[0], found, args.budget)
            if mixture is None:
                say(f"--budget {args.budget:g}: no mixture is that small, not even of the formats with the fewest bits")
            else:
                rows.append(at.row("mixture", mixture, scales[0]))
    return rows, _sensitivity(args.model, patterns, names, found, rows[0])


def _patterns(found: Outline, by: str) -> list[str]:
    """Return patterns that together are every linear layer once, and the embeddings."""
    own = [name for name in found.layers if name not in found.shared]
    parts = {name: re.fullmatch(_IN_BLOCK, name) for name in own}
    at = {"blocks": 1, "kinds": 2, "layers": 0}[by]
    return [*dict.fromkeys(match[at] if match else name for name, match in parts.items()), EMBEDDINGS]


def _mixture(
    at: Measurement, floats: Row, found: Mapping[tuple[str, str], Row], budget: float
) -> dict[str, str] | None:
    """Return the formats of the best mixture of `budget` bytes a parameter, None where none is so small."""
    count = at.outline.parameters
    choices: dict[str, list[tuple[str, float, float]]] = {}
    for (pattern, name), row in found.items():
        saved = (floats.bytes_per_parameter - row.bytes_per_parameter) * count
        choices.setdefault(pattern, []).append((name, row.gap or 0.0, -saved))
    for each in choices.values():
        each.append(("none", 0.0, 0.0))
    chosen = best_mixture(choices, (budget - floats.bytes_per_parameter) * count)
    return None if chosen is None else {pattern: name for pattern, name in chosen.items() if name != "none"}


def _sensitivity(
    model: str, patterns: Sequence[str], names: Sequence[str], found: Mapping[tuple[str, str], Row], floats: Row
) -> dict[str, Any]:
    return {
        "patterns": list(patterns),
        "formats": list(names),
        "operand": "weight",
        "seeds": [0],
        "rule": "",
        "reference": "the same weights as floats",
        "reference_loss": floats.val_loss,
        "of": model,
        "gap": [[found[pattern, name].gap for name in names] for pattern in patterns],
        "spread": [[found[pattern, name].gap_se for name in names] for pattern in patterns],
        "status": [[None] * len(names) for _ in patterns],
    }


@contextmanager
def _progress(count: int) -> Iterator[Callable[[str], None]]:
    """Yield what is told of every measurement that is over: a bar on a terminal, else a line every so often."""
    console, begun, told, done = Console(stderr=True), time.monotonic(), time.monotonic(), 0
    with Bar(transient=True, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=count)

        def tick(what: str) -> None:
            nonlocal told, done
            now, done = time.monotonic(), done + 1
            bar.update(task, completed=done, description=printable(what))
            if not console.is_terminal and now - told >= _EVERY:
                told = now
                left = in_words((now - begun) / done * (count - done))
                say(f"{done} of {count}: {what}" + (f"; {left} left" if done < count else ""))

        yield tick


def _write(out: Path, model: str, rows: Sequence[Row], table: Any, facts: Mapping[str, Any], block: int) -> Path:
    """Write rows, sensitivity and report; return the page's path."""
    (out / FILE).unlink(missing_ok=True)
    if table is not None:
        write_json(out / FILE, table)
    write_json(out / ROWS, {"model": model, "environment": facts, "rows": [asdict(row) for row in rows]})
    runs = [_as_run(row, model, facts, block) for row in rows]
    options = {"title": f"nanogpt-bench evaluate: {Path(model).name}", "facts": facts_of(runs)}
    grouped = group_rows(runs)
    return write_report(grouped, out, **options, baseline=grouped[0].label)


def _as_run(row: Row, model: str, facts: Mapping[str, Any], block: int) -> Run:
    """Return a row as the report reads it: a run of no step."""
    rule = f"rounded ({row.scale})" if row.formats else "float32"
    settings = {"pretrained": model, "block_size": block, "formats": row.formats, "granularity": row.scale or None}
    summary = {
        "name": f"{row.format} {row.scale}".strip(),
        "rule": rule,
        "format": row.format,
        "status": "finished",
        "seed": 0,
        "final_val_loss": row.val_loss,
        "final_val_loss_se": row.val_loss_se,
        "bytes_per_parameter": row.bytes_per_parameter,
        "quantized_parameters": row.quantized_parameters,
        "bits_per_byte": row.bits_per_byte,
    }
    return Run(Path(summary["name"]), {"rule": rule, "model": settings}, facts, summary=summary)


def _table(rows: Sequence[Row]) -> Table:
    table = Table("format", "scales")
    for name in ("loss", "gap to float", "perplexity", "bits/byte", "bytes/param", "quantised", "seconds"):
        table.add_column(name, justify="right")
    for row in rows:
        gap = "-" if row.gap is None else f"{row.gap:+.4f}{_error(row.gap_se)}"
        perplexity = "-" if row.perplexity is None else f"{row.perplexity:.2f}"
        figures = (f"{row.bits_per_byte:.4f}", f"{row.bytes_per_parameter:.3f}", f"{row.quantized_parameters:,}")
        losses = (f"{row.val_loss:.4f}{_error(row.val_loss_se)}", gap, perplexity)
        table.add_row(row.format, row.scale, *losses, *figures, f"{row.seconds:.1f}")
    return table


def _error(error: float | None) -> str:
    return "" if error is None else f" ± {error:.4f}"
