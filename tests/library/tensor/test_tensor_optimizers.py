"""Other people's optimizers on one-byte weights: torch's, geoopt's, optimi's.  Every in-place operator rounds."""

from collections.abc import Callable, Iterable
from typing import Any

import geoopt
import pytest
import torch
from optimizer_cases import normal, step_from
from tensor_cases import Net, loss_of, parameter, train
from torch import Tensor, optim

import fp8manifold as fm
from fp8manifold.random_bits import named_word

Make = Callable[[Iterable[Tensor]], optim.Optimizer]

#: name: (make, largest share of the first loss that may be left after 40 steps)
OPTIMIZERS: dict[str, tuple[Make, float]] = {
    "Adam": (lambda p: optim.Adam(p, 1e-2), 0.1),
    "Adam-amsgrad": (lambda p: optim.Adam(p, 1e-2, amsgrad=True, weight_decay=1e-3), 0.1),
    "AdamW": (lambda p: optim.AdamW(p, 1e-2), 0.1),
    "AdamW-foreach": (lambda p: optim.AdamW(p, 1e-2, foreach=True), 0.1),
    "AdamW-fused": (lambda p: optim.AdamW(p, 1e-2, fused=True), 0.1),
    "SGD": (lambda p: optim.SGD(p, 0.1), 0.5),
    "SGD-momentum": (lambda p: optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=1e-4), 0.1),
    "SGD-foreach": (lambda p: optim.SGD(p, 0.1, momentum=0.9, foreach=True), 0.1),
    "SGD-fused": (lambda p: optim.SGD(p, 0.1, momentum=0.9, fused=True), 0.1),
    "Adafactor": (lambda p: optim.Adafactor(p, 5e-2), 0.7),
    "LBFGS": (lambda p: optim.LBFGS(p, 0.2, max_iter=2), 0.5),
    "LBFGS-wolfe": (lambda p: optim.LBFGS(p, 1.0, max_iter=2, line_search_fn="strong_wolfe"), 0.1),
    "RMSprop": (lambda p: optim.RMSprop(p, 2e-3), 0.1),
    "NAdam": (lambda p: optim.NAdam(p, 1e-2), 0.1),
    "geoopt.RiemannianAdam": (lambda p: geoopt.optim.RiemannianAdam(in_ulps(p, 0.5, 1e-2)), 0.2),
    # without momentum: geoopt starts it from the Euclidean gradient, which is no step in ULPs
    "geoopt.RiemannianSGD": (lambda p: geoopt.optim.RiemannianSGD(in_ulps(p, 300.0, 0.1), lr=0.1, stabilize=7), 0.7),
}
if hasattr(optim, "Muon"):  # since torch 2.9
    OPTIMIZERS["Muon"] = (lambda p: optim.Muon([x for x in p if x.dim() == 2], 2e-2), 0.5)
everyone = pytest.mark.parametrize(("make", "share"), OPTIMIZERS.values(), ids=OPTIMIZERS)


def in_ulps(params: Iterable[Tensor], lr: float, float_lr: float) -> list[dict[str, Any]]:
    params = list(params)
    own = [p for p in params if isinstance(p, fm.FP8Parameter)]
    return [{"params": own, "lr": lr}, {"params": [p for p in params if p not in set(own)], "lr": float_lr}]


@everyone
def test_it_learns(make: Make, share: float) -> None:
    """The loss falls, codes move, and everything stays what it was: one byte a weight, on the grid."""
    net = Net()
    first = loss_of(net).item()
    codes, scales = [p.codes.clone() for p in net.stored], [p.scale.clone() for p in net.stored]
    last = train(net, make(net.parameters()))
    assert last < share * first
    for p, before, scale in zip(net.stored, codes, scales, strict=True):
        assert type(p) is fm.FP8Parameter
        assert (p.codes != before).float().mean() > 0.2
        assert torch.equal(p.scale, scale)
        assert p.manifold.check_point_on_manifold(p)
        assert int(p.counter) >= 40


@pytest.mark.extra("optimi")
def test_optimi() -> None:
    import optimi

    for options in ({}, {"foreach": False}, {"decouple_lr": True, "weight_decay": 1e-5}):
        net = Net()
        first = loss_of(net).item()
        assert train(net, optimi.AdamW(net.parameters(), 1e-2, **options)) < 0.2 * first
        assert all(type(p) is fm.FP8Parameter for p in net.stored)


def test_steps_are_the_operators_with_a_rounding_each() -> None:
    """AdamW decays (one rounding) and steps (another), with draws of counts 0 and 1."""
    p = parameter(seed=9)
    start = p.dequantize()
    p.grad = normal(4, 64, seed=1)
    optim.AdamW([p], lr=1e-2, weight_decay=0.1).step()
    scale = p.scale
    mul, addcdiv = {"seed": 9, "stream": named_word("mul_")}, {"seed": 9, "stream": named_word("addcdiv_")}
    decayed = fm.round_to_grid(start * (1 - 1e-3) / scale, "E4M3", "stochastic", step=0, **mul) * scale
    stepped = decayed - 1e-2 * p.grad / (p.grad.abs() + 1e-8)
    expected = fm.round_to_grid(stepped / scale, "E4M3", "stochastic", step=1, **addcdiv) * scale
    assert (p.dequantize() == expected).float().mean() > 0.99  # the last bits of the direction are torch's own
    assert int(p.counter) == 2


def test_geoopt_steps_as_on_the_grid_of_floats() -> None:
    """An FP8Parameter moves, code for code, as a ManifoldParameter of float values on the same manifold."""
    p = parameter(seed=4)
    manifold = fm.FP8Manifold("E4M3", p.scale, "stochastic", seed=4)
    q = geoopt.ManifoldParameter(p.dequantize(), manifold=manifold)
    optimizers = [geoopt.optim.RiemannianAdam([x], lr=0.5) for x in (p, q)]
    for step in range(5):
        for x, optimizer in zip((p, q), optimizers, strict=True):
            step_from(optimizer, x, normal(4, 64, seed=step))
        manifold.counter += 1  # copying into codes is a write as well, if one that moves nothing
        assert torch.equal(p.dequantize(), q.detach().as_subclass(Tensor))
    assert int(p.counter) == int(manifold.counter) == 10
