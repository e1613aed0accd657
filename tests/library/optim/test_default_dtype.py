"""Native steps do not depend on torch's default dtype and device."""

import pytest
import torch

import fp8manifold as fm

OPTIMIZERS = {
    "adafactor": lambda p: fm.optim.StiffnessAdafactor(p, lr=0.1),
    "adafactor-momentum": lambda p: fm.optim.StiffnessAdafactor(p, momentum=0.9, moments="8bit"),
    "muon": lambda p: fm.optim.StiffnessMuon(p, lr=0.1),
    "muon-8bit": lambda p: fm.optim.StiffnessMuon(p, lr=0.1, moments="8bit"),
    "adamw": lambda p: fm.optim.StiffnessAdamW(p, lr=0.1, moments="8bit"),
    "riemannian": lambda p: fm.optim.RiemannianAdam(p, lr=1.0, float_lr=1e-3),
}


def normal(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def parameters():
    return [
        fm.FP8Parameter(normal(24, 40, seed=1), "E4M3", seed=0),
        torch.nn.Parameter(normal(48, 72, seed=2)),
    ]


def stepped(kind, params, gradients):
    optimizer = OPTIMIZERS[kind](params)
    for step in range(4):
        for parameter, gradient in zip(params, gradients[step], strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    return [params[0].codes.clone(), params[1].detach().clone()]


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("change", ["dtype", "device"])
def test_steps_are_the_same_under_other_defaults(kind, change):
    gradients = [[normal(24, 40, seed=9 + t), normal(48, 72, seed=90 + t)] for t in range(4)]
    expected = stepped(kind, parameters(), gradients)
    params = parameters()
    try:
        if change == "dtype":
            torch.set_default_dtype(torch.bfloat16)
        else:
            torch.set_default_device("meta")
        ends = stepped(kind, params, gradients)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    for end, expected_end in zip(ends, expected, strict=True):
        assert torch.equal(end, expected_end)


def test_half_of_adafactors_state_is_refused():
    weight = torch.nn.Parameter(normal(8, 12, seed=1))
    optimizer = fm.optim.StiffnessAdafactor([weight])
    weight.grad = normal(8, 12, seed=2)
    optimizer.step()
    state = optimizer.state_dict()
    del state["state"][0]["col_var"]
    with pytest.raises(ValueError, match="lacks col_var, and has row_var: both are needed"):
        fm.optim.StiffnessAdafactor([weight]).load_state_dict(state)


def test_an_error_can_not_be_divided_by_a_size_of_zero():
    weight = fm.FP8Parameter(torch.zeros(8, 8), "E4M3")
    with pytest.raises(ValueError, match=r"^writeback='momentum' needs eps\[1\] > 0"):
        fm.optim.StiffnessAdafactor([weight], momentum=0.9, writeback="momentum", eps=(None, 0.0))
