"""One training run, from its settings to its summary.

`prepare_run` settles settings, texts and device. `train` then builds the model and takes
the folder. `Loop` takes the steps and validates; it records every step, saves checkpoints
when they are due, and decides when the run ends.
"""

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from functools import partial
from pathlib import Path
from signal import Signals
from time import perf_counter
from typing import Any

from nanogpt_bench.checkpoint import check_room, commit_checkpoint
from nanogpt_bench.checkpoint.format import CheckpointNotWritten, Contents
from nanogpt_bench.config import metrics
from nanogpt_bench.config.endings import FailureClass, RunStatus, StopKind
from nanogpt_bench.config.rules import stall_counts
from nanogpt_bench.config.schema import Config
from nanogpt_bench.config.settings import Resolved, to_yaml
from nanogpt_bench.failures import failures_of
from nanogpt_bench.failures.table import ENDINGS
from nanogpt_bench.loop.anomalies import Sentry
from nanogpt_bench.loop.observers import build_observers
from nanogpt_bench.loop.outcome import Outcome, Progress, summarize
from nanogpt_bench.loop.prepared import Prepared, prepare_run
from nanogpt_bench.loop.resume import (
    capture,
    check_unused,
    config_facts,
    expected_bytes,
    find_checkpoint,
    remove_output,
    restore,
    resumed_environment,
    share_checkpoint,
)
from nanogpt_bench.loop.trackers import Trackers, start_trackers
from nanogpt_bench.loop.trainer import Trainer, mean_and_error
from nanogpt_bench.model.gpt import GPT, build_model
from nanogpt_bench.monitors.points import Anomaly, Observer, Step
from nanogpt_bench.runs.environment import config_history, history_comment
from nanogpt_bench.runs.load import Alert
from nanogpt_bench.runs.read import AT_START, SUMS, write_sums
from nanogpt_bench.setup.memory import held_bytes
from nanogpt_bench.setup.runtime import threads_and_seed
from nanogpt_bench.setup.surgery import left_in_float
from nanogpt_bench.system.errors import BenchError, counted, disk_failure
from nanogpt_bench.system.files import locked, remove_parts, write_json, write_text
from nanogpt_bench.system.ranks import ALONE, Ranks
from nanogpt_bench.system.signals import StopRequest

_LOG = logging.getLogger("nanogpt_bench")


