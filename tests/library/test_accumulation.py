"""Gradients of several backward passes, summed up while they are freed: in bfloat16, or in Muon's momentum."""

import copy
import math
from typing import Any

import pytest
import torch
from in_backward_cases import OPTIMIZERS, everything, network, train
from torch import Tensor, nn

import fp8manifold as fm
from fp8manifold import optim
from fp8manifold.optim._in_backward.gradients import FOR_SUMS, GradientSum
from fp8manifold.optim._state import twins
from fp8manifold.optim._writeback import to_half
from fp8manifold.random_bits import Stream, draw_range, mixed_word

BATCHES = [torch.arange(10), torch.arange(5, 10), torch.arange(3)]


def loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(tokens).square().mean() / len(BATCHES)


def pass_all(model: nn.Module, optimizer: Any, steps: int = 1) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        for tokens in BATCHES:
            loss(model, tokens).backward()
        optimizer.step()


def eager(optimizer: Any) -> Any:
    for group in optimizer.param_groups:
        group["compile"] = False
    return optimizer


def rounded_sums(model: nn.Module, optimizer: Any) -> dict[Tensor, Tensor]:
    """The readable definition: each gradient added to the sum before, which is rounded with draws of its own."""
    sums: dict[Tensor, Tensor] = {}
    streams = {p: state["stream"] for p, state in optimizer.state.items()}
    for count, tokens in enumerate(BATCHES):
        parameters = [p for p in model.parameters() if p.requires_grad]
        for p, gradient in zip(parameters, torch.autograd.grad(loss(model, tokens), parameters), strict=True):
            step = int(optimizer.state[p]["step"]) + 1
            draws = draw_range(0, p.numel(), Stream((0, step, streams[p], FOR_SUMS, count)), p.device).view(p.shape)
            wide = gradient.float() + sums.get(p, torch.zeros(())).float()
            sums[p] = to_half(wide, torch.bfloat16, draws)
    return sums


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("storage", ["fp8", None])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_sums_are_the_gradients_of_an_ordinary_step(name: str, storage: str | None, clips: bool) -> None:
    plain, model = network(storage), network(storage)
    ordinary, optimizer = eager(OPTIMIZERS[name](plain)), eager(OPTIMIZERS[name](model))
    train(plain, ordinary, 1)
    train(model, optimizer, 1)
    optimizer.zero_grad()
    optim.step_in_backward(optimizer, accumulate="bfloat16")
    for _ in range(2):
        sums = rounded_sums(plain, ordinary)
        for p, held in sums.items():
            p.grad = held.to(p.dtype)
        optimizer.zero_grad()
        for tokens in BATCHES:
            loss(model, tokens).backward()
        gradients = [p.grad for p in model.parameters()]
        assert all(isinstance(g, GradientSum) and g.held.dtype is torch.bfloat16 for g in gradients)
        assert all(map(torch.equal, [g.float() for g in gradients if g is not None], map(Tensor.float, sums.values())))
        if clips:
            norms = [nn.utils.clip_grad_norm_(each.parameters(), 1e-3) for each in (plain, model)]
            assert torch.equal(*norms)
        ordinary.step()
        optimizer.step()
        assert repr(model[1].weight.grad).startswith("SpentGradient")
    assert everything(model, optimizer) == everything(plain, ordinary)


def test_sums_are_right_on_average() -> None:
    """A gradient far below the spacing of the sum moves it as often as it should."""
    weight = nn.Parameter(torch.zeros(4000))
    optimizer = optim.StiffnessAdamW([weight])
    optim.step_in_backward(optimizer, accumulate="bfloat16")
    weight.sum().backward()
    for _ in range(8):
        (weight * 2.0**-10).sum().backward()
    assert isinstance(weight.grad, GradientSum)
    assert abs(float(weight.grad.float().mean()) - (1 + 2.0**-7)) < 4 * 2.0**-7 * 0.33 / math.sqrt(4000)
    assert set(weight.grad.held.tolist()) <= {1 + k * 2.0**-7 for k in range(9)}


