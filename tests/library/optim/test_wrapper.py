"""StiffnessWrapper: updates or gradients of any torch optimizer scaled by the stiffness."""

from contextlib import nullcontext

import optimizer_cases as cases
import pytest
import torch
from optimizer_cases import (
    ROWS,
    free_weight,
    grid_weight,
    normal,
    put_gradients,
    same_bits,
    step_from,
    values,
)
from torch import nn

import fp8manifold as fm
from fp8manifold.optim import StiffnessWrapper, anneal

double = torch.float64
SGD, AdamW = torch.optim.SGD, torch.optim.AdamW


def ratio(x, scale, exponent, damping=2.0**-8, clip=16.0):
    stiffness = fm.ulp(x / scale, "E4M3") * scale
    return (stiffness / stiffness.mean()).clamp(damping, clip) ** exponent


@pytest.mark.parametrize("exponent", [1.0, 0.5, 2.0, 0.37, -1.0])
@pytest.mark.parametrize("inner", [SGD, AdamW])
def test_an_update_is_scaled_element_by_element(inner, exponent):
    """``w + scale (S / S_ref)^k u``, where u is what the optimizer would have added.

    In float64 on the continuous manifold.
    """
    weight = free_weight(normal(3, 40, dtype=double), "E4M3", ROWS.double() * 1.3)
    plain = nn.Parameter(values([weight])[0])
    optimizer = StiffnessWrapper(inner([weight], lr=0.01), 0.3, exponent, damping=0.25, clip=2.0)
    put_gradients([weight, plain], 0)
    plain.grad = weight.grad.clone()
    old_values = values([weight])[0]
    inner([plain], lr=0.01).step()
    optimizer.step()
    factor = 0.3 * ratio(old_values, ROWS.double() * 1.3, exponent, 0.25, 2.0)
    assert torch.allclose(
        weight.detach(), old_values + factor * (plain.detach() - old_values), rtol=1e-12, atol=1e-14
    )


@pytest.mark.parametrize("writeback", ["nearest", "stochastic"])
def test_a_grid_is_rounded_once_from_the_scaled_update(writeback):
    weight = grid_weight("E4M3", (3, 40), ROWS, std=0.3)
    optimizer = StiffnessWrapper(SGD([weight], lr=0.02), exponent=1.0, writeback=writeback, seed=9)
    for t in range(3):
        put_gradients([weight], t)
        old_values, gradient = values([weight])[0], weight.grad.clone()
        optimizer.step()
        assert cases.on_grid(weight), t
        if t == 0:  # afterwards S_ref is that of the first step
            update = (old_values - 0.02 * gradient) - old_values
            target = old_values + update * ratio(old_values, ROWS, 1.0)
            stream = optimizer.streams.get(weight)
            draws = {"seed": 9, "step": 0, "stream": stream} if writeback == "stochastic" else {}
            expected = fm.round_to_grid(target / ROWS, "E4M3", writeback, **draws) * ROWS
            # The factor may differ in its last bit.
            assert (weight.detach() == expected).double().mean() > 0.98, t
            largest_ulp = fm.ulp(old_values / ROWS, "E4M3").max() * ROWS.max()
            assert (weight.detach() - expected).abs().max() <= largest_ulp, t


def test_by_default_the_manifold_says_how_to_round():
    """A tenth of an ULP: nearest stays, stochastic moves a tenth of the weights."""
    shares = []
    for rounding in ("nearest", "stochastic"):
        weight = cases.manifold_parameter(
            fm.FP8Manifold("E4M3", rounding=rounding), torch.full((10_000,), 1.5)
        )
        optimizer = StiffnessWrapper(SGD([weight], lr=0.0125))
        step_from(optimizer, weight, torch.ones(10_000))
        shares.append((weight != 1.5).double().mean().item())
    assert shares[0] == 0.0
    assert abs(shares[1] - 0.1) < 4 * 0.003


def test_scale_and_exponent_follow_their_schedules():
    """They are called with the number of steps taken; the reference is refreshed when due."""
    weight = free_weight(normal(30, dtype=double), "E4M3")
    optimizer = StiffnessWrapper(
        SGD([weight], lr=0.01), anneal(1.0, 0.5, 4), anneal(1.0, 0.0, 4), refresh_every=1
    )
    for t in range(6):
        put_gradients([weight], t)
        old_values = values([weight])[0]
        optimizer.step()
        share = min(t / 4, 1)
        expected = (
            old_values - 0.01 * (1 - share / 2) * ratio(old_values, 1.0, 1 - share) * weight.grad
        )
        assert torch.allclose(weight.detach(), expected, rtol=1e-12, atol=1e-14), t


def test_the_reference_is_kept_between_refreshes():
    weight = free_weight(torch.tensor([1.0, 2.0, 4.0, 8.0], dtype=double), "E4M3")
    optimizer = StiffnessWrapper(SGD([weight], lr=2.0**-6), exponent=1.0, refresh_every=3)
    moved = []
    for t in range(4):
        with torch.no_grad():
            weight.copy_(torch.tensor([1.0, 2.0, 4.0, 8.0], dtype=double) * 2**t)
        weight.grad = torch.ones(4, dtype=double)
        old_values = values([weight])[0]
        optimizer.step()
        moved.append(round(((old_values - weight.detach())[0] * 2**6).item(), 9))
    at_first = 4 / 15
    assert moved == pytest.approx([at_first, 2 * at_first, 4 * at_first, at_first], rel=1e-8)


