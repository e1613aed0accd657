"""Whole runs under watch, of all layers or in turns.

What they write is registered, and nothing else changes.
"""

import re

import pytest
import torch
from bench_runs import recorded, records_of, resolved
from torch import nn

from nanogpt_bench.config.metrics import WATCHED
from nanogpt_bench.loop.train import run
from nanogpt_bench.loop.trainer import Trainer
from nanogpt_bench.model.gpt import GPT, GPTShape
from nanogpt_bench.monitors import METRICS, Step
from nanogpt_bench.monitors.capture import Watched
from nanogpt_bench.monitors.points import Anomaly, Turns
from nanogpt_bench.monitors.resources import Resources, flops_per_token

ALL_FORMATS = "{'*': {weight: E4M3, activation: {format: E4M3, policy: delayed}, gradient: E5M2, rounding: split}}"
GRID_FORMATS = (
    "{'*': {weight: E4M3, activation: {format: E4M3, rounding: stochastic}, gradient: E5M2}}"
)


@pytest.mark.parametrize(
    "settings",
    [
        {"rule": "bf16-mixed", "model__dropout": 0.2},
        {"rule": "master", "model__formats": ALL_FORMATS, "train__accumulation": 2},
        {"rule": "stochastic", "model__formats": GRID_FORMATS, "model__dropout": 0.2},
        {"rule": "residual8", "model__format": "E3M4", "train__precision": "float32"},
    ],
    ids=lambda settings: settings["rule"],
)
def test_watching_everything_changes_nothing(tiny, tmp_path, settings):
    shadow = {"shadow__enabled": True, "shadow__interval": 2}
    watched_records = records_of(tiny(**settings, **shadow, monitor__interval=1), tmp_path / "seen")
    unseen = records_of(
        tiny(**settings, monitor__watch="[]", alerts__enabled=False), tmp_path / "unseen"
    )
    keys = ("train/loss", "val/loss", "grad/norm")
    assert [[record.get(key) for key in keys] for record in watched_records] == [
        [record.get(key) for key in keys] for record in unseen
    ]
    assert not [
        key
        for key in unseen[-1]
        if key.startswith(("quant/", "bits/", "stall/", "geometry/", "attention/"))
    ]


NAMESPACES = {name: f"{name}/" for name in ("bits", "attention", "geometry")}
NAMESPACES |= {
    "stall": "stall/update_lost",
    "zones": "stall/zero_gradient_zone",
    "ranges": "quant/",
}
NAMESPACES |= {"gradients": "grad/l2", "resources": "memory/", "trend": "train/loss_smoothed"}


@pytest.mark.parametrize("monitor", WATCHED)
@pytest.mark.parametrize("alone", [True, False], ids=["alone", "left out"])
def test_a_monitor_is_watched_alone_or_left_out(tiny, tmp_path, monitor, alone):
    settings = {"rule": "stochastic", "model__formats": GRID_FORMATS, "train__max_steps": 2}
    watch = {monitor} if alone else set(WATCHED) - {monitor}
    last = records_of(tiny(**settings, monitor__watch=f"[{','.join(watch)}]"), tmp_path / "run")[-1]
    assert {
        name for name, prefix in NAMESPACES.items() if any(key.startswith(prefix) for key in last)
    } == watch


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


def registered(key):
    """The metric that a key on disk belongs to."""
    for metric in METRICS:
        layer = "(/.+)?" if metric.over else ""
        operand = f"/({'|'.join(metric.operands)})" if metric.operands else ""
        if re.fullmatch(re.escape(metric.name) + operand + layer, key):
            return metric
    return None


def test_all_that_a_watched_run_writes_is_registered(
    tiny, corpus_dir, labelled_dir, tmp_path, monkeypatch
):
    shadow = {"shadow__enabled": True, "shadow__interval": 2}
    monkeypatch.setattr("nanogpt_bench.monitors.resources._peak_flops", lambda device: 1e12)
    speed = {"eval__also": str(corpus_dir)}
    formats = "{'*': {weight: E4M3, activation: E4M3, gradient: E5M2}}"
    names, residual = set(), "{'*': {weight: E4M3, gradient: E5M2}}"
    for name, settings in {
        "residual": {"rule": "muon-residual8", "model__formats": residual, **shadow, **speed},
        "master": {"rule": "master", "model__formats": formats, **shadow, **speed},
        "stiefel": {"model__constraint": "stiefel", "model__format": "E4M3", **speed},
        "sphere": {"model__constraint": "sphere", **speed},
        "labels": {
            "rule": "fp32",
            "task": "classify",
            "data__dir": str(labelled_dir),
            "monitor__floor_formats": "[E4M3]",
        },
    }.items():
        first, *later = records_of(tiny(**settings), tmp_path / name)
        names |= set(first).union(*later) - {"step"}
        assert first["memory/peak_bytes"] > 1e7, name
    metrics = {key: registered(key) for key in names}
    assert [key for key, metric in metrics.items() if metric is None] == []
    assert [metric.name for metric in METRICS if metric not in metrics.values()] == []


def test_model_flops_utilisation_is_known_where_the_machine_is(monkeypatch):
    config = resolved()
    model = GPT(GPTShape(4, 4, 128, 64))
    flops = flops_per_token(model, config)
    assert flops == 6 * (4 * 12 * 128 * 128 + 257 * 128) + 12 * 4 * 128 * 64
    step = Step(
        3,
        model,
        torch.optim.SGD(model.parameters()),
        record={"val/loss": 1.0, "time/tokens_per_s": 1e5},
    )
    with monkeypatch.context() as patched:
        patched.setattr("nanogpt_bench.monitors.resources._peak_flops", lambda device: 2e12)
        Resources(Watched.from_model(config, model, torch.device("cpu"))).complete_record(step)
    assert step.record["mfu"] == pytest.approx(1e5 * flops / 2e12)
    assert (step.record["memory/peak_bytes"] or 0) > 1e7
    step.record.pop("mfu")
    Resources(Watched.from_model(config, model, torch.device("cpu"))).complete_record(step)
    assert "mfu" not in step.record


