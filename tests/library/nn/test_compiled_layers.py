"""Layers under torch.compile and AOTInductor: one graph, or the reason in one line."""

import copy
from typing import Any

import pytest
import torch
from optimizer_cases import normal
from torch import Tensor, nn

import fp8manifold as fm
from fp8manifold import LayerSpec, OperandSpec

# Dynamo warns as it goes on behind a break.
pytestmark = pytest.mark.filterwarnings("ignore")
#: This torch compiles no layer with quantised activations or products of codes.
OLD = torch.__version__.startswith("2.8.")
X = normal(16, 32, seed=9)

#: options of a layer that no graph holds, and what ``fullgraph=True`` says
REASONS: dict[str, tuple[dict[str, Any], str]] = {
    "gradient": ({"gradient": "E5M2"}, "a format of gradients, which is measured"),
    "global": ({"gradient": OperandSpec("E5M2", scale="global")}, "a format of gradients"),
    "delayed": ({"activation": "E4M3", "policy": "delayed"}, "a delayed scale, which remembers"),
    "static": ({"activation": "E4M3", "policy": "static"}, "a static scale, which the first"),
    "stochastic": ({"activation": "E4M3", "rounding": "stochastic"}, "stochastic rounding, which"),
}
#: options of a layer that one graph holds
WHOLE: dict[str, dict[str, Any]] = {
    "weights": {},
    "activation": {"activation": "E4M3"},
    "products": {"products": "fp8"},
}


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    """No graph of an earlier test, which ``fullgraph=True`` would take with its breaks."""
    torch._dynamo.reset()


def net(options: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    floats = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
    return fm.quantize_model(floats, LayerSpec("E4M3", **options), "codes")


def gradients(model: Any, layers: Any) -> list[Tensor]:
    out = model(X)
    out.square().sum().backward()
    return [out.detach(), *(p.grad for p in layers.parameters())]


@pytest.mark.parametrize("name", REASONS)
def test_fullgraph_says_why_there_is_none(name: str) -> None:
    options, reason = REASONS[name]
    compiled = torch.compile(net(options), fullgraph=True, backend="eager")
    with pytest.raises(RuntimeError) as raised:
        compiled(X)
    if OLD and "activation" in options:
        reason = "torch 2.8 has no graph of a quantised layer"
    assert reason in str(raised.value)
    assert "leave fullgraph=True out, or take policy='dynamic'" in str(raised.value)


def assert_equal(tensors: list[Tensor], expected: list[Tensor]) -> None:
    assert len(tensors) == len(expected)
    assert all(map(torch.equal, tensors, expected))


@pytest.mark.parametrize("name", REASONS)
def test_without_fullgraph_they_compute_the_same(name: str) -> None:
    layers = net(REASONS[name][0])
    twin = copy.deepcopy(layers)
    compiled = torch.compile(layers, backend="eager")
    assert_equal(gradients(compiled, layers), gradients(twin, twin))


@pytest.mark.parametrize("name", WHOLE)
def test_other_layers_are_one_graph(name: str) -> None:
    layers = net(WHOLE[name])
    twin = copy.deepcopy(layers)
    compiled = torch.compile(layers, fullgraph=True, backend="eager")
    if OLD and name != "weights":
        with pytest.raises(RuntimeError, match=r"torch 2\.8 has no graph of a quantised layer"):
            compiled(X)
        return
    assert_equal(gradients(compiled, layers), gradients(twin, twin))


@pytest.mark.slow
def test_aotinductor_takes_frozen_weights(cpp_compiler: None, tmp_path: Any) -> None:
    model = net({}).requires_grad_(False)
    program = torch.export.export(model, (X,))
    package = torch._inductor.aoti_compile_and_package(
        program, package_path=str(tmp_path / "model.pt2")
    )
    loaded = torch._inductor.aoti_load_package(package)
    torch.testing.assert_close(loaded(X), model(X))
