"""What every optimizer of the registry keeps to: groups, ascent, loss scaling, weights that are rescaled meanwhile."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from family_cases import NAMES, OPTIONS, RIEMANNIAN_NAMES, make, zoo
from optimizer_cases import bits_of, normal, on, put_gradients, same_bits, snapshot, stored_weight, values
from torch import Tensor, nn

import fp8manifold as fm

by_name = pytest.mark.parametrize("name", NAMES)


@by_name
def test_ascending_is_descending_on_the_negated_gradient(name: str) -> None:
    kinds, others = zoo(), zoo()
    up, down = make(name, kinds.values(), maximize=True), make(name, others.values())
    for t in range(4):
        put_gradients(kinds.values(), t, 0.1)
        put_gradients(others.values(), t, 0.1)
        for p in others.values():
            p.grad = None if p.grad is None else -p.grad
        given = {p: bits_of(p.grad) for p in kinds.values() if p.grad is not None}
        up.step()
        down.step()
        assert same_bits(values(kinds.values()), values(others.values()))
        assert all(bits_of(p.grad) == bits for p, bits in given.items()), "the gradient was written to"


@by_name
def test_groups_of_different_options_step_as_optimizers_of_their_own(name: str) -> None:
    """Position in the whole list keys the noise, so the others are there too, held still by having no gradient."""
    lr = OPTIONS[name]["lr"]
    chosen: list[dict[str, Any]] = [
        {"lr": 0.5 * lr, "writeback": "residual8", "moments": "8bit"},
        {"weight_decay": 0.1, "maximize": True, "seed": 4},
        {"writeback": "nearest", "moments": "bfloat16", "refresh_every": 2},
    ]
    shapes = [(3, 7), (2, 9), (4, 5)]
    weights = [stored_weight(shape=s, seed=i) for i, s in enumerate(shapes)]
    grouped = make(name, [{"params": [w], **options} for w, options in zip(weights, chosen, strict=True)])
    for t in range(5):
        put_gradients(weights, t, 0.1)
        grouped.step()
    for i, options in enumerate(chosen):
        alone = [stored_weight(shape=s, seed=j) for j, s in enumerate(shapes)]
        single = make(name, alone, **options)
        for t in range(5):
            put_gradients(alone, t, 0.1)
            for j, p in enumerate(alone):
                p.grad = p.grad if j == i else None
            single.step()
        assert bits_of(alone[i]) == bits_of(weights[i]), options


@by_name
def test_loss_scaling_over_stored_and_ordinary_weights(name: str) -> None:
    """Unscaled and clipped gradients step as such; an overflow is left out by the scaler, a NaN by the optimizer."""
    pair = [[stored_weight(seed=1, granularity="tensor"), nn.Parameter(normal(7, seed=2))] for _ in "ab"]
    scaled, plain = (make(name, parameters) for parameters in pair)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=100)

    def loss(parameters: list[Any], t: int) -> Tensor:
        return ((parameters[0] @ parameters[1]) * normal(3, seed=t)).sum()

    for t in range(4):
        scaled.zero_grad()
        scaler.scale(loss(pair[0], t)).backward()
        scaler.unscale_(scaled)
        torch.nn.utils.clip_grad_norm_(pair[0], 0.5)
        scaler.step(scaled)
        scaler.update()
        plain.zero_grad()
        loss(pair[1], t).backward()
        torch.nn.utils.clip_grad_norm_(pair[1], 0.5)
        plain.step()
        assert same_bits(values(pair[0]), values(pair[1]))
    for bad in (math.inf, math.nan):
        scaled.zero_grad()
        scaler.scale(loss(pair[0], 9) * bad).backward()
        before = snapshot(scaled)
        scaler.step(scaled)
        scaler.update()
        assert snapshot(scaled) == before
    assert scaler.get_scale() == 2.0**12


@pytest.mark.parametrize("name", RIEMANNIAN_NAMES)
def test_a_code_gradient_whose_square_overflows_does_not_stick(name: str) -> None:
    """E5M2 near its end, where S = 8192: S g overflows in its square though g does not; the weight moves again."""
    p = on(fm.FP8Manifold("E5M2"), torch.full((4,), 40_000.0))
    optimizer = make(name, [p], lr=0.5, momentum=0.0) if name == "RiemannianSGD" else make(name, [p], lr=0.5)
    for t in range(60):
        p.grad = torch.full((4,), 3e17 if t == 3 else 1e-4)
        optimizer.step()
    state = [x for x in optimizer.state[p].values() if isinstance(x, Tensor)]
    assert all(x.isfinite().all() for x in state)
    assert p.isfinite().all()
    assert optimizer.skipped_steps <= 1


@by_name
def test_a_run_that_diverges_stays_finite(name: str) -> None:
    """Steps far too long in formats of few and of many binades: codes of numbers, at scales that hold them."""
    for fmt in ("E7M0", "E4M3", "E5M2", "E1M6", "E4M3FNUZ", "P3109_8P3", "E2M1"):
        p = fm.FP8Parameter(normal(6, 7, std=0.1), fmt, headroom=1.0)
        q = on(fm.FP8Manifold(fmt, p.scale.clone(), "stochastic"), normal(6, 7, std=0.1))
        optimizer = make(name, [p, q], lr=1e5 * OPTIONS[name]["lr"], refresh_every=2)
        for t in range(6):
            put_gradients([p, q], t, 10.0 ** (3 * t - 3))
            optimizer.step()
            assert all(x.isfinite().all() for x in values([p, q])), (fmt, t)
            assert not (p.codes > 2 * p.format.sign_bit - 1).any()
        assert all(x.isfinite().all() for w in (p, q) for x in optimizer.state[w].values() if isinstance(x, Tensor))
