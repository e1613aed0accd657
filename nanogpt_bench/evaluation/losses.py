"""The validation loss of one set of weights in several formats, without training: a configuration's, or a run's."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from nanogpt_bench.config.metrics import OF_LABELS, VAL_PERPLEXITY
from nanogpt_bench.config.rules import RULES
from nanogpt_bench.config.schema import ROUNDED, WITHOUT_FORMATS, Config, OptimizerConfig
from nanogpt_bench.config.settings import Resolved
from nanogpt_bench.data.batches import Corpus, open_corpus
from nanogpt_bench.evaluation.measurement import Row
from nanogpt_bench.evaluation.weights import OF_FORMATS, RunWeights, checked_overrides, folder_of, named_formats
from nanogpt_bench.loop.outcome import count
from nanogpt_bench.model.weights import load_weights, quantized_layers, save_weights
from nanogpt_bench.runs.environment import environment
from nanogpt_bench.runs.trained import choose, load
from nanogpt_bench.setup.formats import format_name, format_summary, has_format
from nanogpt_bench.setup.resolve import resolve
from nanogpt_bench.setup.runtime import runtime
from nanogpt_bench.system.errors import BenchError
from nanogpt_bench.system.words import say
from nanogpt_bench.training.trainer import Trainer

#: of the environment, what changes the last bits of a loss
_OF_BITS = ("libraries.torch", "threads", "cpu", "gpu")


#: what a file has of a row
WRITTEN = (
    *("format", "storage", "val_loss", "gap", "perplexity", "bits_per_byte", "quantized_parameters", "checkpoint"),
    "of_labels",
)


def measure(
    trainers: Iterable[tuple[str, Trainer]], save: Path | None = None, checkpoint: str | None = None
) -> list[Row]:
    """Return the rows of models by their names; gaps are to the first. Weights are written to a folder `save`."""
    rows: list[Row] = []
    for name, trainer in trainers:
        if save:
            save_weights(trainer.model, save / f"{_file_name(name)}.safetensors")
        loss = trainer.validate()
        figures = trainer.figures(loss)
        rows.append(
            Row(
                format=name,
                val_loss=loss,
                gap=loss - rows[0].val_loss if rows else None,
                perplexity=figures.get(VAL_PERPLEXITY.name),
                bits_per_byte=trainer.bits_per_byte(loss),
                quantized_parameters=count(layer.weight for layer in quantized_layers(trainer.model).values()),
                storage=trainer.config.model.storage or "",
                checkpoint=checkpoint,
                of_labels={metric.figure: figures[metric.name] for metric in OF_LABELS if metric.name in figures},
            )
        )
    return rows


def _file_name(row: str) -> str:
    """A row's name as that of a file.

    >>> _file_name("E4M3 (as trained)")
    'E4M3-as-trained'
    """
    return re.sub(r"[ ()]+", "-", row).strip("-")


# A configuration's first weights


def evaluate(
    config: Config, formats: Sequence[str] = (), *, weights: Path | None = None, save: Path | None = None
) -> list[Row]:
    """Return the validation loss of a configuration's initial weights: in float, then in each format.

    Args:
        config: the model and where its weights come from (`model.init_from`, or a seed).
        formats: each takes the place of `*` in `model.formats`; none: `model.formats` as it is.
        weights: a file that `save_weights` wrote of this very configuration, whose loss is then the only row.
        save: folder to write the weights of every row to, as FORMAT.safetensors.

    Raises:
        BenchError: settings, corpus, checkpoint or weights that can't be used, or nothing to compare.
    """
    resolved = common_settings(config, formats)
    with runtime(resolved) as device:
        corpus = open_corpus(resolved)
        if weights:
            trainer = Trainer(resolved, corpus, device)
            load_weights(trainer.model, weights)
            return measure([(format_summary(resolved), trainer)], save)
        rows = _rows(config, resolved, formats)
        return measure(((name, Trainer(row, corpus, device)) for name, row in rows.items()), save)


def common_settings(config: Config, formats: Sequence[str]) -> Resolved:
    """Return what all rows have in common, resolved: of a configuration that may have no format of its own."""
    if not formats:
        return resolve(config)
    base = copy.deepcopy(config)
    rule = RULES.get(config.rule or "")
    storage = rule.storage if rule else config.model.storage or "float32"
    rounds = storage not in WITHOUT_FORMATS
    if rounds and not (config.model.formats or config.model.format):
        base.model.format = next((name for name in formats if format_name(name, "--formats") != "none"), None)
    return resolve(base if has_format(base.model) else _without_formats(base))


def _rows(config: Config, resolved: Resolved, formats: Sequence[str]) -> dict[str, Resolved]:
    """The configuration without formats, then in each format, by name."""
    if not formats and not resolved.model.formats:
        raise BenchError("nothing to compare with the float weights; give --formats E4M3,E5M2 or model.formats")
    rows = {name: _untrained(config, resolved, name) for name in ["none", *named_formats(formats)]}
    return rows if len(rows) > 1 else rows | {format_summary(resolved): resolved}


def _untrained(config: Config, resolved: Resolved, fmt: str) -> Resolved:
    """`config` in one format, and without the rule, which means nothing where no step is taken."""
    row = copy.deepcopy(config)
    row.rule, row.optimizer = None, OptimizerConfig()
    row.train.precision = resolved.train.precision
    if fmt == "none":
        row.model.format, row.model.formats = None, {}
        row.model.storage = row.model.headroom = row.model.embeddings = None
        return resolve(_without_formats(row))
    row.model.format = fmt
    # Under the other two storages nothing would be rounded.
    row.model.storage = resolved.model.storage if resolved.model.storage in ("master", *ROUNDED) else None
    return resolve(row)


def _without_formats(config: Config) -> Config:
    """A copy without the settings of rows in a format."""
    config = copy.deepcopy(config)
    config.model.granularity = config.model.tied = None
    return config


# A run's weights


def evaluate_run(
    run_dir: Path,
    checkpoint: str = "last",
    formats: Sequence[str] = (),
    overrides: Sequence[str] = (),
    *,
    save: Path | None = None,
) -> list[Row]:
    """Return the validation losses of a run's weights: as trained, as floats where that differs, and in each format.

    Standard error gets the text that they are measured on, and whether the first row is the loss that the run recorded.

    Args:
        run_dir: the run's folder.
        checkpoint: last, best or step-N.
        formats: each is that of every weight, in place of the run's.
        overrides: settings of the measurement, and of the rows in a format.
        save: folder to write the weights of every row to.

    Raises:
        BenchError: no such checkpoint, another text, or formats that don't go with the model.
    """
    names, given = named_formats(formats), checked_overrides(overrides)
    trained = load(choose(run_dir, checkpoint))
    weights = RunWeights(trained, given)
    corpus = weights.open_text()
    say(f"weights of {folder_of(trained.path)}; text {corpus.folder}, tokenizer {corpus.meta['tokenizer']}")
    with runtime(weights.own) as device:
        rows = measure(_trainers(weights, names, corpus, device), save, str(trained.path))
        say(_comparison(weights, rows[0].val_loss, environment(corpus, weights.own.runtime.threads)))
    return rows


def _trainers(
    weights: RunWeights, names: Sequence[str], corpus: Corpus, device: torch.device
) -> Iterator[tuple[str, Trainer]]:
    """Yield name and model of every row."""
    yield f"{format_summary(weights.own)} (as trained)", weights.as_trained(corpus, device)
    if not weights.is_plain or "none" in names:
        yield "none", weights.rounded({}, corpus, device)
    for name in names:
        if name != "none":
            yield name, weights.rounded(weights.requantised(name), corpus, device)
    if not names and any(key in weights.given for key in OF_FORMATS):
        yield "given", weights.rounded({**weights.own.model.formats, **weights.formats}, corpus, device)


def _comparison(weights: RunWeights, loss: float, now: Mapping[str, Any]) -> str:
    """A sentence on whether the loss is the recorded one, to the bit, and what differs if it is not."""
    trained = weights.trained
    recorded, where = trained.val_loss, f"the run at step {trained.step}"
    if recorded is None:
        return f"{where} did not validate: there is nothing to compare the first row with"
    if loss == recorded:
        return f"{where} had the val loss of the first row, to the bit"
    differing = [f"--{key}" for key in weights.given if key not in OF_FORMATS]
    for key in _OF_BITS:
        then, here = (_at(facts, key) for facts in (trained.environment, now))
        differing += [f"{key} was {then!r}, is {here!r}"] if then != here else []
    return f"{where} had val loss {recorded!r}, here it is {loss!r}: {', '.join(differing) or 'nothing known differs'}"


def _at(facts: Any, key: str) -> Any:
    for name in key.split("."):
        facts = facts.get(name) if isinstance(facts, Mapping) else None
    return facts
