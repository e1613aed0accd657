"""`nanogpt-bench evaluate`: the validation loss of one set of weights in several formats, without training."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from nanogpt_bench.commands.arguments import OF_REPORT
from nanogpt_bench.commands.evaluate_run import evaluate_run
from nanogpt_bench.commands.evaluate_trained import evaluate_trained
from nanogpt_bench.commands.evaluation import Evaluation, measured
from nanogpt_bench.commands.run import say
from nanogpt_bench.config.metrics import OF_LABELS
from nanogpt_bench.config.precedence import has_format
from nanogpt_bench.config.rules import RULES
from nanogpt_bench.config.schema import ROUNDED, Config, OptimizerConfig
from nanogpt_bench.config.settings import Resolved, find_config, load_config
from nanogpt_bench.data.batches import open_corpus
from nanogpt_bench.data.default import prepare_default
from nanogpt_bench.model.weights import load_weights, save_weights
from nanogpt_bench.runs.trained import is_checkpoint, is_run, run_folder
from nanogpt_bench.step.formats import format_name, format_summary
from nanogpt_bench.step.resolve import resolve
from nanogpt_bench.step.trainer import Trainer
from nanogpt_bench.system.errors import BenchError
from nanogpt_bench.training.train import runtime, write_json

#: columns of the table where no terminal says how wide it is
_WIDTH = 120


def evaluate(
    config: Config, formats: Sequence[str] = (), *, weights: Path | None = None, save: Path | None = None
) -> list[Evaluation]:
    """Return the validation loss of a configuration's initial weights: in float, then in each format.

    Args:
        config: the model and where its weights come from (`model.init_from`, or a seed).
        formats: each takes the place of `*` in `model.formats`; none: `model.formats` as it is.
        weights: a file that `save_weights` wrote of this very configuration, whose loss is then the only row.
        save: folder to write the weights of every row to, as FORMAT.safetensors.

    Raises:
        BenchError: settings, corpus, checkpoint or weights that can't be used, or nothing to compare.
    """
    resolved = _base(config, formats)
    with runtime(resolved) as device:
        corpus = open_corpus(resolved)
        own = {format_summary(resolved): resolved}
        rows: list[Evaluation] = []
        for name, row in (own if weights else _rows(config, resolved, formats)).items():
            trainer = Trainer(row, corpus, device)
            if weights:
                load_weights(trainer.model, weights)
            if save:
                save_weights(trainer.model, save / f"{name}.safetensors")
            rows.append(measured(name, trainer, rows[0].val_loss if rows else None))
        return rows


def _rows(config: Config, resolved: Resolved, formats: Sequence[str]) -> dict[str, Resolved]:
    """Return the configuration without formats, then in each format, by name."""
    if not formats and not resolved.model.formats:
        raise BenchError("nothing to compare with the float weights; give --formats E4M3,E5M2 or model.formats")
    names = ["none", *(format_name(name, "--formats") for name in formats)]
    rows = {name: _untrained(config, resolved, name) for name in names}
    return rows if len(rows) > 1 else rows | {format_summary(resolved): resolved}


def _untrained(config: Config, resolved: Resolved, fmt: str) -> Resolved:
    """Return `config` in one format, and without the rule, which means nothing where no step is taken."""
    row = copy.deepcopy(config)
    row.rule, row.optimizer = None, OptimizerConfig()
    row.train.precision = resolved.train.precision
    if fmt == "none":
        row.model.format, row.model.formats = None, {}
        row.model.storage = row.model.headroom = None
        return resolve(_without_formats(row))
    row.model.format = fmt
    # Under the other two storages nothing would be rounded.
    row.model.storage = resolved.model.storage if resolved.model.storage in ("master", *ROUNDED) else None
    return resolve(row)


def _base(config: Config, formats: Sequence[str]) -> Resolved:
    """Return what all rows have in common, resolved: of a configuration that may have no format of its own."""
    if not formats:
        return resolve(config)
    base = copy.deepcopy(config)
    rule = RULES.get(config.rule or "")
    rounds = rule.storage != "float32" if rule else config.model.storage not in (None, "float32")
    if rounds and not (config.model.formats or config.model.format):
        base.model.format = next((name for name in formats if format_name(name, "--formats") != "none"), None)
    has_one = has_format({"model.format": base.model.format, "model.formats": base.model.formats})
    return resolve(base if has_one else _without_formats(base))


def _without_formats(config: Config) -> Config:
    """Return a copy without what is said of the rows in a format."""
    config = copy.deepcopy(config)
    config.model.granularity = config.model.tied = None
    return config


def evaluate_command(
    config_name: str,
    formats: Sequence[str],
    overrides: Sequence[str],
    *,
    out: Path | None = None,
    weights: Path | None = None,
    save: Path | None = None,
    checkpoint: str | None = None,
    average: int | None = None,
) -> int:
    """Print the table of `evaluate`, write it to `out` as JSON where one is given, and return 0.

    A run's folder, or the config.yaml in it, stands for the weights that the run has trained; with `weights` for its
    settings.

    Raises:
        BenchError: a configuration, weights or formats that don't go together.
    """
    run_dir = run_folder(config_name)
    if run_dir is not None and weights is None:
        rows = evaluate_run(run_dir, checkpoint or "last", formats, overrides, save=save, average=average or 1)
        show_rows(rows, "gap to as trained", out)
        return 0
    if average is not None:
        raise BenchError(
            f"--average: {average} checkpoints are those of a run; {config_name!r} with what is given is none"
        )
    if checkpoint is not None:
        what = "--weights says which weights; leave one out" if weights else f"{config_name!r} is no folder of a run"
        raise BenchError(f"--checkpoint: {checkpoint!r}: {what}")
    if run_dir is None and Path(config_name).is_dir():
        raise BenchError(_no_run(Path(config_name)))
    gave_way: list[str] = []
    path = run_dir / "config.yaml" if run_dir else find_config(config_name)
    config = load_config(path, overrides, gave_way.append)
    if weights and formats:
        raise BenchError("--weights holds weights in the formats of the config; leave --formats out")
    prepare_default(_base(config, formats).data.dir)
    rows = evaluate(config, formats, weights=weights, save=save)
    for line in gave_way:
        say(line)
    show_rows(rows, "gap to float", out)
    return 0


def report_command(args: argparse.Namespace) -> int:
    """Write the report of a run's weights in several formats, print its tables, and return 0.

    Raises:
        BenchError: not the folder of a run, or options that can't be used.
    """
    run_dir = run_folder(args.config)
    if run_dir is None or args.weights is not None:
        option = next((f"--{name}" for name in OF_REPORT if getattr(args, name)), "--formats all")
        what = "--weights says which weights" if run_dir else f"{args.config!r} is no folder of a run"
        raise BenchError(f"{option}: a report is of a run, or with --model PATH; {what}")
    return evaluate_trained(run_dir, args)


def _no_run(path: Path) -> str:
    """What to say of a folder that is none of a run."""
    if is_checkpoint(path):
        return f"{str(path)!r} is a checkpoint; give its run's folder and --checkpoint {path.name}"
    runs = [str(child) for child in sorted(path.iterdir()) if is_run(child)]
    return f"{str(path)!r} is no folder of a run" + (f"; it holds: {', '.join(runs)}" if runs else "")


def show_rows(rows: Sequence[Evaluation], gap: str, out: Path | None) -> None:
    """Print the table, whose gaps are called `gap`, and write it to `out` as JSON where one is given."""
    console = Console()
    console.width = console.width if console.is_terminal else _WIDTH
    console.print(_table(rows, gap))
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_json(out, [row.facts for row in rows])


def _table(rows: Sequence[Evaluation], gap_name: str) -> Table:
    table = Table("format", "storage")
    of_labels = [metric for metric in OF_LABELS if any(row.of_labels for row in rows)]
    beside = [metric.title for metric in of_labels] or ["perplexity", "bits/byte"]
    for name in ("val loss", gap_name, *beside, "quantised"):
        table.add_column(name, justify="right")
    for row in rows:
        found = [_cell(row.of_labels.get(metric.figure)) for metric in of_labels]
        found = found or [_cell(row.perplexity, ".2f"), _cell(row.bits_per_byte)]
        gap = _cell(row.gap, "+.4f")
        table.add_row(row.format, row.storage, _cell(row.val_loss), gap, *found, f"{row.quantized_parameters:,}")
    return table


def _cell(value: float | None, spec: str = ".4f") -> str:
    return "-" if value is None else format(value, spec)
