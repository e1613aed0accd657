"""The weights of a run's checkpoint, as trained and rounded to formats, and their
validation losses.
"""

import copy
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from nanogpt_bench.config.metrics import OF_LABELS, VAL_PERPLEXITY
from nanogpt_bench.config.schema import MANIFOLDS, ROUNDED, Config, OptimizerConfig
from nanogpt_bench.config.settings import build_config, parse_overrides
from nanogpt_bench.data import prepare_default
from nanogpt_bench.data.batches import Corpus, open_corpus
from nanogpt_bench.evaluation.measurement import Evaluation
from nanogpt_bench.loop.outcome import count
from nanogpt_bench.loop.trainer import Trainer
from nanogpt_bench.model.gpt import GPT, build_model
from nanogpt_bench.model.weights import fill, quantized_layers, save_weights
from nanogpt_bench.runs.environment import at, environment
from nanogpt_bench.runs.trained import Trained, choose, fill_floats, load, trained_shape
from nanogpt_bench.setup.formats import format_name, format_summary
from nanogpt_bench.setup.resolve import resolve
from nanogpt_bench.setup.runtime import runtime
from nanogpt_bench.setup.start import check_text, same_text
from nanogpt_bench.setup.task import model_shape
from nanogpt_bench.system.errors import BenchError, say

#: settings that may differ from the run's: those of the measurement, and those of the
#: rows in a format
OF_MEASURE = ("data.dir", "eval.", "runtime.", "train.batch_size")
OF_FORMATS = ("model.storage", "model.granularity", "model.headroom", "model.tied", "model.formats")
#: entries of the environment that can change the last bits of a loss
_OF_BITS = ("libraries.torch", "threads", "cpu", "gpu")
#: the fields of an evaluation that a file has
WRITTEN = (
    *(
        "format",
        "storage",
        "val_loss",
        "gap",
        "perplexity",
        "bits_per_byte",
        "quantized_parameters",
        "checkpoint",
    ),
    "of_labels",
)
#: the checkpoint's name in the errors of `fill` and `fill_floats`
_CALLED = "the checkpoint"


