"""Alerts: thresholds, cool-downs, levels; steps that are not finite; ending a run early."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from nanogpt_bench.checkpoint import step_file, steps
from nanogpt_bench.config.schema import Config
from nanogpt_bench.config.watching import AlertsConfig
from nanogpt_bench.loop.outcome import Progress
from nanogpt_bench.loop.train import run
from nanogpt_bench.observers import Alert, AlertObserver, Step, TrendObserver
from nanogpt_bench.observers.alerts import _hash
from nanogpt_bench.system.errors import BenchError
from nanogpt_bench.training.trainer import Trainer

Tiny = Callable[..., Config]
NAN = math.nan


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


class Watch:
    """An alert observer that is fed records, at times of the test's choosing."""

    def __init__(self, folder: Path, settings: AlertsConfig, baseline: Mapping[int, float], stall: bool) -> None:
        self.now, self.alerts = 0.0, list[Alert]()
        self.trend = TrendObserver(settings, baseline)
        path = folder / "alerts.jsonl"
        self.observer = AlertObserver(
            settings, path, self.trend, stall=stall, tell=self.alerts.append, clock=lambda: self.now
        )

    def see(self, number: int, record: dict[str, float | int | None], seconds: float = 0.0) -> list[str]:
        """Feed one record and return the kinds of the alerts it raised."""
        self.now += seconds
        before = len(self.alerts)
        step = Step(number, torch.nn.Linear(1, 1), torch.optim.SGD([torch.zeros(1)]), record=record)
        self.trend.written(step)
        self.observer.written(step)
        return [alert.kind for alert in self.alerts[before:]]


@pytest.fixture
def watch(tmp_path: Path) -> Callable[..., Watch]:
    def make(baseline: Mapping[int, float] | None = None, stall: bool = True, **settings: Any) -> Watch:
        return Watch(tmp_path, AlertsConfig(**settings), baseline or {}, stall)

    return make


@pytest.mark.parametrize(
    ("kind", "metric", "limit", "where"),
    [
        ("bit_stall", "stall/update_lost/blocks.0.mlp.fc", 0.5, "blocks.0.mlp.fc"),
        ("overflow", "quant/overflow/activation/lm_head", 0.01, "activation of lm_head"),
        ("kurtosis", "quant/kurtosis/residual/blocks.0", 10.0, "residual of blocks.0"),
    ],
)
def test_the_worst_layer_is_compared_with_the_threshold(
    watch: Callable[..., Watch], kind: str, metric: str, limit: float, where: str
) -> None:
    seen = watch()
    above, total = math.nextafter(limit, 100), metric.rsplit("/", 1)[0]
    assert seen.see(1, {metric: limit, total: above}) == []
    assert seen.see(2, {metric: above, metric + "2": limit}) == [kind]
    (alert,) = seen.alerts
    assert (alert.step, alert.level, alert.value, alert.threshold) == (2, "WARN", above, limit)
    assert where in alert.message


def test_a_lost_update_that_rounding_makes_up_for_is_no_stall(watch: Callable[..., Watch]) -> None:
    assert watch(stall=False).see(1, {"stall/update_lost/lm_head": 0.99}) == []


def test_an_alert_waits_for_its_cool_down(watch: Callable[..., Watch]) -> None:
    seen = watch(cooldown_s=300.0, nan_cooldown_s=60.0, nan_patience=100)
    record: dict[str, float | int | None] = {"quant/overflow/weight/a": 0.5, "loss_is_nan": 1}
    assert seen.see(1, dict(record)) == ["loss_is_nan", "overflow"]
    assert seen.see(2, dict(record), seconds=59.0) == []
    assert seen.see(3, dict(record), seconds=2.0) == ["loss_is_nan"]
    assert seen.see(4, dict(record), seconds=238.0) == ["loss_is_nan"]
    assert seen.see(5, dict(record), seconds=2.0) == ["overflow"]
    assert seen.observer.counts == {"loss_is_nan": 3, "overflow": 2}


def test_levels_are_settings(watch: Callable[..., Watch]) -> None:
    seen = watch(levels={"overflow": "ERROR", "kurtosis": "off"})
    assert seen.see(1, {"quant/overflow/weight/a": 0.5, "quant/kurtosis/weight/a": 99.0}) == ["overflow"]
    assert seen.alerts[0].level == "ERROR"


def test_loss_and_gradient_are_told_apart_and_patience_ends_in_an_error(watch: Callable[..., Watch]) -> None:
    seen = watch(nan_patience=2)
    assert seen.see(1, {"grad_has_nan": 1, "loss_is_nan": 0, "grad/norm": NAN}) == ["grad_has_nan"]
    assert seen.see(2, {"grad_has_nan": 0, "loss_is_nan": 0}) == []
    assert seen.see(3, {"grad_has_nan": 1, "loss_is_nan": 1}) == ["loss_is_nan"]
    assert seen.see(4, {"grad_has_nan": 1, "loss_is_nan": 1}) == ["loss_is_nan"]
    assert [alert.level for alert in seen.alerts] == ["WARN", "WARN", "ERROR"]
    assert seen.alerts[-1].value == 2.0


