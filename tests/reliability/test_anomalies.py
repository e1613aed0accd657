"""NaN and Inf in every place of a step, and steps that are not taken.

The run follows the documented policy, and does nothing else.
"""

import math

import pytest
import torch
from small_runs import BASE, contents_bits, recorded, words
from torch import Tensor, nn

import fp8manifold as fm
from nanogpt_bench.checkpoint import read_checkpoint, step_file, steps, verify
from nanogpt_bench.config.settings import find_config, load_config
from nanogpt_bench.loop import train
from nanogpt_bench.loop.anomalies import first_bad_weight
from nanogpt_bench.loop.resume import capture
from nanogpt_bench.loop.train import run
from nanogpt_bench.loop.trainer import Trainer
from nanogpt_bench.system.errors import BenchError

#: where each is first seen
PLACES = {
    "gradient": "gradient of lm_head.weight",
    "weight": "weight of blocks.0.mlp.fc.bias",
    "state": "optimizer state ",
    "loss": "loss",
    "activation": "activation of blocks.0.mlp.fc",
}
VALUES = (math.nan, math.inf, -math.inf)
STEPS = 20


@pytest.fixture
def make(small_corpus):
    base = {**BASE, "data.dir": small_corpus, "model.bias": True, "train.max_steps": STEPS}
    base |= {
        "eval.interval": STEPS,
        "optimizer.warmup_steps": 0,
        "checkpoint.every": 2,
        "monitor.interval": 1000,
    }
    base["monitor.watch"] = "[stall, zones, ranges, bits, gradients, geometry, resources, trend]"
    del base["checkpoint.keep"]

    def config(**overrides):
        settings = base | {key.replace("__", "."): value for key, value in overrides.items()}
        return load_config(None, [f"--{key}={value}" for key, value in settings.items()])

    return config


class Injector:
    """Puts a value into one place of a step; keeps the state before and after it."""

    # One closure for a place of a step: they share what is being spoilt.
    def __init__(self, patch, kind, injected_step, value):  # noqa: C901
        self.before = self.after = None
        spoiling = False
        accumulate, train_step, init = Trainer._accumulate, Trainer.train_step, Trainer.__init__

        def spoil_activation(module, inputs, output):
            if spoiling and module.training:
                output = output.clone()
                output[0, 0, 0] = value
            return output

        def make_trainer(trainer, *arguments, **options):
            init(trainer, *arguments, **options)
            trainer.model.blocks[0].mlp.fc.register_forward_hook(spoil_activation)

        def step_once(trainer, step, observers):
            nonlocal spoiling
            if step.number == injected_step + 1:
                self.after = capture(0, trainer, [], {})
            if step.number == injected_step:
                self.before = capture(0, trainer, [], {})
                bias = trainer.model.blocks[0].mlp.fc.bias
                if kind == "weight":
                    bias.data[3] = value
                elif kind == "state":
                    stored = [
                        entry
                        for entry in trainer.optimizer.state[bias].values()
                        if isinstance(entry, Tensor)
                    ]
                    next(entry for entry in stored if entry.numel() > 1).view(-1)[1] = value
            spoiling = step.number == injected_step and kind == "activation"
            return train_step(trainer, step, observers)

        def add_up(trainer, step, observers):
            loss = accumulate(trainer, step, observers)
            if step.number == injected_step and kind == "gradient":
                trainer.model.lm_head.weight.grad[0, 0] = value
            return value if step.number == injected_step and kind == "loss" else loss

        patch.setattr(Trainer, "__init__", make_trainer)
        patch.setattr(Trainer, "train_step", step_once)
        patch.setattr(Trainer, "_accumulate", add_up)


def same(first, second):
    own_bits, second_bits = (
        {
            name: value
            for name, value in contents_bits(state).items()
            if name.startswith(("model/", "optimizer/"))
        }
        for state in (first, second)
    )
    return own_bits == second_bits


