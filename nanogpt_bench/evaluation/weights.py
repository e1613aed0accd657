"""The weights of a run's checkpoint and their validation losses.

`RunWeights` makes trainers of them: with the weights as they were stored, as floats,
and rounded to formats. `evaluate_run` validates each.

The settings of a row in a format are the run's, but for what belongs to its training:
the rule and its optimizer go, and so does what computed its products. Weights are
stored as in the run if that has a grid, else rounded from a master copy.
"""

import copy
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from nanogpt_bench.config.metrics import OF_LABELS, VAL_PERPLEXITY
from nanogpt_bench.config.schema import (
    MANIFOLDS,
    NO_FORMAT,
    ROUNDED,
    Config,
    OptimizerConfig,
    Precision,
    Storage,
)
from nanogpt_bench.config.settings import build_config, parse_overrides
from nanogpt_bench.data import prepare_default
from nanogpt_bench.data.batches import Corpus, open_corpus
from nanogpt_bench.evaluation.measurement import Evaluation
from nanogpt_bench.loop.outcome import count
from nanogpt_bench.loop.trainer import Trainer, trainer_inputs
from nanogpt_bench.model.gpt import GPT, build_model
from nanogpt_bench.model.weights import fill, quantized_layers, save_weights
from nanogpt_bench.runs.environment import at, environment
from nanogpt_bench.runs.trained import Trained, choose, fill_floats, load, trained_shape
from nanogpt_bench.setup.formats import format_name, format_summary
from nanogpt_bench.setup.memory import check_batches_fit
from nanogpt_bench.setup.resolve import resolve
from nanogpt_bench.setup.runtime import runtime
from nanogpt_bench.setup.start import check_text, same_text
from nanogpt_bench.setup.task import model_shape
from nanogpt_bench.system.errors import BenchError, say

# Settings of the command line, which may differ from the run's: those of the measurement,
# and those of the rows in a format. A name that ends with a dot stands for a section.
MEASUREMENT_KEYS = ("data.dir", "eval.", "runtime.", "train.batch_size")
FORMAT_KEYS = (
    "model.storage",
    "model.granularity",
    "model.headroom",
    "model.tied",
    "model.formats",
)
#: entries of the environment that can change the last bits of a loss
_BIT_FACTS = ("libraries.torch", "threads", "cpu", "gpu")
#: the fields of an evaluation that a file has
EVALUATION_FIELDS = (
    "format",
    "storage",
    "val_loss",
    "gap",
    "perplexity",
    "bits_per_byte",
    "quantized_parameters",
    "checkpoint",
    "of_labels",
)
#: the checkpoint's name in the errors of `fill` and `fill_floats`
_NAME = "the checkpoint"


