"""Shards on the paths of who sets nothing: native steps, one process, one column, compiled passes, averages."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from optimizer_cases import normal
from rank_cases import batch, loss_of, model, refusal
from rank_pool import Pool
from test_ranks_fsdp import check_same, own_rows, put_equal_gradients, sharded, step_alike, stepped
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.swa_utils import get_ema_multi_avg_fn

import fp8manifold as fm


def trained_alone(granularity: str) -> None:
    parts, whole = sharded(model(granularity)), model(granularity)
    optimizers = [fm.optim.StiffnessAdamW(each.parameters(), lr=0.01) for each in (parts, whole)]
    for step in range(3):
        losses = [loss_of(each, batch(step)) for each in (parts, whole)]
        assert losses[0].item() == losses[1].item()
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    parts.reshard()
    check_same(parts, whole)


@pytest.mark.parametrize("granularity", ["channel", "tensor", "block"])
def test_one_process_holds_all_rows(pools: dict[int, Pool], granularity: str) -> None:
    pools[1].run(trained_alone, granularity)


@pytest.mark.parametrize("writeback", ["residual8", "stochastic"])
def test_odd_columns_are_stepped_natively(pair: Pool, writeback: str) -> None:
    """7 columns."""
    pair.run(stepped, "StiffnessAdamW", writeback, "8bit", {"rows": 7}, {})


def columns_stepped() -> None:
    parts, whole = (nn.Sequential(nn.Linear(1, 7, bias=False), nn.Linear(7, 1, bias=False)) for _ in range(2))
    with torch.no_grad():
        for each in (parts, whole):
            for i, p in enumerate(each.parameters()):
                p.copy_(normal(*p.shape, seed=i, std=0.1))
    parts = sharded(parts)
    optimizers = [fm.optim.StiffnessMuon([{"params": list(each.parameters())}], lr=0.1) for each in (parts, whole)]
    for step in range(2):
        step_alike(parts, whole, optimizers, step)


def test_matrices_of_one_column_and_of_one_row(pair: Pool) -> None:
    pair.run(columns_stepped)


def compiled(granularity: str, rows: int) -> None:
    torch._dynamo.reset()
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")  # dynamo asks for it
    parts, whole = sharded(model(granularity, rows=rows)), model(granularity, rows=rows)
    graph: Any = torch.compile(parts, backend="aot_eager")
    optimizer = fm.optim.StiffnessAdamW(parts.parameters(), lr=0.01)
    for step in range(2):
        out = graph(batch(step))
        if step == 0:
            torch.testing.assert_close(out, whole(batch(step)), rtol=1e-5, atol=1e-6)
        out.square().mean().backward()
        assert all(p.grad is not None for p in parts.parameters())
        optimizer.step()


@pytest.mark.parametrize(("granularity", "rows"), [("channel", 7), ("tensor", 24)])
def test_passes_in_a_graph(pair: Pool, granularity: str, rows: int) -> None:
    """Scales that FSDP does not fill are written between a graph's forward and its backward pass."""
    pair.run(compiled, granularity, rows)


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
