"""One training run: settings, corpus and folder are prepared; then its steps,
validations, records and checkpoints.
"""

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from signal import Signals
from time import perf_counter
from typing import Any

from nanogpt_bench.checkpoint import check_room, commit
from nanogpt_bench.checkpoint.format import CheckpointNotWritten, Contents
from nanogpt_bench.config import metrics
from nanogpt_bench.config.rules import stall_counts
from nanogpt_bench.config.schema import Config
from nanogpt_bench.config.settings import to_yaml
from nanogpt_bench.data.batches import open_corpus, refuse_changed
from nanogpt_bench.failures import failures_of
from nanogpt_bench.failures.table import ENDINGS
from nanogpt_bench.loop.anomalies import Sentry
from nanogpt_bench.loop.observers import baseline_curve, build_observers
from nanogpt_bench.loop.outcome import Outcome, Progress, summarize
from nanogpt_bench.loop.resume import (
    capture,
    check_unused,
    config_facts,
    expected_bytes,
    find_checkpoint,
    found_by_all,
    remove_output,
    restore,
    resumed_environment,
)
from nanogpt_bench.loop.trackers import Trackers, check_trackers, start_trackers
from nanogpt_bench.loop.trainer import Trainer, mean_and_error
from nanogpt_bench.model.gpt import build_model
from nanogpt_bench.monitors.points import Anomaly, Observer, Step
from nanogpt_bench.runs.environment import config_history, environment, history_comment
from nanogpt_bench.runs.load import Alert
from nanogpt_bench.runs.read import AT_START, SUMS, write_sums
from nanogpt_bench.setup.memory import check_fits, held_bytes
from nanogpt_bench.setup.resolve import resolve_for
from nanogpt_bench.setup.runtime import check_ranks, runtime
from nanogpt_bench.setup.surgery import left_in_float
from nanogpt_bench.system.errors import BenchError, counted, disk_failure
from nanogpt_bench.system.files import locked, remove_parts, write_json, write_text
from nanogpt_bench.system.ranks import ALONE, Ranks
from nanogpt_bench.system.signals import StopRequest


