"""Every class of failure provoked in a real short run, and none in healthy ones."""

from pathlib import Path

import pytest

from nanogpt_bench.failures import classify, diagnose
from nanogpt_bench.failures.table import OVER_FIRST, OVER_MEDIAN, REST
from nanogpt_bench.loop.train import run

#: a learning rate that suits the tiny model under AdamW
GOOD_LR = 0.02
ACTIVATION_SCALE = 0.01  # about what the amax of the tiny model's activations asks for


def with_activations(scale: float) -> str:
    """E4M3 weights and activations, the latter at a fixed scale."""
    return f"{{'*': {{weight: E4M3, activation: {{format: E4M3, scale: {scale}}}}}}}"


#: name -> settings of a run
SETTINGS = {
    "float": {"rule": "fp32", "optimizer__lr": GOOD_LR, "train__max_steps": 40},
    "one byte": {"rule": "stochastic", "model__format": "E4M3", "optimizer__lr": GOOD_LR, "train__max_steps": 40},
    "frozen": {"rule": "nearest", "model__format": "E7M0", "optimizer__lr": 0.002, "train__max_steps": 30},
    "lr x 100": {"rule": "fp32", "optimizer__lr": 100 * GOOD_LR, "train__max_steps": 30},
    "unclipped sgd": {  # wide enough for one feature to stand far above the others
        "rule": "sgd",
        "model__n_embd": 64,
        "optimizer__lr": 3.0,
        "optimizer__grad_clip": 0,
        "optimizer__schedule": "constant",
        "train__max_steps": 30,
        "monitor__interval": 1,
    },
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
def runs(tiny, tmp_path_factory):
    """Return a function from a name to the folder of its run, done once."""
    folder = tmp_path_factory.mktemp("provoked")

    def of(name):
        path = folder / name
        if not path.exists():
            run(tiny(**SETTINGS[name]), path)
        return path

    return of


def kinds(path: Path) -> list[str]:
    return [finding.kind for finding in diagnose(path).found]


@pytest.mark.parametrize("name", ["float", "one byte", "scale as it should be"])
def test_a_healthy_run_shows_none(runs, name):
    assert kinds(runs(name)) == []
    states = {finding.kind: finding.state for finding in classify(runs(name))}
    assert {state for kind, state in states.items() if kind != "off_manifold"} == {"clear"}
    assert states["off_manifold"] == ("clear" if name == "one byte" else "not judged")


#: by run: classes found, and of the last of them its step, metric, and the ends of a figure of its evidence
PROVOKED = {
    "frozen": (["stall"], 2, "stall/update_lost", "mean", 0.9, 1.0),
    "lr x 100": (["attention_collapse", "divergence"], None, OVER_FIRST, "extreme", 5, 1e9),
    "unclipped sgd": (["divergence", "nan", "exploding_gradients"], None, OVER_MEDIAN, "extreme", 100, 1e99),
    "lr of nothing": (["plateau"], 1, REST, "extreme", 0, 0.5),
    "no straight-through": (["zero_gradients"], 1, "grad/norm", "extreme", 0, 0),
    "scale 2^20 too small": (["overflow"], None, "quant/overflow/activation", "extreme", 0.9, 1.0),
}


@pytest.mark.parametrize("name", PROVOKED)
def test_a_class_is_found_in_the_run_that_provokes_it(runs, name):
    expected, step, metric, figure, low, high = PROVOKED[name]
    found = {finding.kind: finding for finding in diagnose(runs(name)).found}
    assert found.keys() >= set(expected)
    if name in ("frozen", "lr of nothing"):
        assert list(found) == expected
    last = found[expected[-1]]
    assert step in (None, last.step)
    assert last.evidence["metric"] == metric
    assert low <= float(last.evidence[figure] or 0) <= high
    if name == "frozen":
        assert str(last.evidence["worst_layer"]).startswith("blocks.0.")
    if name == "unclipped sgd":
        assert (last.step or 0) < (found["nan"].step or 0)