STEPS = 9
#: figures of a layer that describe one step alone, nothing before it; where there
#: are several operands, the name ends with one
OF_THE_STEP = (
    *(
        "quant/kurtosis/weight",
        "quant/overflow/activation",
        "quant/amax/gradient",
        "bits/uniformity/weight",
    ),
    *("stall/update_lost", "stall/update_ulps", "stall/arrived", "stall/zero_gradient_zone"),
    *("grad/l2", "grad/update_to_noise", "geometry/stiffness_mean"),
)
#: metrics whose value over all layers is the largest layer's; all others are means
WORST = ("quant/kurtosis", "quant/amax/")


def step_number(number, *, last=False):
    return Step(number, nn.Linear(1, 1), torch.optim.SGD([nn.Parameter(torch.ones(1))]), last)


def taken_layers(turns, names, number, *, last=False):
    step = step_number(number, last=last)
    names_at_step = "".join(name for name in names if turns.takes(step, name))
    turns.complete_record(step)
    return names_at_step


def test_the_first_look_takes_all_layers_and_every_turn_each_layer_once_none_of_them_empty():
    turns = Turns(3, ["abcdefg", "xy"], 10)
    looks = [taken_layers(turns, "abcdefg", number) for number in range(10, 90, 10)]
    assert looks[0] == "abcdefg"
    assert sorted("".join(looks[1:4])) == sorted("".join(looks[4:7])) == list("abcdefg")
    assert all(2 <= len(look) <= 3 for look in looks[1:])
    assert taken_layers(turns, "abcdefg", 95) == ""
    assert taken_layers(turns, "abcdefg", 97, last=True) == taken_layers(turns, "abcdefg", 90)
    turns = Turns(5, ["ab"])
    assert [taken_layers(turns, "ab", number) for number in range(1, 6)] == [
        "ab",
        "a",
        "b",
        "a",
        "b",
    ]
    turns, step = Turns(2, ["ab"]), step_number(1)
    step.anomaly = Anomaly(1, ("loss",), "loss")
    turns.complete_record(step)
    assert [taken_layers(turns, "ab", number) for number in (2, 3)] == ["ab", "b"]


@pytest.mark.parametrize(("count", "first"), [(2, "ab"), (3, "abc"), (1, "abc")])
def test_a_run_that_goes_on_with_other_turns_begins_with_all_layers(count, first):
    earlier = Turns(2, ["abc"])
    taken_layers(earlier, "abc", 1)
    later = Turns(count, ["abc"])
    later.load_state(earlier.state())
    assert taken_layers(later, "abc", 2) == first


def watched(tiny, turns, **overrides):
    overrides = {
        "rule": "stochastic",
        "model__formats": GRID_FORMATS,
        "train__max_steps": STEPS,
        **overrides,
    }
    return tiny(monitor__interval=1, monitor__turns=turns, eval__interval=STEPS, **overrides)


@pytest.fixture(scope="module")
def in_turn(tiny, tmp_path_factory):
    """A run that looks at one in three layers in every step, with a checkpoint of each."""
    folder = tmp_path_factory.mktemp("runs") / "r"
    run(watched(tiny, 3, checkpoint__every=1, checkpoint__keep=STEPS), folder)
    return folder


@pytest.mark.parametrize("rule", ["stochastic", "master"])
def test_figures_are_those_of_the_step_and_over_all_layers_of_the_latest(
    tiny, tmp_path, rule, in_turn
):
    whole = records_of(watched(tiny, 1, rule=rule), tmp_path / "whole")[1:]
    folder = in_turn if rule == "stochastic" else tmp_path / "turns"
    if rule == "master":
        run(watched(tiny, 3, rule=rule), folder)
    some_records = recorded(folder)[1:]
    assert [record["train/loss"] for record in some_records] == [
        record["train/loss"] for record in whole
    ]
    metrics = [metric for metric in OF_THE_STEP if metric in whole[0]]
    assert len(metrics) == len(OF_THE_STEP) - (2 if rule == "master" else 0)
    for metric in metrics:
        check_turns(metric, some_records, whole)


def check_turns(metric, some_records, whole):
    """Compare every figure with that of the run that always looks at all layers."""
    latest = {}
    sizes = {"qkv": 768, "attn.proj": 256, "fc": 1024, "mlp.proj": 1024, "lm_head": 656}
    for index, (part, full) in enumerate(zip(some_records, whole, strict=True)):
        figures = {key: value for key, value in part.items() if key.startswith(f"{metric}/")}
        assert figures == {key: full[key] for key in figures}, metric
        latest |= figures
        layers = {key for key in full if key.startswith(f"{metric}/")}
        assert set(latest) == layers, (index, part)
        assert (len(figures) == len(layers)) == (index == 0), metric
        if metric.startswith(WORST):
            assert part[metric] == max(latest.values()), (index, part)
        elif metric.startswith(("stall/update", "grad/", "geometry/", "bits/", "quant/overflow")):
            weight = {
                key: next(size for end, size in sizes.items() if key.endswith(end))
                for key in latest
            }
            if "/activation" in metric:
                continue  # weighed by what flows in
            mean = sum(latest[key] * weight[key] for key in latest) / sum(weight.values())
            assert part[metric] == pytest.approx(mean), metric