class Loop:
    """One run in progress: steps, validations, records, checkpoints, and its end."""

    def __init__(
        self,
        prepared: Prepared,
        trainer: Trainer,
        on_progress: Callable[[Progress], None] | None,
        stop: StopRequest,
    ) -> None:
        self.config = prepared.config
        self.trainer = trainer
        self.run_dir = prepared.run_dir
        self.on_progress = on_progress
        self.stop = stop
        self.environment = prepared.environment
        self.ranks = trainer.ranks
        self.outcome = Outcome()
        self.trackers = Trackers([])
        #: alerts of the current step
        self.alerts: list[Alert] = []
        self.observers = build_observers(
            self.config,
            trainer,
            # The first process writes the files.
            self.run_dir if self.ranks.first else None,
            baseline=prepared.baseline,
            tell=self.alerts.append,
        )
        #: all observers in the order of their calls, the trackers last, once started
        self.called: list[Observer] = [*self.observers.all]
        self.sentry = Sentry(trainer)
        optimizer = self.config.optimizer
        self.stall_counts = stall_counts(
            self.config.model.storage, optimizer.writeback, optimizer.writeback_end
        )
        self.started = perf_counter()
        #: whether this process has taken a step
        self.stepped = False
        #: number of the last step that is over, skipped or not; None before the first
        #: validation
        self.last_step: int | None = None

    def begin(self, checkpoint: Contents | None) -> None:
        """Prepare the folder and start the trackers.

        The run begins at step 0, or at the step of a checkpoint.
        """
        earlier_trackers = {}
        if checkpoint is not None:
            restore(checkpoint, self.trainer, self.observers.all)
            self.outcome = Outcome(**checkpoint.facts["outcome"])
            self.outcome.go_on(self.config.train.stop_on)
            self.last_step = checkpoint.step
            self.started = perf_counter() - checkpoint.facts["elapsed_s"]
            self.environment = resumed_environment(checkpoint, self.environment, self.config)
            earlier_trackers = checkpoint.facts["trackers"]
        with self.ranks.together():
            if self.ranks.first:
                self._prepare_folder()
                self.trackers = start_trackers(
                    self.config, self.run_dir, earlier_trackers, self.last_step
                )
        self.called.append(self.trackers)

    def _prepare_folder(self) -> None:
        if self.last_step is None:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            remove_output(self.run_dir)
        else:
            # They describe the end of a run that now goes on.
            for name in (SUMS, "summary.json"):
                (self.run_dir / name).unlink(missing_ok=True)
        remove_parts(self.run_dir)
        write_text(
            self.run_dir / "config.yaml", history_comment(self.environment) + to_yaml(self.config)
        )
        write_json(self.run_dir / "environment.json", self.environment)
        write_sums(self.run_dir, AT_START)

    def save(self, step: Step) -> None:
        """Commit a checkpoint of the state after a step."""
        contents = self._capture(step)
        with self.ranks.together(CheckpointNotWritten):
            if contents is not None:
                commit_checkpoint(self.run_dir, contents, keep_last=self.config.checkpoint.keep)

    def _capture(self, step: Step) -> Contents | None:
        loss = step.record.get(metrics.VAL_LOSS.name)
        self._measure_memory()
        facts = {
            "config": config_facts(self.config),
            "environment": self.environment,
            "trackers": self.trackers.facts,
            "best": self._is_best(step),
            "val_loss": loss if loss is not None and math.isfinite(loss) else None,
            "best_val_loss": self.outcome.best_val_loss,
            "outcome": dataclasses.asdict(self.outcome),
            "elapsed_s": perf_counter() - self.started,
        }
        return capture(step.number, self.trainer, self.observers.all, facts)

    def _is_best(self, step: Step) -> bool:
        loss = step.record.get(metrics.VAL_LOSS.name)
        return loss is not None and loss == self.outcome.best_val_loss

    def _measure_memory(self) -> None:
        """Count the bytes once a step has given the optimizer its state.

        A resumed run knows them already.
        """
        if self.outcome.steps and (self.stepped or self.outcome.held_bytes is None):
            self.outcome.held_bytes = held_bytes(self.trainer.model, self.trainer.optimizer)
            self.outcome.gradient_peak_bytes = self.trainer.gradient_peak.bytes

    def _save_if_due(self, step: Step) -> None:
        if self.outcome.status is RunStatus.FAILED:
            return
        settings = self.config.checkpoint
        ends = settings.last and (step.last or self.outcome.status is RunStatus.STOPPED)
        is_periodic = settings.every is not None and step.number % settings.every == 0
        is_best = settings.best and self._is_best(step)
        is_due = (is_periodic or is_best) and step.anomaly is None
        if ends or is_due or self.outcome.ended_by(StopKind.SIGNAL):
            self.save(step)

    def go(self) -> dict[str, Any]:
        """Train to the end of the run; return the content of summary.json."""
        try:
            if self.last_step is None:
                self._validate_first()
            # A run counts as finished until something ends it early.
            while self.outcome.status is RunStatus.FINISHED:
                number = (self.last_step or 0) + 1
                if number > self.config.train.max_steps:
                    break
                self._take_step(number)
            return self._finish()
        except KeyboardInterrupt:
            self.outcome.status = RunStatus.STOPPED
            self._finish()
            raise
        except (OSError, CheckpointNotWritten) as error:
            message = disk_failure(error) if isinstance(error, OSError) else str(error)
            if message is None:
                self._break_off()
                raise
            self.outcome.end_on_disk(message, self.last_step or 0, self.trainer.tokens_in)
            return self._finish()
        except BaseException:
            self._break_off()
            raise

    def _break_off(self) -> None:
        self._close()
        self.trackers.finish(None)

    def _take_step(self, number: int) -> None:
        """Train a step, count or skip it, and validate if it is due.

        The step is recorded, and the run ended or saved where that is due.
        """
        start = perf_counter()
        step = self.trainer.new_step(number, last=number == self.config.train.max_steps)
        self.sentry.copy_buffers()
        self.trainer.train_step(step, self.called)
        self.stepped = True
        seconds = perf_counter() - start
        step.anomaly = self.sentry.check(step)
        if step.anomaly is None:
            self._count(step, seconds)
        else:
            self._skip(step, step.anomaly)
        if self._is_validated(step):
            self._validate(step)
        self._record(step)
        self._end_on_trend(step)
        self._end_on_signal(step)
        self.last_step = step.number
        self._save_if_due(step)

    def _is_validated(self, step: Step) -> bool:
        if self.outcome.status is RunStatus.FAILED:
            return False
        if step.last or self.outcome.status is RunStatus.STOPPED:
            return True
        return step.number % self.config.eval.interval == 0

    def _count(self, step: Step, seconds: float) -> None:
        outcome = self.outcome
        tokens = self.trainer.tokens_in(step.number)
        outcome.steps = step.number
        outcome.anomalies = 0
        outcome.tokens += tokens
        outcome.training_seconds += seconds
        step.record[metrics.SPEED.name] = tokens / seconds
        limit = self.config.train.max_seconds
        if limit is None:
            return
        is_over = self.ranks.any(perf_counter() - self.started >= limit)
        if is_over and not step.last:
            message = f"the time of train.max_seconds {limit:g} was over after step {step.number}"
            outcome.end_early(StopKind.TIME, message, step.number)

    def _skip(self, step: Step, anomaly: Anomaly) -> None:
        """Skip a step.

        The run fails where weights or state are bad, too, or after as many skipped
        steps in a row as patience allows.
        """
        outcome = self.outcome
        train = self.config.train
        patience = 1 if train.on_anomaly == "stop" else ENDINGS[FailureClass.NAN].patience
        if not outcome.anomalies:
            outcome.first_anomaly = step.number
        outcome.anomalies += 1
        if anomaly.lasting:
            outcome.fail(
                FailureClass.NAN,
                f"{anomaly.where} is not finite at step {step.number}",
                step.number,
            )
        elif outcome.anomalies >= patience and FailureClass.NAN in train.stop_on:
            message = f"{_name_bad_number(step.record)} at step {step.number}"
            if patience > 1:
                message += f", and was not finite in the {counted(patience - 1, 'step')} before"
            message += f"; first seen in {anomaly.where}"
            outcome.fail(FailureClass.NAN, message, outcome.first_anomaly)

    def _end_on_trend(self, step: Step) -> None:
        """End the run at a divergence or plateau that `train.stop_on` names."""
        trend = self.observers.trend
        if trend is None or step.last or self.outcome.status is not RunStatus.FINISHED:
            return
        if metrics.VAL_LOSS.name not in step.record:
            return
        stop_on = self.config.train.stop_on
        if FailureClass.DIVERGENCE in stop_on and trend.diverging:
            reference = "that of the baseline" if self.config.alerts.baseline else "its own lowest"
            message = (
                f"the smoothed training loss is {trend.excess[-1]:.1%} above {reference} at step "
                f"{step.number}"
            )
            self.outcome.fail(FailureClass.DIVERGENCE, message, step.number)
        elif FailureClass.PLATEAU in stop_on and trend.flat:
            patience = ENDINGS[FailureClass.PLATEAU].patience
            message = (
                f"{metrics.VAL_LOSS.name} has not fallen for {patience} validations, up to step "
                f"{step.number}"
            )
            self.outcome.end_early(StopKind.PLATEAU, message, step.number)

    def _end_on_signal(self, step: Step) -> None:
        """End the run if a signal came during the step; the last ends it anyway."""
        number = int(self.ranks.largest(self.stop.number))
        if number and self.outcome.status is RunStatus.FINISHED and not step.last:
            message = f"{Signals(number).name} after step {step.number}"
            self.outcome.end_early(StopKind.SIGNAL, message, step.number)

    def _validate_first(self) -> None:
        step = self.trainer.new_step(0, last=False)
        self._validate(step)
        self.outcome.first_val_loss = step.record.get(metrics.VAL_LOSS.name)
        self._record(step)
        self.last_step = 0
        self._end_on_signal(step)
        is_best = self.config.checkpoint.best and self._is_best(step)
        if is_best or self.outcome.ended_by(StopKind.SIGNAL):
            self.save(step)

    def _validate(self, step: Step) -> None:
        outcome = self.outcome
        loss, error = mean_and_error(self.trainer.validation_losses())
        outcome.final_val_loss_se = error
        step.record[metrics.VAL_LOSS.name] = loss
        step.record[metrics.VAL_LOSS_SE.name] = error
        step.record |= self.trainer.also_loss()
        if not math.isfinite(loss):
            outcome.final_val_loss = None
            if (
                FailureClass.NAN in self.config.train.stop_on
                or step.last
                or outcome.status is RunStatus.STOPPED
            ):
                message = f"{metrics.VAL_LOSS.name} is {loss} at step {step.number}"
                outcome.fail(FailureClass.NAN, message, step.number)
            return
        step.record |= self.trainer.figures(loss)
        outcome.final_val_loss = loss
        outcome.final_figures = {}
        for metric in metrics.BESIDE_LOSS:
            if metric.name in step.record:
                outcome.final_figures[metric.figure] = step.record[metric.name]
        best = outcome.best_val_loss
        outcome.best_val_loss = loss if best is None else min(loss, best)

    def _record(self, step: Step) -> None:
        step.record[metrics.TOKENS.name] = self.outcome.tokens
        step.record[metrics.ELAPSED.name] = perf_counter() - self.started
        with self.ranks.together():
            for observer in self.called:
                observer.complete_record(step)
            for observer in self.called:
                observer.take_record(step)
        if self.on_progress is not None:
            self.on_progress(self._progress(step))
        self.alerts.clear()

    def _progress(self, step: Step) -> Progress:
        record = step.record
        stall = self.observers.stall
        return Progress(
            step=step.number,
            max_steps=self.config.train.max_steps,
            train_loss=record.get(metrics.TRAIN_LOSS.name),
            val_loss=self.outcome.final_val_loss,
            best_val_loss=self.outcome.best_val_loss,
            stall=stall.mean if stall and self.stall_counts else None,
            arrived=stall.arrived if stall else None,
            lr=record.get(metrics.LR.name) or 0.0,
            tokens_per_s=record.get(metrics.SPEED.name) or 0.0,
            elapsed_s=perf_counter() - self.started,
            alerts=tuple(self.alerts),
        )

    def _finish(self) -> dict[str, Any]:
        """Write and return the summary.

        If the disk has ended the run, files that it refuses are left out.
        """
        refusals: AbstractContextManager[Any] = nullcontext()
        if self.outcome.ended_by(StopKind.DISK):
            refusals = suppress(OSError, BenchError)
        self._close()
        self._measure_memory()
        self.outcome.seconds = perf_counter() - self.started
        summary = summarize(
            self.run_dir.name, self.config, self.trainer, self.outcome, self.observers
        )
        if not self.ranks.first:
            return summary
        summary["config_history"] = config_history(self.environment)
        with refusals:
            # It has no sum of the summary, and is written again once all others are.
            (self.run_dir / SUMS).unlink(missing_ok=True)
            write_json(self.run_dir / "summary.json", summary)
            # Judged from the folder's files, summary included, so that the result can
            # be computed again later.
            summary["failures"] = failures_of(self.run_dir)
        self.trackers.finish(summary)
        summary["trackers"] = self.trackers.facts
        with refusals:
            write_json(self.run_dir / "summary.json", summary)
            write_sums(self.run_dir)
        return summary

    def _close(self) -> None:
        refusals: AbstractContextManager[Any] = nullcontext()
        if self.outcome.ended_by(StopKind.DISK):
            refusals = suppress(OSError)
        for observer in self.called:
            with refusals:
                observer.close()