def inject(make, run_dir, kind, policy, number, count):
    rule = ("fp32", "stiffness", "master")[count % 3]
    formats = {} if rule == "fp32" else {"model__formats": "{mlp.fc: E4M3}"}
    with pytest.MonkeyPatch.context() as patch:
        injector = Injector(patch, kind, number, VALUES[count % 3])
        summary = run(make(rule=rule, train__on_anomaly=policy, **formats), run_dir)
    alerts = recorded(run_dir, "alerts.jsonl")
    fails = kind in ("weight", "state") or policy == "stop"
    assert summary["status"] == ("failed" if fails else "finished"), summary["failure"]
    assert [record["step"] for record in recorded(run_dir)] == list(
        range((number if fails else STEPS) + 1)
    )
    assert f"first seen in {PLACES[kind]}" in alerts[0]["message"]
    stored = step_file(run_dir / "anomaly", number)
    verify(stored)
    assert read_checkpoint(stored).facts["anomaly"]["step"] == number
    if fails:
        assert summary["failure"]["step"] == number
        assert PLACES[kind] in summary["failure"]["message"]
    elif policy == "skip" and number < STEPS:
        assert same(injector.before, injector.after)
    for step in steps(run_dir):
        verify(step_file(run_dir, step))
        tensors = read_checkpoint(step_file(run_dir, step)).tensors
        for name, tensor in (tensors["model"] | tensors["optimizer"]).items():
            # codes are float8, which has no isfinite
            if tensor.is_floating_point():
                assert tensor.float().isfinite().all(), (step, name)


@pytest.mark.covering(2)
@pytest.mark.parametrize("number", [2, 7, 11, 16, STEPS])
@pytest.mark.parametrize("policy", ["skip", "stop"])
@pytest.mark.parametrize("kind", PLACES)
def test_what_is_injected_is_named_and_meets_the_policy(
    make, tmp_path, kind, policy, number, full, tally
):
    chosen = range(number, min(number + 5, STEPS + 1)) if full else (number,)
    for one in chosen:
        inject(make, tmp_path / f"{one}", kind, policy, one, one // 4)
    tally(f"NaN or Inf in {kind}, {policy}", len(chosen))


def test_scales_and_counters_of_a_step_left_out_are_as_before(make, tmp_path, monkeypatch):
    operand = "{format: E4M3, policy: delayed, history: 4, rounding: stochastic}"
    formats = f"{{mlp: {{weight: E4M3, activation: {operand}, gradient: {operand}}}}}"
    injector = Injector(monkeypatch, "activation", 5, math.nan)
    assert run(make(rule="master", model__formats=formats), tmp_path / "r")["status"] == "finished"
    assert any("history" in name for name in injector.before.tensors["model"])
    assert same(injector.before, injector.after)


def test_a_finite_state_whose_norm_overflows_is_no_anomaly(make, tmp_path, monkeypatch):
    Injector(monkeypatch, "state", 3, 3e38)
    config = make(rule="fp32", optimizer__lr=1e-44, optimizer__weight_decay=0, train__max_steps=4)
    summary = run(config, tmp_path / "r")
    assert (summary["status"], summary["steps"]) == ("finished", 4)
    assert "nan" not in summary["alerts"]


def test_codes_that_stand_for_nan_are_found():
    layer = torch.nn.Linear(4, 2)
    layer.weight = fm.FP8Parameter(torch.ones(2, 4), "E5M2")
    assert first_bad_weight(layer) is None
    layer.weight.codes[1, 2] = 0x7F
    assert first_bad_weight(layer) == "weight of weight"


def config(corpus):
    within = {"train.step_in_backward": True, "optimizer.grad_clip": 0, "shadow.enabled": False}
    return load_config(find_config("e4m3.yaml"), words("codes stochastic", corpus, within)[5:])


def test_a_gradient_that_no_step_has_used_ends_the_run_with_a_line(
    small_corpus, tmp_path, monkeypatch
):
    monkeypatch.setattr(fm.optim.InBackward, "_on_gradient", lambda *_: None)
    with pytest.raises(
        BenchError, match=r"train.step_in_backward: .* has a gradient that step_in_backward has not"
    ):
        train.run(config(small_corpus), tmp_path / "r")


def test_a_run_that_takes_no_step_says_so_and_shows_no_movement(
    small_corpus, tmp_path, monkeypatch
):
    real, alerts, arrived = Trainer._backward, [], {}

    def deaf(trainer, loss, step, observers):
        real(
            trainer,
            loss if step.number <= 12 else loss.detach() * nn.Parameter(loss.new_ones(())),
            step,
            observers,
        )

    def show(progress):
        alerts.extend(progress.alerts)
        arrived[progress.step] = progress.arrived

    monkeypatch.setattr(Trainer, "_backward", deaf)
    summary = train.run(config(small_corpus), tmp_path / "r", on_progress=show)
    assert [(alert.step, alert.kind) for alert in alerts] == [(18, "no_step"), (18, "no_change")]
    assert alerts[0].message == "the optimizer took no step from step 12 to step 18, in 6 steps"
    assert summary["alerts"] == {"no_step": 1, "no_change": 1}
    assert arrived[12] is not None
    assert arrived[16] is arrived[24] is None
