"""Weights that several processes hold by rows: one byte a weight, and the steps of one process to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from family_cases import VALID, make
from optimizer_cases import bits_of, normal
from rank_cases import batch, model
from rank_pool import Pool
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import fp8manifold as fm
from fp8manifold._shards import FP8Shard


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    ranks = Pool(3, tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.end()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    ranks = Pool(2, tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.end()


def sharded(net: Any, *, nested: bool = True, **options: Any) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in net if nested else ():
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, **options)
    return fully_shard(net, mesh=mesh, **options)


def own_rows(whole: Tensor, part: Tensor) -> Tensor:
    each = -(-whole.shape[0] // dist.get_world_size())
    return whole[dist.get_rank() * each :][: part.shape[0]]


def check_same(net: nn.Module, alone: nn.Module) -> None:
    """The own rows of every parameter have the bits of the whole one's."""
    for (name, p), q in zip(net.named_parameters(), alone.parameters(), strict=True):
        held: Any = p._local_tensor
        if isinstance(q, fm.FP8Tensor):
            assert isinstance(held, FP8Shard), name
            assert torch.equal(held.codes, own_rows(q.codes, held.codes)), name
            scale = own_rows(q.scale, held.codes) if q.scale.dim() else q.scale
            assert torch.equal(held.scale, scale), name
            assert held.counter == q.counter
            assert held.seed == q.seed
        else:
            assert bits_of(held) == bits_of(own_rows(q, held)), name


def put_equal_gradients(net: nn.Module, alone: nn.Module, step: int) -> None:
    """What a reduction would have left: the same bits, by rows here and whole there."""
    for i, (p, q) in enumerate(zip(net.parameters(), alone.parameters(), strict=True)):
        q.grad = normal(*q.shape, seed=1000 * step + i, std=0.3).to(q.dtype)
        part = own_rows(q.grad, p._local_tensor).clone()
        p.grad = DTensor.from_local(part, p.device_mesh, p.placements, shape=q.shape, stride=q.stride())


# ------------------------------------------------------------------------------------------------------ steps
def stepped(name: str, writeback: str, moments: str, net: dict[str, Any], options: dict[str, Any]) -> int:
    """Steps of rows and of the whole from equal gradients; how many scales were widened."""
    whole = model(**net, keep_remainder=writeback.startswith("residual"))
    parts = sharded(model(**net, keep_remainder=writeback.startswith("residual")))
    options = {"writeback": writeback, "moments": moments, "refresh_every": 2, **options}
    optimizers = [make(name, each.parameters(), **options) for each in (parts, whole)]
    for step in range(4):
        put_equal_gradients(parts, whole, step)
        for optimizer in optimizers:
            optimizer.step()
        check_same(parts, whole)
        if step == 1:  # the first forward pass may put other memory in the place of the parameters
            with torch.no_grad():
                assert torch.equal(parts(batch(0)), whole(batch(0)))
            parts.reshard()  # after a forward pass the root stays whole
    ours, its = optimizers
    assert ours.bounded_share == its.bounded_share
    assert ours.widened_scales == its.widened_scales
    return int(ours.widened_scales)


COMBINATIONS = [c for c in VALID if c[0] != "FisherNaturalGradient"]
#: every optimizer, every write-back and every kind of averages, in the default run
SOME = COMBINATIONS[1::3]


@pytest.mark.parametrize("combination", SOME, ids=lambda c: "-".join(c))
def test_rows_are_stepped_as_the_whole(pool: Pool, combination: tuple[str, str, str]) -> None:
    """22, 64 and 5 rows in 3 processes: none of which has as many as the others."""
    pool.run(stepped, *combination, {"granularity": "channel"}, {})


@pytest.mark.parametrize("granularity", ["tensor", "block"])
@pytest.mark.parametrize(
    "combination",
    [
        ("StiffnessAdamW", "residual4", "8bit"),
        ("StiffnessAdamW", "stochastic", "bfloat16"),
        ("StiffnessMuon", "residual8", "8bit"),
        ("StiffnessMuon", "momentum", "bfloat16"),
        ("RiemannianAdam", "stochastic", "8bit"),
    ],
    ids=lambda c: "-".join(c),
)
def test_every_granularity(pair: Pool, combination: tuple[str, str, str], granularity: str) -> None:
    pair.run(stepped, *combination, {"granularity": granularity}, {})


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("granularity", ["tensor", "channel", "block"])
@pytest.mark.parametrize("combination", COMBINATIONS, ids=lambda c: "-".join(c))
def test_every_combination(
    pool: Pool, pair: Pool, combination: tuple[str, str, str], granularity: str, size: int
) -> None:
    for net in ({}, {"rows": 7}, {"storage": "float"}):
        (pair if size == 2 else pool).run(stepped, *combination, {"granularity": granularity, **net}, {})
