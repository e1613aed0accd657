"""The task of a run: a text, or documents with labels.

`Language` and `Classify` have the same methods: batches, losses and other measures.
`model_shape` is the shape of the task's model.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from nanogpt_bench.config import metrics
from nanogpt_bench.config.schema import Config, Task
from nanogpt_bench.data.batches import (
    Corpus,
    batch,
    documents_of,
    draw_documents,
    eval_batches,
    held_out_batches,
    label_names,
)
from nanogpt_bench.model.gpt import INIT_STD, GPTShape

#: bytes per token of a batch in memory, as an input and as a target
BYTES_HELD = 16
#: inputs and targets
Pair = tuple[Tensor, Tensor]
ValidationFigures = dict[str, float | None]


def document_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the binary cross-entropy of every document (N,), in nats per label.

    It is the mean over a document's labels.
    """
    losses = functional.binary_cross_entropy_with_logits(logits.float(), labels, reduction="none")
    return losses.mean(1)


class F1Scores(NamedTuple):
    """F1 of all labels together, and the mean over the labels."""

    micro: float
    macro: float


def f1_scores(logits: Tensor, labels: Tensor) -> F1Scores:
    """Return micro and macro F1 of logits (N, L) against labels (N, L) of 0 and 1.

    A logit above 0 predicts its label. F1 = 2 TP / (2 TP + FP + FN): micro over all
    labels together, macro the mean over the labels. A label that no document has and
    that is never predicted, so that the denominator is 0, counts 0, as in scikit-learn.

    >>> labels = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    >>> f1_scores(torch.tensor([[1.0, -1.0], [1.0, -1.0]]), labels)
    F1Scores(micro=0.6666666666666666, macro=0.3333333333333333)
    """
    predicted = logits > 0
    actual = labels > 0
    hits = (predicted & actual).sum(0).double()
    total = (predicted.sum(0) + actual.sum(0)).double()
    micro = 2 * hits.sum() / total.sum().clamp(min=1)
    macro = (2 * hits / total.clamp(min=1)).mean()
    return F1Scores(float(micro), float(macro))


def r_precision(logits: Tensor, labels: Tensor) -> float | None:
    """Return the share of a document's R labels that is among its R highest logits.

    It is the mean over documents. Of equal logits the first counts as higher. Documents
    without labels are left out; None if there are no others.

    >>> r_precision(torch.tensor([[3.0, 2.0, 1.0]]), torch.tensor([[1.0, 0.0, 1.0]]))
    0.5

    Source: Chalkidis et al. 2019, Large-Scale Multi-Label Text Classification on EU
    Legislation.
    """
    counts = labels.sum(1)
    has_labels = counts > 0
    if not bool(has_labels.any()):
        return None
    ranked = labels.gather(1, logits.argsort(dim=1, descending=True, stable=True))
    top = torch.arange(labels.shape[1], device=labels.device) < counts.unsqueeze(1)
    hits = (ranked * top).sum(1)[has_labels]
    return float((hits.double() / counts[has_labels]).mean())


@dataclass(frozen=True)
class Passes:
    """A model's forward passes, in evaluation mode and in the training's precision."""

    #: mean loss of a batch, from its inputs and targets
    loss: Callable[[Tensor, Tensor], Tensor]
    #: logits of a batch, from its inputs
    logits: Callable[[Tensor], Tensor]


#: the seed by which validation batches are drawn
EVAL_SEED = 1337


class Language:
    """The task of predicting the next token in blocks of a text.

    Losses are in nats per token.
    """

    def __init__(self, config: Config, corpus: Corpus) -> None:
        self._config = config
        self._corpus = corpus
        self._block = config.model.block_size or 0

    def batch(self, step: int, micro_step: int) -> Pair:
        """Return a micro-batch of a step (from 0).

        It is a pure function of the seed, the step and the micro-step.
        """
        return batch(
            self._corpus.train,
            self._config.train.batch_size,
            self._block,
            seed=self._config.seed,
            step=step,
            micro_step=micro_step,
        )

    def tokens(self, step: int) -> int:
        """Return how many tokens a step (from 0) trains on."""
        train = self._config.train
        return train.batch_size * train.accumulation * self._block

    def held_out(self) -> list[Pair]:
        """Return the fixed validation batches."""
        batches, size = self._config.eval.batches, self._config.train.batch_size
        return eval_batches(self._corpus.val, batches, size, self._block, seed=EVAL_SEED)

    def losses(self, passes: Passes, batches: Sequence[Pair]) -> list[float]:
        """Return the loss of each batch."""
        return [passes.loss(tokens, targets).item() for tokens, targets in batches]

    def figures(self, passes: Passes, batches: Sequence[Pair], loss: float) -> ValidationFigures:
        """Return what is recorded with `loss`, the mean over the validation batches."""
        return {
            metrics.VAL_PERPLEXITY.name: math.exp(loss) if loss < 700 else None,
            metrics.VAL_BITS_PER_BYTE.name: self.bits_per_byte(loss),
        }

    def bits_per_byte(self, loss: float) -> float | None:
        """Return a loss in bits per UTF-8 byte of the validation text."""
        return loss / math.log(2) * self._corpus.val_tokens_per_byte