def test_a_gradient_is_scaled_and_put_back():
    weight = free_weight(normal(3, 20, dtype=double), "E4M3")
    plain = nn.Parameter(values([weight])[0])
    optimizer = StiffnessWrapper(
        SGD([weight], lr=0.1, momentum=0.9), 0.5, 1.0, on="gradient", refresh_every=1
    )
    reference = SGD([plain], lr=0.1, momentum=0.9)
    for t in range(5):
        put_gradients([weight], t)
        gradient = weight.grad
        original = gradient.clone()
        step_from(optimizer, plain, original * 0.5 * ratio(values([weight])[0], 1.0, 1.0))
        reference.step()
        assert weight.grad is gradient, t
        assert torch.equal(weight.grad, original), t
        assert (weight - plain).abs().max() < 1e-13, t


def test_gradients_are_put_back_when_the_optimizer_fails():
    weight = nn.Parameter(torch.ones(3))
    inner = SGD([weight], lr=0.1)
    optimizer = StiffnessWrapper(inner, scale=0.5, on="gradient")
    gradient = weight.grad = torch.ones(3)

    def fail(*_):
        raise RuntimeError("no step")

    inner.register_step_pre_hook(fail)
    with pytest.raises(RuntimeError, match="no step"):
        optimizer.step()
    assert weight.grad is gradient


NORMALISING = ("AdamW", "Adam", "NAdam", "Rprop", "Adadelta", "RMSprop", "Adagrad", "Adafactor")


@pytest.mark.parametrize("inner", [*NORMALISING, "ASGD", "SGD"])
def test_a_factor_on_the_gradient_of_what_normalises_it_warns(inner):
    warned = pytest.warns(UserWarning, match=f"gradient of {inner} cancels")
    with warned if inner in NORMALISING else nullcontext():
        StiffnessWrapper(getattr(torch.optim, inner)([grid_weight()], lr=0.1), on="gradient")


@pytest.mark.parametrize("mode", ["update", "gradient"])
def test_a_closure_is_called_by_the_optimizer(mode):
    """LBFGS calls it several times, and the last gradients are the closure's."""
    weight = nn.Parameter(normal(6))
    optimizer = StiffnessWrapper(
        torch.optim.LBFGS([weight], lr=0.5, max_iter=8), scale=0.9, on=mode
    )
    calls = []

    def closure():
        optimizer.zero_grad()
        loss = (weight - 2.0).square().sum()
        loss.backward()
        calls.append(weight.grad.clone())
        return loss

    first = optimizer.step(closure)
    for _ in range(10):
        optimizer.step(closure)
    assert len(calls) > 11
    assert torch.equal(weight.grad, calls[-1])
    assert first > 1.0
    assert (weight - 2.0).abs().max() < 1e-2


def test_schedulers_groups_and_state_are_the_inner_optimizers():
    weight, later = grid_weight(seed=1), nn.Parameter(torch.ones(2))
    inner = SGD([weight], lr=0.4, momentum=0.9)
    optimizer = StiffnessWrapper(inner)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    put_gradients([weight], 0)
    optimizer.step()
    scheduler.step()
    assert inner.param_groups[0]["lr"] == 0.2
    assert optimizer.state is inner.state
    assert optimizer.param_groups is inner.param_groups
    optimizer.add_param_group({"params": [later]})
    assert len(inner.param_groups) == 2
    assert isinstance(optimizer, torch.optim.Optimizer)


@pytest.mark.parametrize("inner", [SGD, AdamW])
def test_resume_is_exact_mid_schedule(inner):
    def make(p):
        return StiffnessWrapper(
            inner(p, lr=0.02),
            exponent=anneal(1.0, 0.0, 12),
            writeback="stochastic",
            seed=3,
            refresh_every=5,
        )

    weights = [grid_weight("E4M3", (3, 7), ROWS), nn.Parameter(normal(4))]
    optimizer = make(weights)
    for t in range(7):
        put_gradients(weights, t)
        optimizer.step()
    copies = cases.same_parameters(weights)
    resumed = make(copies)
    resumed.load_state_dict(cases.through_disk(optimizer.state_dict()))
    assert cases.frozen(resumed.state_dict()) == cases.frozen(optimizer.state_dict())
    for t in range(7, 14):
        put_gradients(weights, t)
        put_gradients(copies, t)
        optimizer.step()
        resumed.step()
        assert same_bits(values(weights), values(copies)), t


def test_an_optimizer_that_needs_a_closure_says_so():
    model = fm.quantize_model(torch.nn.Linear(4, 2), "E4M3", storage="grid")
    optimizer = StiffnessWrapper(torch.optim.LBFGS(model.parameters(), max_iter=2))

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(1, 4)).square().sum()
        loss.backward()
        return loss

    with pytest.raises(TypeError, match=r"step\(\) needs a closure .*: LBFGS calls it"):
        optimizer.step()
    assert optimizer.steps_taken == 0
    old_weight = model.weight.detach().clone()
    optimizer.step(closure)
    assert optimizer.steps_taken == 1
    assert not torch.equal(model.weight.detach(), old_weight)
