"""The report on a model's weights in several formats.

`report_model` measures a model of transformers, `report_run` the weights of a run. Both
make a `Measurement` and go on in `_report`:

    rows             an evaluation for each format and granularity of scales, or for the
                     formats that were given by layer
    --sensitivity    a map of gaps: each group of layers alone in each format
    --budget         the mixture of formats that, by the map, is best in so many bytes
    files            evaluation.json, sensitivity.json, the page
"""

import argparse
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress as Bar
from torch import Tensor, nn

from nanogpt_bench.config.endings import RunStatus
from nanogpt_bench.config.schema import NO_FORMAT, Config, Task
from nanogpt_bench.config.settings import build_config, parse_overrides
from nanogpt_bench.data.batches import Corpus, load_corpus
from nanogpt_bench.data.text import read_corpus_text
from nanogpt_bench.data.tokenizers import check_tokens, model_tokenizer
from nanogpt_bench.evaluation.gap_map import GapMap, LayerGroups, layer_groups
from nanogpt_bench.evaluation.measurement import (
    EMBEDDINGS,
    GAPS_FILE,
    Evaluation,
    Measurement,
    StoredAs,
    gaps_table,
    quantized,
    rows_table,
)
from nanogpt_bench.evaluation.weights import RunWeights, checked_overrides, folder_of, named_formats
from nanogpt_bench.model.causal import (
    Outline,
    find_model,
    load_causal,
    load_narrow,
    outline,
    skeleton,
)
from nanogpt_bench.report import report_facts, write_report
from nanogpt_bench.report.rows import group_rows
from nanogpt_bench.runs.environment import environment
from nanogpt_bench.runs.load import Run
from nanogpt_bench.runs.trained import choose, load
from nanogpt_bench.setup.runtime import runtime
from nanogpt_bench.system.errors import BenchError, counted, printable, rough_time, say
from nanogpt_bench.system.files import is_unused, json_test, locked, mapping_with, write_json

EVALUATION_FILE = "evaluation.json"
#: the fields of an evaluation that the file has
REPORT_FIELDS = (
    "format",
    "scale",
    "formats",
    "val_loss",
    "val_loss_se",
    "gap",
    "gap_se",
    "perplexity",
    "bits_per_byte",
    "bytes_per_parameter",
    "quantized_parameters",
    "seconds",
)
#: the formats without --formats
DEFAULT_FORMATS = ("E2M5", "E3M4", "E4M3", "E1M6", "E5M2", "E7M0")
#: the formats of `--formats all`
ALL = ("E1M6", "E2M5", "E3M4", "E4M3", "E5M2", "E6M1", "E7M0")
#: settings of `run` that a report on a pretrained model takes
SETTINGS = (
    "data.dir",
    "model.block_size",
    "model.formats",
    "model.tied",
    "model.headroom",
    "train.batch_size",
    "runtime.threads",
    "runtime.device",
)
#: tokens of a window, by default for a pretrained model
WINDOW_TOKENS = 256
#: number of windows, by default for a pretrained model
WINDOWS = 24
#: windows at a time, by default for a pretrained model
BATCH = 4
#: settings that a report on a run does not take, and why
_SET_OTHERWISE = {
    "model.granularity": "give --scales",
    "model.storage": "every row has one byte per weight",
}
#: seconds between two lines of progress
_PROGRESS_SECONDS = 15.0
_REPORT_WIDTH = 130


def report_model(args: argparse.Namespace) -> int:
    """Measure a causal language model of transformers.

    Tables are printed and a folder is written. The last line is the page's path.
    """
    settings = parse_overrides(args.overrides)
    for key in settings:
        if key not in SETTINGS:
            raise BenchError(f"--{key} can't be used with --model; allowed: {', '.join(SETTINGS)}")
    config = build_config({key: value for key, value in settings.items() if key != "model.formats"})
    layer_formats = dict(settings.get("model.formats") or {})
    out = args.out or Path("runs") / f"evaluate-{Path(args.model).resolve().stem}"
    with locked(out, "--out"), runtime(config) as device, torch.no_grad():
        _check_folder(out)
        model_outline = outline(args.model)
        folder = config.data.dir if "data.dir" in settings else None
        corpus = _open_text(args, folder, model_outline, config.model.block_size)
        batch = config.train.batch_size if "train.batch_size" in settings else BATCH
        # The measurement has the only reference to the model, so that it can free the
        # model before it reads it again.
        measurement = _pretrained_measurement(
            args, config, layer_formats, batch, model_outline, corpus, device
        )
        facts = environment(corpus, config.runtime.threads)
        _report(measurement, args, layer_formats, out, facts)
    return 0


