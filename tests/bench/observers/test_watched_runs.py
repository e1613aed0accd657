"""Whole runs under watch: nothing changes, what is turned off is gone, and the shadow agrees where it must."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bench_runs import recorded

from nanogpt_bench.config.schema import Config
from nanogpt_bench.loop.train import run
from nanogpt_bench.training.trainer import Trainer

Tiny = Callable[..., Config]
FLAGS = ("stall", "ranges", "bits", "attention", "gradients", "geometry", "resources", "trend")
OFF = {f"monitor__{flag}": False for flag in FLAGS}
ALL_FORMATS = "{'*': {weight: E4M3, activation: {format: E4M3, policy: delayed}, gradient: E5M2, rounding: split}}"
GRID_FORMATS = "{'*': {weight: E4M3, activation: {format: E4M3, rounding: stochastic}, gradient: E5M2}}"


def records_of(config: Config, folder: Path) -> list[dict[str, Any]]:
    run(config, folder)
    return recorded(folder)


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
def test_watching_everything_changes_nothing(tiny: Tiny, tmp_path: Path, settings: dict[str, Any]) -> None:
    shadow = {"shadow__enabled": True, "shadow__interval": 2}
    seen = records_of(tiny(**settings, **shadow, monitor__interval=1), tmp_path / "seen")
    unseen = records_of(tiny(**settings, **OFF, alerts__enabled=False), tmp_path / "unseen")
    keys = ("train/loss", "val/loss", "grad/norm")
    assert [[record.get(key) for key in keys] for record in seen] == [
        [record.get(key) for key in keys] for record in unseen
    ]
    assert not [key for key in unseen[-1] if key.startswith(("quant/", "bits/", "stall/", "geometry/", "attention/"))]


NAMESPACES = {
    "stall": "stall/update_lost",
    "ranges": "quant/",
    "bits": "bits/",
    "attention": "attention/",
    "gradients": "grad/l2",
    "geometry": "geometry/",
    "resources": "memory/",
    "trend": "train/loss_smoothed",
}


@pytest.mark.parametrize("flag", FLAGS)
def test_a_monitor_that_is_turned_off_leaves_the_others(tiny: Tiny, tmp_path: Path, flag: str) -> None:
    settings = {"rule": "stochastic", "model__formats": GRID_FORMATS, "train__max_steps": 2}
    last = records_of(tiny(**settings, **{f"monitor__{flag}": False}), tmp_path / "r")[-1]
    found = {name for name, prefix in NAMESPACES.items() if any(key.startswith(prefix) for key in last)}
    assert found == set(FLAGS) - {flag}


def test_every_figure_is_there_by_layer_and_over_all_layers(tiny: Tiny, tmp_path: Path) -> None:
    settings = {"rule": "residual8", "model__formats": GRID_FORMATS, "shadow__enabled": True}
    last = records_of(tiny(**settings), tmp_path / "r")[-1]
    layers = {"blocks.0.attn.qkv", "blocks.0.attn.proj", "blocks.0.mlp.fc", "blocks.0.mlp.proj", "lm_head"}
    operands = ("weight", "activation", "gradient")
    shares = ("overflow", "underflow", "subnormal", "clamped", "amax", "amax_over_std", "kurtosis", "scale", "log2_std")
    bits = ("entropy", "uniformity", "codes_used", "codes_ever_used", "binades_occupied", "top_exponent", "longest_gap")
    utilisations = ("mantissa_utilisation", "exponent_utilisation", "exponent_bit_0", "mantissa_bit_0")
    names = [f"quant/{figure}/{operand}" for figure in shares for operand in operands]
    names += [f"bits/{figure}/{operand}" for figure in (*bits, *utilisations) for operand in operands]
    stall = ("update_lost", "update_success", "update_ulps", "move_probability", "residual_saturation", "code_drift")
    names += [f"stall/{figure}" for figure in (*stall, "arrived", "zero_gradient_zone")]
    gradients = ("l2", "linf", "snr", "zero", "dead", "cosine", "quant_snr_db", "update_to_noise")
    names += [f"grad/{figure}" for figure in gradients]
    geometry = ("stiffness_mean", "off_grid", "gradient_stiffness_correlation", "path_length", "displacement")
    warps = ("metric_min_eigenvalue", "warp_spread", "warp_slope", "warp_crossings", "warp_distortion")
    names += [f"geometry/{figure}" for figure in (*geometry, *warps)]
    for name in names:
        assert last.get(name) is not None, name
        assert {key[len(name) + 1 :] for key in last if key.startswith(f"{name}/")} == layers, name
    assert last["quant/kurtosis/residual/blocks.0"] > 1
    assert {"attention/entropy", "attention/entropy_min", "grad/cosine_min", "attention/entropy/0/1"} <= set(last)
    assert last["geometry/off_grid"] == 0.0


def test_distributions_are_written_at_the_last_step(tiny: Tiny, tmp_path: Path) -> None:
    run(tiny(rule="master", model__formats=ALL_FORMATS), tmp_path / "r")
    found = recorded(tmp_path / "r", "histograms.jsonl")
    assert {histogram["step"] for histogram in found} == {6}
    kinds = {histogram["name"].rsplit("/", 1)[0] for histogram in found}
    operands = ("weight", "activation", "gradient", "weight_gradient")
    assert kinds == {
        *(f"bits/code_histogram/{operand}" for operand in operands),
        *(f"bits/gap_lengths/{operand}" for operand in operands),
        *("grad/magnitude", "grad/dead_runs", "geometry/stiffness", "stall/weight_residual"),
    }
    for histogram in found:
        places = histogram.get("values") or histogram["edges"]
        assert len(places) == len(histogram["counts"]) + ("edges" in histogram), histogram["name"]
        if not histogram["name"].startswith(("bits/gap", "bits/code_histogram/activation", "bits/code_histogram/grad")):
            layer = histogram["name"].rsplit("/", 1)[1]
            sizes = {"qkv": 768, "attn.proj": 256, "fc": 1024, "mlp.proj": 1024, "lm_head": 656}
            assert sum(histogram["counts"]) == next(n for end, n in sizes.items() if layer.endswith(end))


@pytest.mark.parametrize("settings", [{}, {"train__accumulation": 3}, {"model__dropout": 0.3}])
def test_float32_weights_have_a_shadow_that_agrees_exactly(
    tiny: Tiny, tmp_path: Path, settings: dict[str, Any]
) -> None:
    config = tiny(rule="fp32", shadow__enabled=True, shadow__interval=3, train__max_steps=4, **settings)
    records = records_of(config, tmp_path / "r")
    assert ["grad/cosine" in record for record in records] == [False, False, False, True, True]
    for record in records[3:]:
        assert record["grad/cosine"] == record["grad/cosine_min"] == 1.0
        assert record["grad/cosine/lm_head"] == 1.0
        assert record["grad/quant_snr_db/lm_head"] is None  # no noise at all
        assert record["shadow/overhead"] > 0


def test_the_shadow_holds_dequantised_weights(tiny: Tiny, tmp_path: Path) -> None:
    settings = {"rule": "master", "model__format": "E2M1", "train__precision": "float32", "shadow__enabled": True}
    settings |= {"shadow__interval": 1, "train__max_steps": 1}
    same = records_of(tiny(**settings), tmp_path / "dequantised")[-1]
    assert same["grad/cosine_min"] > 1 - 1e-6  # the straight-through gradient is that at the dequantised weights


def test_a_step_that_is_skipped_is_measured_too(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Trainer._accumulate

    def accumulate(trainer: Trainer, *arguments: Any) -> float:
        trainer.model.final_norm.weight.register_hook(lambda gradient: gradient * float("nan"))
        return original(trainer, *arguments)

    monkeypatch.setattr(Trainer, "_accumulate", accumulate)
    config = tiny(rule="stochastic", model__formats=GRID_FORMATS, monitor__interval=1)
    records = records_of(config, tmp_path / "r")
    assert [record["grad_has_nan"] for record in records[1:]] == [1, 1, 1]
    assert all("quant/overflow/activation" in record for record in records[1:])
    assert all("stall/update_lost" not in record for record in records[1:])