def run(
    config: Config,
    run_dir: Path,
    *,
    resume: bool = False,
    allow_config_change: bool = False,
    on_progress: Callable[[Progress], None] | None = None,
    stop: StopRequest | None = None,
    ranks: Ranks = ALONE,
    say: Callable[[str], None] = _LOG.warning,
    texts: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """Train as `config` says, and return the content of summary.json.

    It is `prepare_run` and `train`, whose arguments it takes. Refused settings leave no
    files.
    """
    prepared = prepare_run(config, run_dir, resume=resume, ranks=ranks, texts=texts)
    return train(
        prepared,
        allow_config_change=allow_config_change,
        on_progress=on_progress,
        stop=stop,
        say=say,
    )


def train(
    prepared: Prepared,
    *,
    allow_config_change: bool = False,
    on_progress: Callable[[Progress], None] | None = None,
    stop: StopRequest | None = None,
    say: Callable[[str], None] = _LOG.warning,
) -> dict[str, Any]:
    """Train a prepared run, and return the content of summary.json.

    Everything is written into its folder. A resumed run goes on from the newest
    checkpoint there that verifies, with the numbers of a run that had never stopped.
    Without a checkpoint it begins at step 0. `say` gets notices, as of skipped
    checkpoints.

    `train.on_anomaly` decides about a step in which something is not finite. A signal
    noted in `stop` ends the run after the current step, with a checkpoint. A file that
    can't be written ends it without one. KeyboardInterrupt writes the summary, then
    interrupts.

    Each process of the run calls this function, and the first one writes. All stop
    together and read the same checkpoint.
    """
    config, run_dir, ranks = prepared.config, prepared.run_dir, prepared.ranks
    with threads_and_seed(config), ExitStack() as stack:
        with ranks.together():
            if ranks.first:
                _take_folder(stack, run_dir, is_new=not prepared.resume)
        trainer = Trainer(prepared, start=_start_model(config))
        if config.model.pretrained and config.layers and ranks.first:
            say(left_in_float(trainer.model))
        check_room(run_dir, expected_bytes(trainer), "the first checkpoint")
        checkpoint = None
        if prepared.resume:
            find = partial(
                find_checkpoint,
                run_dir,
                config,
                prepared.environment,
                allow_change=allow_config_change,
                say=say,
            )
            checkpoint = share_checkpoint(ranks, run_dir, find)
        if config.model.init_from:
            from nanogpt_bench.setup.start import check_start

            check_start(config, checkpoint)
        loop = Loop(prepared, trainer, on_progress, stop or StopRequest())
        loop.begin(checkpoint)
        # Its tensors would take memory during the whole run.
        del checkpoint
        return loop.go()


def _name_bad_number(record: Mapping[str, Any]) -> str:
    """Name the loss or the gradient of a step, whichever is not finite.

    Where steps are in the backward pass and nothing is clipped, there is no norm of all
    gradients.

    >>> _name_bad_number({"train/loss": 2.5, "loss_is_nan": 0})
    'the gradient is not finite'
    """
    is_loss = record[metrics.LOSS_IS_NAN.name]
    name = metrics.TRAIN_LOSS.name if is_loss else metrics.GRAD_NORM.name
    if name not in record:
        return "the gradient is not finite"
    return f"{name} is {record[name]}"


def _take_folder(stack: ExitStack, run_dir: Path, *, is_new: bool) -> None:
    """Lock a run's folder until the stack closes; refuse to begin where there is a run."""
    try:
        stack.enter_context(locked(run_dir, "run folder"))
    finally:
        # Not before: until the lock is taken another run may begin in the folder. If it
        # can't be taken, the run that is there says more than the lock.
        if is_new:
            check_unused(run_dir)


def _start_model(config: Resolved) -> GPT | None:
    """Return a model of the shape that the run began with, if it is known.

    Its weights do not matter: those of the run's checkpoint replace them.
    """
    return build_model(config.initial_shape, 0) if config.initial_shape else None
