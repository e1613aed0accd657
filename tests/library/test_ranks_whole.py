"""Shards as a whole: what ``full_tensor`` gives, and running averages, which each process takes of its rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_cases import batch, model
from rank_pool import Pool
from test_ranks_fsdp import Vectors, own_rows, put_equal_gradients, sharded
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.swa_utils import get_ema_multi_avg_fn

import fp8manifold as fm


# ------------------------------------------------------------------------------------------------ full_tensor
def check_whole(given: Any, whole: Tensor) -> None:
    """Everything that a one-byte weight is, and the values of an ordinary one."""
    if not isinstance(whole, fm.FP8Tensor):
        assert torch.equal(given, whole)
        return
    assert type(given) is fm.FP8Tensor
    for name in ("codes", "scale", "counter", "remainder"):
        ours, its = getattr(given, name), getattr(whole, name)
        assert (ours is None) == (its is None), name
        assert its is None or torch.equal(ours, its), name
    assert given._traits() == whole._traits()


def made_whole(granularity: str, rows: int) -> None:
    net: dict[str, Any] = {"granularity": granularity, "rows": rows, "keep_remainder": True}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for parts, whole in ((sharded(model(**net)), model(**net)), (fully_shard(Vectors(), mesh=mesh), Vectors())):
        for p, q in zip(parts.parameters(), whole.parameters(), strict=True):
            check_whole(p.full_tensor(), q.detach())
            with torch.no_grad():
                check_whole(p.full_tensor(), q.detach())
            check_whole(p.detach().full_tensor(), q.detach())
            assert p.full_tensor().requires_grad
            (p.full_tensor() ** 2).sum().backward()
            (q * q).sum().backward()
            assert torch.equal(p.grad._local_tensor, own_rows(q.grad, p._local_tensor))
        if dist.get_world_size() > 1:  # alone it shares its memory, as torch has it of floats
            before = [own.clone() for own in codes_of(parts)]
            with torch.no_grad():
                for p in parts.parameters():
                    p.full_tensor().zero_()
            assert all(torch.equal(own, was) for own, was in zip(codes_of(parts), before, strict=True))


def codes_of(net: nn.Module) -> list[Tensor]:
    held = [getattr(p, "_local_tensor") for p in net.parameters()]  # noqa: B009  # which only DTensors have
    return [x.codes for x in held if isinstance(x, fm.FP8Tensor)]


@pytest.mark.parametrize("rows", [22, 7])
@pytest.mark.parametrize("granularity", ["tensor", "channel", "block"])
def test_full_tensor_is_the_whole_in_codes(pools: dict[int, Pool], granularity: str, rows: int) -> None:
    """Rows that 2 and 3 do not divide, fewer rows than processes, and odd columns."""
    for size in (1, 2, 3):
        pools[size].run(made_whole, granularity, rows)


class Four(nn.Module):
    """Of four rows two processes of three have two each, and the third has none."""

    def __init__(self) -> None:
        super().__init__()
        values = torch.linspace(-1, 1, 12).reshape(4, 3)
        self.weight = fm.FP8Parameter(values, "E4M3", seed=0, keep_remainder=True)


def stepped_whole(writeback: str) -> None:
    parts, whole = fully_shard(Four(), mesh=init_device_mesh("cpu", (dist.get_world_size(),))), Four()
    check_whole(parts.weight.full_tensor(), whole.weight.detach())
    optimizers = [fm.optim.StiffnessAdamW(each.parameters(), writeback=writeback) for each in (parts, whole)]
    put_equal_gradients(parts, whole, 0)
    for optimizer in optimizers:
        optimizer.step()
    assert whole.weight.remainder is None
    check_whole(parts.weight.full_tensor(), whole.weight.detach())


@pytest.mark.parametrize("writeback", ["stochastic", "residual8"])
def test_what_rounding_left_is_part_of_the_whole_until_a_step(pool: Pool, writeback: str) -> None:
    pool.run(stepped_whole, writeback)


def lost_in_one() -> None:
    parts, whole = sharded(model(keep_remainder=True)), model(keep_remainder=True)
    held: Any = parts[0].weight._local_tensor
    if dist.get_rank() == 1:
        held.remainder = None
    made = parts[0].weight.full_tensor()
    assert made.remainder is None
    assert torch.equal(made.codes, whole[0].weight.codes)


def test_what_one_process_has_lost_is_not_waited_for(pair: Pool) -> None:
    pair.run(lost_in_one, limit=20)


def not_whole() -> list[str]:
    """What looks like ``full_tensor`` to an operator: the same function of torch's, over what is no whole."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh, said = init_device_mesh("cpu", (dist.get_world_size(),)), []
    p: Any = sharded(model())[0].weight
    assert type(p.to_local()) is type(p._local_tensor)
    for placement in (Replicate(), p.placements[0]):
        try:
            DTensor.from_local(model()[0].weight, mesh, [placement])
        except RuntimeError as error:
            said.append(str(error))
    return said


def test_what_is_not_made_whole_is_refused_as_ever(pair: Pool) -> None:
    for said in pair.run(not_whole):
        assert len(said) == 2
        assert all("can't take an FP8Tensor" in line for line in said)


# --------------------------------------------------------------------------------------------------- averages
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
    said: dict[str, str] = {}
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
    for name, attempt in attempts.items():
        try:
            attempt()
        except ValueError as error:
            said[name] = str(error)
    assert rows.n_averaged == 0
    return said


def test_averages_of_other_rows_are_refused_in_every_process(pair: Pool) -> None:
    first, second = pair.run(refused)
    assert first == second
    assert first.keys() == {"made of rows", "whole of rows", "rows of whole", "other rows"}
    for line in first.values():
        assert "call averaged_model before fully_shard, then fully_shard on the average's module" in line
        assert "\n" not in line