def test_draws_before_the_first_step_are_those_of_the_stream_to_come() -> None:
    model = network("fp8")
    optimizer = OPTIMIZERS["adamw"](model)
    optim.step_in_backward(optimizer, accumulate="bfloat16")
    loss(model, BATCHES[0]).backward()
    words = {p: p.grad.words for p in model.parameters() if isinstance(p.grad, GradientSum)}
    assert not optimizer.state
    optimizer.step()
    assert {p: (0, 1, state["stream"]) for p, state in optimizer.state.items()} == words
    assert len(set(words.values())) == len(words) == len(twins(model.parameters()))


def test_zero_grad_drops_a_sum_and_a_state_is_saved_without_it() -> None:
    model, other = network("fp8"), network("fp8")
    optimizers = [OPTIMIZERS["adamw"](each) for each in (model, other)]
    for optimizer in optimizers:
        optim.step_in_backward(optimizer, accumulate="bfloat16")
    loss(model, BATCHES[1]).backward()
    saved = optimizers[0].state_dict()  # as without step_in_backward: gradients are no part of it
    assert not saved["state"]
    for each, optimizer in zip((model, other), optimizers, strict=True):
        pass_all(each, optimizer)
    assert everything(model, optimizers[0]) == everything(other, optimizers[1])
    optimizers[0].zero_grad()
    loss(model, BATCHES[1]).backward()
    optimizers[0].zero_grad(set_to_none=False)
    assert all(not p.grad.any() for p in model.parameters() if p.grad is not None)


def test_a_sum_that_is_not_finite_leaves_out_all_steps() -> None:
    model = network("fp8")
    optimizer = OPTIMIZERS["muon"](model)
    optim.step_in_backward(optimizer, accumulate="bfloat16")
    before = everything(model, optimizer)
    hook = model[3].weight.register_hook(lambda g: g * math.nan)
    optimizer.warn_after = 1
    with pytest.warns(RuntimeWarning, match=r"has left out 1 steps in a row.*'3.weight'"):
        pass_all(model, optimizer)
    assert (optimizer.skipped_steps, optimizer.skipped_in_row) == (1, 1)
    hook.remove()
    optimizer.skipped_steps = optimizer.skipped_in_row = 0
    assert everything(model, optimizer) == before
    pass_all(model, optimizer)
    assert optimizer.skipped_in_row == 0
    assert {int(state["step"]) for state in optimizer.state.values()} == {1}


def test_what_a_sum_cannot_do_is_refused() -> None:
    model = network("fp8")
    optimizer = OPTIMIZERS["adamw"](model)
    optim.step_in_backward(optimizer, accumulate="bfloat16")
    loss(model, BATCHES[0]).backward()
    gradient = model[1].weight.grad
    assert repr(gradient) == "GradientSum(shape=(16, 16), dtype=torch.float32)"
    assert float(gradient.norm()) > 0
    with pytest.raises(RuntimeError, match="sum in bfloat16"):
        gradient.clamp_(-1, 1)
    with pytest.raises(RuntimeError, match="sum in bfloat16"):
        gradient.mul_(torch.ones(16))
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    with pytest.raises(RuntimeError, match="scaled already, and another gradient comes: clip after the last"):
        loss(model, BATCHES[0]).backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="used and freed"):
        loss(model, BATCHES[0]).backward()


# ----------------------------------------------------------------------------------------------------------- momentum
def muon(model: nn.Module, **options: Any) -> Any:
    return optim.StiffnessMuon.for_model(model, 1e-2, **{"nesterov": False, **options})


@pytest.mark.parametrize("storage", ["fp8", None])
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("writeback", ["stochastic", "residual8", "residual4", "momentum"])
def test_a_momentum_takes_in_gradients_one_by_one(writeback: str, maximize: bool, storage: str | None) -> None:
    """Exactly but for the order of additions in float32, in which the sum of the gradients is not added at once."""
    plain, model = network(storage), network(storage)
    options: dict[str, Any] = {"writeback": writeback, "maximize": maximize, "ns_dtype": torch.float64}
    ordinary, optimizer = muon(plain, **options), muon(model, **options)
    optim.step_in_backward(optimizer, accumulate="momentum")
    for step in range(3):
        pass_all(plain, ordinary)
        pass_all(model, optimizer)
        for (name, one), (_, other) in zip(plain.named_parameters(), model.named_parameters(), strict=True):
            if "momentum_buffer" not in optimizer.state[other]:
                continue
            mine, its = (by.state[p]["momentum_buffer"] for by, p in ((ordinary, one), (optimizer, other)))
            if writeback != "momentum" or storage is None:  # which adds what the last rounding took
                torch.testing.assert_close(its, mine, rtol=2e-5, atol=1e-7, msg=f"{name} in step {step}")
            assert int(optimizer.state[other]["step"]) == step + 1
            assert "micro_batches" not in optimizer.state[other]
        for p, q in zip(plain.parameters(), model.parameters(), strict=True):  # from one start again
            with torch.no_grad():
                q.copy_(p.detach())
        model.load_state_dict(plain.state_dict())
        optimizer.load_state_dict(copy.deepcopy(ordinary.state_dict()))