def _pretrained_measurement(
    args: argparse.Namespace,
    config: Config,
    layer_formats: Mapping[str, Any],
    batch: int,
    model_outline: Outline,
    corpus: Corpus,
    device: torch.device,
) -> Measurement:
    """Return the measurement of a pretrained model, read as its rows need it."""
    way = _way_of_reading(args, config, layer_formats, model_outline)
    model: Any = None
    stored = None
    reader = None
    if way is _Reading.AS_STORED:
        stored = _stored_as(model_outline)
        bytes_each = model_outline.stored_bytes / model_outline.parameters
        model = load_causal(args.model, bytes_each=bytes_each, quantization={})
    elif way is _Reading.FOR_EACH_ROW:
        # None for a model whose files have no 16-bit floats.
        model = load_narrow(args.model)
        reader = partial(_read_in_formats, args.model, device)
    if model is None:
        model = load_causal(args.model)
    block = config.model.block_size or min(
        WINDOW_TOKENS, model_outline.positions, len(corpus.val) - 1
    )
    windows = spread(corpus.val, args.windows or WINDOWS, block).to(device)
    say(
        f"{args.model}: {model_outline.kind}, {model_outline.parameters:,} parameters; "
        f"{counted(len(windows), 'window')} of {counted(block, 'token')}"
    )
    return Measurement(
        name=args.model,
        model=model.to(device),
        windows=windows,
        tokens_per_byte=corpus.val_tokens_per_byte,
        batch=batch,
        options={
            "tied": config.model.tied or "leave",
            "headroom": config.model.headroom,
            "seed": config.seed,
        },
        save=args.save,
        reader=reader,
        stored=stored,
    )


class _Reading(Enum):
    """How a pretrained model is read."""

    #: once, in the codes in which it was published
    AS_STORED = auto()
    #: as floats once, and again for each row, into the codes of its formats
    FOR_EACH_ROW = auto()
    #: once, as floats, which each row rounds
    AS_FLOATS = auto()


def _way_of_reading(
    args: argparse.Namespace,
    config: Config,
    layer_formats: Mapping[str, Any],
    model_outline: Outline,
) -> _Reading:
    """Return how a pretrained model is read.

    Codes of its files serve where no option asks for formats or floats. Reading again
    saves the memory of the floats. It does not serve rows that need them, nor .gguf
    files, which can be read as floats only.
    """
    asks_for_floats = any((args.sensitivity, args.budget, args.embeddings))
    if model_outline.stored:
        model = config.model
        asks_for_formats = any(
            (args.formats, args.scales, layer_formats, model.tied, model.headroom)
        )
        is_as_stored = not asks_for_floats and not asks_for_formats
        return _Reading.AS_STORED if is_as_stored else _Reading.AS_FLOATS
    is_gguf = "gguf_file" in find_model(args.model)
    if asks_for_floats or EMBEDDINGS in layer_formats or is_gguf:
        return _Reading.AS_FLOATS
    return _Reading.FOR_EACH_ROW


def _stored_as(model_outline: Outline) -> StoredAs:
    layers = model_outline.stored.values()
    formats = {layer.format.name for layer in layers}
    granularities = {layer.granularity for layer in layers}
    return StoredAs(",".join(sorted(formats)), ",".join(sorted(granularities)))


def _read_in_formats(
    name: str, device: torch.device, formats: Mapping[str, Any], options: Mapping[str, Any]
) -> nn.Module:
    """Read a model with the weights of `formats` in codes."""
    # Wrong formats are refused before weights are read.
    quantized(skeleton(name).float(), dict(formats), **options)
    quantization = {"formats": dict(formats), **options}
    model: nn.Module = load_causal(name, bytes_each=1.25, quantization=quantization)
    return model.to(device)


def report_run(run_dir: Path, args: argparse.Namespace) -> int:
    """Measure a run's weights on its validation batches, in float32 and rounded.

    Tables and files are those of `report_model`.
    """
    settings = checked_overrides(args.overrides)
    for key, instead in _SET_OTHERWISE.items():
        if key in settings:
            raise BenchError(f"--{key} can't be used with a report of formats; {instead}")
    trained = load(choose(run_dir, args.checkpoint or "last"))
    place = folder_of(trained.path)
    if trained.config.task != Task.LANGUAGE:
        raise BenchError(
            f"{place} was trained with task {trained.config.task!r}, but a report of formats needs "
            "windows of a text; to round its weights to formats: nanogpt-bench evaluate "
            f"{shlex.quote(str(run_dir))} --formats A,B"
        )
    weights = RunWeights(trained, settings)
    config = weights.config
    corpus = weights.open_text()
    out = args.out or Path("runs") / f"evaluate-{run_dir.resolve().name}"
    with locked(out, "--out"), runtime(config) as device, torch.no_grad():
        _check_folder(out)
        trainer = weights.rounded({}, corpus, device)
        windows = trainer.validation_windows()
        block = windows.shape[1] - 1
        say(
            f"weights of {place}; {counted(len(windows), 'window')} of {counted(block, 'token')}, "
            f"in float32"
        )
        measurement = Measurement(
            name=str(run_dir),
            model=trainer.model,
            windows=windows,
            tokens_per_byte=corpus.val_tokens_per_byte,
            batch=config.train.batch_size,
            options={
                "tied": settings.get("model.tied") or "leave",
                "headroom": settings.get("model.headroom"),
                "seed": config.seed or 0,
            },
            save=args.save,
        )
        facts = environment(corpus, config.runtime.threads)
        _report(measurement, args, weights.formats, out, facts)
    return 0