def test_an_attention_head_that_looks_at_one_token(watch: Callable[..., Watch]) -> None:
    seen = watch(attention_entropy=0.1)
    assert seen.see(1, {"attention/entropy_min": 0.1}) == []
    assert seen.see(2, {"attention/entropy_min": 0.05}) == ["entropy_collapse"]


def test_budgets_hold_by_default_and_can_be_given_and_taken_away(watch: Callable[..., Watch]) -> None:
    assert watch().see(1, {"geometry/off_grid": 1e-9}) == ["geometry_budget"]
    assert watch(at_most={"geometry/off_grid": None}).see(1, {"geometry/off_grid": 1e-9}) == []
    seen = watch(at_most={"grad/norm": 2}, at_least={"grad/cosine": 0.9})
    assert seen.see(1, {"grad/norm": 2.0, "grad/cosine": 0.9, "geometry/off_grid": 0.0}) == []
    assert seen.see(2, {"grad/norm": 2.5, "grad/cosine": None}) == ["budget"]
    assert seen.see(3, {"grad/norm": 1.0, "grad/cosine": 0.5}, seconds=999.0) == ["budget"]
    assert "grad/cosine is 0.5, below its budget of 0.9" in seen.alerts[-1].message


def test_a_budget_of_what_is_not_recorded_is_said_at_the_end(
    watch: Callable[..., Watch], caplog: pytest.LogCaptureFixture
) -> None:
    budgets = {"grad/cosin": 0.9, "grad/cosine": 0.5, "mfu": None}
    seen = watch(at_most={"geometry/off_gird": 0, "grad/norm": 2}, at_least=budgets)
    with caplog.at_level(logging.WARNING, "nanogpt_bench"):
        seen.observer.close()
        assert not caplog.records  # a run that ended before its first record
        seen.see(1, {"grad/norm": 1.0, "geometry/off_grid": 0.0})
        seen.see(2, {"grad/cosine": None})
        seen.observer.close()
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "alerts: the run recorded no 'geometry/off_gird', which has a budget; did you mean 'geometry/off_grid'?",
        "alerts: the run recorded no 'grad/cosin', which has a budget; did you mean 'grad/cosine'?",
    ]


def test_divergence_is_measured_against_the_baseline(watch: Callable[..., Watch]) -> None:
    seen = watch(baseline=dict.fromkeys(range(1, 5), 2.0), divergence=0.1, divergence_evals=2, cooldown_s=0.0)
    losses = {1: 2.1, 2: 3.0, 3: 3.0, 4: 3.0, 5: 9.0}
    found = [seen.see(number, {"train/loss": loss, "val/loss": loss}) for number, loss in losses.items()]
    assert found == [[], [], ["early_divergence"], ["early_divergence"], []]  # the baseline ends at step 4
    assert seen.alerts[0].value == pytest.approx((2.1 * 0.95**2 + 3 * (0.95 + 1)) / (0.95**2 + 0.95 + 1) / 2 - 1)


def test_without_a_baseline_a_run_is_measured_against_its_own_best(watch: Callable[..., Watch]) -> None:
    seen = watch(divergence=0.1, divergence_evals=1)
    for number in range(1, 40):
        assert seen.see(number, {"train/loss": 2.0, "val/loss": 2.0}) == []
    assert seen.see(40, {"train/loss": 9.0}) == []  # no validation
    assert seen.see(41, {"train/loss": 9.0, "val/loss": 2.0}) == ["early_divergence"]


def test_a_loss_that_is_null_or_not_finite_does_not_enter_the_smoothed_one(watch: Callable[..., Watch]) -> None:
    seen = watch()
    record: dict[str, float | int | None] = {"train/loss": NAN}
    seen.see(1, {"train/loss": 2.0})
    seen.see(2, record)
    assert "train/loss_smoothed" not in record
    again: dict[str, float | int | None] = {"train/loss": 2.0}
    seen.see(3, again)
    assert again["train/loss_smoothed"] == pytest.approx(2.0)