def test_one_gradient_in_float32_is_an_ordinary_step_to_the_bit() -> None:
    plain, ordinary, model, optimizer = after_one_pass()
    ordinary.step()
    optimizer.step()
    for name in ("1.weight", "3.weight"):
        assert torch.equal(plain.get_parameter(name).detach(), model.get_parameter(name).detach())


def after_one_pass() -> tuple[Any, Any, Any, Any]:
    """A model and its Muon, and the same with gradients taken into the momentum, after the same backward pass."""
    plain, model = network("fp8"), network("fp8")
    ordinary, optimizer = muon(plain), muon(model)
    optim.step_in_backward(optimizer, accumulate="momentum")
    for each, by in ((plain, ordinary), (model, optimizer)):
        by.zero_grad()
        loss(each, BATCHES[0]).backward()
    return plain, ordinary, model, optimizer


def averages(optimizer: Any, weight: Tensor) -> dict[str, Tensor]:
    return {
        name: x.clone() for name, x in optimizer.state[weight].items() if name in ("momentum_buffer", "avg_largest")
    }


def averaged(before: dict[str, Tensor], gradient: Tensor, stream: int, beta: float, moments: str) -> dict[str, Tensor]:
    """A momentum after one more gradient, as a step of float weights at rate 0 has it, at the same step of a stream."""
    weight = nn.Parameter(torch.zeros_like(gradient))
    optimizer: Any = optim.StiffnessMuon([weight], 0.0, nesterov=False, moments=moments)
    weight.grad = torch.zeros_like(gradient)
    optimizer.step()
    state, numbers = optimizer.state[weight], optimizer._numbers
    state |= before | {"step": torch.tensor(0.0), "stream": stream}
    optimizer._numbers = lambda *parts: numbers(*parts) | {"beta1": beta, "gain1": 1 - 0.95}
    weight.grad = gradient
    optimizer.step()
    return averages(optimizer, weight)


@pytest.mark.parametrize("moments", ["bfloat16", "8bit"])
def test_a_momentum_in_fewer_bits_is_rounded_once_a_gradient(moments: str) -> None:
    """With draws of its own each time; the step then leaves the momentum as it is."""
    weight = fm.FP8Parameter(torch.randn(32, 32, generator=torch.Generator().manual_seed(0)), "E4M3", seed=1)
    optimizer = optim.StiffnessMuon([weight], 0.1, nesterov=False, moments=moments)
    optim.step_in_backward(optimizer, accumulate="momentum")
    kept: dict[str, Tensor] = {}
    for i in range(3):
        gradient = torch.randn(32, 32, generator=torch.Generator().manual_seed(1 + i))
        (weight * gradient).sum().backward()
        state = optimizer.state[weight]
        stream = mixed_word(state["stream"], i) if i else state["stream"]
        kept = averaged(kept, gradient, stream, 1.0 if i else 0.95, moments)
        assert same(averages(optimizer, weight), kept)
        assert state["micro_batches"] == i + 1
    codes = weight.codes.clone()
    optimizer.step()
    assert same(averages(optimizer, weight), kept)
    assert not torch.equal(weight.codes, codes)
    assert int(optimizer.state[weight]["step"]) == 1


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(x, other[name]) for name, x in one.items())


def test_a_pass_without_a_parameter_and_fewer_passes_than_usual_are_steps_too() -> None:
    """Nothing counts the passes: what came until ``step()`` is the step."""
    plain, ordinary, model, optimizer = after_one_pass()
    for each, by in ((plain, ordinary), (model, optimizer)):
        each[5].weight.square().sum().backward()
        by.step()
    for name in ("1.weight", "3.weight", "5.weight"):
        mine, its = (by.state[each.get_parameter(name)] for by, each in ((ordinary, plain), (optimizer, model)))
        torch.testing.assert_close(its["momentum_buffer"], mine["momentum_buffer"])


