"""Noise where a grid would round.

Its variance in each arm, and that it depends on the step alone.
"""

import pytest
import torch
from bench_runs import one_step, trainer_of

import fp8manifold as fm
from nanogpt_bench.model.weights import quantized_layers
from nanogpt_bench.setup.noise import WriteBackNoise

MUON = {
    "model__format": "E4M3",
    "model__storage": "continuous",
    "model__n_embd": 64,
    "optimizer__name": "stiffness_muon",
    "optimizer__lr": 1e-3,
    "train__max_steps": 3,
}
KINDS = ("ulp", "mean", "permuted")


@pytest.fixture
def noisy(tiny):
    """Return a function from a kind of noise, or None, to a trainer."""
    return lambda kind, **settings: trainer_of(
        tiny(**(MUON | {"optimizer__noise": kind} | settings))
    )


def stepped(trainer, steps=1):
    """The weights of all layers before the last of some steps and after it."""
    for number in range(1, steps):
        one_step(trainer, number)
    old_weights = weights(trainer)
    one_step(trainer, steps)
    return old_weights, weights(trainer)


def weights(trainer):
    layers = quantized_layers(trainer.model)
    return {name: layer.weight.detach().clone() for name, layer in layers.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_the_noise_has_the_variance_of_stochastic_rounding(kind, noisy):
    """Over a layer, by the spacings of the arm: noise over its deviation is normal."""
    quiet, loud = noisy(None), noisy(kind)
    old_weights, target = stepped(quiet)
    _, new_weights = stepped(loud)
    ratios = []
    for name, layer in quantized_layers(quiet.model).items():
        spacing = layer.manifold.stiffness(old_weights[name])
        if kind == "mean":
            spacing = spacing.mean()
        if kind == "permuted":
            spacing = spacing.flatten()[places_of(loud, name)].view_as(spacing)
        step = (target[name] - old_weights[name]).abs()
        deviation = (step * (spacing - step)).clamp(min=0).sqrt()
        short = (step < spacing) & (deviation > 0)
        ratios.append(((new_weights[name] - target[name]) / deviation)[short])
    ratio = torch.cat(ratios)
    assert len(ratio) > 10_000
    assert abs(ratio.mean().item()) < 0.03
    assert ratio.square().mean().item() == pytest.approx(1.0, abs=0.05)
    assert ratio.pow(4).mean().item() == pytest.approx(3.0, abs=0.4)


def places_of(trainer, name):
    noise = WriteBackNoise(trainer.model, trainer.config)
    return noise._layers[list(quantized_layers(trainer.model)).index(name)].permutation


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_and_a_step_decide_the_noise(kind, noisy):
    first, again, other_seed = (stepped(noisy(kind, seed=s), 2)[1] for s in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other_seed[name]) for name in first)
    _, one = stepped(noisy(kind, seed=1), 1)
    assert not any(torch.equal(first[name], one[name]) for name in first)


def test_a_permutation_keeps_the_spacings_of_a_layer_and_moves_them(noisy):
    trainer = noisy("permuted")
    for name, layer in quantized_layers(trainer.model).items():
        places = places_of(trainer, name)
        assert torch.equal(places.sort().values, torch.arange(layer.weight.numel())), name
        assert (places == torch.arange(layer.weight.numel())).float().mean() < 0.01, name


def test_the_ends_of_the_range_hold(noisy):
    trainer = noisy("ulp", optimizer__lr=1e6, optimizer__grad_clip=0.0)
    _, new_weights = stepped(trainer)
    for name, layer in quantized_layers(trainer.model).items():
        end = layer.manifold.scale * fm.FloatFormat.from_string("E4M3").max
        assert bool((new_weights[name].abs() <= end).all()), name
