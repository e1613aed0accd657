"""`nanogpt-bench evaluate runs/X`: the weights that a run has trained, as they are and rounded to formats."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from nanogpt_bench.commands.evaluation import Evaluation, measured
from nanogpt_bench.data.batches import Corpus, open_corpus
from nanogpt_bench.data.default import prepare_default
from nanogpt_bench.model.weights import save_weights
from nanogpt_bench.runs.environment import environment
from nanogpt_bench.runs.trained import choose, choose_last, load
from nanogpt_bench.step.formats import format_summary
from nanogpt_bench.step.runtime import runtime
from nanogpt_bench.step.trainer import Trainer
from nanogpt_bench.system.errors import printable
from nanogpt_bench.training.rounded import OF_FORMATS, Rounded, checked_overrides, folder_of, named_formats

#: of the environment, what changes the last bits of a loss
_OF_BITS = ("libraries.torch", "threads", "cpu", "gpu")


def evaluate_run(
    run_dir: Path,
    checkpoint: str = "last",
    formats: Sequence[str] = (),
    overrides: Sequence[str] = (),
    *,
    save: Path | None = None,
    average: int = 1,
) -> list[Evaluation]:
    """Return the validation losses of a run's weights: as trained, as floats where that differs, and in each format.

    What they are measured on is said on standard error, and whether the first row is the loss that the run recorded.

    Args:
        run_dir: the run's folder.
        checkpoint: last, best or step-N.
        formats: each is that of every weight, in place of the run's.
        overrides: settings of the measurement, and of the rows in a format.
        save: folder to write the weights of every row to.
        average: all rows but the first are of the mean of the weights of that many checkpoints, the last of them the
            one named.

    Raises:
        BenchError: no such checkpoint, fewer than are to be averaged, another text, or formats that don't go with the
            model.
    """
    names, given = named_formats(formats), checked_overrides(overrides)
    trained, *earlier = map(
        load, choose_last(run_dir, checkpoint, average) if average > 1 else [choose(run_dir, checkpoint)]
    )
    weights = Rounded(trained, given, earlier)
    prepare_default(weights.own.data.dir)
    corpus = open_corpus(weights.own)
    weights.check_text(corpus)
    _say(f"weights of {folder_of(trained.folder)}; text {corpus.folder}, tokenizer {corpus.meta['tokenizer']}")
    rows: list[Evaluation] = []
    with runtime(weights.own) as device:
        for name, trainer in _trainers(weights, names, corpus, device):
            if save:
                save_weights(trainer.model, save / f"{_file_name(name)}.safetensors")
            rows.append(measured(name, trainer, rows[0].val_loss if rows else None, str(trained.folder)))
        _say(_comparison(weights, rows[0].val_loss, environment(corpus, weights.own.runtime.threads)))
    return rows


def _file_name(row: str) -> str:
    """A row's name as that of a file.

    >>> _file_name("E4M3 (as trained)"), _file_name("none, mean of 3")
    ('E4M3-as-trained', 'none-mean-of-3')
    """
    return re.sub(r"[ (),]+", "-", row).strip("-")


def _trainers(
    weights: Rounded, names: Sequence[str], corpus: Corpus, device: torch.device
) -> Iterator[tuple[str, Trainer]]:
    """Yield name and model of every row."""
    yield f"{format_summary(weights.own)} (as trained)", weights.as_trained(corpus, device)
    of = f", mean of {1 + len(weights.earlier)}" if weights.earlier else ""
    if not weights.is_plain or "none" in names or of:
        yield f"none{of}", weights.rounded({}, corpus, device)
    for name in names:
        if name != "none":
            yield f"{name}{of}", weights.rounded(weights.requantised(name), corpus, device)
    if not names and any(key in weights.given for key in OF_FORMATS):
        yield f"given{of}", weights.rounded({**weights.own.model.formats, **weights.formats}, corpus, device)


def _comparison(weights: Rounded, loss: float, now: Mapping[str, Any]) -> str:
    """Say whether the loss is the one that the run recorded, to the bit, and if not what differs."""
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


def _say(line: str) -> None:
    print(printable(line), file=sys.stderr)
