"""Cases for several processes: a small model, its batches, and steps to compare."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from optimizer_cases import bits_of, normal, with_factors
from torch import Tensor, nn

import fp8manifold as fm


def model(
    granularity: Any = "channel",
    *,
    storage: Any = "fp8",
    rows: int = 22,
    seed: int = 0,
    products: Any = "decoded",
    factors: bool = False,
    **options: Any,
) -> Any:
    """Three linear layers with norms; 2 and 3 divide the rows of none of them where ``rows`` is 22 or 7 alone."""
    net = nn.Sequential(
        nn.Linear(64, rows), nn.LayerNorm(rows), nn.Linear(rows, 64), nn.Tanh(), nn.Linear(64, 5, bias=False)
    )
    with torch.no_grad():
        for i, p in enumerate(net.parameters()):
            p.copy_(normal(*p.shape, seed=100 * seed + i, std=0.1))
    if storage == "float":
        return net
    kinds = {"*": fm.LayerSpec("E4M3", granularity=granularity, products=products)}
    if products != "decoded":  # which 16 has to divide
        kinds["4"] = fm.LayerSpec("E4M3", granularity=granularity)
    if granularity == "block":  # which 32 has to divide
        kinds["2"] = fm.LayerSpec("E4M3", granularity="channel")
    return with_factors(fm.quantize_model(net, kinds, storage, seed=seed, **options), factors)


def batch(step: int, rank: int = 0) -> Tensor:
    return normal(6, 64, seed=1000 * step + rank)


def loss_of(net: nn.Module, x: Tensor) -> Tensor:
    out = net(x)
    return (out.float() - 0.5).square().mean()


def synced(net: nn.Module) -> Any:
    fm.distributed.sync(net)
    return net


def train_on(net: nn.Module, optimizer: Any, x: Tensor) -> None:
    optimizer.zero_grad()
    loss_of(net, x).backward()
    optimizer.step()


def refusal(call: Callable[[], Any]) -> str:
    try:
        call()
    except (RuntimeError, ValueError, TypeError, FloatingPointError) as error:
        return str(error)
    return ""


def stored(net: nn.Module) -> dict[str, bytes]:
    """Everything of a model that a checkpoint would hold, by name, as bytes."""
    return {name: bits_of(x) for name, x in net.state_dict().items()}


def seeds(net: nn.Module) -> list[int]:
    return [p.seed for p in net.parameters() if isinstance(p, fm.FP8Tensor)]


def combined(names: str) -> Any:
    """Mark a test of combinations that are written as optimizer-writeback-moments."""
    cases = names.split()
    return pytest.mark.parametrize("combination", [tuple(name.split("-")) for name in cases], ids=cases)
