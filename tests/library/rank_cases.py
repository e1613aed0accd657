"""Cases for several processes: a small model, its batches, and steps to compare."""

import pytest
import torch
from optimizer_cases import bits_of, normal, with_factors
from torch import nn

import fp8manifold as fm


def model(
    granularity="channel",
    *,
    storage="codes",
    rows=22,
    seed=0,
    products="decoded",
    factors=False,
    **options,
):
    """Return three linear layers, with ``rows``, 64 and 5 rows, and a norm.

    Two processes share 22 and 64 rows evenly, and three do not. Neither share the 5 rows
    of the last layer evenly, nor ``rows=7``.
    """
    net = nn.Sequential(
        nn.Linear(64, rows),
        nn.LayerNorm(rows),
        nn.Linear(rows, 64),
        nn.Tanh(),
        nn.Linear(64, 5, bias=False),
    )
    with torch.no_grad():
        for i, p in enumerate(net.parameters()):
            p.copy_(normal(*p.shape, seed=100 * seed + i, std=0.1))
    if storage == "float":
        return net
    kinds = {"*": fm.LayerSpec("E4M3", granularity=granularity, products=products)}
    # Products in 8 bits need rows that 16 divides, and the last layer has 5.
    if products != "decoded":
        kinds["4"] = fm.LayerSpec("E4M3", granularity=granularity)
    # Blocks are of 32 columns, and the second layer has ``rows`` columns.
    if granularity == "block":
        kinds["2"] = fm.LayerSpec("E4M3", granularity="channel")
    return with_factors(fm.quantize_model(net, kinds, storage, seed=seed, **options), factors)


def batch(step, rank=0):
    return normal(6, 64, seed=1000 * step + rank)


def loss_of(net, x):
    out = net(x)
    return (out.float() - 0.5).square().mean()


def synced(net):
    fm.distributed.sync(net)
    return net


def train_on(net, optimizer, x):
    optimizer.zero_grad()
    loss_of(net, x).backward()
    optimizer.step()


def refusal(call):
    try:
        call()
    except (RuntimeError, ValueError, TypeError, FloatingPointError) as error:
        return str(error)
    return ""


def stored(net):
    """Everything of a model that a checkpoint would hold, by name, as bytes."""
    return {name: bits_of(x) for name, x in net.state_dict().items()}


def seeds(net):
    return [p.seed for p in net.parameters() if isinstance(p, fm.FP8Tensor)]


def combined(names):
    """Mark a test of combinations that are written as optimizer-writeback-moments."""
    cases = names.split()
    return pytest.mark.parametrize(
        "combination", [tuple(name.split("-")) for name in cases], ids=cases
    )
