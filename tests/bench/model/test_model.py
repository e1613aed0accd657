"""The GPT: shapes, initial values, causality."""

import math

import pytest
import torch

from nanogpt_bench.model.gpt import FLOATS, GPT, GPTShape, build_model, linear_sizes

SMALL = GPTShape(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=50)


def test_what_is_known_of_layers_before_there_is_a_model_is_so() -> None:
    modules = dict(GPT(SMALL).named_modules())
    linear = {name: (m.in_features, m.out_features) for name, m in modules.items() if isinstance(m, torch.nn.Linear)}
    assert list(linear_sizes(2, 32, 50).items()) == list(linear.items())
    kinds = {name.rpartition(".")[2]: type(module).__name__ for name, module in modules.items()}
    blocks = {"blocks", "0", "1", "attn", "mlp", ""}  # what holds others
    floats = {last: kind for last, kind in kinds.items() if kind != "Linear" and last not in blocks}
    assert {name.rpartition(".")[2]: type(modules[name]).__name__ for name in FLOATS} == floats
    assert {name: type(modules[name]).__name__ for name in FLOATS} == FLOATS


def test_a_token_does_not_see_later_ones() -> None:
    model = build_model(SMALL, seed=0)
    tokens = torch.arange(16)[None]
    changed = tokens.clone()
    changed[0, 10] = 49
    difference = (model(tokens) - model(changed)).detach().abs().amax(-1)[0]
    assert float(difference[:10].max()) == 0.0
    assert float(difference[10:].min()) > 0.0


def test_initial_values_follow_gpt2() -> None:
    model = build_model(GPTShape(n_layer=8, n_head=4, n_embd=256, block_size=64, vocab_size=300, bias=True), seed=0)
    assert float(model.blocks[0].attn.qkv.weight.detach().std()) == pytest.approx(0.02, rel=0.02)
    assert float(model.blocks[3].mlp.proj.weight.detach().std()) == pytest.approx(0.02 / math.sqrt(16), rel=0.02)
    assert float(model.token_embedding.weight.detach().std()) == pytest.approx(0.02, rel=0.02)
    assert float(model.blocks[0].mlp.fc.bias.detach().abs().max()) == 0.0


def test_the_first_loss_is_that_of_a_uniform_guess() -> None:
    tokens = torch.randint(0, 50, (8, 17), generator=torch.Generator().manual_seed(0))
    loss = build_model(SMALL, seed=0).loss(tokens[:, :-1], tokens[:, 1:])
    assert float(loss.detach()) == pytest.approx(math.log(50), abs=0.1)


def test_the_seed_decides_and_the_global_generator_stays() -> None:
    before = torch.get_rng_state()
    one, same, other = (build_model(SMALL, seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one.lm_head.weight, same.lm_head.weight)
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)


def test_tying_shares_one_parameter() -> None:
    tied = GPT(GPTShape(2, 2, 32, 16, vocab_size=50, tie_weights=True))
    assert tied.lm_head.weight is tied.token_embedding.weight
    total = sum(parameter.numel() for parameter in GPT(SMALL).parameters())
    assert sum(parameter.numel() for parameter in tied.parameters()) == total - 50 * 32


def test_dropout_acts_in_training_only() -> None:
    model = build_model(GPTShape(1, 2, 32, 16, vocab_size=50, dropout=0.5), seed=0)
    tokens = torch.arange(16)[None]
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))