def checked_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the settings of a command line by dotted key; refuse those that an
    evaluation does not take.
    """
    given = parse_overrides(overrides)
    for key in given:
        if key == "model.format":
            raise BenchError(
                "--model.format: the weights have been trained; give the formats to round to as "
                "--formats"
            )
        if not any(
            key == known or (known.endswith(".") and key.startswith(known))
            for known in OF_MEASURE + OF_FORMATS
        ):
            allowed = ", ".join(
                f"{name}*" if name.endswith(".") else name for name in OF_MEASURE + OF_FORMATS
            )
            raise BenchError(f"--{key}: the weights of a run have been trained; allowed: {allowed}")
    return given


class RunWeights:
    """A checkpoint's weights, from which trainers are made."""

    def __init__(self, trained: Trained, given: Mapping[str, Any]) -> None:
        self.trained, self.given = trained, given
        self.formats: dict[str, Any] = dict(given.get("model.formats") or {})
        self._shape = trained_shape(trained.path)
        measure = {key: value for key, value in given.items() if key not in OF_FORMATS}
        # As many threads as the run had: sums in another order have other last bits.
        measure["runtime.threads"] = given.get("runtime.threads") or _threads(trained)
        self._given = build_config({**trained.settings, "model.init_from": None, **measure})
        #: the run's own settings, and those of the measurement
        self.own = resolve(self._given)
        self._start: GPT | None = None

    def open_text(self) -> Corpus:
        """Return the given text, or the run's, which has to be unchanged; the default
        text is prepared if need be.
        """
        prepare_default(self.own.data.dir)
        corpus, called = open_corpus(self.own), str(self.trained.path)
        if "data.dir" not in self.given and not same_text(self.trained, corpus):
            raise BenchError(
                f"{str(corpus.folder)!r} is not the text that {called!r} was trained on (its "
                f"sha256 differs); give "
                "that text, or this one, as --data.dir"
            )
        check_text(self.trained, corpus, called)
        return corpus

    def as_trained(self, corpus: Corpus, device: torch.device) -> Trainer:
        """Return the run's model with its weights as they were stored."""
        trainer = Trainer(
            self.own, corpus, device, start=build_model(model_shape(self.own, corpus), 0)
        )
        fill(trainer.model, self.trained.tensors, self.trained.metadata, _CALLED)
        return trainer

    @property
    def is_plain(self) -> bool:
        """True if the run computed with float32 weights, which then have the same loss
        as floats.
        """
        own = self.own
        return (
            own.model.storage == "float32"
            and own.train.precision != "bf16-pure"
            and not own.model.torchao_float8
        )

    def rounded(self, formats: Mapping[str, Any], corpus: Corpus, device: torch.device) -> Trainer:
        """Return a trainer of the weights rounded to `formats` of layer patterns; of
        float weights if it is empty.
        """
        config = resolve(self._row(formats))
        if self._start is None:
            self._start = build_model(model_shape(self._row({}), corpus), 0)
            fill_floats(self._start, self.trained, _CALLED)
        return Trainer(config, corpus, device, start=copy.deepcopy(self._start))

    def trainers(
        self, names: Sequence[str], corpus: Corpus, device: torch.device, *, floats: bool = False
    ) -> Iterator[tuple[str, Trainer]]:
        """Yield the weights as trained, and rounded to each format; `none` stands for
        floats.

        With `floats`, floats come second if they differ from the weights as trained;
        and if there are no `names`, the formats that were given as settings come last.
        Settings of formats are refused where no row has one.
        """
        own = {**self.own.model.formats, **self.formats} if floats and not names else {}
        of_formats = [key for key in self.given if key in OF_FORMATS]
        if of_formats and not own and set(names) <= {"none"}:
            raise BenchError(
                f"--{of_formats[0]}: no row has a format; give --formats, such as --formats E4M3"
            )
        yield f"{format_summary(self.own)} (as trained)", self.as_trained(corpus, device)
        first = ["none"] if floats and (not self.is_plain or "none" in names) else []
        for name in (*first, *(name for name in names if name not in first)):
            yield (
                name,
                self.rounded({} if name == "none" else self.requantised(name), corpus, device),
            )
        if own and of_formats:
            yield "given", self.rounded(own, corpus, device)

    def requantised(self, fmt: str) -> dict[str, Any]:
        """Return `model.formats` that round every weight to `fmt`, except in layers
        that the run or the user left out.

        Formats of activations stay those of the run.
        """
        own = {
            pattern: _with_weight(value, fmt) for pattern, value in self.own.model.formats.items()
        }
        return {"*": fmt, **own, **self.formats}

    def _row(self, formats: Mapping[str, Any]) -> Config:
        row = copy.deepcopy(self._given)
        row.rule, row.optimizer = None, OptimizerConfig()
        row.model.torchao_float8 = row.model.products = row.model.constraint = None
        row.model.tie_weights = self._shape.tie_weights
        if row.train.precision == "bf16-pure":
            row.train.precision = "bf16-mixed"  # formats are not taken from bfloat16 weights
        row.model.formats, row.model.format = dict(formats), None
        if not formats or all(value == "none" for value in formats.values()):
            row.model.formats = {}
            row.model.storage = row.model.granularity = row.model.headroom = row.model.tied = None
            row.model.embeddings = None
            return row
        # rounded weights are stored as in the run if that has a grid, otherwise under a
        # master copy
        storage, own = self.given.get("model.storage"), self.own.model.storage
        if storage is not None and storage not in ("master", *ROUNDED):
            raise BenchError(
                f"--model.storage: {storage!r} rounds nothing; allowed: master, grid, fp8"
            )
        row.model.storage = str(storage or (own if own in ROUNDED else "master"))
        row.model.embeddings = row.model.embeddings if row.model.storage == "fp8" else None
        row.model.granularity = self.given.get("model.granularity", row.model.granularity)
        headroom = row.model.headroom if row.model.storage in MANIFOLDS else None
        row.model.headroom = self.given.get("model.headroom", headroom)
        row.model.tied = self.given.get(
            "model.tied", row.model.tied if row.model.tie_weights else None
        )
        return row


