"""The share of the machine's speed, where that is known, and memory."""

import pytest
import torch
from bench_runs import resolved

from nanogpt_bench.model.gpt import GPT, GPTShape
from nanogpt_bench.monitors import Step
from nanogpt_bench.monitors.capture import Watched
from nanogpt_bench.monitors.resources import Resources, flops_per_token


def test_model_flops_utilisation_is_known_where_the_machine_is(monkeypatch):
    config = resolved()
    model = GPT(GPTShape(4, 4, 128, 64))
    flops = flops_per_token(model, config)
    assert flops == 6 * (4 * 12 * 128 * 128 + 257 * 128) + 12 * 4 * 128 * 64
    step = Step(3, model, torch.optim.SGD(model.parameters()), record={"val/loss": 1.0, "time/tokens_per_s": 1e5})
    with monkeypatch.context() as patched:
        patched.setattr("nanogpt_bench.monitors.resources._peak_flops", lambda device: 2e12)
        Resources(Watched.of(config, model, torch.device("cpu"))).written(step)
    assert step.record["mfu"] == pytest.approx(1e5 * flops / 2e12)
    assert (step.record["memory/peak_bytes"] or 0) > 1e7
    step.record.pop("mfu")
    Resources(Watched.of(config, model, torch.device("cpu"))).written(step)
    assert "mfu" not in step.record
