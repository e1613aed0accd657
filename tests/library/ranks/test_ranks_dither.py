"""Dithered draws over several processes: however a tensor is cut or reloaded, the bits of one, over an epoch's end."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from family_cases import VALID, ids, make
from optimizer_cases import frozen
from paths import by
from rank_cases import model, stored
from rank_pool import Pool
from test_ranks_ddp import backward_beside
from test_ranks_fsdp import check_same, put_equal_gradients, sharded
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fp8manifold as fm
from fp8manifold.random_bits import EPOCH

BORDER = EPOCH - 2
"""Writes that are behind each parameter when the steps begin that are compared: the third is of another epoch."""

COMBINATIONS = [c for c in VALID if c[0] != "FisherNaturalGradient"]
combined = pytest.mark.parametrize(("name", "writeback", "moments"), COMBINATIONS, ids=ids(COMBINATIONS))
KINDS = {
    "riemannian": ("RiemannianAdam", "stochastic", "8bit"),
    "muon": ("StiffnessMuon", "stochastic", "8bit"),
    "residual": ("StiffnessAdamW", "residual8", "bfloat16"),
}


def dithering(kind: tuple[str, str, str], net: nn.Module, **more: Any) -> Any:
    name, writeback, moments = kind
    options = {"writeback": writeback, "moments": moments, "draws": "dither", "refresh_every": 2, **more}
    return make(name, net.parameters(), **options)


def near_the_border(*optimizers: Any) -> None:
    """Let states that have begun be as far as the last writes of an epoch."""
    for optimizer in optimizers:
        for state in optimizer.state.values():
            assert int(state["step"]) == 1
            state["step"] += BORDER - 1


def keeps(kind: tuple[str, str, str]) -> dict[str, Any]:
    return {"keep_remainder": True} if kind[1].startswith("residual") else {}


def rows_stepped(
    kind: tuple[str, str, str], net: dict[str, Any], *, path: str = "native", own: bool = False, **more: Any
) -> bool:
    """Steps of rows and of the whole; whether draws that are anew in each step had led elsewhere."""
    dtype, taken = net.pop("dtype", torch.float32), {"draws": None} if own else {}
    whole, other, parts = (model(**net, **keeps(kind)).to(dtype) for _ in range(3))
    parts = sharded(parts)
    ours, its = (by(path, dithering(kind, each, **taken, **more)) for each in (parts, whole))
    anew = by(path, dithering(kind, other, draws="independent", **more))
    for step in range(5):
        put_equal_gradients(parts, whole, step)
        for p, q in zip(whole.parameters(), other.parameters(), strict=True):
            q.grad = p.grad.clone()
        for optimizer in (ours, its, anew):
            optimizer.step()
        check_same(parts, whole)
        if step == 0:
            near_the_border(ours, its, anew)
    assert {int(state["step"]) for state in ours.state.values()} == {BORDER + 4}
    return stored(whole) != stored(other)


@pytest.mark.covering(1)
@pytest.mark.parametrize(("granularity", "path"), [("channel", "native"), ("tensor", "eager"), ("block", "native")])
@combined
def test_rows_draw_as_the_whole(
    pool: Pool, name: str, writeback: str, moments: str, granularity: str, path: str
) -> None:
    """22, 64 and 5 rows in 3 processes, natively and by torch's own operators."""
    kind = (name, writeback, moments)
    differs = pool.run(rows_stepped, kind, {"granularity": granularity}, path=path)
    assert differs == [writeback != "nearest"] * 3


@pytest.mark.parametrize("name", ["RiemannianAdam", "RiemannianSGD"])
def test_rows_draw_by_the_weights_own(pool: Pool, name: str) -> None:
    """Of an optimizer without draws of its own, with those that the model was made with."""
    assert pool.run(rows_stepped, (name, "stochastic", "8bit"), {"draws": "dither"}, own=True) == [True] * 3


def replicas_stepped(kind: tuple[str, str, str] | None) -> Any:
    """Ranks under DDP and one process with the averaged gradients; None: torch's SGD, which the tensors draw for."""
    net = model(seed=dist.get_rank(), **(keeps(kind) if kind else {}))
    if kind is None and dist.get_rank() == 0:  # what the others are sent
        for p in net.parameters():
            if isinstance(p, fm.FP8Tensor):
                p.draws = "dither"
                p.counter.fill_(BORDER)
    fm.distributed.sync(net)
    assert {p.draws for p in net.parameters() if isinstance(p, fm.FP8Tensor)} == {
        "dither" if kind is None else "independent"
    }
    alone = copy.deepcopy(net)
    wrapped = DistributedDataParallel(net, init_sync=False)
    ours, its = (torch.optim.SGD(m.parameters(), 0.1) if kind is None else dithering(kind, m) for m in (net, alone))
    for step in range(5):
        backward_beside(wrapped, alone, step)
        for optimizer in (ours, its):
            optimizer.step()
        if step == 0 and kind:
            near_the_border(ours, its)
    assert stored(net) == stored(alone)
    assert frozen(ours.state_dict()) == frozen(its.state_dict())
    return stored(net)


@pytest.mark.parametrize("kind", [*KINDS, None])
def test_replicas_draw_as_one_process(pool: Pool, kind: str | None) -> None:
    each = pool.run(replicas_stepped, KINDS[kind] if kind else None)
    assert each[0] == each[1] == each[2]