class Loop:
    """One run in progress: steps, validations, records."""

    def __init__(
        self,
        config: Config,
        trainer: Trainer,
        run_dir: Path,
        baseline: Mapping[int, float],
        on_progress: Callable[[Progress], None] | None,
        stop: StopRequest,
        environment: dict[str, Any],
    ) -> None:
        self.config, self.trainer, self.run_dir, self.on_progress = (
            config,
            trainer,
            run_dir,
            on_progress,
        )
        self.stop, self.environment = stop, environment
        self.ranks, self.outcome, self.trackers = trainer.ranks, Outcome(), Trackers([])
        self.raised: list[Alert] = []
        written = run_dir if self.ranks.first else None
        self.watch = build_observers(
            config, trainer, written, baseline=baseline, tell=self.raised.append
        )
        self.observers: list[Observer] = [*self.watch.all]
        self.sentry = Sentry(trainer)
        self.stall_counts = stall_counts(config.model.storage, config.optimizer.writeback)
        self.started = perf_counter()
        #: whether this process has taken a step
        self.stepped = False
        #: number of the last step that is over, skipped or not; None before the first
        #: validation
        self.done: int | None = None

    def begin(self, found: Contents | None) -> None:
        """Prepare the folder and start the trackers, at step 0 or at the step of the
        checkpoint `found`.
        """
        if found is not None:
            restore(found, self.trainer, self.watch.all)
            self.outcome, self.done = Outcome(**found.facts["outcome"]), found.step
            self.outcome.go_on(self.config.train.stop_on)
            self.started = perf_counter() - found.facts["elapsed_s"]
            self.environment = resumed_environment(found, self.environment, self.config)
        with self.ranks.together():
            if self.ranks.first:
                self._make_ready({} if found is None else found.facts["trackers"])
        self.observers.append(self.trackers)

    def _make_ready(self, earlier: dict[str, Any]) -> None:
        after = -1 if self.done is None else self.done
        if self.done is None:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            remove_output(self.run_dir)
        else:
            for name in (SUMS, "summary.json"):  # they describe the end of a run that now goes on
                (self.run_dir / name).unlink(missing_ok=True)
        remove_parts(self.run_dir)
        write_text(
            self.run_dir / "config.yaml", history_comment(self.environment) + to_yaml(self.config)
        )
        write_json(self.run_dir / "environment.json", self.environment)
        write_sums(self.run_dir, AT_START)
        self.trackers = start_trackers(self.config, self.run_dir, earlier, after)

    def save(self, step: Step) -> None:
        """Commit a checkpoint of the state after a step."""
        contents = self._contents(step)
        with self.ranks.together(CheckpointNotWritten):
            if contents is not None:
                commit(self.run_dir, contents, keep_last=self.config.checkpoint.keep)

    def _contents(self, step: Step) -> Contents | None:
        loss, outcome = step.record.get(metrics.VAL_LOSS.name), self.outcome
        self._measure()
        facts = {
            "config": config_facts(self.config),
            "environment": self.environment,
            "trackers": self.trackers.facts,
            "best": self._is_best(step),
            "val_loss": loss if loss is not None and math.isfinite(loss) else None,
            "best_val_loss": outcome.best_val_loss,
            "outcome": dataclasses.asdict(outcome),
            "elapsed_s": perf_counter() - self.started,
        }
        return capture(step.number, self.trainer, self.watch.all, facts)

    def _is_best(self, step: Step) -> bool:
        loss = step.record.get(metrics.VAL_LOSS.name)
        return loss is not None and loss == self.outcome.best_val_loss

    def _measure(self) -> None:
        """Count the bytes once a step has given the optimizer its state; a resumed run
        knows them already.
        """
        if self.outcome.steps and (self.stepped or self.outcome.held_bytes is None):
            self.outcome.held_bytes = held_bytes(self.trainer.model, self.trainer.optimizer)
            self.outcome.gradient_peak_bytes = self.trainer.gradient_peak.bytes

    def _save_if_due(self, step: Step) -> None:
        settings, status = self.config.checkpoint, self.outcome.status
        ends = settings.last and (step.last or status == "stopped")
        due = settings.every is not None and step.number % settings.every == 0
        due = (due or (settings.best and self._is_best(step))) and step.anomaly is None
        if status != "failed" and (ends or due or self.outcome.ended_by("signal")):
            self.save(step)

    def go(self) -> dict[str, Any]:
        try:
            if self.done is None:
                self._first_validation()
            while (
                self.outcome.status == "finished" and (self.done or 0) < self.config.train.max_steps
            ):
                self._one_step((self.done or 0) + 1)
            return self._finish()
        except KeyboardInterrupt:
            self.outcome.status = "stopped"
            self._finish()
            raise
        except (OSError, CheckpointNotWritten) as error:
            why = disk_failure(error) if isinstance(error, OSError) else str(error)
            if why is None:
                self._break_off()
                raise
            self.outcome.end_on_disk(why, self.done or 0, self.trainer.tokens_in)
            return self._finish()
        except BaseException:
            self._break_off()
            raise

    def _break_off(self) -> None:
        self._close()
        self.trackers.finish(None)

    def _one_step(self, number: int) -> None:
        """Train a step, count or skip it, validate if due, record, end the run if due,
        and save if due.
        """
        begun = perf_counter()
        step = self.trainer.new_step(number, last=number == self.config.train.max_steps)
        self.sentry.before()
        self.trainer.train_step(step, self.observers)
        self.stepped = True
        spent = perf_counter() - begun
        step.anomaly = self.sentry.after(step)
        if step.anomaly is None:
            self._count(step, spent)
        else:
            self._skip(step, step.anomaly)
        stopped, failed = (self.outcome.status == status for status in ("stopped", "failed"))
        if not failed and (step.last or stopped or step.number % self.config.eval.interval == 0):
            self._validate(step)
        self._write(step)
        self._end_on_trend(step)
        self._end_on_signal(step)
        self.done = step.number
        self._save_if_due(step)

    def _count(self, step: Step, spent: float) -> None:
        outcome, tokens = self.outcome, self.trainer.tokens_in(step.number)
        outcome.steps, outcome.anomalies = step.number, 0
        outcome.tokens += tokens
        outcome.training_seconds += spent
        step.record[metrics.SPEED.name] = tokens / spent
        limit = self.config.train.max_seconds
        if (
            limit is not None
            and self.ranks.any(perf_counter() - self.started >= limit)
            and not step.last
        ):
            outcome.end_early(
                "time",
                f"train.max_seconds {limit:g} were over after step {step.number}",
                step.number,
            )

    def _skip(self, step: Step, anomaly: Anomaly) -> None:
        """Skip a step; fail where weights or state are bad, too, or after as many in a
        row as patience allows.
        """
        outcome, train = self.outcome, self.config.train
        patience = 1 if train.on_anomaly == "stop" else ENDINGS["nan"].patience
        outcome.first_anomaly = outcome.first_anomaly if outcome.anomalies else step.number
        outcome.anomalies += 1
        if anomaly.lasting:
            outcome.fail("nan", f"{anomaly.where} is not finite at step {step.number}", step.number)
        elif outcome.anomalies >= patience and "nan" in train.stop_on:
            bad = (
                metrics.TRAIN_LOSS if step.record[metrics.LOSS_IS_NAN.name] else metrics.GRAD_NORM
            ).name
            rest = (
                f", and not finite in the {counted(patience - 1, 'step')} before"
                if patience > 1
                else ""
            )
            message = f"{bad} is {step.record[bad]} at step {step.number}{rest}; first seen in {anomaly.where}"
            outcome.fail("nan", message, outcome.first_anomaly)

    def _end_on_trend(self, step: Step) -> None:
        """End the run at a divergence or plateau that `train.stop_on` names."""
        reasons, trend = self.config.train.stop_on, self.watch.trend
        if (
            trend is None
            or self.outcome.status != "finished"
            or metrics.VAL_LOSS.name not in step.record
            or step.last
        ):
            return
        if "divergence" in reasons and trend.diverging:
            against = "the baseline's" if self.config.alerts.baseline else "its own best"
            message = f"the smoothed training loss is {trend.excess[-1]:.1%} above {against} at step {step.number}"
            self.outcome.fail("divergence", message, step.number)
        elif "plateau" in reasons and trend.flat:
            flat = f"has not fallen for {ENDINGS['plateau'].patience} validations"
            self.outcome.end_early(
                "plateau", f"{metrics.VAL_LOSS.name} {flat}, up to step {step.number}", step.number
            )

    def _end_on_signal(self, step: Step) -> None:
        """End the run if a signal came during the step; the last step ends it anyway."""
        number = int(self.ranks.largest(self.stop.number))
        if number and self.outcome.status == "finished" and not step.last:
            self.outcome.end_early(
                "signal", f"{Signals(number).name} after step {step.number}", step.number
            )

    def _first_validation(self) -> None:
        step = self.trainer.new_step(0, last=False)
        self._validate(step)
        self.outcome.first_val_loss = step.record.get(metrics.VAL_LOSS.name)
        self._write(step)
        self.done = 0
        self._end_on_signal(step)
        if self.outcome.ended_by("signal") or (self.config.checkpoint.best and self._is_best(step)):
            self.save(step)

    def _validate(self, step: Step) -> None:
        loss, self.outcome.final_val_loss_se = mean_and_error(self.trainer.validation_losses())
        step.record |= {
            metrics.VAL_LOSS.name: loss,
            metrics.VAL_LOSS_SE.name: self.outcome.final_val_loss_se,
        }
        step.record |= self.trainer.also_loss()
        if not math.isfinite(loss):
            self.outcome.final_val_loss = None
            if "nan" in self.config.train.stop_on or step.last or self.outcome.status == "stopped":
                self.outcome.fail(
                    "nan", f"{metrics.VAL_LOSS.name} is {loss} at step {step.number}", step.number
                )
            return
        step.record |= self.trainer.figures(loss)
        self.outcome.final_val_loss = loss
        beside = (metric for metric in metrics.BESIDE_LOSS if metric.name in step.record)
        self.outcome.final_figures = {metric.figure: step.record[metric.name] for metric in beside}
        best = self.outcome.best_val_loss
        self.outcome.best_val_loss = loss if best is None else min(loss, best)

    def _write(self, step: Step) -> None:
        step.record[metrics.TOKENS.name] = self.outcome.tokens
        step.record[metrics.ELAPSED.name] = perf_counter() - self.started
        with self.ranks.together():
            for observer in self.observers:
                observer.written(step)
        if self.on_progress is not None:
            self.on_progress(self._progress(step))
        self.raised.clear()

    def _progress(self, step: Step) -> Progress:
        record, outcome, stall = step.record, self.outcome, self.watch.stall
        return Progress(
            step=step.number,
            max_steps=self.config.train.max_steps,
            train_loss=record.get(metrics.TRAIN_LOSS.name),
            val_loss=outcome.final_val_loss,
            best_val_loss=outcome.best_val_loss,
            stall=stall.mean if stall and self.stall_counts else None,
            arrived=stall.arrived if stall else None,
            lr=record.get(metrics.LR.name) or 0.0,
            tokens_per_s=record.get(metrics.SPEED.name) or 0.0,
            elapsed_s=perf_counter() - self.started,
            alerts=tuple(self.raised),
        )

    def _finish(self) -> dict[str, Any]:
        """Write and return the summary; if the disk has ended the run, files that it
        refuses are left out.
        """
        attempt = suppress(OSError, BenchError) if self.outcome.ended_by("disk") else nullcontext()
        self._close()
        self._measure()
        self.outcome.seconds = perf_counter() - self.started
        summary = summarize(self.run_dir.name, self.config, self.trainer, self.outcome, self.watch)
        if not self.ranks.first:
            return summary
        summary["config_history"] = config_history(self.environment)
        with attempt:
            (self.run_dir / SUMS).unlink(
                missing_ok=True
            )  # until all is written, since it has no sum of the summary
            write_json(self.run_dir / "summary.json", summary)
            # Judged from the folder's files, summary included, so that the result can
            # be computed again later.
            summary["failures"] = failures_of(self.run_dir)
        self.trackers.finish(summary)
        summary["trackers"] = self.trackers.facts
        with attempt:
            write_json(self.run_dir / "summary.json", summary)
            write_sums(self.run_dir)
        return summary

    def _close(self) -> None:
        attempt = suppress(OSError) if self.outcome.ended_by("disk") else nullcontext()
        for observer in self.observers:
            with attempt:
                observer.close()


