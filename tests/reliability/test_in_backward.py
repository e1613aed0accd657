"""Runs whose steps are taken in the backward pass: a gradient that is left, and steps that are not taken, are said."""

from pathlib import Path
from typing import Any

import pytest
from small_runs import words
from torch import nn

import fp8manifold as fm
from nanogpt_bench.config.settings import find_config, load_config
from nanogpt_bench.loop import train
from nanogpt_bench.loop.trainer import Trainer
from nanogpt_bench.runs.load import Alert
from nanogpt_bench.system.errors import BenchError

KIND = "fp8 stochastic"
WITHIN: dict[str, object] = {"train.step_in_backward": True, "optimizer.grad_clip": 0, "shadow.enabled": False}


def config(corpus: Path, **more: object) -> Any:
    overrides = words(KIND, corpus, {**WITHIN, **{key.replace("__", "."): value for key, value in more.items()}})[5:]
    return load_config(find_config("e4m3.yaml"), overrides)


def test_a_gradient_that_no_step_has_used_ends_the_run_with_a_line(
    small_corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fm.optim.InBackward, "_take", lambda *_: None)
    with pytest.raises(BenchError, match=r"train.step_in_backward: .* has a gradient that step_in_backward has not"):
        train.run(config(small_corpus), tmp_path / "r")


def test_a_run_that_takes_no_step_says_so_and_shows_no_movement(
    small_corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, alerts, arrived = Trainer._backward, list[Alert](), dict[int, float | None]()

    def deaf(trainer: Trainer, loss: Any, step: Any, observers: Any) -> None:
        real(trainer, loss if step.number <= 12 else loss.detach() * nn.Parameter(loss.new_ones(())), step, observers)

    def show(progress: train.Progress) -> None:
        alerts.extend(progress.alerts)
        arrived[progress.step] = progress.arrived

    monkeypatch.setattr(Trainer, "_backward", deaf)
    summary = train.run(config(small_corpus), tmp_path / "r", on_progress=show)
    assert [(alert.step, alert.kind) for alert in alerts] == [(18, "no_step"), (18, "no_change")]
    assert alerts[0].message == "the optimizer took no step from step 12 to step 18, in 6 steps"
    assert summary["alerts"] == {"no_step": 1, "no_change": 1}
    assert arrived[12] is not None
    assert arrived[16] is arrived[24] is None
