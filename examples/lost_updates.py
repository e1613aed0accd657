"""
Updates that bfloat16 loses
===========================

The weights of a norm begin at 1. There the next bfloat16 number is 0.004 below and 0.008
above, and rounding to nearest undoes every update of less than half of that. A network
in bfloat16 has to move these weights from 1.0 to 0.8. ``fm.lost_updates`` says after one
backward pass what will be lost. Then torch's AdamW and StiffnessAdamW, which rounds
stochastically, take 600 steps at the same rate. Figures are the share of norm weights
whose update is lost, and their mean after the steps.

Expected output::

    torch's AdamW: 100.0% lost, 1.0000 after 600 steps
    StiffnessAdamW: 0.0% lost, 0.8002 after 600 steps
"""

import torch
from torch import nn

import fp8manifold as fm

STEPS = 600
WIDTH = 64


def loss(norm: nn.Module, seed: int) -> torch.Tensor:
    """Return the distance to a norm whose weights are 0.8, on random inputs."""
    x = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(seed))
    target = 0.8 * nn.functional.rms_norm(x, (WIDTH,))
    return (norm(x.bfloat16()).float() - target).square().mean()


def train(name: str, norm: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Print what the first step loses, and where the weights end."""
    loss(norm, 0).backward()
    lost = fm.lost_updates(norm, optimizer).lost_share
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(norm, step).backward()
        optimizer.step()
    mean = norm.weight.detach().float().mean()
    print(f"{name}: {lost:.1%} lost, {mean:.4f} after {STEPS} steps")


def main() -> None:
    """Train a norm in bfloat16 twice, at the same rate."""
    norm = nn.RMSNorm(WIDTH, dtype=torch.bfloat16)
    train("torch's AdamW", norm, torch.optim.AdamW(norm.parameters(), lr=1e-3, weight_decay=0.0))
    norm = nn.RMSNorm(WIDTH, dtype=torch.bfloat16)
    ours = fm.optim.StiffnessAdamW(norm.parameters(), lr=1e-3, weight_decay=0.0)
    train("StiffnessAdamW", norm, ours)


if __name__ == "__main__":
    main()