_LOG = logging.getLogger("nanogpt_bench")


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
    """Train as `config` says, write everything into `run_dir` and return the content of
    summary.json.

    With `resume` the run goes on from the newest checkpoint in `run_dir` that verifies,
    with the same numbers as if it had never stopped; without a checkpoint it begins at
    step 0. `say` gets notices, as of skipped checkpoints.

    `train.on_anomaly` decides about a step in which something is not finite. A signal
    noted in `stop` ends the run after the current step, with a checkpoint; a file that
    can't be written ends it without one. KeyboardInterrupt writes the summary, then
    interrupts.

    Each process of `ranks` calls this function, and the first one writes; all stop
    together and read the same checkpoint. Refused settings leave no files.

    `texts` has the digests, by their folders, of the corpora that the run has to be
    trained on; with any others a `TextChangedError` is raised.
    """
    config = resolve_for(config, run_dir, resume=resume)
    check_ranks(config, ranks)
    with runtime(config) as device:
        refuse_changed(texts or {})
        corpus = open_corpus(config)
        check_fits(config, corpus)
        facts = environment(corpus, config.runtime.threads)
        facts |= (
            {"parallel": config.train.parallel, "processes": ranks.size} if ranks.size > 1 else {}
        )
        if config.model.init_from:
            from nanogpt_bench.setup.start import check_start, start_facts

            facts |= start_facts(config)
        baseline = baseline_curve(config.alerts.baseline)
        check_trackers(config)
        if not resume:
            check_unused(run_dir)
        trainer = Trainer(
            config,
            corpus,
            device,
            start=build_model(config.begun, 0) if config.begun else None,
            ranks=ranks,
        )
        # again, now that all are open, so that a corpus replaced meanwhile is noticed
        refuse_changed(texts or {})
        if config.model.pretrained and config.layers and ranks.first:
            say(left_in_float(trainer.model))
        check_room(run_dir, expected_bytes(trainer), "the first checkpoint")
        with locked(run_dir, "run folder") if ranks.first else nullcontext():
            if not resume and ranks.first:
                check_unused(run_dir)  # another run may have used the folder meanwhile
            find = partial(
                find_checkpoint, run_dir, config, facts, allow_change=allow_config_change, say=say
            )
            found = found_by_all(ranks, run_dir, find) if resume else None
            if config.model.init_from:
                check_start(config, found)
            progress = Loop(
                config, trainer, run_dir, baseline, on_progress, stop or StopRequest(), facts
            )
            progress.begin(found)
            del found  # its tensors would take memory during the whole run
            return progress.go()
