"""The report on a model's weights in several formats: evaluations, a table of gaps by
layer, and a mixture.
"""

import argparse
import math
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress as Bar
from torch import Tensor, nn

import fp8manifold as fm
from nanogpt_bench.config.settings import build_config, parse_overrides
from nanogpt_bench.data.batches import Corpus, load_corpus
from nanogpt_bench.data.text import read_text
from nanogpt_bench.data.tokenizers import check_tokens, model_tokenizer
from nanogpt_bench.evaluation.budget import best_mixture, bytes_within
from nanogpt_bench.evaluation.measurement import (
    EMBEDDINGS,
    FILE,
    Evaluation,
    Measurement,
    gaps_table,
    quantized,
    rows_table,
)
from nanogpt_bench.evaluation.weights import RunWeights, checked_overrides, folder_of, named_formats
from nanogpt_bench.model.causal import (
    Outline,
    find_model,
    is_linear,
    load_causal,
    load_narrow,
    outline,
    skeleton,
)
from nanogpt_bench.report import facts_of, write_report
from nanogpt_bench.report.rows import group_rows
from nanogpt_bench.runs.environment import environment
from nanogpt_bench.runs.load import Run
from nanogpt_bench.runs.trained import choose, load
from nanogpt_bench.setup.runtime import runtime
from nanogpt_bench.system.errors import BenchError, counted, printable, refusals, rough_time, say
from nanogpt_bench.system.files import holds, is_unused, locked, mapping_with, write_json

ROWS = "evaluation.json"
#: the evaluation of each layer pattern quantised alone, by pattern and format
Cells = Mapping[tuple[str, str], Evaluation]
#: the fields of an evaluation that the file has
WRITTEN = (
    *(
        "format",
        "scale",
        "formats",
        "val_loss",
        "val_loss_se",
        "gap",
        "gap_se",
        "perplexity",
        "bits_per_byte",
    ),
    *("bytes_per_parameter", "quantized_parameters", "seconds"),
)
FORMATS = ("E2M5", "E3M4", "E4M3", "E1M6", "E5M2", "E7M0")
#: the formats of `--formats all`
ALL = ("E1M6", "E2M5", "E3M4", "E4M3", "E5M2", "E6M1", "E7M0")
#: settings of `run` that a report on a pretrained model takes
SETTINGS = (
    *("data.dir", "model.block_size", "model.formats", "model.tied", "model.headroom"),
    *("train.batch_size", "runtime.threads", "runtime.device"),
)
#: defaults for a pretrained model: tokens per window, windows, and windows at a time
BLOCK, WINDOWS, BATCH = 256, 24, 4
#: settings that a report on a run does not take, and why
_SET_OTHERWISE = {
    "model.granularity": "give --scales",
    "model.storage": "every row has one byte per weight",
}
#: a layer's block, and its name inside the block
_IN_BLOCK = re.compile(r"(.*?\.\d+)\.(.+)")
#: seconds between two lines of progress
_EVERY = 15.0
_WIDTH = 130


def report_model(args: argparse.Namespace) -> int:
    """Measure a causal language model of transformers; print tables, write a folder,
    and print the page's path.
    """
    given = parse_overrides(args.overrides)
    for key in given:
        if key not in SETTINGS:
            raise BenchError(
                f"--{key} means nothing to a pretrained model; allowed: {', '.join(SETTINGS)}"
            )
    config = build_config({key: value for key, value in given.items() if key != "model.formats"})
    out = args.out or Path("runs") / f"evaluate-{Path(args.model).resolve().stem}"
    with locked(out, "--out"), runtime(config) as device, torch.no_grad():
        _check_folder(out)
        found = outline(args.model)
        corpus = _text(
            args, config.data.dir if "data.dir" in given else None, found, config.model.block_size
        )
        block = config.model.block_size or min(BLOCK, found.positions, len(corpus.val) - 1)
        own = dict(given.get("model.formats") or {})
        floats = (args.sensitivity, args.budget, args.embeddings)
        more = (
            args.formats,
            args.scales,
            own,
            given.get("model.tied"),
            given.get("model.headroom"),
        )
        # A model published in codes is measured in these, unless an option needs its
        # floats. A float model is read again for each row, into codes, unless rows need
        # the floats. A .gguf file can be read as floats only.
        stored = _as_stored(found) if found.stored and not any((*floats, *more)) else None
        shared = any(floats) or EMBEDDINGS in own
        rereads = not found.stored and not shared and "gguf_file" not in find_model(args.model)
        codes: dict[str, Any] = {}
        if stored:
            codes = {"bytes_each": found.stored_bytes / found.parameters, "quantization": {}}
        model: Any = (load_narrow(args.model) if rereads else None) or load_causal(
            args.model, **codes
        )
        windows = spread(corpus.val, args.windows or WINDOWS, block).to(device)
        batch = config.train.batch_size if "train.batch_size" in given else BATCH
        options = {
            "tied": config.model.tied or "leave",
            "headroom": config.model.headroom,
            "seed": config.seed,
        }
        read = f"{counted(len(windows), 'window')} of {counted(block, 'token')}"
        say(f"{args.model}: {found.kind}, {found.parameters:,} parameters; {read}")
        measured = (
            model.to(device),
            windows,
            corpus.val_tokens_per_byte,
            batch,
            options,
            args.save,
        )
        reader = partial(_read, args.model, device) if rereads else None
        at = Measurement(args.model, *measured, reader=reader, stored=stored)
        del model, measured
        _report(at, args, own, out, environment(corpus, config.runtime.threads))
    return 0


