"""On a card, the bits of the CPU, its products from codes, and few launches.

They are skipped where there is none.
"""

import importlib
import sys
from pathlib import Path

import pytest
import torch
from test_triton_interpreted import LIBRARY_TESTS, SESSIONS, run
from torch import nn

import fp8manifold as fm
from fp8manifold.nn._products import why_no_units

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
FOLDER = Path(__file__).parents[2] / "benchmarks"
CARD = torch.device("cuda")


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module("gpu")
    for name in [
        name for name in sys.modules if name.partition(".")[0] in ("gpu", "_gpu", "_record")
    ]:
        sys.modules.pop(name)


@pytest.mark.parametrize("part", ["exact_steps", "exact_arrays", "exact_products"])
def test_every_bit_is_the_cpus(part, gpu, tmp_path):
    result = gpu.run_parts(
        gpu.Session(False), gpu.parts_to_measure([part], {}), tmp_path / "gpu.json"
    )
    assert gpu.failures(result) == []
    assert result["parts"][part]["figures"]


def test_a_steady_step_is_a_few_launches_and_no_wait(gpu):
    """But for events of the step before."""
    counted = gpu.launches(gpu.Session(False))
    assert counted["launches"] <= 12
    assert counted["waits"] == 0


@pytest.mark.parametrize("file", SESSIONS)
def test_kernels_have_the_bits_of_native_code(file):
    """Every case of the interpreter's, by kernels that were compiled for the card."""
    selection, counted, least = SESSIONS[file]
    code, output, counts = run(str(LIBRARY_TESTS / file), "-k", selection, interpreted=False)
    assert code == 0, output[-3000:]
    assert counts[counted] > least


UNITS = {"E4M3": "fp8", "E5M2": "fp8", "E1M6": "int8"}
CASES = [("E4M3", "bfloat16"), ("E4M3", "fp8"), ("E5M2", "fp8"), ("E1M6", "bfloat16")]


def passes(net, x, g):
    x = x.detach().requires_grad_()
    net.weight.grad = None
    y = net(x)
    y.backward(g)
    return [tensor.detach().cpu().float() for tensor in (y, x.grad, net.weight.grad)]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [(16, 64, 32), (256, 768, 3072), (1024, 4096, 1024)])
@pytest.mark.parametrize(("fmt", "gradient"), CASES)
def test_products_are_the_emulations(fmt, gradient, size, dtype, compiled):
    """FP8 within what its units leave out of a sum, INT8 to the bit."""
    reason = why_no_units(UNITS[fmt], CARD)
    if reason:
        pytest.skip(reason)
    rows, length, width = size
    torch.manual_seed(0)
    spec = fm.LayerSpec(fmt, products=UNITS[fmt], gradient_products=gradient)
    net = fm.quantize_model(nn.Linear(length, width, bias=False).to(dtype), spec, storage="codes")
    x, g = torch.randn(rows, length).to(dtype), torch.randn(rows, width).mul(1e-3).to(dtype)
    expected = passes(net, x, g)
    net.to(CARD)
    outcome = passes(torch.compile(net) if compiled else net, x.to(CARD), g.to(CARD))
    w, x, g = net.weight.dequantize().cpu().float().abs(), x.float().abs(), g.float().abs()
    for name, one, other, sums in zip(
        ["y", "dx", "dw"], outcome, expected, (x @ w.t(), g @ w, g.t() @ x), strict=True
    ):
        if UNITS[fmt] == "int8" and name != "dw":
            assert torch.equal(one, other), name
        else:
            ulp = (
                2.0**-7 * torch.maximum(one.abs(), other.abs()) if dtype is torch.bfloat16 else 0.0
            )
            assert ((one - other).abs() <= ulp + 2.0**-11 * sums).all(), name