def _open_text(
    args: argparse.Namespace, folder: str | None, model_outline: Outline, block: int | None
) -> Corpus:
    """Return the text that a pretrained model is measured on, in its tokens."""
    if (args.input is None) == (folder is None):
        raise BenchError(
            "--model needs a text; give --input FILE, or --data.dir DIR that prepare wrote with "
            "--tokenizer and the model"
        )
    if block is not None and block > model_outline.positions:
        raise BenchError(
            f"model.block_size: {block} is more than the {model_outline.positions} positions of "
            f"{args.model!r}"
        )
    if folder is None:
        return _tokenized(args, model_outline, block or 1)
    corpus = load_corpus(Path(folder), block or 1)
    check_tokens(
        str(corpus.meta["tokenizer"]),
        args.model,
        model_outline.vocab_size,
        folder,
        int(corpus.val.max()),
    )
    return corpus


def _tokenized(args: argparse.Namespace, model_outline: Outline, block: int) -> Corpus:
    """Return the text file --input as a corpus in memory."""
    text = read_corpus_text(args.input)
    tokenizer = model_tokenizer(args.model)
    tokens = tokenizer.encode(text)
    check_tokens(
        tokenizer.name,
        args.model,
        model_outline.vocab_size,
        str(args.input),
        int(np.max(tokens, initial=0)),
    )
    if len(tokens) <= block:
        raise BenchError(
            f"--input {str(args.input)!r} has {counted(len(tokens), 'token')}, but a window needs "
            f"{block + 1}"
        )
    meta = {
        **tokenizer.meta(),
        "source": {"kind": "text", "file": args.input.name},
        "splits": {"val": {"tokens": len(tokens), "bytes": len(text.encode("utf-8"))}},
    }
    return Corpus(args.input, tokens, tokens, meta)


