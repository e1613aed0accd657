"""One training run: the loop, its files in the run folder, and the summary."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from nanogpt_bench.config import ROUNDED, Config
from nanogpt_bench.data import load_corpus
from nanogpt_bench.environment import environment
from nanogpt_bench.errors import BenchError
from nanogpt_bench.failures import failures_of
from nanogpt_bench.observers import HistogramObserver, JsonlObserver, Observer, StallObserver, Step
from nanogpt_bench.resolve import resolve
from nanogpt_bench.settings import to_yaml
from nanogpt_bench.step import Trainer
from nanogpt_bench.summary import summarize, weight_histograms
from nanogpt_bench.surgery import quantized_layers


@dataclass(frozen=True)
class Progress:
    """Where a run stands after a step; losses in nats a token."""

    step: int
    max_steps: int
    train_loss: float | None
    val_loss: float | None
    best_val_loss: float | None
    stall: float | None
    lr: float
    tokens_per_s: float
    elapsed_s: float


@dataclass
class Outcome:
    """What the loop found out, beside the weights."""

    status: str = "finished"
    failure: dict[str, Any] | None = None
    steps: int = 0
    tokens: int = 0
    first_val_loss: float | None = None
    final_val_loss: float | None = None
    best_val_loss: float | None = None
    seconds: float = 0.0
    training_seconds: float = 0.0

    def fail(self, kind: str, message: str, step: int) -> None:
        """Record how the run failed; a failed run has no final loss."""
        self.status = "failed"
        self.failure = {"kind": kind, "message": message, "step": step}
        self.final_val_loss = None


def run(config: Config, run_dir: Path, *, on_progress: Callable[[Progress], None] | None = None) -> dict[str, Any]:
    """Train as `config` says, write everything into `run_dir` and return the content of summary.json.

    A loss that is not finite ends the run with status "failed"; Ctrl-C writes the summary, then interrupts.

    Raises:
        BenchError: settings or corpus that can't be used, or a `run_dir` that already holds a run; nothing is written.
    """
    config = resolve(config)
    with _runtime(config) as device:
        corpus = load_corpus(Path(config.data.dir), config.model.block_size or 0)
        trainer = Trainer(config, corpus, device)
        _start_folder(run_dir, config, environment(corpus, config.runtime.threads))
        return _Run(config, trainer, run_dir, on_progress).go()


@contextmanager
def _runtime(config: Config) -> Iterator[torch.device]:
    """Set threads and seeds for the run, and put back what was there."""
    wanted = config.runtime.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise BenchError("runtime.device: 'cuda' is not available on this machine; allowed: auto, cpu")
    device = torch.device("cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu")
    threads = torch.get_num_threads()
    torch.set_num_threads(config.runtime.threads or threads)
    try:
        with torch.random.fork_rng():
            torch.manual_seed(config.seed)  # dropout
            yield device
    finally:
        torch.set_num_threads(threads)


def _start_folder(run_dir: Path, config: Config, facts: dict[str, Any]) -> None:
    if run_dir.exists() and any(run_dir.iterdir()):
        raise BenchError(f"run folder {str(run_dir)!r} already holds a run; give another --name or remove it")
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    write_json(run_dir / "environment.json", facts)


def write_json(path: Path, content: Any, indent: int | None = 1) -> None:
    """Write a JSON file so that a reader sees all of it or none."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(content, indent=indent, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(partial, path)


