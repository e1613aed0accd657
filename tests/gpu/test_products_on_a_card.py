"""Products straight from codes on a card beside their emulation on the CPU; skipped where there are no units."""

import pytest
import torch
from torch import nn

import fp8manifold as fm
from fp8manifold.nn._products import why_no_units

CARD = torch.device("cuda")
CASES = [("E4M3", "bfloat16"), ("E4M3", "fp8"), ("E5M2", "fp8"), ("E1M6", "bfloat16")]
UNITS = {"E4M3": "fp8", "E5M2": "fp8", "E1M6": "int8"}


def passes(net, x, g):
    x = x.detach().requires_grad_()
    net.weight.grad = None
    y = net(x)
    y.backward(g)
    return [each.detach().cpu().float() for each in (y, x.grad, net.weight.grad)]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [(16, 64, 32), (256, 768, 3072), (1024, 4096, 1024)])
@pytest.mark.parametrize(("fmt", "gradient"), CASES)
def test_products_are_the_emulations(fmt, gradient, size, dtype, compiled):
    """FP8 within what its units leave out of a sum, INT8 to the bit."""
    if not torch.cuda.is_available() or (why := why_no_units(UNITS[fmt], CARD)):
        pytest.skip("there is no GPU" if not torch.cuda.is_available() else why)
    rows, length, width = size
    torch.manual_seed(0)
    spec = fm.LayerSpec(fmt, products=UNITS[fmt], gradient_products=gradient)
    net = fm.quantize_model(nn.Linear(length, width, bias=False).to(dtype), spec, storage="fp8")
    x, g = torch.randn(rows, length).to(dtype), torch.randn(rows, width).mul(1e-3).to(dtype)
    expected = passes(net, x, g)
    net.to(CARD)
    found = passes(torch.compile(net) if compiled else net, x.to(CARD), g.to(CARD))
    w, x, g = net.weight.dequantize().cpu().float().abs(), x.float().abs(), g.float().abs()
    for name, one, other, sums in zip(["y", "dx", "dw"], found, expected, (x @ w.t(), g @ w, g.t() @ x), strict=True):
        if UNITS[fmt] == "int8" and name != "dw":
            assert torch.equal(one, other), name
        else:
            ulp = 2.0**-7 * torch.maximum(one.abs(), other.abs()) if dtype is torch.bfloat16 else 0.0
            assert ((one - other).abs() <= ulp + 2.0**-11 * sums).all(), name
