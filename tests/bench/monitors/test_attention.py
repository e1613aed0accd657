"""Attention entropy by hand, of heads that look at everything alike, and what looking leaves behind."""

import math

import pytest
import torch
from torch import nn
from watched_models import normal, observers_of, one_step, watched

import fp8manifold as fm
from nanogpt_bench.model.gpt import GPT, GPTShape
from nanogpt_bench.monitors import Step
from nanogpt_bench.monitors.attention import attention_entropy


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
    heads = [record[f"attention/entropy/{block}/{head}"] for block in range(2) for head in range(2)]
    assert [*heads, record["attention/entropy"], record["attention/entropy_min"]] == pytest.approx([uniform] * 6)


def test_looking_at_attention_leaves_the_scales():
    spec = {"activation": {"format": "E4M3", "policy": "delayed", "history": 16}}
    model = fm.quantize_model(GPT(GPTShape(1, 2, 8, 4, vocab_size=5)), {"*": spec}, "master")
    tokens = torch.zeros(3, 4, dtype=torch.long)
    model(tokens)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    _, attention, _ = observers_of(watched(model, lambda one_in: model(tokens + 1)), "attention")
    step = Step(1, model, torch.optim.SGD(model.parameters()))
    attention.after_step(step)
    assert "attention/entropy" in step.record
    after = dict(model.named_buffers())
    assert before
    assert all(torch.equal(before[name], after[name]) for name in before)
