"""Every class of failure provoked in a real short run, and none in healthy ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nanogpt_bench.config.schema import Config
from nanogpt_bench.failures import Finding, classify, diagnose
from nanogpt_bench.loop.train import run

Tiny = Callable[..., Config]
Runs = Callable[[str], Path]
#: a learning rate that suits the tiny model under AdamW
GOOD_LR = 0.02
#: wide enough for one feature to stand far above the others
UNCLIPPED_SGD: dict[str, Any] = {
    "rule": "sgd",
    "model__n_embd": 64,
    "optimizer__lr": 3.0,
    "optimizer__grad_clip": 0,
    "optimizer__schedule": "constant",
    "train__max_steps": 30,
    "monitor__interval": 1,
}
ACTIVATION_SCALE = 0.01  # about what the amax of the tiny model's activations asks for


def with_activations(scale: float) -> str:
    """E4M3 weights and activations, the latter at a fixed scale."""
    return f"{{'*': {{weight: E4M3, activation: {{format: E4M3, scale: {scale}}}}}}}"


#: name -> settings of a run
SETTINGS: dict[str, dict[str, Any]] = {
    "float": {"rule": "fp32", "optimizer__lr": GOOD_LR, "train__max_steps": 40},
    "one byte": {"rule": "stochastic", "model__format": "E4M3", "optimizer__lr": GOOD_LR, "train__max_steps": 40},
    "frozen": {"rule": "nearest", "model__format": "E7M0", "optimizer__lr": 0.002, "train__max_steps": 30},
    "lr x 100": {"rule": "fp32", "optimizer__lr": 100 * GOOD_LR, "train__max_steps": 30},
    "unclipped sgd": UNCLIPPED_SGD,
    "lr of nothing": {"rule": "fp32", "optimizer__lr": 1e-7, "train__max_steps": 30},
    "no straight-through": {
        "rule": "master",
        "model__formats": "{'*': {weight: E4M3, activation: E4M3, ste: none}}",
        "train__max_steps": 20,
    },
    "scale 2^20 too small": {
        "rule": "master",
        "model__formats": with_activations(ACTIVATION_SCALE * 2**-20),
        "train__max_steps": 20,
    },
    "scale as it should be": {
        "rule": "master",
        "model__formats": with_activations(ACTIVATION_SCALE),
        "optimizer__lr": GOOD_LR,
        "train__max_steps": 20,
    },
}


@pytest.fixture(scope="module")
def runs(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Return a function from a name to the folder of its run, done once."""
    folder = tmp_path_factory.mktemp("provoked")

    def of(name: str) -> Path:
        path = folder / name
        if not path.exists():
            run(tiny(**SETTINGS[name]), path)
        return path

    return of


def kinds(path: Path) -> list[str]:
    return [finding.kind for finding in diagnose(path).found]


def the(kind: str, path: Path, **others: Any) -> Finding:
    return next(finding for finding in classify(path, **others) if finding.kind == kind)


@pytest.mark.parametrize("name", ["float", "one byte", "scale as it should be"])
def test_a_healthy_run_shows_none(runs: Runs, name: str) -> None:
    assert kinds(runs(name)) == []
    states = {finding.kind: finding.state for finding in classify(runs(name))}
    assert {state for kind, state in states.items() if kind != "off_manifold"} == {"clear"}
    assert states["off_manifold"] == ("clear" if name == "one byte" else "not judged")


def test_e7m0_with_nearest_rounding_stalls_from_the_first_look(runs: Runs) -> None:
    assert kinds(runs("frozen")) == ["stall"]
    finding = the("stall", runs("frozen"))
    assert finding.step == 2
    assert 0.9 < float(finding.evidence["mean"] or 0) <= 1.0
    assert str(finding.evidence["worst_layer"]).startswith("blocks.0.")


def test_a_hundred_times_the_learning_rate_diverges_and_attention_collapses(runs: Runs) -> None:
    assert {"divergence", "attention_collapse"} <= set(kinds(runs("lr x 100")))
    assert float(the("divergence", runs("lr x 100")).evidence["extreme"] or 0) > 5
    collapse = the("attention_collapse", runs("lr x 100"))
    assert float(collapse.evidence["extreme"] or 0) < 0.1


def test_without_clipping_gradients_explode_until_the_loss_is_not_finite(runs: Runs) -> None:
    found = {finding.kind: finding.step or 0 for finding in diagnose(runs("unclipped sgd")).found}
    assert {"divergence", "exploding_gradients", "nan"} <= set(found)
    assert found["exploding_gradients"] < found["nan"]


def test_a_learning_rate_of_nothing_is_a_plateau_from_the_start(runs: Runs) -> None:
    assert kinds(runs("lr of nothing")) == ["plateau"]
    assert the("plateau", runs("lr of nothing")).step == 1


def test_rounding_without_a_straight_through_estimator_leaves_no_gradient(runs: Runs) -> None:
    assert "zero_gradients" in kinds(runs("no straight-through"))
    finding = the("zero_gradients", runs("no straight-through"))
    assert (finding.step, finding.evidence["metric"], finding.evidence["extreme"]) == (1, "grad/norm", 0.0)


def test_a_scale_a_million_times_too_small_overflows(runs: Runs) -> None:
    assert "overflow" in kinds(runs("scale 2^20 too small"))
    finding = the("overflow", runs("scale 2^20 too small"))
    assert str(finding.evidence["metric"]).endswith("/activation")
    assert float(finding.evidence["extreme"] or 0) > 0.9
