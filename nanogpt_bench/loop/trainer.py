"""One optimizer step and one validation: the arithmetic of the loop, without files and
clocks.
"""

import math
import statistics
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

import fp8manifold as fm
from nanogpt_bench.config import metrics
from nanogpt_bench.config.schema import Config
from nanogpt_bench.config.settings import Resolved
from nanogpt_bench.data.batches import Corpus, open_also
from nanogpt_bench.loop.clipping import clipping_of
from nanogpt_bench.model.gpt import GPT, build_model
from nanogpt_bench.monitors.points import Observer, Step
from nanogpt_bench.setup.memory import GradientPeak, check_fits
from nanogpt_bench.setup.optimizers import (
    build_optimizer,
    keep_peer_weights,
    lr_factor,
    peak_lr,
    stiffness_at,
    train_in_float8,
)
from nanogpt_bench.setup.runtime import CompiledLoss, Loss, bfloat16_products, replicated
from nanogpt_bench.setup.surgery import quantize
from nanogpt_bench.setup.task import Figures, Passes, model_shape, task_of
from nanogpt_bench.system.errors import BenchError, one_line
from nanogpt_bench.system.ranks import ALONE, Ranks


def initial_model(config: Config, corpus: Corpus) -> Any:
    """Return the float model that a resolved configuration starts from: random weights,
    or those of a checkpoint.
    """
    check_fits(config, corpus, trained=False)
    if config.model.pretrained:
        from nanogpt_bench.setup.pretrained import pretrained_model

        return pretrained_model(config, corpus)
    shape = model_shape(config, corpus)
    if config.model.init_from:
        from nanogpt_bench.setup.start import start_model

        return start_model(shape, config, corpus)
    return build_model(shape, config.seed)


def trained_model(
    config: Resolved, corpus: Corpus, device: torch.device, start: GPT | None = None
) -> Any:
    """Return the model that a resolved configuration trains: quantised, in its
    precision, on its device.
    """
    model = initial_model(config, corpus) if start is None else start
    dtype = torch.bfloat16 if config.train.precision == "bf16-pure" else torch.float32
    model = quantize(train_in_float8(model, config, device), config).to(device, dtype)
    return keep_peer_weights(model, config)


