"""Steps of single parameters, as image trainers take them in hooks of their own."""

import pytest
import torch
from torch import nn

import fp8manifold as fm
from fp8manifold import optim

X = torch.linspace(-1, 1, 32).reshape(4, 8)
MAKERS = {
    "adamw": lambda m: optim.StiffnessAdamW(m.parameters(), 1e-2),
    "8bit": lambda m: optim.StiffnessAdamW(m.parameters(), 1e-2, moments="8bit"),
    "lion": lambda m: optim.StiffnessLion(m.parameters(), 1e-3),
    "muon": lambda m: optim.StiffnessMuon.for_model(m, 1e-2),
    "riemannian": lambda m: optim.RiemannianAdam(m.parameters(), 0.5, float_lr=1e-3),
}
makers = pytest.mark.parametrize("kind", MAKERS)


def network():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    return fm.quantize_model(model, "E4M3")


def loss(model, sign=1.0):
    return model(sign * X).square().mean()


def step_in_hooks(optimizer):
    """Step each parameter once it has its gradient, as a trainer does."""
    for group in optimizer.param_groups:
        for index, parameter in enumerate(group["params"]):

            def hook(tensor, group=group, index=index):
                optimizer.step_parameter(tensor, group, index)
                tensor.grad = None

            parameter.register_post_accumulate_grad_hook(hook)


def values(model):
    return [p.dequantize() if isinstance(p, fm.FP8Tensor) else p for p in model.parameters()]


@makers
def test_steps_are_those_of_step(kind):
    fused, plain = network(), network()
    optimizer, reference = MAKERS[kind](fused), MAKERS[kind](plain)
    assert optimizer.supports_fused_back_pass is True
    step_in_hooks(optimizer)
    begin = [x.clone() for x in values(fused)]
    for sign in (1.0, -1.0, 1.0):
        loss(fused, sign).backward()
        # a trainer may call it; nothing is left to step
        optimizer.step()
        loss(plain, sign).backward()
        reference.step()
        reference.zero_grad()
    assert all(map(torch.equal, values(fused), values(plain)))
    assert not any(map(torch.equal, values(fused), begin))


def test_a_pass_whose_gradients_are_not_finite_counts_once():
    model = network()
    optimizer = MAKERS["adamw"](model)
    step_in_hooks(optimizer)
    before = values(model)
    for passes in (1, 2):
        with pytest.warns(RuntimeWarning, match="is not finite: its step was skipped"):
            (loss(model) * float("nan")).backward()
        assert optimizer.skipped_steps == passes
    assert all(map(torch.equal, values(model), before))


def test_a_parameter_without_a_gradient_stays():
    model = network()
    optimizer = MAKERS["adamw"](model)
    before = values(model)
    optimizer.step_parameter(model[0].weight, optimizer.param_groups[0], 0)
    assert torch.equal(values(model)[0], before[0])


def two_handles():
    model = network()
    optimizer = MAKERS["adamw"](model)
    return model, optimizer, optim.step_in_backward(optimizer)


class Together(optim.StiffnessAdamW):
    steps_alone = False


def together():
    model = network()
    return model, Together(model.parameters(), 1e-2), None


def replaced():
    model = network()
    optimizer = MAKERS["adamw"](model)
    weight = model[0].weight
    fm.dequantize_model(model)
    return nn.ParameterList([weight]), optimizer, None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (two_handles, "step_in_backward steps already"),
        (together, "steps parameters together"),
        (replaced, "replaced '0.weight'"),
    ],
)
def test_what_would_be_wrong_is_refused(make, message):
    model, optimizer, _handle = make()
    parameter = next(model.parameters())
    with pytest.raises(RuntimeError, match=message):
        optimizer.step_parameter(parameter, optimizer.param_groups[0], 0)


def test_several_processes_are_refused(monkeypatch):
    model = network()
    optimizer = MAKERS["adamw"](model)
    monkeypatch.setattr("fp8manifold.optim._optimizer.is_distributed", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(RuntimeError, match="for one process, and here are 2"):
        optimizer.step_parameter(model[0].weight, optimizer.param_groups[0], 0)
