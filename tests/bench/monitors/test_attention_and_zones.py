"""Entropy of attention by hand, and zones without gradient by trial.

The two monitors share their models.
"""

import math
from typing import Any

import pytest
import torch
from torch import nn
from watched_models import (
    SCALES,
    format_of,
    layer_of,
    normal,
    observers_of,
    on_grid,
    one_step,
    watched,
)

import fp8manifold as fm
from nanogpt_bench.model.gpt import GPT, GPTShape
from nanogpt_bench.monitors import Step
from nanogpt_bench.monitors.attention import attention_entropy
from nanogpt_bench.monitors.zones import zero_gradient_zone


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_entropy_is_the_sum_by_hand(dtype, monkeypatch):
    query, key = normal(5, 2, 6, 4, seed=1, std=2).to(dtype), normal(5, 2, 6, 4, seed=2).to(dtype)
    scores = (query.double() @ key.double().transpose(2, 3)) / 2
    p = scores.masked_fill(~torch.ones(6, 6, dtype=torch.bool).tril(), -math.inf).softmax(-1)
    expected = torch.special.entr(p).sum(-1).mean((0, 2)).tolist()
    assert attention_entropy(query, key).tolist() == pytest.approx(expected, rel=1e-4)
    monkeypatch.setattr("nanogpt_bench.monitors.attention._CHUNK", 150)
    assert attention_entropy(query, key).tolist() == pytest.approx(expected, rel=1e-4)


def test_entropy_at_the_edges():
    one_hot = torch.eye(5).expand(1, 1, 5, 5) * 100
    assert attention_entropy(one_hot, one_hot).item() == pytest.approx(0, abs=1e-6)
    query, key = normal(5, 2, 6, 4, seed=1), normal(5, 2, 6, 4, seed=2)
    query[0, 1, 0, 0] = math.nan
    assert attention_entropy(query, key).isnan().tolist() == [False, True]
    assert attention_entropy(query[:0], key[:0]).tolist() == [0, 0]


def test_attention_that_looks_at_everything_alike_has_the_entropy_of_that():
    model = GPT(GPTShape(2, 2, 8, 4, vocab_size=5))
    for block in model.blocks:
        nn.init.zeros_(block.attn.qkv.weight)
    tokens = torch.zeros(3, 4, dtype=torch.long)
    observers = observers_of(watched(model, lambda one_in: model(tokens)), "attention")
    record = one_step(model, observers, tokens).record
    uniform = sum(math.log(n) for n in range(1, 5)) / 4
    heads = [record[f"attention/entropy/{head}"] for head in ("0/0", "0/1", "1/0", "1/1")]
    assert [*heads, record["attention/entropy"], record["attention/entropy_min"]] == pytest.approx(
        [uniform] * 6
    )


def test_looking_at_attention_leaves_the_scales():
    spec = {"activation": {"format": "E4M3", "policy": "delayed", "history": 16}}
    model = fm.quantize_model(GPT(GPTShape(1, 2, 8, 4, vocab_size=5)), {"*": spec}, "master")
    tokens = torch.zeros(3, 4, dtype=torch.long)
    model(tokens)
    old_buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    _, attention, _ = observers_of(watched(model, lambda one_in: model(tokens + 1)), "attention")
    step = Step(1, model, torch.optim.SGD(model.parameters()))
    attention.after_step(step)
    assert "attention/entropy" in step.record
    new_buffers = dict(model.named_buffers())
    assert old_buffers
    assert all(torch.equal(old_buffers[name], new_buffers[name]) for name in old_buffers)


def zone_by_trial(
    w: torch.Tensor, x: torch.Tensor, fmt: str, scale: Any, output: torch.dtype
) -> float:
    """Move every weight up and down by half a spacing.

    The rounded outputs are compared in float64.
    """
    half = (fm.ulp((w / scale).double(), fmt) * scale.double() / 2).expand(w.shape)
    y, unchanged = x.double() @ w.double().T, 0
    for i in range(w.shape[0]):
        for j in range(w.shape[1]):
            moved = (y[:, i] + sign * x[:, j].double() * half[i, j] for sign in (-1, 1))
            unchanged += all(torch.equal(m.to(output), y[:, i].to(output)) for m in moved)
    return unchanged / w.numel()


@pytest.mark.parametrize("name", ["E4M3", "E5M2", "E7M0"])
@pytest.mark.parametrize("output", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 4])
def test_zones_are_found_by_trial(name, output, rows):
    w = on_grid(name, 5, 40, std=3.0) * SCALES[0]
    x = normal(rows, 40, seed=1) * torch.logspace(-4, 0, 40)
    x[:, 3] = 0
    share = zero_gradient_zone(w, x, format_of(name), SCALES[0], output_dtype=output)
    assert share == pytest.approx(zone_by_trial(w, x, name, SCALES[0], output), abs=1.5 / 200)
    assert 0 < share < 1


def test_more_rows_leave_fewer_zones_and_pieces_the_same(monkeypatch):
    w, x = on_grid("E4M3", 30, 50, std=0.2), normal(32, 50, seed=1) * torch.logspace(-4, 0, 50)
    shares = [zero_gradient_zone(w, x[:n], format_of("E4M3")) for n in (0, 1, 4, 32)]
    assert shares[0] == 1
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] < shares[1]
    monkeypatch.setattr("nanogpt_bench.monitors.zones.PIECE_ELEMENTS", 120)
    assert zero_gradient_zone(w, x[:4], format_of("E4M3")) == shares[2]


def test_zones_at_the_edges():
    w = on_grid("E4M3", 2, 3)
    assert zero_gradient_zone(w, torch.zeros(4, 3), format_of("E4M3")) == 1
    assert (
        zero_gradient_zone(w, torch.ones(4, 3), format_of("E4M3"), output_dtype=torch.float32) == 0
    )
    assert (
        zero_gradient_zone(w, torch.ones(1, 3), format_of("E4M3"), bias=torch.full((2,), 1e6)) == 1
    )
    assert (
        zero_gradient_zone(w, torch.ones(1, 3), format_of("E4M3"), bias=torch.full((2,), torch.inf))
        == 1
    )
    assert zero_gradient_zone(torch.empty(0, 3), torch.ones(1, 3), format_of("E4M3")) == 0


@pytest.mark.parametrize(("inputs", "share"), [(0.0, 1.0), (1.0, 0.0)])
def test_weights_that_meet_no_input_are_in_a_zone(inputs, share):
    model = layer_of({"weight": "E4M3"}, normal(4, 4))
    record = one_step(
        model, observers_of(watched(model), "zones"), torch.full((2, 4), inputs)
    ).record
    assert record["stall/zero_gradient_zone/0"] == record["stall/zero_gradient_zone"] == share
