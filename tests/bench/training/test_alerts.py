"""Alerts that a run gives as it goes.

Steps that are not finite or not taken, weights that stand still, early ends.
"""

import math
import re
from itertools import chain, repeat
from pathlib import Path

import pytest
import torch
from bench_runs import recorded, refusal
from safetensors.torch import load_file
from torch import nn

import fp8manifold as fm
from nanogpt_bench.checkpoint import step_file, steps
from nanogpt_bench.cli import main
from nanogpt_bench.loop.observers import (
    AlertObserver,
    JsonlObserver,
    Standstill,
    TrendObserver,
    _hash_weights,
)
from nanogpt_bench.loop.train import run
from nanogpt_bench.loop.trainer import Trainer
from nanogpt_bench.monitors import Step
from nanogpt_bench.setup.resolve import resolve


def step(number, record):
    return Step(number, nn.Linear(1, 1), torch.optim.SGD([torch.zeros(1)]), record=record)


def test_a_class_of_failure_is_told_once_at_the_look_that_shows_it(tiny, tmp_path):
    alerts, messages = [], []
    config = resolve(tiny(rule="nearest", model__format="E4M3", monitor__interval=10))
    observer = AlertObserver(config, tmp_path, alerts.append)
    record = {
        "stall/update_lost": 0.75,
        "stall/update_lost/lm_head": 0.875,
        "quant/kurtosis/activation": 99.0,
    }
    for number in (10, 20, 25, 30, 40, 50):
        observer.take_record(step(number, dict(record)))
        messages.append(len(alerts))
    assert messages == [0, 0, 0, 1, 1, 1]
    (alert,) = alerts
    assert (alert.step, alert.kind, alert.level, alert.value, alert.threshold) == (
        30,
        "stall",
        "WARN",
        0.75,
        0.5,
    )
    assert (
        alert.message
        == "75.0% of the weights lost a requested update, most of all in lm_head; from step 10 on"
    )


def test_the_trend_is_measured_against_a_baseline_or_the_runs_own_best():
    def ends(trend, losses):
        outcomes = []
        for number, loss in enumerate(losses, start=1):
            trend.complete_record(step(number, {"train/loss": loss, "val/loss": 2.0}))
            outcomes.append(trend.diverging)
        return outcomes

    baseline = TrendObserver(dict.fromkeys(range(1, 6), 2.0))
    assert (
        ends(baseline, [2.1, 3.0, 3.0, 3.0, 9.0, 0.0]) == [False] * 3 + [True] * 3
    )  # it ends at step 5
    assert baseline.excess[1] == pytest.approx((2.1 * 0.95 + 3) / (0.95 + 1) / 2 - 1)
    observer = TrendObserver({})
    assert ends(observer, [2.0] * 30 + [9.0] * 3) == [False] * 32 + [True]
    assert (observer.flat, observer.flatness[-1]) == (True, 0.0)


def test_a_loss_that_is_not_finite_does_not_enter_the_smoothed_one():
    trend, records = TrendObserver({}), [{"train/loss": loss} for loss in (2.0, math.nan, 2.0)]
    for number, record in enumerate(records, start=1):
        trend.complete_record(step(number, record))
    assert [record.get("train/loss_smoothed") for record in records] == [
        2.0,
        None,
        pytest.approx(2.0),
    ]


@pytest.mark.parametrize(
    "baseline", [{}, dict.fromkeys(range(1, 5), 0.0)], ids=["no baseline", "a baseline of 0"]
)
def test_a_loss_above_0_is_too_high(baseline):
    trend = TrendObserver(baseline)
    for number, loss, excess in (
        (1, 0.0, 0.0),
        *((number, 0.25, math.inf) for number in (2, 3, 4)),
    ):
        validation = step(number, {"train/loss": loss, "val/loss": loss})
        trend.complete_record(validation)
        assert validation.record["train/excess"] == excess, number
    assert trend.diverging


def sabotage(monkeypatch, steps, quantity):
    """Put a NaN into the gradient or the loss of chosen steps.

    It comes by way of the model's own parameters.
    """
    accumulate = Trainer._accumulate

    def spoiled(trainer, step, observers):
        loss = accumulate(trainer, step, observers)
        if step.number in steps and quantity == "gradient":
            trainer.model.lm_head.weight.grad[0, 0] = math.nan
        return math.nan if step.number in steps and quantity == "loss" else loss

    monkeypatch.setattr(Trainer, "_accumulate", spoiled)


