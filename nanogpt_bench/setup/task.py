"""What is learnt: the batches of a task, its losses on what was held out, and its figures beside the loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from nanogpt_bench.config import metrics
from nanogpt_bench.config.schema import Config
from nanogpt_bench.data.batches import Corpus, batch, eval_batches
from nanogpt_bench.data.documents import documents_of, drawn, held_out
from nanogpt_bench.setup.multilabel import document_losses, f1_scores, r_precision

#: inputs and targets
Pair = tuple[Tensor, Tensor]
Figures = dict[str, float | None]


@dataclass(frozen=True)
class Passes:
    """A model's forward passes, in evaluation mode and in the precision of the training."""

    #: of a batch's inputs and targets, the mean loss
    loss: Callable[[Tensor, Tensor], Tensor]
    #: of a batch's inputs, what the head says
    logits: Callable[[Tensor], Tensor]


class Language:
    """Predict the next token in blocks of a text; losses are in nats a token."""

    def __init__(self, config: Config, corpus: Corpus) -> None:
        self._config, self._corpus = config, corpus
        self._block = config.model.block_size or 0

    def batch(self, step: int, micro_step: int) -> Pair:
        """Return what a step, from 0, trains on: a pure function of the data's seed, the step and the micro-step."""
        size, seed = self._config.train.batch_size, self._config.data.seed or 0
        return batch(self._corpus.train, size, self._block, seed=seed, step=step, micro_step=micro_step)

    def tokens(self, step: int) -> int:
        """Return how many tokens a step, from 0, trains on."""
        train = self._config.train
        return train.batch_size * train.accumulation * self._block

    def held_out(self) -> list[Pair]:
        """Return the fixed validation batches."""
        evaluation, size = self._config.eval, self._config.train.batch_size
        return eval_batches(self._corpus.val, evaluation.batches, size, self._block, seed=evaluation.seed)

    def losses(self, passes: Passes, batches: Sequence[Pair]) -> list[float]:
        """Return the loss of each of some batches."""
        return [passes.loss(tokens, targets).item() for tokens, targets in batches]

    def figures(self, passes: Passes, batches: Sequence[Pair], loss: float) -> Figures:
        """Return what is recorded beside the mean loss of the validation batches."""
        return {
            metrics.VAL_PERPLEXITY.name: math.exp(loss) if loss < 700 else None,
            metrics.VAL_BITS_PER_BYTE.name: self.bits_per_byte(loss),
        }

    def bits_per_byte(self, loss: float) -> float | None:
        """Return a loss as bits a UTF-8 byte of the validation text."""
        return loss / math.log(2) * self._corpus.val_tokens_per_byte


class Classify:
    """Tell a document's labels from its first tokens; losses are in nats a label. Methods as those of `Language`."""

    def __init__(self, config: Config, corpus: Corpus) -> None:
        self._config, self._block = config, config.model.block_size or 0
        self._train, self._val = (documents_of(corpus, split) for split in ("train", "val"))

    def batch(self, step: int, micro_step: int) -> Pair:
        return self._train.rows(self._drawn(step, micro_step), self._block)

    def tokens(self, step: int) -> int:
        """Return how many tokens a step trains on, padding left out."""
        drawn = (self._drawn(step, micro_step) for micro_step in range(self._config.train.accumulation))
        return sum(int(self._train.lengths(which, self._block).sum()) for which in drawn)

    def held_out(self) -> list[Pair]:
        """Return the fixed validation batches: no document is in two of them, and the last may be a small one."""
        evaluation, size = self._config.eval, self._config.train.batch_size
        drawn = held_out(self._val, evaluation.batches, size, seed=evaluation.seed)
        return [self._val.rows(which, self._block) for which in drawn]

    def losses(self, passes: Passes, batches: Sequence[Pair]) -> list[float]:
        """Return the loss of every document."""
        found: list[float] = document_losses(*_answers(passes, batches)).tolist()
        return found

    def figures(self, passes: Passes, batches: Sequence[Pair], loss: float) -> Figures:
        answers = _answers(passes, batches)
        found = (*f1_scores(*answers), r_precision(*answers))
        return {metric.name: value for metric, value in zip(metrics.OF_LABELS, found, strict=True)}

    def bits_per_byte(self, loss: float) -> float | None:
        """Return None: the loss says nothing of bytes."""
        return None

    def _drawn(self, step: int, micro_step: int) -> NDArray[Any]:
        size, seed = self._config.train.batch_size, self._config.data.seed or 0
        return drawn(self._train, size, seed=seed, step=step, micro_step=micro_step)


def _answers(passes: Passes, batches: Sequence[Pair]) -> Pair:
    """Logits and labels of all documents, (N, L) each."""
    logits = torch.cat([passes.logits(tokens) for tokens, _ in batches])
    return logits, torch.cat([labels for _, labels in batches])


def task_of(config: Config, corpus: Corpus) -> Language | Classify:
    """Return what a resolved configuration learns on a corpus.

    Raises:
        BenchError: a corpus without the labels that it needs.
    """
    return Classify(config, corpus) if config.task == "classify" else Language(config, corpus)