def checked_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the settings of a command line by dotted key.

    Those that an evaluation does not take are refused.
    """
    settings = parse_overrides(overrides)
    for key in settings:
        if key == "model.format":
            raise BenchError(
                "--model.format: the run is trained already; give the formats to round its "
                "weights to as --formats"
            )
        if not _is_allowed(key):
            names = [
                f"{name}*" if name.endswith(".") else name
                for name in MEASUREMENT_KEYS + FORMAT_KEYS
            ]
            raise BenchError(
                f"--{key}: the run is trained already, so only these can be given: "
                f"{', '.join(names)}"
            )
    return settings


def _is_allowed(key: str) -> bool:
    for name in MEASUREMENT_KEYS + FORMAT_KEYS:
        is_in_section = name.endswith(".") and key.startswith(name)
        if key == name or is_in_section:
            return True
    return False


class RunWeights:
    """A checkpoint's weights, from which trainers are made."""

    def __init__(self, trained: Trained, overrides: Mapping[str, Any]) -> None:
        """Take a checkpoint and the settings that `checked_overrides` returns."""
        self.trained = trained
        self.overrides = overrides
        #: the formats that were given by layer
        self.formats: dict[str, Any] = dict(overrides.get("model.formats") or {})
        self._shape = trained_shape(trained.path)
        measurement = {key: value for key, value in overrides.items() if key not in FORMAT_KEYS}
        # As many threads as the run had: sums in another order have other last bits.
        measurement["runtime.threads"] = overrides.get("runtime.threads") or _threads(trained)
        settings = {**trained.settings, "model.init_from": None, **measurement}
        self._unresolved = build_config(settings)
        #: the settings of the run, and those of the measurement
        self.config = resolve(self._unresolved)
        #: the model of float weights, once one was asked for
        self._floats: GPT | None = None

    def open_text(self) -> Corpus:
        """Return the given text, or the run's, which has to be unchanged.

        The default text is prepared if need be.
        """
        prepare_default(self.config.data.dir)
        corpus = open_corpus(self.config)
        name = str(self.trained.path)
        if "data.dir" not in self.overrides and not same_text(self.trained, corpus):
            raise BenchError(
                f"{str(corpus.folder)!r} is not the text that {name!r} was trained on (its sha256 "
                "differs); give that text as --data.dir, or this one, to measure on it"
            )
        check_text(self.trained, corpus, name)
        check_batches_fit(self.config)
        return corpus

    def as_trained(self, corpus: Corpus, device: torch.device) -> Trainer:
        """Return the run's model with its weights as they were stored."""
        model = build_model(model_shape(self.config, corpus), 0)
        trainer = Trainer(trainer_inputs(self.config, corpus, device), start=model)
        fill(trainer.model, self.trained.tensors, self.trained.metadata, _NAME)
        return trainer

    @property
    def is_plain(self) -> bool:
        """True if the weights as trained have the same loss as floats.

        The run then computed with float32 weights.
        """
        model = self.config.model
        if model.storage != Storage.FLOAT32 or model.torchao_float8:
            return False
        return self.config.train.precision != Precision.BF16_PURE

    def rounded(self, formats: Mapping[str, Any], corpus: Corpus, device: torch.device) -> Trainer:
        """Return a trainer of the weights rounded to `formats` of layer patterns.

        Without formats the weights are floats.
        """
        config = resolve(self._row_config(formats))
        if self._floats is None:
            self._floats = build_model(model_shape(self._row_config({}), corpus), 0)
            fill_floats(self._floats, self.trained, _NAME)
        return Trainer(trainer_inputs(config, corpus, device), start=copy.deepcopy(self._floats))

    def trainers(
        self, names: Sequence[str], corpus: Corpus, device: torch.device, *, floats: bool = False
    ) -> Iterator[tuple[str, Trainer]]:
        """Yield (row's name, trainer) of the weights as trained, then in each format.

        The rows are, in this order:

        1. the weights as trained
        2. with `floats`, floats, if they can differ from the weights as trained, or are
           among `names`
        3. the others of `names`; `none` stands for floats
        4. with `floats` and without `names`, the formats that were given as settings

        Settings of formats are refused where no row has one.
        """
        given_formats = {}
        if floats and not names:
            given_formats = {**self.config.model.formats, **self.formats}
        format_settings = [key for key in self.overrides if key in FORMAT_KEYS]
        if format_settings and not given_formats and set(names) <= {NO_FORMAT}:
            raise BenchError(
                f"--{format_settings[0]}: no row has a format; give --formats, such as --formats "
                "E4M3"
            )
        yield f"{format_summary(self.config)} (as trained)", self.as_trained(corpus, device)
        rows = list(names)
        if floats and (not self.is_plain or NO_FORMAT in names):
            rows = [NO_FORMAT, *(name for name in names if name != NO_FORMAT)]
        for name in rows:
            formats = {} if name == NO_FORMAT else self.requantised(name)
            yield name, self.rounded(formats, corpus, device)
        if given_formats and format_settings:
            yield "given", self.rounded(given_formats, corpus, device)

    def requantised(self, fmt: str) -> dict[str, Any]:
        """Return `model.formats` that round every weight to `fmt`.

        Layers that the run or the user left out stay so. Formats of activations stay
        those of the run.
        """
        formats: dict[str, Any] = {"*": fmt}
        for pattern, value in self.config.model.formats.items():
            formats[pattern] = _with_weight(value, fmt)
        return formats | self.formats

    def _row_config(self, formats: Mapping[str, Any]) -> Config:
        """Return the settings of a row in `formats`."""
        config = copy.deepcopy(self._unresolved)
        config.rule = None
        config.optimizer = OptimizerConfig()
        if config.train.precision == Precision.BF16_PURE:
            # Formats are not taken from bfloat16 weights.
            config.train.precision = Precision.BF16_MIXED.value
        # Nothing is trained, and steps in the backward pass ask for one of our optimizers.
        config.train.step_in_backward = False
        model = config.model
        model.torchao_float8 = None
        model.products = None
        model.constraint = None
        model.tie_weights = self._shape.tie_weights
        model.format = None
        model.formats = dict(formats)
        if all(value == NO_FORMAT for value in formats.values()):
            model.formats = {}
            model.storage = None
            model.granularity = None
            model.headroom = None
            model.tied = None
            model.embeddings = None
            return config
        model.storage = self._row_storage()
        if model.storage != Storage.CODES:
            model.embeddings = None
        if model.storage not in MANIFOLDS:
            model.headroom = None
        if not model.tie_weights:
            model.tied = None
        # What the user gave counts also where the run's own was dropped.
        model.granularity = self.overrides.get("model.granularity", model.granularity)
        model.headroom = self.overrides.get("model.headroom", model.headroom)
        model.tied = self.overrides.get("model.tied", model.tied)
        return config

    def _row_storage(self) -> str:
        """Return how a row stores its rounded weights.

        It is as in the run if that has a grid, otherwise under a master copy.
        """
        storage = self.overrides.get("model.storage")
        if storage is None:
            run_storage = self.config.model.storage
            return run_storage if run_storage in ROUNDED else Storage.MASTER.value
        if storage not in (Storage.MASTER, *ROUNDED):
            raise BenchError(
                f"--model.storage: {storage!r} does not round; allowed: master, grid, codes"
            )
        return str(storage)


