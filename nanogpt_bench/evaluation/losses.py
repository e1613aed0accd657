"""The validation loss of a run's weights in several formats, without training."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from nanogpt_bench.config.metrics import OF_LABELS, VAL_PERPLEXITY
from nanogpt_bench.data.batches import Corpus
from nanogpt_bench.evaluation.measurement import Row
from nanogpt_bench.evaluation.weights import OF_FORMATS, RunWeights, checked_overrides, folder_of, named_formats
from nanogpt_bench.loop.outcome import count
from nanogpt_bench.model.weights import quantized_layers, save_weights
from nanogpt_bench.runs.environment import at, environment
from nanogpt_bench.runs.trained import choose, load
from nanogpt_bench.setup.formats import format_summary
from nanogpt_bench.setup.runtime import runtime
from nanogpt_bench.system.errors import say
from nanogpt_bench.training.trainer import Trainer

#: of the environment, what changes the last bits of a loss
_OF_BITS = ("libraries.torch", "threads", "cpu", "gpu")
#: what a file has of a row
WRITTEN = (
    *("format", "storage", "val_loss", "gap", "perplexity", "bits_per_byte", "quantized_parameters", "checkpoint"),
    "of_labels",
)


def _file_name(row: str) -> str:
    """A row's name as that of a file.

    >>> _file_name("E4M3 (as trained)")
    'E4M3-as-trained'
    """
    return re.sub(r"[ ()]+", "-", row).strip("-")


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
        rows: list[Row] = []
        for name, trainer in _trainers(weights, names, corpus, device):
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
                    checkpoint=str(trained.path),
                    of_labels={metric.figure: figures[metric.name] for metric in OF_LABELS if metric.name in figures},
                )
            )
        say(_comparison(weights, rows[0].val_loss, environment(corpus, weights.own.runtime.threads)))
    return rows


def _trainers(
    weights: RunWeights, names: Sequence[str], corpus: Corpus, device: torch.device
) -> Iterator[tuple[str, Trainer]]:
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
        then, here = (at(facts, key) for facts in (trained.environment, now))
        differing += [f"{key} was {then!r}, is {here!r}"] if then != here else []
    return f"{where} had val loss {recorded!r}, here it is {loss!r}: {', '.join(differing) or 'nothing known differs'}"