def test_resets_and_refreshes_happen_once_a_step() -> None:
    plain, model = network("fp8"), network("fp8")
    options: dict[str, Any] = {"reset_every": 2, "stabilize_every": 1, "refresh_every": 1, "stiffness": 1.0}
    ordinary, optimizer = muon(plain, **options), muon(model, **options)
    optim.step_in_backward(optimizer, accumulate="momentum")
    pass_all(plain, ordinary, 2)
    pass_all(model, optimizer, 2)
    model.load_state_dict(plain.state_dict())
    optimizer.load_state_dict(copy.deepcopy(ordinary.state_dict()))
    pass_all(plain, ordinary)
    pass_all(model, optimizer)
    for name in ("1.weight", "3.weight"):
        mine, its = (by.state[each.get_parameter(name)] for by, each in ((ordinary, plain), (optimizer, model)))
        assert its["since"] == mine["since"] == 2
        torch.testing.assert_close(its["momentum_buffer"], mine["momentum_buffer"])


def test_a_half_taken_step_is_neither_saved_nor_dropped() -> None:
    model = network("fp8")
    optimizer = muon(model)
    optim.step_in_backward(optimizer, accumulate="momentum")
    start = copy.deepcopy(optimizer.state_dict())
    loss(model, BATCHES[0]).backward()
    assert optimizer.state[model[1].weight]["micro_batches"] == 1
    with pytest.raises(RuntimeError, match=r"a step is under way: .* save the state after it"):
        optimizer.state_dict()
    with pytest.raises(RuntimeError, match="used and freed"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"zero_grad\(\) was called before the step, .* in the momentum already"):
        loss(model, BATCHES[0]).backward()
    optimizer.load_state_dict(start)  # which drops it all
    optimizer.zero_grad()
    assert everything(model, optimizer) == everything(network("fp8"), muon(network("fp8")))


def test_a_gradient_that_is_not_finite_is_left_out_of_its_momentum() -> None:
    plain, ordinary, model, optimizer = after_one_pass()
    hook = model[3].weight.register_hook(lambda g: g * math.inf)
    with pytest.warns(RuntimeWarning, match=r"'3.weight'.* is not finite in one of the backward passes"):
        (loss(model, BATCHES[1]) * 0 + model[3].weight.sum()).backward()
    hook.remove()
    ordinary.step()
    optimizer.step()
    assert optimizer.skipped_steps == 1
    assert torch.equal(
        optimizer.state[model[3].weight]["momentum_buffer"], ordinary.state[plain[3].weight]["momentum_buffer"]
    )


def test_adams_parameters_are_summed_up_beside_a_momentum() -> None:
    model = network("fp8")
    optimizer = muon(model)
    optim.step_in_backward(optimizer, accumulate="momentum")
    loss(model, BATCHES[0]).backward()
    kinds = {name: type(p.grad).__name__ for name, p in model.named_parameters()}
    assert kinds == {
        name: "SpentGradient" if name in ("1.weight", "3.weight", "5.weight") else "GradientSum" for name in kinds
    }
    optimizer.step()
    assert {int(state["step"]) for state in optimizer.state.values()} == {1}


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda m: optim.StiffnessAdamW(m.parameters()), "StiffnessAdamW has none here, .* give accumulate='bfloat16'"),
        (lambda m: optim.StiffnessSGD(m.parameters(), 0.1), "StiffnessSGD has none here"),
        (lambda m: muon(m, nesterov=True), "does not go with nesterov=True: .* give nesterov=False .*'bfloat16'"),
        (lambda m: muon(m, momentum=0.0), "does not go with momentum=0: "),
        (lambda m: muon(m, others=["*"]), "StiffnessMuon has none here"),
    ],
)
def test_what_no_momentum_can_take_in_is_refused(make: Any, match: str) -> None:
    optimizer = make(network("fp8"))
    with pytest.raises(ValueError, match=match):
        optim.step_in_backward(optimizer, accumulate="momentum")
    with pytest.raises(ValueError, match=r"accumulate='momentun' is unknown: .* did you mean 'momentum'"):
        optim.step_in_backward(optimizer, accumulate="momentun")
    optim.step_in_backward(optimizer, accumulate="bfloat16")
