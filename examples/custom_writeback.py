"""
A write-back of your own
========================

One method of the manifold, ``round``, brings a step back to the grid. This one goes up
or down with the odds of stochastic rounding but without chance: weight i of step t is
compared with the fraction of (i + t) times the golden ratio, a sequence that fills [0,
1) more evenly than random numbers do. geoopt's RiemannianAdam then trains a linear
regression on an E4M3 grid with each write-back, with a learning rate that falls from 4
ULPs per step to 0.04.

Expected output::

    nearest:       loss 52.349 -> 6.7399
    stochastic:    loss 52.349 -> 0.6801
    golden ratio:  loss 52.349 -> 0.6624
"""

import geoopt
import torch
from torch import Tensor

import fp8manifold as fm

GOLDEN = (5**0.5 - 1) / 2


class GoldenRatioManifold(fm.FP8Manifold):
    """The grid of a format, written back to with evenly spread odds."""

    def round(self, x: Tensor) -> Tensor:
        """Round to the grid, away from zero where the fraction of a step is above the
        element's draw.
        """
        index = torch.arange(x.numel(), dtype=torch.float64).view(x.shape)
        place = (index + float(self.counter)) * GOLDEN % 1
        self.counter += 1
        draws = (place * 2**24).to(torch.int32)
        return fm.round_to_grid(x, self.format, "stochastic", bits=draws)


def train(manifold: fm.FP8Manifold, steps: int = 600) -> tuple[float, float]:
    """Loss before and after training."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(512, 32, generator=generator)
    targets = inputs @ torch.randn(32, 1, generator=generator)
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
    return losses[0], losses[-1]


if __name__ == "__main__":
    manifolds = {
        "nearest": fm.FP8Manifold("E4M3"),
        "stochastic": fm.FP8Manifold("E4M3", rounding="stochastic", seed=1),
        "golden ratio": GoldenRatioManifold("E4M3"),
    }
    for name, manifold in manifolds.items():
        first, last = train(manifold)
        print(f"{name + ':':<15}loss {first:.3f} -> {last:.4f}")
