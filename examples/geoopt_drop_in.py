"""
geoopt's RiemannianAdam on eight-bit weights
============================================

geoopt's own optimizer trains a linear regression whose weights are E4M3 numbers with no
other copy. The learning rate falls from 4 ULPs per step to 0.04. Below half an ULP
nearest rounding loses every update, and stochastic rounding does not.

Expected output::

       nearest: loss 52.349 -> 6.7399
    stochastic: loss 52.349 -> 0.6366
"""

import geoopt
import torch

import fp8manifold as fm


def train(rounding: str, steps: int = 600) -> tuple[float, float]:
    """Return the loss before and after training."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(512, 32, generator=generator)
    targets = inputs @ torch.randn(32, 1, generator=generator)

    manifold = fm.FP8Manifold("E4M3", rounding=rounding, seed=1)
    start = torch.randn(32, 1, generator=generator)
    weight = geoopt.ManifoldParameter(manifold.projx(start), manifold=manifold)
    optimizer = geoopt.optim.RiemannianAdam([weight], lr=4.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, total_iters=steps)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (inputs @ weight - targets).square().mean()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    assert bool((manifold.projx(weight) == weight).all()), "a weight has left the grid"
    return losses[0], losses[-1]


if __name__ == "__main__":
    for rounding in ("nearest", "stochastic"):
        first, last = train(rounding)
        print(f"{rounding:>10}: loss {first:.3f} -> {last:.4f}")
