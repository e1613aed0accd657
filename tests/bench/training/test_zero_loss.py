"""A loss of exactly 0, as of a text of one character: nothing is divided by it, and none is lower."""

import math
from collections.abc import Callable, Iterator
from itertools import chain, repeat
from pathlib import Path

import pytest
import torch
from bench_runs import recorded

from nanogpt_bench.cli import main
from nanogpt_bench.config.schema import Config
from nanogpt_bench.loop.observers import TrendObserver
from nanogpt_bench.loop.train import run
from nanogpt_bench.loop.trainer import Trainer
from nanogpt_bench.monitors import Step

SMALL = ["--model.n_layer", "1", "--model.n_head", "1", "--model.n_embd", "32", "--model.block_size", "16"]
SMALL += ["--train.batch_size", "2", "--eval.batches", "2", "--eval.interval", "2", "--optimizer.warmup_steps", "1"]
LOOKED_AT = ["--shadow.enabled", "true", "--shadow.interval", "2", "--monitor.interval", "2"]


def test_a_text_of_one_character_is_trained_on_and_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("a" * 3000)
    assert main(["prepare", "text", "--input", "a.txt", "--tokenizer", "char", "--out", "a"]) == 0
    common = ["--data.dir", "a", "--train.max_steps", "20", *SMALL]
    assert main(["run", "fp32.yaml", "--name", "fp32", *common]) == 0
    against = ["--alerts.baseline", "runs/fp32", "--train.stop_on", "divergence"]
    assert main(["run", "e4m3.yaml", "--name", "e4m3", *LOOKED_AT, *against, *common]) == 0
    records = recorded(tmp_path / "runs" / "e4m3")
    assert {record["train/excess"] for record in records if "train/excess" in record} == {0.0}
    assert records[-1]["val/loss"] == 0.0
    assert main(["evaluate", "runs/fp32", "--formats", "E4M3"]) == 0
    monkeypatch.setattr("nanogpt_bench.report.build.write_figures", lambda *_: None)
    assert main(["report", "runs", "--out", "page", "--baseline", "fp32"]) == 0


@pytest.mark.parametrize("baseline", [{}, dict.fromkeys(range(1, 5), 0.0)])
def test_a_loss_above_one_of_0_is_too_high(baseline: dict[int, float]) -> None:
    trend = TrendObserver(baseline)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    for number, loss, excess in ((1, 0.0, 0.0), (2, 0.25, math.inf), (3, 0.25, math.inf), (4, 0.25, math.inf)):
        step = Step(number, model, optimizer, record={"train/loss": loss, "val/loss": loss})
        trend.written(step)
        assert step.record["train/excess"] == excess
    assert trend.diverging


def test_the_lowest_loss_stays_0(tiny: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: Iterator[float] = chain([1.0, 0.0], repeat(0.5))
    monkeypatch.setattr(Trainer, "validation_losses", lambda _: [next(told)])
    summary = run(tiny(train__max_steps=4, eval__interval=1), tmp_path / "run")
    assert (summary["best_val_loss"], summary["final_val_loss"]) == (0.0, 0.5)
