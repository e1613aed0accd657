"""Layers in turn: which a look takes, that its figures are those of the step, and what is said of all of them."""

from typing import Any

import pytest
import torch
from bench_runs import Tiny, recorded, records_of
from torch import nn

from nanogpt_bench.config.schema import Config
from nanogpt_bench.loop.train import run
from nanogpt_bench.monitors.points import Anomaly, Step, Turns

Record = dict[str, Any]
FORMATS = "{'*': {weight: E4M3, activation: {format: E4M3, rounding: stochastic}, gradient: E5M2}}"
STEPS = 9
#: figures of a layer that are of nothing but the step, with the operands that they are of
OF_THE_STEP = (
    *("quant/kurtosis/weight", "quant/overflow/activation", "quant/amax/gradient", "bits/uniformity/weight"),
    *("stall/update_lost", "stall/update_ulps", "stall/arrived", "stall/zero_gradient_zone"),
    *("grad/l2", "grad/update_to_noise", "geometry/stiffness_mean"),
)
#: metrics whose value over all layers is the largest layer's; all others are means
LARGEST = ("quant/kurtosis", "quant/amax/")


def step_number(number: int, *, last: bool = False) -> Step:
    return Step(number, nn.Linear(1, 1), torch.optim.SGD([nn.Parameter(torch.ones(1))]), last)


def taken(turns: Turns, names: str, number: int, *, last: bool = False) -> str:
    step = step_number(number, last=last)
    found = "".join(name for name in names if turns.takes(step, name))
    turns.written(step)
    return found


def test_the_first_look_takes_all_layers_and_the_others_each_layer_once_a_turn():
    turns = Turns(3, ["abcdefg", "xy"], 10)
    looks = [taken(turns, "abcdefg", number) for number in range(10, 90, 10)]
    assert looks[0] == "abcdefg"
    assert sorted("".join(looks[1:4])) == sorted("".join(looks[4:7])) == list("abcdefg")
    assert all(2 <= len(look) <= 3 for look in looks[1:])
    assert taken(turns, "abcdefg", 95) == ""
    assert taken(turns, "abcdefg", 97, last=True) == taken(turns, "abcdefg", 90)


def test_fewer_names_than_turns_leave_none_empty_and_a_first_that_is_not_finite_is_followed_by_another():
    turns = Turns(5, ["ab"])
    assert [taken(turns, "ab", number) for number in range(1, 6)] == ["ab", "a", "b", "a", "b"]
    turns, step = Turns(2, ["ab"]), step_number(1)
    step.anomaly = Anomaly(1, ("loss",), "loss")
    turns.written(step)
    assert [taken(turns, "ab", number) for number in (2, 3)] == ["ab", "b"]


@pytest.mark.parametrize(("count", "first"), [(2, "ab"), (3, "abc"), (1, "abc")])
def test_a_run_that_goes_on_with_other_turns_begins_with_all_layers(count, first):
    earlier = Turns(2, ["abc"])
    taken(earlier, "abc", 1)
    later = Turns(count, ["abc"])
    later.load_state(earlier.state())
    assert taken(later, "abc", 2) == first


def watched(tiny: Tiny, turns: int, **more: object) -> Config:
    more = {"rule": "stochastic", "model__formats": FORMATS, "train__max_steps": STEPS, **more}
    return tiny(monitor__interval=1, monitor__turns=turns, eval__interval=STEPS, **more)


@pytest.fixture(scope="module")
def in_turn(tiny, tmp_path_factory):
    """A run that looks at one in three layers in every step, with a checkpoint of each."""
    folder = tmp_path_factory.mktemp("runs") / "r"
    run(watched(tiny, 3, checkpoint__every=1, checkpoint__keep=STEPS), folder)
    return folder


@pytest.mark.parametrize("rule", ["stochastic", "master"])
def test_figures_are_those_of_the_step_and_over_all_layers_of_the_latest(tiny, tmp_path, rule, in_turn):
    whole = records_of(watched(tiny, 1, rule=rule), tmp_path / "whole")[1:]
    folder = in_turn if rule == "stochastic" else tmp_path / "turns"
    if rule == "master":
        run(watched(tiny, 3, rule=rule), folder)
    some = recorded(folder)[1:]
    assert [record["train/loss"] for record in some] == [record["train/loss"] for record in whole]
    metrics = [metric for metric in OF_THE_STEP if metric in whole[0]]
    assert len(metrics) == len(OF_THE_STEP) - (2 if rule == "master" else 0)
    for metric in metrics:
        check_turns(metric, some, whole)


def check_turns(metric: str, some: list[Record], whole: list[Record]) -> None:
    """Compare every figure with that of the run that always looks at all layers."""
    latest = {}
    sizes = {"qkv": 768, "attn.proj": 256, "fc": 1024, "mlp.proj": 1024, "lm_head": 656}
    for index, (part, full) in enumerate(zip(some, whole, strict=True)):
        own = {key: value for key, value in part.items() if key.startswith(f"{metric}/")}
        assert own == {key: full[key] for key in own}, metric
        latest |= own
        layers = {key for key in full if key.startswith(f"{metric}/")}
        assert set(latest) == layers
        assert (len(own) == len(layers)) == (index == 0), metric
        if metric.startswith(LARGEST):
            assert part[metric] == max(latest.values())
        elif metric.startswith(("stall/update", "grad/", "geometry/", "bits/", "quant/overflow")):
            weight = {key: next(size for end, size in sizes.items() if key.endswith(end)) for key in latest}
            if "/activation" in metric:
                continue  # weighed by what flows in
            mean = sum(latest[key] * weight[key] for key in latest) / sum(weight.values())
            assert part[metric] == pytest.approx(mean), metric