@pytest.mark.parametrize(
    ("quantity", "kind"), [("gradient", "grad_has_nan"), ("loss", "loss_is_nan")]
)
def test_single_steps_that_are_not_finite_are_skipped(tiny, tmp_path, monkeypatch, quantity, kind):
    sabotage(monkeypatch, {2, 3, 5}, quantity)
    messages = []
    summary = run(tiny(rule="fp32"), tmp_path / "r", on_progress=messages.append)
    assert (summary["status"], summary["steps"]) == ("finished", 6)
    assert math.isfinite(summary["final_val_loss"])
    assert (summary["alerts"], summary["tokens"]) == ({"nan": 1}, 3 * 64)
    (alert,) = recorded(tmp_path / "r", "alerts.jsonl")
    assert (alert["step"], alert["level"], alert["kind"], alert["value"]) == (2, "WARN", "nan", 1.0)
    assert re.fullmatch(
        f"the {quantity} was not finite; from step 2 on; first seen in {quantity}.*",
        alert["message"],
    )
    assert [[a.kind for a in progress.alerts] for progress in messages] == [
        [],
        [],
        ["nan"],
        [],
        [],
        [],
        [],
    ]
    records = recorded(tmp_path / "r")
    assert [record[kind] for record in records[1:]] == [0, 1, 1, 0, 1, 0]
    saved = load_file(step_file(tmp_path / "r" / "anomaly", 2))
    assert all(bool(tensor.isfinite().all()) for tensor in saved.values())
    assert steps(tmp_path / "r" / "anomaly") == [2]


def test_patience_ends_the_run(tiny, tmp_path, monkeypatch):
    sabotage(monkeypatch, {1, 2, 4, 5, 6}, "gradient")
    summary = run(tiny(rule="fp32"), tmp_path / "r")
    assert (summary["status"], summary["steps"], summary["final_val_loss"]) == ("failed", 3, None)
    message = "grad/norm is nan at step 6, and was not finite in the 2 steps before; "
    message += "first seen in gradient of lm_head.weight"
    assert summary["failure"] == {"kind": "nan", "message": message, "step": 4}


def test_alerts_stops_and_saved_states_can_be_turned_off(tiny, tmp_path, monkeypatch):
    sabotage(monkeypatch, {2, 3, 4, 5}, "gradient")
    settings = {"train__stop_on": "[]", "alerts__save_on_anomaly": False, "alerts__enabled": False}
    summary = run(tiny(rule="fp32", **settings), tmp_path / "r")
    assert (summary["status"], summary["steps"], summary["alerts"]) == ("finished", 6, {})
    assert not {"anomaly", "alerts.jsonl"} & {path.name for path in (tmp_path / "r").iterdir()}


def test_a_plateau_stops_the_run(tiny, tmp_path):
    settings = {
        "train__stop_on": "plateau",
        "train__max_steps": 12,
        "optimizer__lr": 1e-7,
        "eval__interval": 1,
    }
    summary = run(tiny(**settings), tmp_path / "r")
    assert (summary["status"], summary["steps"], summary["failure"]) == ("stopped", 5, None)
    assert summary["stop"]["kind"] == "plateau"
    assert summary["final_val_loss"] == recorded(tmp_path / "r")[-1]["val/loss"]
    config = tiny(**settings | {"train__stop_on": "[]"})
    assert run(config, tmp_path / "r", resume=True, allow_config_change=True)["steps"] == 12


def test_divergence_from_a_baseline_fails_the_run_and_one_that_is_none_is_refused(tiny, tmp_path):
    with refusal(r"alerts.baseline: .*gone' is not a run folder"):
        run(tiny(alerts__baseline=tmp_path / "gone"), tmp_path / "r")
    assert not (tmp_path / "r").exists()
    run(tiny(rule="fp32", train__max_steps=30, optimizer__lr=0.01), tmp_path / "base")
    settings = {
        "rule": "fp32",
        "alerts__baseline": tmp_path / "base",
        "train__stop_on": "nan,divergence",
    }
    settings |= {"eval__interval": 5, "train__max_steps": 30}
    summary = run(tiny(optimizer__lr=3.0, **settings), tmp_path / "r")
    assert (summary["status"], summary["failure"]["kind"]) == ("failed", "divergence")
    assert summary["steps"] < 30
    assert summary["alerts"]["divergence"] == 1
    assert summary["final_val_loss"] is None
    good = run(tiny(optimizer__lr=0.01, **settings), tmp_path / "good")
    assert (good["status"], good["alerts"]) == ("finished", {})


def test_weights_of_any_strides_have_the_hash_of_their_values():
    """A column of a matrix that was left is no run of bytes."""
    column = torch.arange(12.0).reshape(4, 3)[:, 0]
    strided, copied = (nn.ParameterList([values]) for values in (column, column.clone()))
    assert _hash_weights(strided) == _hash_weights(copied)


