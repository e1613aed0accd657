"""Cases of one-byte weights: formats, granularities, their definition, a small network."""

import pytest
import torch
from optimizer_cases import normal
from torch import nn

import fp8manifold as fm

#: IEEE-like, fn, fnuz, finite and P3109 layouts, no mantissa, one exponent bit, and
#: codes of fewer than eight bits.
FORMATS = (
    "E4M3",
    "E5M2",
    "E3M4",
    "E1M6",
    "E7M0",
    "E4M3FNUZ",
    "E5M2FNUZ",
    "P3109_8P3",
    "E2M3",
    "E3M2",
    "E2M1",
)
GRANULARITIES = ("tensor", "channel", "block")

every_format = pytest.mark.parametrize("name", FORMATS)
every_granularity = pytest.mark.parametrize("granularity", GRANULARITIES)


def parameter(name="E4M3", shape=(4, 64), seed=0, **options):
    return fm.FP8Parameter(normal(*shape, seed=seed, std=0.1), name, **{"seed": seed, **options})


def decoded(p):
    """Decode by definition: the value of each code times its scale, in float64."""
    scale = p.scale.double()
    if p.block_size:
        scale = scale.repeat_interleave(p.block_size, -1)
    return fm.decode(p.codes, p.format, torch.float64) * scale


def same_store(a, b):
    if (a.format, a.block_size) != (b.format, b.block_size):
        return False
    parts = ("codes", "scale", "counter")
    return all(torch.equal(getattr(a, part), getattr(b, part)) for part in parts)


class Net(nn.Module):
    """Two layers of one-byte weights, one with a bias, and a float layer."""

    def __init__(self, name="E4M3", dtype=None, **options):
        super().__init__()
        self.first = nn.Linear(32, 64)
        self.second = nn.Linear(64, 32, bias=False)
        self.head = nn.Linear(32, 1)
        for i, p in enumerate(self.parameters()):
            p.data = normal(*p.shape, seed=i, std=0.15)
        if dtype is not None:
            self.to(dtype)
        for i, layer in enumerate((self.first, self.second)):
            layer.weight = fm.FP8Parameter(layer.weight, name, **{"seed": i, **options})

    def forward(self, x):
        x = torch.relu(self.first(x))
        return self.head(torch.relu(self.second(x)))

    @property
    def stored(self):
        return [self.first.weight, self.second.weight]


INPUT = normal(256, 32, seed=99)
TARGET = INPUT[:, :1] * INPUT[:, 1:2]


def loss_of(net, dtype=torch.float32):
    return (net(INPUT.to(dtype)).float() - TARGET).square().mean()


def train(net, optimizer, steps=40, *, dtype=torch.float32):
    """Take steps, and return the mean of the last five losses."""

    def closure():
        optimizer.zero_grad()
        loss = loss_of(net, dtype)
        loss.backward()
        return loss.item()

    losses = [float(optimizer.step(closure)) for _ in range(steps)]
    return sum(losses[-5:]) / 5