def spread(tokens: Any, count: int, block: int) -> Tensor:
    """Return windows (N, T + 1) spread evenly over a text.

    There are fewer than `count` where the text is too short for them.
    """
    if len(tokens) <= block:
        raise BenchError(
            f"the text has {counted(len(tokens), 'token')}, but a window of {block} needs "
            f"{block + 1}"
        )
    count = max(1, min(count, (len(tokens) - 1) // block))
    starts = np.linspace(0, len(tokens) - block - 1, count).astype(np.int64)
    positions = starts[:, None] + np.arange(block + 1)
    return torch.from_numpy(np.asarray(tokens)[positions].astype(np.int64))


def _report(
    measurement: Measurement,
    args: argparse.Namespace,
    layer_formats: Mapping[str, Any],
    out: Path,
    facts: Mapping[str, Any],
) -> None:
    """Measure, write the folder and print the tables.

    The formats are those of the command line and, by layer, of `layer_formats`.
    """
    names: list[str] = []
    for name in args.formats or ():
        names += ALL if name == "all" else (name,)
    formats = named_formats(names)
    if NO_FORMAT in formats:
        raise BenchError("--formats: gaps are measured against 'none' already; leave it out")
    results = _measure(measurement, args, formats, layer_formats)
    page = _write_report_files(out, measurement, results, facts)
    Console(width=None if sys.stdout.isatty() else _REPORT_WIDTH).print(rows_table(results.rows))
    if results.gaps is not None:
        print("".join(f"{printable(line)}\n" for line in gaps_table(results.gaps).splitlines()))
    print(page)


def _check_folder(out: Path) -> None:
    wrote = json_test(mapping_with("model", "environment", "rows"))
    if not is_unused(out) and not wrote(out / EVALUATION_FILE):
        raise BenchError(
            f"--out {str(out)!r} is in use and does not hold an evaluation of a model; give a new "
            "folder"
        )


class _RowPlan(NamedTuple):
    """A row that will be measured: the arguments of `Measurement.row`."""

    name: str
    formats: Mapping[str, Any]
    scale: str

    @property
    def title(self) -> str:
        return f"{self.name} {self.scale}" if self.scale else self.name


class _Results(NamedTuple):
    """What was measured: rows and, of a map, the content of sensitivity.json."""

    rows: list[Evaluation]
    gaps: dict[str, Any] | None = None


def _measure(
    measurement: Measurement,
    args: argparse.Namespace,
    formats: Sequence[str],
    layer_formats: Mapping[str, Any],
) -> _Results:
    names = list(formats)
    if not names and not layer_formats and not measurement.stored:
        names = list(DEFAULT_FORMATS)
    scales = list(dict.fromkeys(args.scales or ["channel"]))
    plans = _plan_rows(measurement, names, scales, layer_formats, embeddings=args.embeddings)
    groups: dict[str, list[str]] = {}
    if args.sensitivity or args.budget is not None:
        grouping = LayerGroups(args.sensitivity or LayerGroups.KINDS)
        groups = layer_groups(measurement, grouping, layer_formats)
        names = names or list(DEFAULT_FORMATS)
    with _progress_bar(len(plans) + len(groups) * len(names)) as tick:
        rows: list[Evaluation] = []
        for plan in plans:
            rows.append(measurement.row(*plan))
            tick(f"{plan.title}: {rows[-1].val_loss:.4f}")
            # Once, of the first row with formats. It is the second one, or the only one
            # of a model that is measured in the codes of its files.
            if len(rows) == 2 or measurement.stored:
                say(f"not quantised: {'; '.join(measurement.unquantised) or 'nothing'}")
        if not groups:
            return _Results(rows)
        gap_map = GapMap(measurement, rows[0], groups, names, scales[0], layer_formats)
        gap_map.measure(tick)
        if args.budget is not None:
            mixture = gap_map.measure_mixture(args.budget)
            if mixture is not None:
                rows.append(mixture)
    return _Results(rows, gap_map.content())


def _plan_rows(
    measurement: Measurement,
    names: Sequence[str],
    scales: Sequence[str],
    layer_formats: Mapping[str, Any],
    *,
    embeddings: bool,
) -> list[_RowPlan]:
    """Return the rows: the weights as they are, then every format at every granularity.

    Without formats there are rows of those that were given by layer, if any.
    """
    stored = measurement.stored or StoredAs(NO_FORMAT, "")
    plans = [_RowPlan(stored.formats, {}, stored.granularities)]
    if layer_formats and not names:
        plans += [_RowPlan("mixed", layer_formats, scale) for scale in scales]
    rounded = ("*", EMBEDDINGS) if embeddings else ("*",)
    for name in names:
        formats = {**dict.fromkeys(rounded, name), **layer_formats}
        plans += [_RowPlan(name, formats, scale) for scale in scales]
    return plans


@contextmanager
def _progress_bar(count: int) -> Iterator[Callable[[str], None]]:
    """Yield a function to call after every measurement.

    It moves a bar on a terminal, or prints a line every 15 s.
    """
    console = Console(stderr=True)
    start = time.monotonic()
    last_line = start
    finished = 0
    with Bar(transient=True, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=count)

        def tick(line: str) -> None:
            nonlocal last_line, finished
            now = time.monotonic()
            finished += 1
            bar.update(task, completed=finished, description=printable(line))
            if not console.is_terminal and now - last_line >= _PROGRESS_SECONDS:
                last_line = now
                remaining = rough_time((now - start) / finished * (count - finished))
                estimate = f"; {remaining} left" if finished < count else ""
                say(f"{finished} of {count}: {line}{estimate}")

        yield tick


def _write_report_files(
    out: Path, measurement: Measurement, results: _Results, facts: Mapping[str, Any]
) -> Path:
    """Write the files of a report; return the page's path."""
    (out / GAPS_FILE).unlink(missing_ok=True)
    if results.gaps is not None:
        write_json(out / GAPS_FILE, results.gaps)
    rows = [row.facts(REPORT_FIELDS) for row in results.rows]
    write_json(
        out / EVALUATION_FILE, {"model": measurement.name, "environment": facts, "rows": rows}
    )
    block = measurement.windows.shape[1] - 1
    runs = [_as_run(row, measurement.name, facts, block) for row in results.rows]
    grouped = group_rows(runs)
    return write_report(
        grouped,
        out,
        title=f"nanogpt-bench evaluate: {Path(measurement.name).name}",
        facts=report_facts(runs),
        baseline=grouped[0].label,
    )


def _as_run(row: Evaluation, model: str, facts: Mapping[str, Any], block: int) -> Run:
    """Return a row as a run without steps, which the report can read."""
    if row.formats:
        rule = f"rounded ({row.scale})"
    else:
        rule = "float32" if row.format == NO_FORMAT else "as stored"
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
        "status": RunStatus.FINISHED.value,
        "seed": 0,
        "final_val_loss": row.val_loss,
        "final_val_loss_se": row.val_loss_se,
        "bytes_per_parameter": row.bytes_per_parameter,
        "quantized_parameters": row.quantized_parameters,
        "bits_per_byte": row.bits_per_byte,
    }
    return Run(Path(summary["name"]), {"rule": rule, "model": settings}, facts, summary=summary)