def _threads(trained: Trained) -> int | None:
    """The run's threads; None where they are not known or this machine has fewer cores."""
    threads = trained.settings.get("runtime.threads") or trained.environment.get("threads")
    return threads if isinstance(threads, int) and 1 <= threads <= (os.cpu_count() or 1) else None


def _with_weight(value: Any, fmt: str) -> Any:
    """A layer's format or specification with another format for its weight; `none`
    stays.
    """
    if not isinstance(value, dict):
        return value if value == "none" else fmt
    weight = value.get("weight")
    if weight == "none":
        return value
    return {**value, "weight": {**weight, "format": fmt} if isinstance(weight, dict) else fmt}


def named_formats(names: Sequence[str]) -> list[str]:
    """Return the canonical names of formats, each once.

    >>> named_formats(["e4m3", "E4M3", "none"])
    ['E4M3', 'none']
    """
    return list(dict.fromkeys(format_name(name, "--formats") for name in names))


def folder_of(path: Path) -> str:
    """Return the place of a checkpoint in words: its run's folder, and its name.

    >>> folder_of(Path("runs/e4m3/checkpoints/step-500.safetensors"))
    'runs/e4m3, checkpoints/step-500'
    """
    return f"{path.parent.parent}, {path.parent.name}/{path.stem}"


def evaluate_run(
    run_dir: Path,
    checkpoint: str = "last",
    formats: Sequence[str] = (),
    overrides: Sequence[str] = (),
    *,
    save: Path | None = None,
) -> list[Evaluation]:
    """Return the validation losses of a run's weights: as trained, as floats if that
    differs, and in each format.

    Lines on standard error name the text, and say whether the first row has the loss
    that the run recorded. Each format is used for all weights, in place of the run's.
    `overrides` are settings of the measurement and of the rows in a format; `save` is a
    folder for the weights of every row.
    """
    names, given = named_formats(formats), checked_overrides(overrides)
    trained = load(choose(run_dir, checkpoint))
    weights = RunWeights(trained, given)
    corpus = weights.open_text()
    say(
        f"weights of {folder_of(trained.path)}; text {corpus.folder}, tokenizer "
        f"{corpus.meta['tokenizer']}"
    )
    with runtime(weights.own) as device:
        rows: list[Evaluation] = []
        for name, trainer in weights.trainers(names, corpus, device, floats=True):
            if save:
                file = re.sub(r"[ ()]+", "-", name).strip("-")
                save_weights(trainer.model, save / f"{file}.safetensors")
            loss = trainer.validate()
            figures = trainer.figures(loss)
            rows.append(
                Evaluation(
                    format=name,
                    val_loss=loss,
                    gap=loss - rows[0].val_loss if rows else None,
                    perplexity=figures.get(VAL_PERPLEXITY.name),
                    bits_per_byte=trainer.task.bits_per_byte(loss),
                    quantized_parameters=count(
                        layer.weight for layer in quantized_layers(trainer.model).values()
                    ),
                    storage=trainer.config.model.storage or "",
                    checkpoint=str(trained.path),
                    of_labels={
                        metric.figure: figures[metric.name]
                        for metric in OF_LABELS
                        if metric.name in figures
                    },
                )
            )
        say(
            _comparison(weights, rows[0].val_loss, environment(corpus, weights.own.runtime.threads))
        )
    return rows


def _comparison(weights: RunWeights, loss: float, now: Mapping[str, Any]) -> str:
    """A sentence on whether the loss is the recorded one, to the bit, and what differs
    if it is not.
    """
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
