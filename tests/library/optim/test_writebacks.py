"""Write-backs: at the ends of the range, in states of earlier releases, and errors that the momentum makes up for."""

import pytest
import torch
from optimizer_cases import normal, step_from

import fp8manifold as fm
from fp8manifold import optim
from fp8manifold.optim import WRITEBACKS, StiffnessAdamW, StiffnessSGD

double = torch.float64


def move(kind, p, options, gradient):
    optimizer = getattr(optim, kind)([p], **options)
    step_from(optimizer, p, gradient)
    return optimizer


def test_what_is_out_of_range_saturates_and_comes_back():
    for writeback in WRITEBACKS:
        p = fm.FP8Parameter(torch.tensor([400.0, -400.0, 1.0]), "E4M3", scale=1.0)
        options = {"lr": 1.0, "momentum": 0.5, "stiffness": 0.0, "writeback": writeback, "refresh_every": 10**6}
        optimizer = move("StiffnessSGD", p, options, torch.tensor([-1e9, 1e9, 0.0]))
        assert p.tolist() == [448.0, -448.0, 1.0]
        residual = optimizer.state[p].get("residual", torch.zeros(3))
        assert (residual * torch.tensor([1, -1, 0]) <= 0).all()  # nothing beyond the ends
        optimizer.state[p]["momentum_buffer"].zero_()
        step_from(optimizer, p, torch.tensor([64.0, -64.0, 0.0]))
        assert p.tolist() == [384.0, -384.0, 1.0]


@pytest.mark.parametrize("bits", [4, 2])
def test_a_residual_of_several_weights_a_byte_is_refused(bits):
    """As earlier releases kept them, in a state that is loaded and in one that somebody has put there."""
    p = fm.FP8Parameter(torch.ones(3, 5), "E4M3")
    optimizer = move("StiffnessAdamW", p, {"writeback": "residual8"}, torch.ones(3, 5))
    state, codes = optimizer.state_dict(), p.codes.clone()
    state["state"][0] = state["state"][0] | {"residual": torch.zeros(15 * bits // 8 + 1, dtype=torch.uint8)}
    state["param_groups"][0]["writeback"] = f"residual{bits}"
    message = r"residual in torch\.uint8: residuals of 4 and 2 bits can't be read any more; writeback='residual8' has"
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(state)
    optimizer.state[p]["residual"] = state["state"][0]["residual"]
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    assert torch.equal(p.codes, codes)
    with pytest.raises(ValueError, match=f"writeback='residual{bits}'.*residual8"):
        StiffnessAdamW([p], writeback=f"residual{bits}")


FIXED = {"k = 0": {"stiffness": 0.0}, "dampening": {"stiffness": 0.0, "dampening": 0.5}}


@pytest.mark.parametrize("options", FIXED.values(), ids=FIXED)
def test_weight_and_momentum_together_move_as_if_nothing_were_rounded(options):
    """Over 200 steps with given gradients: codes of E4M3 against float64, to the rounding of float32."""
    lr, beta = 0.01, 0.9
    w = normal(40, 25, seed=1)
    p = fm.FP8Parameter(w, "E4M3")
    exact, m = p.dequantize().double(), torch.zeros(40, 25, dtype=double)
    optimizer = StiffnessSGD([p], lr=lr, momentum=beta, writeback="momentum", **options)
    for t in range(200):
        g = normal(40, 25, seed=10 + t)
        step_from(optimizer, p, g)
        m = beta * m + g.double() * (1.0 if t == 0 else 1 - options.get("dampening", 0.0))
        exact = exact - lr * m
        ours = p.dequantize().double() - lr * beta / (1 - beta) * optimizer.state[p]["momentum_buffer"].double()
        torch.testing.assert_close(ours, exact - lr * beta / (1 - beta) * m, rtol=0, atol=2e-5)
    assert (p.dequantize().double() - exact).abs().max() > 0.01