class _Run:
    """One run in progress: steps, validations, records."""

    def __init__(
        self, config: Config, trainer: Trainer, run_dir: Path, on_progress: Callable[[Progress], None] | None
    ) -> None:
        self.config, self.trainer, self.run_dir, self.on_progress = config, trainer, run_dir, on_progress
        self.outcome = Outcome()
        self.stall = self._stall_observer()
        sinks: list[Observer] = [
            JsonlObserver(run_dir / "metrics.jsonl"),
            HistogramObserver(run_dir / "histograms.jsonl"),
        ]
        self.observers: list[Observer] = [*([self.stall] if self.stall else []), *sinks]
        self.started = perf_counter()
        self.last_stall: float | None = None

    def _stall_observer(self) -> StallObserver | None:
        storage = self.config.model.storage
        if storage not in ("master", *ROUNDED) or not self.config.monitor.stall:
            return None
        monitor = self.config.monitor
        interval = monitor.stall_interval or monitor.interval
        return StallObserver(quantized_layers(self.trainer.model), storage, interval)

    def go(self) -> dict[str, Any]:
        try:
            self._first_validation()
            self._loop()
        except KeyboardInterrupt:
            self.outcome.status = "stopped"
            self._finish()
            raise
        except BaseException:
            self._close()
            raise
        return self._finish()

    def _loop(self) -> None:
        for number in range(1, self.config.train.max_steps + 1):
            if self.outcome.status != "finished":
                return
            self._one_step(number)

    def _one_step(self, number: int) -> None:
        begun = perf_counter()
        step = self.trainer.new_step(number, last=number == self.config.train.max_steps)
        loss = self.trainer.train_step(step, self.observers)
        spent = perf_counter() - begun
        if math.isfinite(loss):
            self._count(step, spent)
        else:
            self.outcome.fail("nan", f"train/loss is {loss} at step {number}", number)
        self._validate_if_due(step)
        self._write(step)

    def _count(self, step: Step, spent: float) -> None:
        outcome, tokens = self.outcome, self.trainer.tokens_per_step
        outcome.steps = step.number
        outcome.tokens += tokens
        outcome.training_seconds += spent
        step.record["time/tokens_per_s"] = tokens / spent
        limit = self.config.train.max_seconds
        if limit is not None and perf_counter() - self.started >= limit and not step.last:
            outcome.status = "stopped"

    def _first_validation(self) -> None:
        step = self.trainer.new_step(0, last=False)
        self._validate(step)
        self.outcome.first_val_loss = step.record.get("val/loss")
        self._write(step)

    def _validate_if_due(self, step: Step) -> None:
        if self.outcome.status == "failed":
            return
        if step.last or step.number % self.config.eval.interval == 0 or self.outcome.status == "stopped":
            self._validate(step)

    def _validate(self, step: Step) -> None:
        loss = self.trainer.validate()
        step.record["val/loss"] = loss
        if not math.isfinite(loss):
            self.outcome.fail("nan", f"val/loss is {loss} at step {step.number}", step.number)
            return
        step.record["val/perplexity"] = math.exp(loss) if loss < 700 else None
        step.record["val/bits_per_byte"] = self.trainer.bits_per_byte(loss)
        self.outcome.final_val_loss = loss
        self.outcome.best_val_loss = min(loss, self.outcome.best_val_loss or math.inf)

    def _write(self, step: Step) -> None:
        step.record["tokens"] = self.outcome.tokens
        step.record["time/elapsed_s"] = perf_counter() - self.started
        for observer in self.observers:
            observer.written(step)
        if self.on_progress is not None:
            self.on_progress(self._progress(step))

    def _progress(self, step: Step) -> Progress:
        record, outcome = step.record, self.outcome
        if self.stall:
            self.last_stall = record.get(self.stall.metric, self.last_stall)
        return Progress(
            step=step.number,
            max_steps=self.config.train.max_steps,
            train_loss=record.get("train/loss"),
            val_loss=outcome.final_val_loss,
            best_val_loss=outcome.best_val_loss,
            stall=self.last_stall,
            lr=record.get("lr") or 0.0,
            tokens_per_s=record.get("time/tokens_per_s") or 0.0,
            elapsed_s=perf_counter() - self.started,
        )

    def _finish(self) -> dict[str, Any]:
        self._close()
        self.outcome.seconds = perf_counter() - self.started
        write_json(self.run_dir / "weights.json", weight_histograms(self.trainer.model, self.config), None)
        summary = summarize(self.run_dir.name, self.config, self.trainer, self.outcome, self.stall)
        write_json(self.run_dir / "summary.json", summary)
        # Judged from what the folder now holds, summary included, as anyone can repeat later.
        summary["failures"] = failures_of(self.run_dir)
        write_json(self.run_dir / "summary.json", summary)
        return summary

    def _close(self) -> None:
        for observer in self.observers:
            observer.close()
