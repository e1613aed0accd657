"""`nanogpt-bench evaluate`: the validation loss of one set of weights in several formats, without training."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from nanogpt_bench.config import Config, OptimizerConfig
from nanogpt_bench.data import open_corpus
from nanogpt_bench.errors import BenchError
from nanogpt_bench.resolve import format_name, format_summary, resolve
from nanogpt_bench.run_command import prepare_default, say
from nanogpt_bench.settings import load_config
from nanogpt_bench.shipped import find_config
from nanogpt_bench.step import Trainer
from nanogpt_bench.summary import count
from nanogpt_bench.surgery import quantized_layers
from nanogpt_bench.train import runtime, write_json
from nanogpt_bench.weights import load_weights, save_weights

#: columns of the table where no terminal says how wide it is
_WIDTH = 120


@dataclass(frozen=True)
class Evaluation:
    """One set of weights in one format; loss and gap to the float weights in nats a token."""

    format: str
    storage: str
    val_loss: float
    gap: float | None
    perplexity: float | None
    bits_per_byte: float
    quantized_parameters: int


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
    resolved = resolve(_without_granularity(config) if formats else config)
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
            rows.append(_evaluation(name, trainer, rows[0].val_loss if rows else None))
        return rows


def _rows(config: Config, resolved: Config, formats: Sequence[str]) -> dict[str, Config]:
    """Return the configuration without formats, then in each format, by name."""
    if not formats and not resolved.model.formats:
        raise BenchError("nothing to compare with the float weights; give --formats E4M3,E5M2 or model.formats")
    names = ["none", *(format_name(name, "--formats") for name in formats)]
    rows = {name: _untrained(config, resolved, name) for name in names}
    return rows if len(rows) > 1 else rows | {format_summary(resolved): resolved}


def _untrained(config: Config, resolved: Config, fmt: str) -> Config:
    """Return `config` in one format, and without the rule, which means nothing where no step is taken."""
    row = copy.deepcopy(config)
    row.rule, row.optimizer = None, OptimizerConfig()
    row.train.precision = resolved.train.precision
    if fmt == "none":
        row.model.format, row.model.formats = None, {}
        row.model.storage = row.model.tied = row.model.headroom = None
        return resolve(_without_granularity(row))
    row.model.format = fmt
    row.model.storage = None if resolved.model.storage == "float32" else resolved.model.storage
    return resolve(row)


def _without_granularity(config: Config) -> Config:
    """Return a copy without what is said of the rows in a format, in a configuration that may have none."""
    config = copy.deepcopy(config)
    config.model.granularity = None
    return config


def _evaluation(name: str, trainer: Trainer, float_loss: float | None) -> Evaluation:
    loss, config = trainer.validate(), trainer.config
    layers = quantized_layers(trainer.model)
    return Evaluation(
        format=name,
        storage=config.model.storage or "",
        val_loss=loss,
        gap=None if float_loss is None else loss - float_loss,
        perplexity=math.exp(loss) if loss < 700 else None,
        bits_per_byte=trainer.bits_per_byte(loss),
        quantized_parameters=count(layer.weight for layer in layers.values()),
    )


def evaluate_command(
    config_name: str,
    formats: Sequence[str],
    overrides: Sequence[str],
    *,
    out: Path | None = None,
    weights: Path | None = None,
    save: Path | None = None,
) -> int:
    """Print the table of `evaluate`, write it to `out` as JSON where one is given, and return 0.

    Raises:
        BenchError: a configuration, weights or formats that don't go together.
    """
    gave_way: list[str] = []
    config = load_config(find_config(config_name), overrides, gave_way.append)
    if weights and formats:
        raise BenchError("--weights holds weights in the formats of the config; leave --formats out")
    prepare_default(resolve(config).data.dir)
    rows = evaluate(config, formats, weights=weights, save=save)
    for line in gave_way:
        say(line)
    console = Console()
    console.width = console.width if console.is_terminal else _WIDTH
    console.print(_table(rows))
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_json(out, [asdict(row) for row in rows])
    return 0


def _table(rows: Sequence[Evaluation]) -> Table:
    table = Table("format", "storage")
    for name in ("val loss", "gap to float", "perplexity", "bits/byte", "quantised"):
        table.add_column(name, justify="right")
    for row in rows:
        gap = "-" if row.gap is None else f"{row.gap:+.4f}"
        perplexity = "-" if row.perplexity is None else f"{row.perplexity:.2f}"
        figures = (f"{row.val_loss:.4f}", gap, perplexity, f"{row.bits_per_byte:.4f}", f"{row.quantized_parameters:,}")
        table.add_row(row.format, row.storage, *figures)
    return table