class Classify:
    """The task of predicting a document's labels from its first tokens.

    Losses are in nats per label. The methods are those of `Language`.
    """

    def __init__(self, config: Config, corpus: Corpus) -> None:
        self._config = config
        self._block = config.model.block_size or 0
        self._train = documents_of(corpus, "train")
        self._val = documents_of(corpus, "val")

    def batch(self, step: int, micro_step: int) -> Pair:
        return self._train.rows(self._draw(step, micro_step), self._block)

    def tokens(self, step: int) -> int:
        """Return how many tokens a step trains on, padding left out."""
        tokens = 0
        for micro_step in range(self._config.train.accumulation):
            documents = self._draw(step, micro_step)
            tokens += int(self._train.lengths(documents, self._block).sum())
        return tokens

    def held_out(self) -> list[Pair]:
        """Return the fixed validation batches.

        No document is in two of them, and the last may be smaller.
        """
        batches, size = self._config.eval.batches, self._config.train.batch_size
        indices = held_out_batches(self._val, batches, size, seed=EVAL_SEED)
        return [self._val.rows(documents, self._block) for documents in indices]

    def losses(self, passes: Passes, batches: Sequence[Pair]) -> list[float]:
        """Return the loss of every document."""
        losses: list[float] = document_losses(*_logits_and_labels(passes, batches)).tolist()
        return losses

    def figures(self, passes: Passes, batches: Sequence[Pair], loss: float) -> ValidationFigures:
        """Return F1 and R-precision over all documents."""
        logits, labels = _logits_and_labels(passes, batches)
        f1 = f1_scores(logits, labels)
        return {
            metrics.MICRO_F1.name: f1.micro,
            metrics.MACRO_F1.name: f1.macro,
            metrics.R_PRECISION.name: r_precision(logits, labels),
        }

    def bits_per_byte(self, loss: float) -> float | None:
        """Return None: a loss per label has no bits per byte."""
        return None

    def _draw(self, step: int, micro_step: int) -> NDArray[Any]:
        """Return indices of a micro-batch's documents."""
        size, seed = self._config.train.batch_size, self._config.seed
        return draw_documents(self._train, size, seed=seed, step=step, micro_step=micro_step)


def _logits_and_labels(passes: Passes, batches: Sequence[Pair]) -> Pair:
    """Return logits and labels of all documents, (N, L) each."""
    logits = torch.cat([passes.logits(tokens) for tokens, _ in batches])
    return logits, torch.cat([labels for _, labels in batches])


def model_shape(config: Config, corpus: Corpus | None) -> GPTShape:
    """Return the shape of a resolved configuration's model.

    Vocabulary and labels are those of a corpus, or 0 without one.
    """
    settings = config.model
    return GPTShape(
        n_layer=settings.n_layer or 0,
        n_head=settings.n_head or 0,
        n_embd=settings.n_embd or 0,
        block_size=settings.block_size or 0,
        vocab_size=corpus.vocab_size if corpus else 0,
        dropout=settings.dropout,
        bias=bool(settings.bias),
        tie_weights=bool(settings.tie_weights),
        gelu=settings.gelu or "exact",
        init_std=settings.init_std or INIT_STD,
        labels=len(label_names(corpus)) if corpus and config.task == Task.CLASSIFY else 0,
    )


def task_of(config: Config, corpus: Corpus) -> Language | Classify:
    """Return the task of a resolved configuration on a corpus."""
    return Classify(config, corpus) if config.task == Task.CLASSIFY else Language(config, corpus)
