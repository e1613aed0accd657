"""Weights made anew or loaded from floats: at a scale that suits them, whatever the one before was, or was not."""

from typing import Any

import pytest
import torch
from laws import each
from optimizer_cases import normal
from tensor_cases import GRANULARITIES, parameter
from torch import nn

import fp8manifold as fm

STORAGES = ("master", "grid", "fp8")
INITIALISERS: dict[str, Any] = {
    "normal": lambda w, s: nn.init.normal_(w, std=s),
    "uniform": lambda w, s: nn.init.uniform_(w, -s, s),
    "trunc_normal": lambda w, s: nn.init.trunc_normal_(w, std=s, a=-2 * s, b=2 * s),
    "xavier": lambda w, s: nn.init.xavier_normal_(w, gain=s),
    "kaiming": lambda w, s: nn.init.kaiming_uniform_(w),
    "constant": nn.init.constant_,
    "orthogonal": lambda w, s: nn.init.orthogonal_(w),
}


def near(p: torch.Tensor, values: torch.Tensor) -> bool:
    p, top = p.detach(), values.abs().amax(-1, keepdim=True)
    return bool(((p - values).abs() <= values.abs() / 8 + top * 2.0**-12).all())


@each("granularity", GRANULARITIES)
@each("std", [1e-7, 1e-3, 1e3])
@each("fill", INITIALISERS.values(), ids=INITIALISERS)
def test_initialisers_take_a_fresh_scale(fill: Any, std: float, granularity: Any) -> None:
    if fill is INITIALISERS["trunc_normal"] and torch.__version__ < (2, 9):
        pytest.skip("torch 2.8 writes between the first values and the last, which are rounded on the way")
    p, q = parameter(granularity=granularity, rounding="nearest"), normal(4, 64)
    with torch.no_grad():
        for w in (p, q):
            torch.manual_seed(0)
            fill(w, std)
    assert near(p, q)


def test_zeros_keep_the_scale() -> None:
    p = parameter(rounding="nearest")
    with torch.no_grad():
        values = p.dequantize()
        p.zero_().add_(values)
    assert torch.equal(p.dequantize(), values)


@each("granularity", GRANULARITIES)
@each("factor", [1e-6, 1e-2, 1e4])
def test_floats_of_another_size_are_loaded_at_a_scale_of_their_own(factor: float, granularity: Any) -> None:
    layer = nn.Linear(64, 4, bias=False)
    layer.weight = parameter(granularity=granularity, rounding="nearest")
    values = normal(4, 64, seed=3, std=0.1) * factor
    layer.load_state_dict({"weight": values})
    expected = fm.FP8Parameter(values, "E4M3", granularity=granularity)
    assert torch.equal(layer.weight.codes, expected.codes)
    assert torch.equal(layer.weight.scale, expected.scale)


def test_points_of_the_grid_are_copied_as_they_are() -> None:
    """A step of geoopt's is a copy: it changes no scale, however small the weights have become."""
    p = parameter(rounding="nearest", scale=1.0)
    scale, points = p.scale.clone(), torch.full(p.shape, p.format.ulp_min)
    with torch.no_grad():
        p.copy_(points)
    assert torch.equal(p.scale, scale)
    assert torch.equal(p.dequantize(), points)


@each("write", [lambda p: p.mul_(1e-6), lambda p: p[1].mul_(1e-6)], ids=["all", "a row"])
def test_what_arithmetic_loses_is_warned_of(write: Any) -> None:
    p = parameter(rounding="nearest")
    with torch.no_grad(), pytest.warns(fm.UnderflowWarning, match="are below half a step of .* near 0.*adapt_scale_"):
        write(p)


def made(storage: Any, *, bias: bool = True, **options: Any) -> Any:
    spec = fm.LayerSpec(
        "E4M3",
        activation={"format": "E5M2", "policy": "delayed"},
        gradient={"format": "E5M2", "rounding": "stochastic"},
    )
    return fm.quantize_model(nn.Linear(64, 32, bias=bias), spec, storage, seed=5, **options)


@each("storage", STORAGES)
@each("bare", [False, True])
def test_a_layer_begins_anew(bare: bool, storage: Any) -> None:
    """Trained, or on meta, given memory, and reset: a layer as if it had been made in the ordinary way."""
    options: Any = {"keep_remainder": storage == "fp8"}
    torch.manual_seed(1)
    expected = made(storage, bias=bare, **options)
    with torch.device("meta" if bare else "cpu"):
        layer = made(storage, bias=bare, **options)
    if bare:
        layer.to_empty(device="cpu")
        for tensor in (*layer.parameters(), *layer.buffers()):
            for part in (tensor.codes, tensor.scale, tensor.counter) if isinstance(tensor, fm.FP8Tensor) else (tensor,):
                part.detach().view(-1).view(torch.uint8).fill_(17)  # what memory may hold
    else:
        for t in range(2):
            layer(normal(3, 64, seed=t)).sum().backward()
        layer.zero_grad()
        with torch.no_grad():
            layer.weight.mul_(0.5)
    torch.manual_seed(1)
    layer.reset_parameters()
    for (name, own), other in zip(layer.state_dict().items(), expected.state_dict().values(), strict=True):
        assert torch.equal(own, other), name
    for one in (layer, expected):
        torch.manual_seed(2)
        one(normal(3, 64)).sum().backward()
    assert torch.equal(layer.weight.grad, expected.weight.grad)


def test_a_plain_layer_around_codes_is_filled() -> None:
    with torch.device("meta"):
        layer = nn.Linear(64, 32)
        layer.weight = fm.FP8Parameter(layer.weight, "E4M3")
    layer.to_empty(device="cpu")
    torch.manual_seed(1)
    layer.reset_parameters()
    torch.manual_seed(1)
    assert near(layer.weight, nn.Linear(64, 32).weight.detach())
