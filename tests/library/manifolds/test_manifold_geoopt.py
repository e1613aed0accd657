"""geoopt's own optimizers on our manifolds, continuous and grid, unchanged."""

import geoopt
import torch
from laws import each
from manifold_cases import lands_on_grid

import fp8manifold as fm

Tensor = torch.Tensor


def descend(optimizer, parameter, gradient) -> Tensor:
    parameter.grad = gradient(parameter.detach())
    optimizer.step()
    return parameter.detach().clone().as_subclass(torch.Tensor)


ON_GRID = {
    "adam": lambda p: geoopt.optim.RiemannianAdam(p, lr=0.5),
    "adam-stabilize": lambda p: geoopt.optim.RiemannianAdam(p, lr=0.5, stabilize=3, amsgrad=True),
    "sgd": lambda p: geoopt.optim.RiemannianSGD(p, lr=4.0),
    "sgd-momentum": lambda p: geoopt.optim.RiemannianSGD(p, lr=0.05, momentum=0.8, stabilize=7),
}


@each("optimizer", ON_GRID.values(), ids=ON_GRID)
@each("rounding", ["nearest", "stochastic"])
@each("name", ["E4M3", "E5M2", "E3M4"])
def test_geoopts_optimizers_stay_on_the_grid(optimizer, rounding, name) -> None:
    generator = torch.Generator().manual_seed(0)
    scale = torch.tensor([[0.25], [1.0], [2.0]])
    manifold = fm.FP8Manifold(name, scale, rounding, seed=1)
    minimum = torch.randn(3, 50, generator=generator) * 1.5
    weight = geoopt.ManifoldParameter(
        manifold.projx(minimum + torch.randn(3, 50, generator=generator)), manifold=manifold
    )
    run, first = optimizer([weight]), float((weight.detach() - minimum).square().mean())
    for _ in range(100):
        x = descend(run, weight, lambda x: x - minimum)
        assert lands_on_grid(x, manifold.format, scale.double())
    last = float((x - minimum).square().mean())
    # geoopt starts the momentum from the Euclidean gradient, 1 / S^2 too long: nothing to ask of its loss
    if rounding == "stochastic" and optimizer is not ON_GRID["sgd-momentum"]:
        assert last < 0.5 * first
