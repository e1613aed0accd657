"""One optimizer step and one validation: the arithmetic of the loop.

It has no files and no clocks. A step sets the learning rate, sums the gradients of its
micro-batches, clips, and steps unless loss or gradient is not finite. With
`train.step_in_backward` and one micro-batch the parameters step during the backward
pass.
"""

import math
import statistics
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import fp8manifold as fm
from nanogpt_bench.config import metrics
from nanogpt_bench.config.schema import Config, Precision
from nanogpt_bench.config.settings import Resolved
from nanogpt_bench.data.batches import Corpus, open_also
from nanogpt_bench.loop.clipping import build_clipping
from nanogpt_bench.model.gpt import GPT, build_model
from nanogpt_bench.monitors.points import Observer, Step
from nanogpt_bench.setup.memory import GradientPeak
from nanogpt_bench.setup.noise import WriteBackNoise
from nanogpt_bench.setup.optimizers import (
    build_optimizer,
    keep_peer_weights,
    lr_factor,
    peak_lr,
    stiffness_at,
    train_in_float8,
)
from nanogpt_bench.setup.runtime import (
    CompiledLoss,
    Loss,
    bfloat16_products,
    replicated,
    weight_dtype,
)
from nanogpt_bench.setup.surgery import quantize
from nanogpt_bench.setup.task import Passes, ValidationFigures, model_shape, task_of
from nanogpt_bench.system.errors import BenchError, one_line
from nanogpt_bench.system.ranks import ALONE, Ranks


@dataclass(frozen=True)
class BatchPlan:
    """How a step's sequences are divided into micro-batches, and these among processes."""

    #: micro-batches of a step
    micro_steps: int
    #: this process' sequences of each micro-batch
    rows: slice
    #: whether parameters step and free their gradients during the backward pass; not
    #: with several micro-batches
    steps_within: bool


@dataclass(frozen=True)
class TrainerInputs:
    """What a trainer is made from: settings, texts, and where and how it computes."""

    config: Resolved
    corpus: Corpus
    #: the text of `eval.also`
    also: Corpus | None
    device: torch.device
    #: of the weights that stay floats
    dtype: torch.dtype
    batches: BatchPlan
    ranks: Ranks


def trainer_inputs(
    config: Resolved, corpus: Corpus, device: torch.device, ranks: Ranks = ALONE
) -> TrainerInputs:
    """Return the inputs of a trainer on an open corpus.

    The text of `eval.also` is opened. The processes of `ranks` share each batch evenly.
    """
    train = config.train
    share = train.batch_size // ranks.size
    batches = BatchPlan(
        micro_steps=train.accumulation,
        rows=slice(ranks.rank * share, (ranks.rank + 1) * share),
        steps_within=train.step_in_backward and train.accumulation == 1,
    )
    also = open_also(config, corpus)
    return TrainerInputs(config, corpus, also, device, weight_dtype(config), batches, ranks)


def initial_model(config: Config, corpus: Corpus) -> Any:
    """Return the float model that a resolved configuration starts from.

    Its weights are random, or those of a checkpoint. Whether it fits the memory is
    checked before, by `prepare_run`.
    """
    if config.model.pretrained:
        from nanogpt_bench.setup.pretrained import pretrained_model

        return pretrained_model(config, corpus)
    shape = model_shape(config, corpus)
    if config.model.init_from:
        from nanogpt_bench.setup.start import start_model

        return start_model(shape, config, corpus)
    return build_model(shape, config.seed)


def trained_model(inputs: TrainerInputs, start: GPT | None = None) -> Any:
    """Return the model that a trainer trains.

    It is quantised, in its precision and on its device. Without the float model `start`
    it begins as the configuration says.
    """
    config, device = inputs.config, inputs.device
    model = initial_model(config, inputs.corpus) if start is None else start
    model = quantize(train_in_float8(model, config, device), config).to(device, inputs.dtype)
    return keep_peer_weights(model, config)


class MeanAndError(NamedTuple):
    """The mean of losses and its standard error, None where it is not defined."""

    mean: float
    error: float | None


def mean_and_error(losses: Sequence[float]) -> MeanAndError:
    """Return the mean of losses and its standard error.

    The error is the standard deviation over the square root of their number. It is None
    for a single loss, and if a loss is not finite.

    >>> tuple(mean_and_error([1.0, 2.0, 3.0]))
    (2.0, 0.5773502691896258)
    """
    mean = sum(losses) / len(losses)
    if len(losses) > 1 and math.isfinite(mean):
        return MeanAndError(mean, statistics.stdev(losses) / math.sqrt(len(losses)))
    return MeanAndError(mean, None)