class Sabotage:
    """Puts a NaN into the gradient or the loss of chosen steps, by way of the model's own parameters."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, steps: set[int], what: str) -> None:
        accumulate = Trainer._accumulate

        def count(trainer: Trainer, step: Step, observers: Any) -> float:
            self.number = step.number
            loss = accumulate(trainer, step, observers)
            if self.number in steps and what == "gradient":
                trainer.model.lm_head.weight.grad[0, 0] = NAN
            return NAN if step.number in steps and what == "loss" else loss

        self.number = 0
        monkeypatch.setattr(Trainer, "_accumulate", count)


@pytest.mark.parametrize(("what", "kind"), [("gradient", "grad_has_nan"), ("loss", "loss_is_nan")])
def test_single_steps_that_are_not_finite_are_skipped(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, kind: str
) -> None:
    Sabotage(monkeypatch, {2, 3, 5}, what)
    seen: list[Progress] = []
    summary = run(tiny(rule="fp32"), tmp_path / "r", on_progress=seen.append)
    assert (summary["status"], summary["steps"]) == ("finished", 6)
    assert math.isfinite(summary["final_val_loss"])
    assert summary["alerts"] == {kind: 1}
    (alert,) = lines(tmp_path / "r" / "alerts.jsonl")
    assert (alert["step"], alert["level"], alert["kind"], alert["value"]) == (2, "WARN", kind, None)
    assert [[a.kind for a in progress.alerts] for progress in seen] == [[], [], [kind], [], [], [], []]
    records = lines(tmp_path / "r" / "metrics.jsonl")
    assert [record[kind] for record in records[1:]] == [0, 1, 1, 0, 1, 0]
    assert summary["tokens"] == 3 * 64
    saved = load_file(step_file(tmp_path / "r" / "anomaly", 2))
    assert all(bool(tensor.isfinite().all()) for tensor in saved.values())
    assert steps(tmp_path / "r" / "anomaly") == [2]


def test_patience_ends_the_run(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Sabotage(monkeypatch, {2, 4, 5}, "gradient")
    summary = run(tiny(rule="fp32", alerts__nan_patience=2), tmp_path / "r")
    assert (summary["status"], summary["steps"], summary["final_val_loss"]) == ("failed", 3, None)
    assert summary["failure"] == {
        "kind": "nan",
        "message": "grad/norm is nan at step 5, and not finite in the 1 step before; first seen in gradient of "
        "lm_head.weight",
        "step": 4,
    }
    assert [alert["level"] for alert in lines(tmp_path / "r" / "alerts.jsonl")] == ["WARN", "ERROR"]


def test_a_run_told_not_to_stop_goes_on(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Sabotage(monkeypatch, {2, 3, 4, 5}, "gradient")
    settings = {"train__stop_on": "[]", "alerts__nan_patience": 2, "alerts__save_on_anomaly": False}
    summary = run(tiny(rule="fp32", **settings), tmp_path / "r")
    assert (summary["status"], summary["steps"]) == ("finished", 6)
    assert not (tmp_path / "r" / "anomaly").exists()


def test_a_plateau_stops_the_run(tiny: Tiny, tmp_path: Path) -> None:
    settings = {"train__stop_on": "plateau", "alerts__plateau_evals": 2, "alerts__plateau": 0.5, "eval__interval": 1}
    summary = run(tiny(**settings), tmp_path / "r")
    assert (summary["status"], summary["steps"], summary["failure"]) == ("stopped", 2, None)
    assert summary["stop"]["kind"] == "plateau"
    assert summary["final_val_loss"] == lines(tmp_path / "r" / "metrics.jsonl")[-1]["val/loss"]


def test_divergence_from_a_baseline_fails_the_run(tiny: Tiny, tmp_path: Path) -> None:
    run(tiny(rule="fp32", train__max_steps=30, optimizer__lr=0.01), tmp_path / "base")
    settings = {
        "alerts__baseline": tmp_path / "base",
        "alerts__divergence_evals": 2,
        "train__stop_on": "nan,divergence",
        "eval__interval": 5,
        "train__max_steps": 30,
    }
    summary = run(tiny(rule="fp32", optimizer__lr=3.0, **settings), tmp_path / "r")
    assert (summary["status"], summary["failure"]["kind"]) == ("failed", "divergence")
    assert summary["steps"] < 30
    assert summary["alerts"]["early_divergence"] == 1
    assert summary["final_val_loss"] is None
    good = run(tiny(rule="fp32", optimizer__lr=0.01, **settings), tmp_path / "good")
    assert (good["status"], good["alerts"]) == ("finished", {})


def test_a_baseline_that_is_none_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"alerts.baseline: .*gone' is no run folder"):
        run(tiny(alerts__baseline=tmp_path / "gone"), tmp_path / "r")
    assert not (tmp_path / "r").exists()


def test_weights_of_any_strides_have_the_hash_of_their_values() -> None:
    """A column of a matrix that was left is no run of bytes."""
    x = torch.arange(12.0).reshape(4, 3)
    hashes = []
    for values in (x[:, 0], x[:, 0].clone()):
        model = nn.Module()
        model.scale = nn.Parameter(values)
        hashes.append(_hash(model))
    assert hashes[0] == hashes[1]


def test_alerts_can_be_turned_off(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Sabotage(monkeypatch, {2}, "loss")
    summary = run(tiny(rule="fp32", alerts__enabled=False), tmp_path / "r")
    assert summary["alerts"] == {}
    assert not (tmp_path / "r" / "alerts.jsonl").exists()