def mean_and_error(losses: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean of losses and its standard error, the standard deviation over the
    square root of their number.

    The error is None for a single loss, and if a loss is not finite.

    >>> mean_and_error([1.0, 2.0, 3.0])
    (2.0, 0.5773502691896258)
    """
    mean = sum(losses) / len(losses)
    known = len(losses) > 1 and math.isfinite(mean)
    return mean, statistics.stdev(losses) / math.sqrt(len(losses)) if known else None


class Trainer:
    """Model, optimizer and batches of a resolved configuration; the processes of
    `ranks` train the model together.
    """

    def __init__(
        self,
        config: Resolved,
        corpus: Corpus,
        device: torch.device,
        start: GPT | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        self.config, self.corpus, self.device, self.ranks = config, corpus, device, ranks
        self.task = task_of(config, corpus)
        self.model: Any = trained_model(config, corpus, device, start)
        if ranks.size > 1:  # the first process' model, to the bit
            fm.distributed.sync(self.model)
        unseen = config.train.accumulation  # index of a micro-batch that no step trains on
        self.optimizer = build_optimizer(
            self.model, config, lambda step: [self._move(self._draw(step, unseen))]
        )
        model_loss: Any = CompiledLoss(self.model) if config.runtime.compile else self.model.loss
        self._model_loss: Loss = model_loss
        replicas = ranks.size > 1 and config.train.parallel == "ddp"
        #: the loss of a training step where it averages gradients over processes; None:
        #: the model's
        self._replicated = replicated(self.model, self._model_loss) if replicas else None
        #: most bytes of gradients at once, in this process' first step
        self.gradient_peak = GradientPeak(self.model)
        self._clipping = clipping_of(self.model, self.optimizer, config)
        self._eval_batches = [self._move(pair) for pair in self.task.held_out()]
        also = open_also(config, corpus)
        #: whether parameters step and free their gradients during the backward pass:
        #: not with several micro-batches
        self._steps_within = config.train.step_in_backward and config.train.accumulation == 1
        self._also_batches = (
            [] if also is None else [self._move(pair) for pair in task_of(config, also).held_out()]
        )

    def tokens_in(self, number: int) -> int:
        """Return how many tokens step `number` (from 1) trains on."""
        return self.task.tokens(number - 1)

    def new_step(self, number: int, *, last: bool) -> Step:
        """Return a new record of step `number` (from 1)."""
        return Step(
            number, self.model, self.optimizer, last, micro_steps=self.config.train.accumulation
        )

    def train_step(self, step: Step, observers: Sequence[Observer]) -> float:
        """Take one step, unless loss or gradient is not finite; record it; return the
        loss, nats per token or label.
        """
        if self.ranks.size > 1:
            # this process' generator, for dropout, is seeded by the step, so that its
            # state need not be saved
            drawn = np.random.SeedSequence([self.config.seed, step.number, self.ranks.rank])
            torch.manual_seed(int(drawn.generate_state(1, np.uint64)[0]))
        lr = self._set_lr(step.number - 1)
        options = self.config.optimizer
        if options.writeback_end is not None:
            last = step.number - 1 >= options.step_at * self.config.train.max_steps
            for group in self.optimizer.param_groups:
                group["writeback"] = options.writeback_end if last else options.writeback
        self.optimizer.zero_grad(set_to_none=True)
        skipped = self._left_out()
        loss = self._accumulate(step, observers)
        norm, clipped = self._clipping.finish()
        # Steps in the backward pass skip parameters whose gradient is not finite, and
        # count the skips.
        whole = self._left_out() == skipped if norm is None else math.isfinite(norm)
        finite = math.isfinite(loss) and whole
        flags = {
            metrics.LOSS_IS_NAN.name: int(not math.isfinite(loss)),
            metrics.GRAD_HAS_NAN.name: int(not whole),
        }
        step.record |= {**flags, metrics.TRAIN_LOSS.name: loss, metrics.LR.name: lr}
        if norm is not None:
            step.record |= {metrics.GRAD_NORM.name: norm, metrics.GRAD_CLIPPED.name: int(clipped)}
        exponent = stiffness_at(self.config, step.number - 1)
        if exponent is not None:
            step.record[metrics.STIFFNESS_EXPONENT.name] = exponent
        if not finite:
            return loss
        if not self._steps_within:
            for observer in observers:
                observer.before_step(step)
            self._end_steps() if self.config.train.step_in_backward else self.optimizer.step()
        for observer in observers:
            observer.after_step(step)
        return loss

    def _set_lr(self, index: int) -> float:
        settings = self.config.optimizer
        factor = lr_factor(settings, index, self.config.train.max_steps)
        for group in self.optimizer.param_groups:
            lr = peak_lr(group, settings) * factor
            if isinstance(
                group["lr"], Tensor
            ):  # the input of a compiled step: its value is replaced, not the tensor
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
        return (settings.lr or 0.0) * factor

    def _accumulate(self, step: Step, observers: Sequence[Observer]) -> float:
        train, total = self.config.train, torch.zeros((), device=self.device)
        for micro_step in range(train.accumulation):
            tokens, targets = step.batch = self._move(self._draw(step.number - 1, micro_step))
            step.micro_step = micro_step
            for observer in observers:
                observer.before_forward(step)
            loss = self.loss(tokens, targets, self._replicated) / train.accumulation
            for observer in observers:
                observer.after_forward(step)
            self._clipping.before_backward()
            self._backward(loss, step, observers)
            step.clip_factor = self._clipping.after_backward()
            for observer in observers:
                observer.after_backward(step)
            total += loss.detach()
        return self.ranks.mean(total.item())

    def _backward(self, loss: Tensor, step: Step, observers: Sequence[Observer]) -> None:
        """Compute gradients; if parameters step on the way, call observers first, and
        skip a loss of NaN or Inf.
        """
        if not self._steps_within:
            with self._products():
                loss.backward()
        elif bool(loss.isfinite()):
            for observer in observers:
                observer.before_step(step)
            # The record has what a warning would say.
            with (
                warnings.catch_warnings(action="ignore", category=RuntimeWarning),
                self._products(),
            ):
                self._clipping.measure(loss)
                loss.backward()
                self._clipping.passed()
                self._end_steps()
        self.gradient_peak.known()

    def _end_steps(self) -> None:
        """End the steps of a backward pass, and free the placeholders of their
        gradients.
        """
        try:
            self.optimizer.step()
        except RuntimeError as error:
            raise BenchError(f"train.step_in_backward: {one_line(error)}") from None
        self.optimizer.zero_grad(set_to_none=True)

    def _left_out(self) -> int:
        return int(getattr(self.optimizer, "skipped_steps", 0))

    def loss(self, tokens: Tensor, targets: Tensor, of: Loss | None = None) -> Tensor:
        """Return the loss on a batch, in the precision of the training; `of` is used in
        place of the model's loss.
        """
        with self.precision():
            loss: Tensor = (of or self._model_loss)(tokens, targets)
        return loss

    @contextmanager
    def precision(self) -> Iterator[None]:
        """The context in which the model computes as in the training."""
        mixed = self.config.train.precision == "bf16-mixed"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=mixed), self._products():
            yield

    def _products(self) -> AbstractContextManager[Any]:
        return bfloat16_products(self.config, self.device)

    def micro_batches(self, number: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the micro-batches of step `number` (from 1)."""
        for micro_step in range(self.config.train.accumulation):
            yield self._move(self._draw(number - 1, micro_step))

    def validate(self) -> float:
        """Return the mean loss over the fixed validation batches, in nats per token or
        label.
        """
        return mean_and_error(self.validation_losses())[0]

    def validation_losses(self) -> list[float]:
        """Return the losses of the fixed validation batches (nats per token), or of
        their documents (per label).
        """
        return self._losses(self._eval_batches)

    def figures(self, loss: float) -> Figures:
        """Return the further values of a validation's record, whose mean loss is
        `loss`.
        """
        with self._evaluating() as passes:
            return self.task.figures(passes, self._eval_batches, loss)

    def validation_windows(self) -> Tensor:
        """Return the fixed validation batches as windows, (N, T + 1)."""
        return torch.cat(
            [torch.cat([tokens, targets[:, -1:]], dim=1) for tokens, targets in self._eval_batches]
        )

    def also_loss(self) -> dict[str, float]:
        """Return the record's entry with the mean loss on the text of `eval.also`;
        empty without one.
        """
        batches = self._also_batches
        return (
            {metrics.VAL_ALSO_LOSS.name: mean_and_error(self._losses(batches))[0]}
            if batches
            else {}
        )

    def _losses(self, batches: Sequence[tuple[Tensor, Tensor]]) -> list[float]:
        """The losses of batches; several processes divide them, each taking equally
        many.
        """
        with self._evaluating() as passes:
            if self.ranks.size == 1:
                return self.task.losses(passes, batches)
            rank, size = self.ranks.rank, self.ranks.size
            losses = [0.0] * len(batches)
            for begin in range(0, len(batches), size):
                index = min(begin + rank, len(batches) - 1)
                (loss,) = self.task.losses(passes, batches[index : index + 1])
                losses[index] = loss if begin + rank < len(batches) else 0.0
        return self.ranks.total(losses)

    @contextmanager
    def _evaluating(self) -> Iterator[Passes]:
        self.model.eval()
        with torch.no_grad():
            yield Passes(self.loss, self._logits)
        self.model.train()

    def _logits(self, tokens: Tensor) -> Tensor:
        with self.precision():
            logits: Tensor = self.model(tokens)
        return logits

    @torch.no_grad()
    def look(self, one_in: int = 1) -> None:
        """Run the model on one validation batch in evaluation mode, on one in `one_in`
        of its sequences.
        """
        self.model.eval()
        tokens, targets = self._eval_batches[0]
        try:
            self.loss(tokens[::one_in], targets[::one_in])
        finally:  # an observer may end the pass by an exception
            self.model.train()

    def _draw(self, index: int, micro_step: int) -> tuple[Tensor, Tensor]:
        drawn = self.task.batch(index, micro_step)
        share = self.config.train.batch_size // self.ranks.size
        own = slice(self.ranks.rank * share, (self.ranks.rank + 1) * share)
        return drawn[0][own], drawn[1][own]

    def _move(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return pair[0].to(self.device), pair[1].to(self.device)