class Trainer:
    """Model, optimizer and batches of a resolved configuration.

    The processes of `ranks` train the model together.
    """

    def __init__(self, inputs: TrainerInputs, start: GPT | None = None) -> None:
        """Build model and optimizer, and draw the validation batches."""
        config, ranks = inputs.config, inputs.ranks
        self.config = config
        self.corpus = inputs.corpus
        self.device = inputs.device
        self.ranks = ranks
        self.batches = inputs.batches
        self.task = task_of(config, inputs.corpus)
        self.model: Any = trained_model(inputs, start)
        if ranks.size > 1:
            # the first process' model, to the bit
            fm.distributed.sync(self.model)
        noise = None if config.optimizer.noise is None else WriteBackNoise(self.model, config)
        # index of a micro-batch that no step trains on
        untrained = self.batches.micro_steps
        self.optimizer = build_optimizer(
            self.model, config, lambda step: [self._move(self._draw(step, untrained))]
        )
        if noise is not None:
            noise.watch(self.optimizer)
        model_loss: Any = CompiledLoss(self.model) if config.runtime.compile else self.model.loss
        self._model_loss: Loss = model_loss
        has_replicas = ranks.size > 1 and config.train.parallel == "ddp"
        #: the loss of a training step where it averages gradients over processes; None:
        #: the model's
        self._replicated = replicated(self.model, self._model_loss) if has_replicas else None
        #: most bytes of gradients at once, in this process' first step
        self.gradient_peak = GradientPeak(self.model)
        self._clipping = build_clipping(self.model, self.optimizer, config)
        self._eval_batches = [self._move(pair) for pair in self.task.held_out()]
        self._also_batches: list[tuple[Tensor, Tensor]] = []
        if inputs.also is not None:
            also_task = task_of(config, inputs.also)
            self._also_batches = [self._move(pair) for pair in also_task.held_out()]

    def tokens_in(self, number: int) -> int:
        """Return how many tokens step `number` (from 1) trains on."""
        return self.task.tokens(number - 1)

    def new_step(self, number: int, *, last: bool) -> Step:
        """Return a new record of step `number` (from 1)."""
        return Step(number, self.model, self.optimizer, last, micro_steps=self.batches.micro_steps)

    def train_step(self, step: Step, observers: Sequence[Observer]) -> float:
        """Take one step, unless loss or gradient is not finite; record it.

        Returns the loss in nats per token or label.
        """
        self._seed_dropout(step)
        lr = self._set_lr(step.number - 1)
        self._set_writeback(step.number - 1)
        self.optimizer.zero_grad(set_to_none=True)
        skips_before = self._skip_count()
        loss = self._accumulate(step, observers)
        norm, was_clipped = self._clipping.finish()
        loss_is_finite = math.isfinite(loss)
        if norm is None:
            # Steps in the backward pass skip parameters whose gradient is not finite,
            # and count the skips.
            gradient_is_finite = self._skip_count() == skips_before
        else:
            gradient_is_finite = math.isfinite(norm)
        step.record[metrics.LOSS_IS_NAN.name] = int(not loss_is_finite)
        step.record[metrics.GRAD_HAS_NAN.name] = int(not gradient_is_finite)
        step.record[metrics.TRAIN_LOSS.name] = loss
        step.record[metrics.LR.name] = lr
        if norm is not None:
            step.record[metrics.GRAD_NORM.name] = norm
            step.record[metrics.GRAD_CLIPPED.name] = int(was_clipped)
        exponent = stiffness_at(self.config, step.number - 1)
        if exponent is not None:
            step.record[metrics.STIFFNESS_EXPONENT.name] = exponent
        if loss_is_finite and gradient_is_finite:
            self._update(step, observers)
        return loss

    def _seed_dropout(self, step: Step) -> None:
        """Seed this process' generator by the step, if there are several processes.

        Then no state has to be saved. A single process draws from one sequence, whose
        state is in the checkpoint.
        """
        if self.ranks.size > 1:
            sequence = np.random.SeedSequence([self.config.seed, step.number, self.ranks.rank])
            torch.manual_seed(int(sequence.generate_state(1, np.uint64)[0]))

    def _set_writeback(self, index: int) -> None:
        settings = self.config.optimizer
        if settings.writeback_end is None:
            return
        # as `remaining_share` asks it, so that the rate falls at the same step
        at_end = index / self.config.train.max_steps >= settings.step_at
        for group in self.optimizer.param_groups:
            group["writeback"] = settings.writeback_end if at_end else settings.writeback

    def _update(self, step: Step, observers: Sequence[Observer]) -> None:
        """Step the optimizer, unless parameters have stepped in the backward pass."""
        if not self.batches.steps_within:
            for observer in observers:
                observer.before_step(step)
            if self.config.train.step_in_backward:
                self._end_steps()
            else:
                self.optimizer.step()
        for observer in observers:
            observer.after_step(step)

    def _set_lr(self, index: int) -> float:
        settings = self.config.optimizer
        factor = lr_factor(settings, index, self.config.train.max_steps)
        for group in self.optimizer.param_groups:
            lr = peak_lr(group, settings) * factor
            if isinstance(group["lr"], Tensor):
                # The input of a compiled step: its value is replaced, not the tensor.
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
        return (settings.lr or 0.0) * factor

    def _accumulate(self, step: Step, observers: Sequence[Observer]) -> float:
        """Sum the gradients of a step's micro-batches; return the mean loss."""
        micro_steps = self.batches.micro_steps
        total = torch.zeros((), device=self.device)
        for micro_step in range(micro_steps):
            tokens, targets = self._move(self._draw(step.number - 1, micro_step))
            step.batch = (tokens, targets)
            step.micro_step = micro_step
            for observer in observers:
                observer.before_forward(step)
            loss = self.loss(tokens, targets, self._replicated) / micro_steps
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
        """Compute gradients.

        If parameters step on the way, observers are called first, and a loss of NaN or
        Inf is skipped.
        """
        if not self.batches.steps_within:
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
        self.gradient_peak.finish()

    def _end_steps(self) -> None:
        """End the steps that parameters took in a backward pass.

        Until then a used gradient is a placeholder in `grad`, without memory.
        """
        try:
            self.optimizer.step()
        except RuntimeError as error:
            raise BenchError(f"train.step_in_backward: {one_line(error)}") from None
        self.optimizer.zero_grad(set_to_none=True)

    def _skip_count(self) -> int:
        return int(getattr(self.optimizer, "skipped_steps", 0))

    def loss(self, tokens: Tensor, targets: Tensor, loss_function: Loss | None = None) -> Tensor:
        """Return the loss on a batch, in the precision of the training.

        `loss_function` is used in place of the model's loss.
        """
        with self.precision():
            loss: Tensor = (loss_function or self._model_loss)(tokens, targets)
        return loss

    @contextmanager
    def precision(self) -> Iterator[None]:
        """The context in which the model computes as in the training."""
        mixed = self.config.train.precision == Precision.BF16_MIXED
        with torch.autocast(self.device.type, torch.bfloat16, enabled=mixed), self._products():
            yield

    def _products(self) -> AbstractContextManager[Any]:
        return bfloat16_products(self.config, self.device)

    def micro_batches(self, number: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the micro-batches of step `number` (from 1)."""
        for micro_step in range(self.batches.micro_steps):
            yield self._move(self._draw(number - 1, micro_step))

    def validate(self) -> float:
        """Return the mean loss over the fixed validation batches, in nats."""
        return mean_and_error(self.validation_losses())[0]

    def validation_losses(self) -> list[float]:
        """Return the losses of the fixed validation batches, in nats per token.

        Those of documents with labels are per document, in nats per label.
        """
        return self._losses(self._eval_batches)

    def figures(self, loss: float) -> ValidationFigures:
        """Return the further values of the record of a validation.

        `loss` is its mean loss.
        """
        with self._evaluating() as passes:
            return self.task.figures(passes, self._eval_batches, loss)

    def validation_windows(self) -> Tensor:
        """Return the fixed validation batches as windows, (N, T + 1)."""
        windows = []
        for tokens, targets in self._eval_batches:
            windows.append(torch.cat([tokens, targets[:, -1:]], dim=1))
        return torch.cat(windows)

    def also_loss(self) -> dict[str, float]:
        """Return the record's entry with the mean loss on the text of `eval.also`.

        It is empty without such a text.
        """
        if not self._also_batches:
            return {}
        losses = self._losses(self._also_batches)
        return {metrics.VAL_ALSO_LOSS.name: mean_and_error(losses).mean}

    def _losses(self, batches: Sequence[tuple[Tensor, Tensor]]) -> list[float]:
        """Return the losses of batches.

        Several processes divide them. Each takes equally many, the last batch again
        where there are none left, since every process has to take part in a pass.
        """
        with self._evaluating() as passes:
            if self.ranks.size == 1:
                return self.task.losses(passes, batches)
            losses = [0.0] * len(batches)
            for begin in range(0, len(batches), self.ranks.size):
                turn = begin + self.ranks.rank
                index = min(turn, len(batches) - 1)
                (loss,) = self.task.losses(passes, batches[index : index + 1])
                losses[index] = loss if turn < len(batches) else 0.0
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
        """Run the model on a validation batch, on one in `one_in` of its sequences.

        The model is in evaluation mode.
        """
        self.model.eval()
        tokens, targets = self._eval_batches[0]
        try:
            self.loss(tokens[::one_in], targets[::one_in])
        finally:
            # An observer may end the pass by an exception.
            self.model.train()

    def _draw(self, index: int, micro_step: int) -> tuple[Tensor, Tensor]:
        """Return this process' rows of a micro-batch."""
        tokens, targets = self.task.batch(index, micro_step)
        return tokens[self.batches.rows], targets[self.batches.rows]

    def _move(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return pair[0].to(self.device), pair[1].to(self.device)
