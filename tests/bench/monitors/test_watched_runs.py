"""Whole runs under watch: nothing changes, and what is not watched is gone."""

import pytest
from bench_runs import records_of

from nanogpt_bench.config.metrics import WATCHED
from nanogpt_bench.loop.trainer import Trainer

ALL_FORMATS = "{'*': {weight: E4M3, activation: {format: E4M3, policy: delayed}, gradient: E5M2, rounding: split}}"
GRID_FORMATS = "{'*': {weight: E4M3, activation: {format: E4M3, rounding: stochastic}, gradient: E5M2}}"


@pytest.mark.parametrize(
    "settings",
    [
        {"rule": "bf16-mixed", "model__dropout": 0.2},
        {"rule": "master", "model__formats": ALL_FORMATS, "train__accumulation": 2},
        {"rule": "stochastic", "model__formats": GRID_FORMATS, "model__dropout": 0.2},
        {"rule": "residual8", "model__format": "E3M4", "train__precision": "float32"},
        {"rule": "stiffness-unrounded", "model__format": "E7M0"},
    ],
    ids=lambda settings: settings["rule"],
)
def test_watching_everything_changes_nothing(tiny, tmp_path, settings):
    shadow = {"shadow__enabled": True, "shadow__interval": 2}
    seen = records_of(tiny(**settings, **shadow, monitor__interval=1), tmp_path / "seen")
    unseen = records_of(tiny(**settings, monitor__watch="[]", alerts__enabled=False), tmp_path / "unseen")
    keys = ("train/loss", "val/loss", "grad/norm")
    assert [[record.get(key) for key in keys] for record in seen] == [
        [record.get(key) for key in keys] for record in unseen
    ]
    assert not [key for key in unseen[-1] if key.startswith(("quant/", "bits/", "stall/", "geometry/", "attention/"))]


NAMESPACES = {name: f"{name}/" for name in ("bits", "attention", "geometry")}
NAMESPACES |= {"stall": "stall/update_lost", "zones": "stall/zero_gradient_zone", "ranges": "quant/"}
NAMESPACES |= {"gradients": "grad/l2", "resources": "memory/", "trend": "train/loss_smoothed"}


@pytest.mark.parametrize("alone", WATCHED)
def test_a_monitor_is_watched_alone_or_left_out(tiny, tmp_path, alone):
    settings = {"rule": "stochastic", "model__formats": GRID_FORMATS, "train__max_steps": 2}
    others = set(WATCHED) - {alone}
    for watch in ({alone}, others):
        last = records_of(tiny(**settings, monitor__watch=f"[{','.join(watch)}]"), tmp_path / str(len(watch)))[-1]
        assert {name for name, prefix in NAMESPACES.items() if any(key.startswith(prefix) for key in last)} == watch


def test_a_step_that_is_skipped_is_measured_too(tiny, tmp_path, monkeypatch):
    original = Trainer._accumulate

    def accumulate(trainer, *arguments):
        trainer.model.final_norm.weight.register_hook(lambda gradient: gradient * float("nan"))
        return original(trainer, *arguments)

    monkeypatch.setattr(Trainer, "_accumulate", accumulate)
    config = tiny(rule="stochastic", model__formats=GRID_FORMATS, monitor__interval=1)
    records = records_of(config, tmp_path / "r")
    assert [record["grad_has_nan"] for record in records[1:]] == [1, 1, 1]
    assert all("quant/overflow/activation" in record for record in records[1:])
    assert all("stall/update_lost" not in record for record in records[1:])
