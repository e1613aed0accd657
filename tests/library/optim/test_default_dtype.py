"""Native steps do not depend on torch's default dtype and device."""

from contextlib import contextmanager, nullcontext

import pytest
import torch
from paths import PATHS, on_path

import fp8manifold as fm
from fp8manifold._native import _arrays

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


#: one has so many weights that codes are counted, and doubles scales
SHAPES = ((24, 40), (48, 72), (16, 512))


def parameters():
    return [
        fm.FP8Parameter(normal(*SHAPES[0], seed=1), "E4M3", seed=0),
        torch.nn.Parameter(normal(*SHAPES[1], seed=2)),
        fm.FP8Parameter(normal(*SHAPES[2], seed=3), "E2M5", seed=1),
    ]


def stepped(kind, params, gradients, path):
    optimizer = on_path(path, OPTIMIZERS[kind](params))
    for step in range(4):
        for parameter, gradient in zip(params, gradients[step], strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    return optimizer, [params[0].codes.clone(), params[1].detach().clone(), params[2].codes.clone()]


@contextmanager
def other_default(change):
    """Change torch's default dtype or device for a while."""
    try:
        if change == "dtype":
            torch.set_default_dtype(torch.bfloat16)
        else:
            torch.set_default_device("meta")
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("change", ["dtype", "device"])
def test_steps_are_the_same_under_other_defaults(kind, change, path, monkeypatch):
    gradients = []
    for step in range(4):
        gradients.append([normal(*shape, seed=9 + 90 * i + step) for i, shape in enumerate(SHAPES)])
    if path == "eager":
        monkeypatch.setattr(_arrays, "library", lambda: None)
    first, expected = stepped(kind, parameters(), gradients, path)
    params = parameters()
    with other_default(change):
        optimizer, ends = stepped(kind, params, gradients, path)
        # a state that was made under this default is loaded under it, and without it
        OPTIMIZERS[kind](params).load_state_dict(optimizer.state_dict())
    OPTIMIZERS[kind](params).load_state_dict(optimizer.state_dict())
    for end, expected_end in zip(ends, expected, strict=True):
        assert torch.equal(end, expected_end)
    assert optimizer.widened_scales == first.widened_scales
    if kind == "riemannian":
        assert optimizer.widened_scales > 0
    for entry in optimizer.state.values():
        for value in entry.values():
            assert not isinstance(value, torch.Tensor) or value.device.type == "cpu"


def test_a_step_in_the_backward_pass_is_the_same_under_another_default_device():
    ends = []
    for change in ("none", "device"):
        model = torch.nn.Sequential(torch.nn.Linear(40, 24), torch.nn.Linear(24, 8))
        with torch.no_grad():
            for i, parameter in enumerate(model.parameters()):
                parameter.copy_(normal(*parameter.shape, seed=i))
        fm.quantize_model(model, "E4M3")
        optimizer = fm.optim.StiffnessAdamW(model.parameters(), lr=0.1)
        fm.optim.step_in_backward(optimizer, clip="previous", max_norm=0.1, first="measure")
        x = normal(5, 40, seed=7)
        with other_default(change) if change == "device" else nullcontext():
            for _ in range(4):
                model(x).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        ends.append([layer.weight.codes.clone() for layer in model])
    assert all(map(torch.equal, *ends))


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