def _threads(trained: Trained) -> int | None:
    """Return the run's threads.

    None where they are not known, or this machine has fewer cores.
    """
    threads = trained.settings.get("runtime.threads") or trained.environment.get("threads")
    if not isinstance(threads, int):
        return None
    return threads if 1 <= threads <= (os.cpu_count() or 1) else None


def _with_weight(value: Any, fmt: str) -> Any:
    """Return a layer's format or specification with another format for its weight.

    `none` stays.
    """
    if not isinstance(value, dict):
        return value if value == NO_FORMAT else fmt
    weight = value.get("weight")
    if weight == NO_FORMAT:
        return value
    if isinstance(weight, dict):
        return {**value, "weight": {**weight, "format": fmt}}
    return {**value, "weight": fmt}


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
    """Return the validation losses of a run's weights, a row for each set of formats.

    They are those of the weights as trained, as floats if that differs, and in each
    format, which is used for all weights in place of the run's. Lines on standard error
    name the text, and say whether the first row has the loss that the run recorded.

    Args:
        run_dir: folder of the run.
        checkpoint: name of its checkpoint.
        formats: names of formats.
        overrides: settings of the measurement and of the rows in a format.
        save: folder for the weights of every row.
    """
    names = named_formats(formats)
    settings = checked_overrides(overrides)
    trained = load(choose(run_dir, checkpoint))
    weights = RunWeights(trained, settings)
    corpus = weights.open_text()
    say(
        f"weights of {folder_of(trained.path)}; text {corpus.folder}, tokenizer "
        f"{corpus.meta['tokenizer']}"
    )
    rows: list[Evaluation] = []
    with runtime(weights.config) as device:
        for name, trainer in weights.trainers(names, corpus, device, floats=True):
            if save:
                file_name = re.sub(r"[ ()]+", "-", name).strip("-")
                save_weights(trainer.model, save / f"{file_name}.safetensors")
            reference_loss = rows[0].val_loss if rows else None
            rows.append(_evaluate(trainer, name, reference_loss, str(trained.path)))
        environment_now = environment(corpus, weights.config.runtime.threads)
        say(_compare_with_record(weights, rows[0].val_loss, environment_now))
    return rows


def _evaluate(
    trainer: Trainer, name: str, reference_loss: float | None, checkpoint: str
) -> Evaluation:
    loss = trainer.validate()
    figures = trainer.figures(loss)
    layers = quantized_layers(trainer.model).values()
    of_labels = {}
    for metric in OF_LABELS:
        if metric.name in figures:
            of_labels[metric.figure] = figures[metric.name]
    return Evaluation(
        format=name,
        val_loss=loss,
        gap=None if reference_loss is None else loss - reference_loss,
        perplexity=figures.get(VAL_PERPLEXITY.name),
        bits_per_byte=trainer.task.bits_per_byte(loss),
        quantized_parameters=count(layer.weight for layer in layers),
        storage=trainer.config.model.storage or "",
        checkpoint=checkpoint,
        of_labels=of_labels,
    )


def _compare_with_record(
    weights: RunWeights, loss: float, environment_now: Mapping[str, Any]
) -> str:
    """Return a sentence on whether the loss is the recorded one, to the bit.

    If it is not, the sentence names what differs.
    """
    trained = weights.trained
    recorded = trained.val_loss
    run = f"the run at step {trained.step}"
    if recorded is None:
        return f"{run} recorded no val loss to compare the first row with"
    if loss == recorded:
        return f"{run} recorded the same val loss as the first row, to the bit"
    differences = [f"--{key}" for key in weights.overrides if key not in FORMAT_KEYS]
    for key in _BIT_FACTS:
        value_then = at(trained.environment, key)
        value_now = at(environment_now, key)
        if value_then != value_now:
            differences.append(f"{key} was {value_then!r}, is now {value_now!r}")
    reasons = ", ".join(differences) or "no known difference"
    return f"{run} recorded val loss {recorded!r}, but here it is {loss!r}: {reasons}"
