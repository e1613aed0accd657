"""Shared by tests of runs: a trainer without its loop, and what a run has recorded."""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from nanogpt_bench.config.schema import Config
from nanogpt_bench.config.settings import load_config
from nanogpt_bench.data.batches import open_corpus
from nanogpt_bench.loop.train import run
from nanogpt_bench.loop.trainer import Trainer, trainer_inputs
from nanogpt_bench.monitors import Observer, Step
from nanogpt_bench.setup.resolve import Resolved, resolve
from nanogpt_bench.system.errors import BenchError
from nanogpt_bench.system.ranks import ALONE, Ranks

#: from overrides to the configuration of a small run: the fixture `tiny`
Tiny = Callable[..., Config]


def trainer_of(config: Config, ranks: Ranks = ALONE) -> Trainer:
    config = config if isinstance(config, Resolved) else resolve(config)
    return Trainer(trainer_inputs(config, open_corpus(config), torch.device("cpu"), ranks))


def one_step(trainer: Trainer, number: int = 1, *observers: Observer) -> Step:
    """Take a step of a training and return it."""
    step = trainer.new_step(number, last=False)
    trainer.train_step(step, observers)
    return step


def train(trainer: Trainer, steps: int) -> list[float]:
    """Take the first steps of a training, without observers, and return their losses."""
    return [
        trainer.train_step(trainer.new_step(number, last=False), ())
        for number in range(1, steps + 1)
    ]


def flags(settings: Mapping[str, object]) -> list[str]:
    """Settings as words of a command line.

    Two underscores stand for a dot, and the later of two wins.
    """
    dotted = {key.replace("__", "."): value for key, value in settings.items()}
    return [f"--{key}={value}" for key, value in dotted.items()]


def recorded(run_dir: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / name).read_text(encoding="utf-8").splitlines()]


def records_of(config: Config, run_dir: Path, **options: Any) -> list[dict[str, Any]]:
    run(config, run_dir, **options)
    return recorded(run_dir)


def summary_of(run_dir: Path) -> dict[str, Any]:
    return dict(json.loads((run_dir / "summary.json").read_text()))


def resolved(words: Sequence[object] = (), **settings: object) -> Resolved:
    """The configuration of words of a command line and of settings."""
    return resolve(load_config(None, [*map(str, words), *flags(settings)]))


@contextmanager
def refusal(match: str | None = None) -> Iterator[pytest.ExceptionInfo[BenchError]]:
    """Expect a refusal, in one line that matches."""
    with pytest.raises(BenchError, match=match) as caught:
        yield caught
    assert "\n" not in str(caught.value)


def wait_until(condition: Callable[[], object], seconds: float = 240.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing happened in time"
        time.sleep(0.1)