def _as_stored(found: Outline) -> tuple[str, str]:
    """The formats of a published model's weights, and the granularities of their
    scales.
    """
    formats = sorted({each.format.name for each in found.stored.values()})
    return ",".join(formats), ",".join(sorted({each.granularity for each in found.stored.values()}))


def _read(
    name: str, device: torch.device, formats: Mapping[str, Any], options: Mapping[str, Any]
) -> nn.Module:
    """The model with the weights of `formats` in codes."""
    asked = {"formats": dict(formats), **options}
    quantized(
        skeleton(name).float(), asked["formats"], **options
    )  # refuses wrong formats before weights are read
    read: nn.Module = load_causal(name, bytes_each=1.25, quantization=asked).to(device)
    return read


def report_run(run_dir: Path, args: argparse.Namespace) -> int:
    """Measure a run's weights in float32 and rounded on its validation batches; print
    and write as `report_model`.
    """
    given = checked_overrides(args.overrides)
    for key, instead in _SET_OTHERWISE.items():
        if key in given:
            raise BenchError(f"--{key} means nothing with a report of formats: {instead}")
    trained = load(choose(run_dir, args.checkpoint or "last"))
    where = folder_of(trained.path)
    if trained.config.task != "language":
        raise BenchError(
            f"{where} is of task {trained.config.task!r}, and a report of formats measures windows "
            f"of a text; nanogpt-bench evaluate {shlex.quote(str(run_dir))} --formats A,B rounds "
            f"its weights to formats"
        )
    weights = RunWeights(trained, given)
    config, corpus = weights.own, weights.open_text()
    out = args.out or Path("runs") / f"evaluate-{run_dir.resolve().name}"
    with locked(out, "--out"), runtime(config) as device, torch.no_grad():
        _check_folder(out)
        trainer = weights.rounded({}, corpus, device)
        windows, batch = trainer.validation_windows(), config.train.batch_size
        block = windows.shape[1] - 1
        tied, headroom = given.get("model.tied") or "leave", given.get("model.headroom")
        options = {"tied": tied, "headroom": headroom, "seed": config.seed or 0}
        say(
            f"weights of {where}; {counted(len(windows), 'window')} of {counted(block, 'token')}, "
            f"in float32"
        )
        per_byte = corpus.val_tokens_per_byte
        at = Measurement(str(run_dir), trainer.model, windows, per_byte, batch, options, args.save)
        _report(at, args, weights.formats, out, environment(corpus, config.runtime.threads))
    return 0


def _text(
    args: argparse.Namespace, folder: str | None, found: Outline, block: int | None
) -> Corpus:
    """The text on which a pretrained model is measured, in the model's tokens."""
    if (args.input is None) == (folder is None):
        raise BenchError(
            "--model needs a text: --input FILE or --data.dir DIR prepared with --tokenizer and "
            "the model"
        )
    if block is not None and block > found.positions:
        raise BenchError(
            f"model.block_size: {block} is more than the {found.positions} positions of "
            f"{args.model!r}"
        )
    if folder is not None:
        corpus = load_corpus(Path(folder), block or 1)
        largest = int(corpus.val.max())
        check_tokens(str(corpus.meta["tokenizer"]), args.model, found.vocab_size, folder, largest)
        return corpus
    text, tokenizer = read_text(args.input), model_tokenizer(args.model)
    tokens = tokenizer.encode(text)
    check_tokens(
        tokenizer.name,
        args.model,
        found.vocab_size,
        str(args.input),
        int(np.max(tokens, initial=0)),
    )
    if len(tokens) <= (block or 1):
        raise BenchError(
            f"--input {str(args.input)!r} has {counted(len(tokens), 'token')}, a window needs "
            f"{(block or 1) + 1}"
        )
    counts = {"tokens": len(tokens), "bytes": len(text.encode("utf-8"))}
    meta = {
        **tokenizer.meta(),
        "source": {"kind": "text", "file": args.input.name},
        "splits": {"val": counts},
    }
    return Corpus(args.input, tokens, tokens, meta)


