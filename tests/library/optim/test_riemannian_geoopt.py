"""RiemannianAdam and RiemannianSGD beside geoopt's: trajectories on its manifolds, and its own on ours."""

import copy
from typing import Any

import geoopt
import pytest
import torch
from laws import each
from optimizer_cases import normal, values
from torch import Tensor, nn

import fp8manifold as fm
from fp8manifold.optim import RiemannianAdam, RiemannianSGD

double = torch.float64


FOREIGN: dict[str, Any] = {
    "sphere": (geoopt.Sphere(), (4, 5)),
    "stiefel": (geoopt.Stiefel(), (5, 3)),
    "ball": (geoopt.PoincareBall(), (4, 3)),
    "euclidean": (geoopt.Euclidean(), (3, 3)),
    "plain": (None, (4,)),
}


def pairs(name: str) -> tuple[list[nn.Parameter], Tensor]:
    manifold, shape = FOREIGN[name]
    x = normal(*shape, seed=1, dtype=double, std=0.3)
    if manifold is None:
        return [nn.Parameter(x.clone()) for _ in range(2)], normal(*shape, seed=2, dtype=double)
    x = manifold.projx(x)
    points = [geoopt.ManifoldParameter(x.clone(), manifold=copy.deepcopy(manifold)) for _ in range(2)]
    return points, normal(*shape, seed=2, dtype=double)


def assert_follows_geoopt(name: str, ours: Any, theirs: Any) -> None:
    (mine, peer), target = pairs(name)
    begin = values([mine])[0]
    optimizer, reference = ours([mine]), theirs([peer])
    for t in range(100):
        noise = normal(*mine.shape, seed=50 + t, dtype=double, std=0.1)
        for p in (mine, peer):
            p.grad = p.detach().as_subclass(Tensor) - target + noise
        optimizer.step()
        reference.step()
        assert (mine - peer).abs().max() < 1e-12
    assert (mine.detach().as_subclass(Tensor) - begin).abs().max() > 0.01


#: the optimizer of both and its options
RULES: list[tuple[str, dict[str, Any]]] = [
    *(("RiemannianAdam", {"betas": (0.8, 0.99), "eps": 1e-7, "amsgrad": amsgrad}) for amsgrad in (False, True)),
    ("RiemannianAdam", {"weight_decay": 0.3}),
    *(("RiemannianSGD", {"weight_decay": weight_decay}) for weight_decay in (0, 0.3)),
]


@each("rule", RULES)
@pytest.mark.parametrize("name", FOREIGN)
def test_steps_elsewhere_are_geoopts(name: str, rule: tuple[str, dict[str, Any]]) -> None:
    ours, theirs = (getattr(house, rule[0]) for house in (fm.optim, geoopt.optim))
    assert_follows_geoopt(name, lambda p: ours(p, 0.02, **rule[1]), lambda p: theirs(p, 0.02, **rule[1]))


class Projecting(type(geoopt.Stiefel())):  # type: ignore[misc]  # the class of the canonical one
    """Stiefel with a projection of vectors; geoopt's ``x (x^T u - u^T x) + ...`` doubles a part of what is tangent."""

    def proju(self, x: Tensor, u: Tensor) -> Tensor:
        symmetric = x.mT @ u
        return u - x @ (symmetric + symmetric.mT) / 2


STABLE: dict[str, Any] = {
    **FOREIGN,
    "stiefel": (Projecting(), (5, 3)),
    "euclidean stiefel": (geoopt.EuclideanStiefel(), (5, 3)),
}


@each("every", [1, 3])
@pytest.mark.parametrize("name", STABLE)
def test_stabilising_elsewhere_is_geoopts(name: str, every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FOREIGN, name, STABLE[name])
    for ours, theirs in ((RiemannianAdam, geoopt.optim.RiemannianAdam), (RiemannianSGD, geoopt.optim.RiemannianSGD)):
        assert_follows_geoopt(
            name,
            lambda p, kind=ours: kind(p, 0.02, stabilize=every),
            lambda p, kind=theirs: kind(p, 0.02, stabilize=every),
        )


def test_momentum_that_is_tangent_stays_as_it_is_on_geoopts_stiefel() -> None:
    """Its ``proju`` is no projection there, and geoopt's own steps with ``stabilize`` end elsewhere."""
    (mine, peer), target = pairs("stiefel")
    optimizer = RiemannianAdam([mine], 0.02, stabilize=1)
    theirs = geoopt.optim.RiemannianAdam([peer], 0.02, stabilize=1)
    for t in range(20):
        for p in (mine, peer):
            p.grad = p.detach().as_subclass(Tensor) - target + normal(*p.shape, seed=t, dtype=double, std=0.1)
        optimizer.step()
        theirs.step()
    momentum, point = optimizer.state[mine]["exp_avg"], mine.detach().as_subclass(Tensor)
    assert (point.mT @ momentum + momentum.mT @ point).abs().max() < 1e-12
    again = mine.manifold.proju(point, momentum)  # type: ignore[attr-defined]
    assert (again - momentum).abs().max() > 0.1 * momentum.abs().max()
    assert (mine - peer).abs().max() > 0.01


@pytest.mark.parametrize("options", [{"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}], ids=str)
def test_sgd_elsewhere_starts_momentum_from_the_riemannian_gradient(options: dict[str, Any]) -> None:
    """On a sphere the first step is along the projected gradient; geoopt's starts from the raw one."""
    sphere = geoopt.Sphere()
    x = sphere.projx(normal(4, seed=1, dtype=double))
    point = geoopt.ManifoldParameter(x.clone(), manifold=sphere)
    point.grad = normal(4, seed=2, dtype=double)
    tangent = sphere.egrad2rgrad(x, point.grad)
    RiemannianSGD([point], 0.1, **options).step()
    factor = 1.9 if "nesterov" in options else 1.0
    assert (point.detach() - sphere.retr(x, -0.1 * factor * tangent)).abs().max() < 1e-15


@pytest.mark.parametrize("make", [fm.optim.RiemannianAdam, fm.optim.RiemannianSGD])
def test_the_manifolds_own_retraction_is_taken(make: Any) -> None:
    """One code inwards from a power of two is half as far as one ULP: the two retractions differ there."""
    landed = {}
    for retraction in ("exponential", "euclidean"):
        manifold = fm.FP8Manifold("E4M3", retraction=retraction)
        weight = geoopt.ManifoldParameter(torch.tensor([2.0]), manifold=manifold)
        weight.grad = torch.tensor([4.0])  # S g = 1: Adam's first direction and SGD's alike
        make([weight], lr=1.0).step()
        landed[retraction] = weight.item()
    assert landed == {"exponential": 1.875, "euclidean": 1.75}
