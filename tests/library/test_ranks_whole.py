"""Running averages of shards, which each process takes of its rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_cases import batch, model, refusal
from rank_pool import Pool
from test_ranks_fsdp import own_rows, put_equal_gradients, sharded
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.swa_utils import get_ema_multi_avg_fn

import fp8manifold as fm


def averaged(nested: bool, ema: bool) -> None:
    options: dict[str, Any] = {"multi_avg_fn": get_ema_multi_avg_fn(0.9)} if ema else {}
    whole, parts = model(), model()
    ours, its = (fm.averaged_model(each, **options) for each in (parts, whole))
    sharded(parts, nested=nested)
    sharded(ours.module, nested=nested)
    optimizers = [fm.optim.StiffnessAdamW(each.parameters(), lr=0.01) for each in (parts, whole)]
    for step in range(3):
        put_equal_gradients(parts, whole, step)
        for optimizer in optimizers:
            optimizer.step()
        if step == 1:  # after which a root is whole, and what is written into it is lost
            with torch.no_grad():
                torch.testing.assert_close(ours(batch(0)), its(batch(0)))
                assert torch.equal(parts(batch(0)), whole(batch(0)))
        ours.update_parameters(parts)
        its.update_parameters(whole)
        for p, q in zip(ours.module.parameters(), its.module.parameters(), strict=True):
            assert torch.equal(p._local_tensor, own_rows(q, p._local_tensor))  # type: ignore[operator]


@pytest.mark.parametrize("ema", [False, True])
@pytest.mark.parametrize("nested", [False, True])
def test_rows_are_averaged_as_the_whole(pair: Pool, nested: bool, ema: bool) -> None:
    pair.run(averaged, nested, ema)


def refused() -> dict[str, str]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parts, partly = sharded(model()), model()
    fully_shard(partly[0], mesh=mesh)
    rows = fm.averaged_model(model())
    sharded(rows.module)
    attempts: dict[str, Any] = {
        "made of rows": lambda: fm.averaged_model(parts),
        "whole of rows": lambda: fm.averaged_model(model()).update_parameters(parts),
        "rows of whole": lambda: rows.update_parameters(model()),
        "other rows": lambda: rows.update_parameters(partly),
    }
    said = {name: refusal(attempt) for name, attempt in attempts.items()}
    assert rows.n_averaged == 0
    return said


def test_averages_of_other_rows_are_refused_in_every_process(pair: Pool) -> None:
    first, second = pair.run(refused)
    assert first == second
    for line in first.values():
        assert "call averaged_model before fully_shard, then fully_shard on the average's module" in line
        assert "\n" not in line