class Run:
    """A layer and an optimizer.

    `go` takes steps, or only counts them, and validates at the last.
    """

    def __init__(
        self, make=lambda parameters: fm.optim.StiffnessAdamW(parameters, 0.1), fmt="E4M3"
    ):
        self.layer = fm.quantize_model(nn.Linear(8, 8), fmt, storage="codes")
        self.optimizer, self.seen, self.number = make(self.layer.parameters()), Standstill(), 0
        self.look(0)

    def look(self, number, **flags):
        record = {**flags, "val/loss": 1.0}
        return [
            kind
            for kind, _ in self.seen.see(Step(number, self.layer, self.optimizer, record=record))
        ]

    def go(self, steps=2, **flags):
        for _ in range(steps):
            self.number += 1
            self.layer(torch.ones(1, 8)).square().sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self.look(self.number, **flags)


def test_steps_that_are_not_taken_and_weights_that_stay():
    deaf, still, gone_on = runs = [Run() for _ in range(3)]
    assert [run.go() for run in runs] == [[]] * 3
    state, gone_on.seen = gone_on.seen.state(), Standstill()  # it compares with the look before
    gone_on.seen.load_state(state)
    deaf.optimizer.step = gone_on.optimizer.step = lambda: None
    still.optimizer.param_groups[0].update(lr=0.0, weight_decay=0.0)
    assert [run.go() for run in runs] == [
        ["no_step", "no_change"],
        ["no_change"],
        ["no_step", "no_change"],
    ]


@pytest.mark.parametrize("flag", ["loss_is_nan", "grad_has_nan"])
def test_steps_that_are_left_out_have_alerts_of_their_own(flag):
    run = Run()
    run.optimizer.step = lambda: None
    assert run.go(1, **{flag: 1}) == []
    assert run.go(1) == ["no_change"]


def test_a_standstill_under_an_optimizer_that_counts_no_steps_is_seen_by_the_weights():
    uncounted = Run(lambda parameters: torch.optim.SGD(parameters, 0.0), "none")
    assert uncounted.go() == ["no_change"]


SMALL = [
    "--model.n_layer",
    "1",
    "--model.n_head",
    "1",
    "--model.n_embd",
    "32",
    "--model.block_size",
    "16",
]
SMALL += [
    "--train.batch_size",
    "2",
    "--eval.batches",
    "2",
    "--eval.interval",
    "2",
    "--optimizer.warmup_steps",
    "1",
]
LOOKED_AT = ["--shadow.enabled", "true", "--shadow.interval", "2", "--monitor.interval", "2"]


@pytest.mark.usefixtures("_no_figures")
def test_a_text_of_one_character_is_trained_on_and_measured(working_folder):
    Path("a.txt").write_text("a" * 3000)
    assert main(["prepare", "text", "--input", "a.txt", "--tokenizer", "char", "--out", "a"]) == 0
    common = ["--data.dir", "a", "--train.max_steps", "20", *SMALL]
    assert main(["run", "fp32.yaml", "--name", "fp32", *common]) == 0
    against = ["--alerts.baseline", "runs/fp32", "--train.stop_on", "divergence"]
    assert main(["run", "e4m3.yaml", "--name", "e4m3", *LOOKED_AT, *against, *common]) == 0
    records = recorded(working_folder / "runs" / "e4m3")
    assert {record["train/excess"] for record in records if "train/excess" in record} == {0.0}
    assert records[-1]["val/loss"] == 0.0
    assert main(["evaluate", "runs/fp32", "--formats", "E4M3"]) == 0
    assert main(["report", "runs", "--out", "page", "--baseline", "fp32"]) == 0


def test_the_lowest_loss_stays_0(tiny, tmp_path, monkeypatch):
    losses = chain([1.0, 0.0], repeat(0.5))
    monkeypatch.setattr(Trainer, "validation_losses", lambda _: [next(losses)])
    summary = run(tiny(train__max_steps=4, eval__interval=1), tmp_path / "run")
    assert (summary["best_val_loss"], summary["final_val_loss"]) == (0.0, 0.5)


def test_a_resumed_run_is_judged_at_the_steps_of_an_uninterrupted_one(tiny, tmp_path):
    config = resolve(tiny(monitor__interval=1))

    def raised(cuts):
        folder = tmp_path / str(cuts)
        folder.mkdir()
        alerts, states = [], []
        for first, end in zip((0, *cuts), (*cuts, 61), strict=True):
            observers = (
                JsonlObserver(folder / "metrics.jsonl"),
                AlertObserver(config, folder, alerts.append),
            )
            for observer, state in zip(observers, states, strict=False):
                observer.load_state(state)
            for number in range(first, end):
                new_step = step(
                    number, {"train/loss": 3.0 if number < 30 else 9.0, "grad/norm": 1.0}
                )
                for observer in observers:
                    observer.take_record(new_step)
            states = [observer.state() for observer in observers]
            observers[0].close()
        return [(alert.step, alert.kind) for alert in alerts]

    assert raised(()) == raised((31,)) != []