def spread(tokens: Any, count: int, block: int) -> Tensor:
    """Return windows (N, T + 1) spread evenly over a text; fewer than `count` where the
    text is too short for them.
    """
    if len(tokens) <= block:
        raise BenchError(
            f"the text has {counted(len(tokens), 'token')}, a window of {block} needs {block + 1}"
        )
    count = max(1, min(count, (len(tokens) - 1) // block))
    starts = np.linspace(0, len(tokens) - block - 1, count).astype(np.int64)
    return torch.from_numpy(
        np.asarray(tokens)[starts[:, None] + np.arange(block + 1)].astype(np.int64)
    )


def _report(
    at: Measurement,
    args: argparse.Namespace,
    own: Mapping[str, Any],
    out: Path,
    facts: Mapping[str, Any],
) -> None:
    """Measure in the formats of the command line and of `own`; write the folder and
    print the tables.
    """
    formats = named_formats(
        [each for name in args.formats or () for each in (ALL if name == "all" else (name,))]
    )
    if "none" in formats:
        raise BenchError("--formats: 'none' is what the gaps are measured against; leave it out")
    if args.budget is not None and not args.sensitivity:
        args.sensitivity = "kinds"
    rows, table = _measure(at, args, formats, own)
    page = _write(out, at.name, rows, table, facts, at.windows.shape[1] - 1)
    Console(width=None if sys.stdout.isatty() else _WIDTH).print(rows_table(rows))
    if table is not None:
        print("".join(f"{printable(line)}\n" for line in gaps_table(table).splitlines()))
    print(page)


def _check_folder(out: Path) -> None:
    wrote = holds(mapping_with("model", "environment", "rows"))
    if not is_unused(out) and not wrote(out / ROWS):
        raise BenchError(
            f"--out {str(out)!r} is in use and holds no evaluation of a model; give a new folder"
        )


def _measure(
    at: Measurement, args: argparse.Namespace, formats: Sequence[str], own: Mapping[str, Any]
) -> tuple[list[Evaluation], dict[str, Any] | None]:
    names = list(formats) or ([] if own or at.stored else list(FORMATS))
    scales = list(dict.fromkeys(args.scales or ["channel"]))
    rounded = ("*", EMBEDDINGS) if args.embeddings else ("*",)
    first, shared = at.stored or ("none", "")
    plans: list[tuple[str, Mapping[str, Any], str]] = [(first, {}, shared)]
    plans += [("mixed", own, scale) for scale in scales if own and not formats]
    for name in names:
        plans += [(name, {**dict.fromkeys(rounded, name), **own}, scale) for scale in scales]
    parts = _parts(at, args.sensitivity, own) if args.sensitivity else {}
    names = names or (list(FORMATS) if parts else [])
    cells = [(pattern, name) for pattern in parts for name in names]
    with _progress(len(plans) + len(cells)) as tick:
        rows = []
        for plan in plans:
            rows.append(at.row(*plan))
            tick(f"{' '.join(filter(None, (plan[0], plan[2])))}: {rows[-1].val_loss:.4f}")
            if len(rows) == 2 or at.stored:
                say(f"not quantised: {'; '.join(at.left) or 'nothing'}")
        if not parts:
            return rows, None
        # The given formats hold in every cell, so its gap is to a row with these alone.
        base, losses = rows[0], at.floats
        if any(value != "none" for value in own.values()):
            base = at.row("given", own, scales[0], saves=False)
            losses = at.losses
        found: dict[tuple[str, str], Evaluation] = {}
        for pattern, name in cells:
            formats_of_cell = {**dict.fromkeys(parts[pattern], name), **own}
            found[pattern, name] = at.row(
                name, formats_of_cell, scales[0], saves=False, against=losses
            )
            tick(f"{pattern} in {name}: {found[pattern, name].gap:+.4f}")
        if args.budget is not None:
            mixture = _mixture(at, base, found, args.budget)
            if mixture is None:
                say(
                    f"--budget {args.budget:g}: no mixture is that small, not even of the formats "
                    f"with the fewest bits"
                )
            else:
                chosen = {key: name for pattern, name in mixture.items() for key in parts[pattern]}
                rows.append(at.row("mixture", {**chosen, **own}, scales[0]))
    return rows, {
        "patterns": list(parts),
        "keys": {pattern: list(keys) for pattern, keys in parts.items()},
        "given": dict(own),
        "formats": names,
        "operand": "weight",
        "seeds": [0],
        "rule": "",
        "reference": "the same weights in the formats given"
        if base.formats
        else "the same weights as floats",
        "reference_loss": base.val_loss,
        "of": at.name,
        "gap": [[found[pattern, name].gap for name in names] for pattern in parts],
        "spread": [[found[pattern, name].gap_se for name in names] for pattern in parts],
        "status": [[None] * len(names) for _ in parts],
    }


def _parts(at: Measurement, by: str, own: Mapping[str, Any]) -> dict[str, list[str]]:
    """Patterns and their keys in `formats`: linear layers and embeddings, each once,
    without those that `own` names.
    """
    group = {"blocks": 1, "kinds": 2, "layers": 0}[by]
    layers: dict[str, list[str]] = {}
    for name in at.layers:
        match = re.fullmatch(_IN_BLOCK, name)
        layers.setdefault(match[group] if match else name, []).append(name)
    patterns = dict.fromkeys((pattern for pattern in own if pattern != EMBEDDINGS), "E4M3")
    linear = {name: (1, 1) for name, module in at.model.named_modules() if is_linear(module)}
    with refusals("model.formats", ValueError):
        given = fm.check_formats(patterns, linear, "fp8") if patterns else {}
    left = {
        pattern: [name for name in names if name not in given] for pattern, names in layers.items()
    }
    parts = {
        pattern: [pattern] if names == layers[pattern] else names
        for pattern, names in left.items()
        if names
    }
    parts |= {} if EMBEDDINGS in own else {EMBEDDINGS: [EMBEDDINGS]}
    if not parts:
        raise BenchError(
            "--sensitivity: model.formats sets every layer already; leave one of them out"
        )
    return parts


def _mixture(
    at: Measurement, base: Evaluation, found: Cells, budget: float
) -> dict[str, str] | None:
    """The formats of the best mixture of at most `budget` bytes per parameter; None if
    no mixture is so small.
    """
    whole = _bytes_of(base, at.parameters)
    choices: dict[str, list[tuple[str, float, int]]] = {}
    for (pattern, name), row in found.items():
        formats = choices.setdefault(pattern, [("none", 0.0, 0)])
        gap = row.gap or 0.0
        if math.isfinite(gap):
            formats.append((name, gap, _bytes_of(row, at.parameters) - whole))
    chosen = best_mixture(choices, bytes_within(budget, at.parameters) - whole)
    return (
        None
        if chosen is None
        else {pattern: name for pattern, name in chosen.items() if name != "none"}
    )


def _bytes_of(row: Evaluation, parameters: int) -> int:
    return round((row.bytes_per_parameter or 0.0) * parameters)


@contextmanager
def _progress(count: int) -> Iterator[Callable[[str], None]]:
    """Yield a function to call after every measurement; it moves a bar on a terminal,
    or prints a line every 15 s.
    """
    console, begun, done = Console(stderr=True), time.monotonic(), 0
    last = begun
    with Bar(transient=True, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=count)

        def tick(what: str) -> None:
            nonlocal last, done
            now, done = time.monotonic(), done + 1
            bar.update(task, completed=done, description=printable(what))
            if not console.is_terminal and now - last >= _EVERY:
                last = now
                left = rough_time((now - begun) / done * (count - done))
                say(f"{done} of {count}: {what}" + (f"; {left} left" if done < count else ""))

        yield tick


def _write(
    out: Path,
    model: str,
    rows: Sequence[Evaluation],
    table: Any,
    facts: Mapping[str, Any],
    block: int,
) -> Path:
    (out / FILE).unlink(missing_ok=True)
    if table is not None:
        write_json(out / FILE, table)
    write_json(
        out / ROWS,
        {"model": model, "environment": facts, "rows": [row.facts(WRITTEN) for row in rows]},
    )
    runs = [_as_run(row, model, facts, block) for row in rows]
    grouped, title = group_rows(runs), f"nanogpt-bench evaluate: {Path(model).name}"
    return write_report(grouped, out, title=title, facts=facts_of(runs), baseline=grouped[0].label)


def _as_run(row: Evaluation, model: str, facts: Mapping[str, Any], block: int) -> Run:
    """Return a row as a run without steps, which the report can read."""
    if row.formats:
        rule = f"rounded ({row.scale})"
    else:
        rule = "float32" if row.format == "none" else "as stored"
    settings = {
        "pretrained": model,
        "block_size": block,
        "formats": row.formats,
        "granularity": row.scale or None,
    }
    summary: dict[str, Any] = {
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
