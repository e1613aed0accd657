"""Differences between processes are named and refused in all of them, before anything has changed."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_cases import batch, loss_of, model, refusal, stored, synced, train_on
from rank_pool import Pool
from test_ranks_fsdp import sharded
from torch import Tensor, nn

import fp8manifold as fm


def matrices(rows: int = 8) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(3)))
    return fm.quantize_model(net, "E4M3", "fp8", seed=1)


def with_gradients(net: nn.Module) -> None:
    loss_of(net, torch.ones(4, 16)).backward()


Spoil = Callable[[Any, Any], Any]


def forget_a_gradient(net: Any, optimizer: Any) -> None:
    list(net.parameters())[dist.get_rank()].grad = None


def another(name: str, value: Any) -> Spoil:
    def spoil(net: Any, optimizer: Any) -> None:
        if dist.get_rank():
            optimizer.param_groups[0][name] = value

    return spoil


def load(net: Any, optimizer: Any) -> None:
    twin = matrices()
    other = fm.optim.StiffnessMuon([{"params": list(twin.parameters())}], lr=0.01)
    for _ in range(3):
        with_gradients(twin)
        other.step()
    if dist.get_rank():
        optimizer.load_state_dict(other.state_dict())


SPOILED: dict[str, tuple[Spoil, str]] = {
    "gradients": (forget_a_gradient, "whether there is a gradient of parameter 0 of group 0"),
    "seed": (another("seed", 9), "seed of group 0"),
    "lr": (another("lr", 0.5), "lr of group 0"),
    "momentum": (another("momentum", 0.5), "momentum of group 0"),
    "state": (load, "how far the state is of parameter 0 of group 0"),
}


def refused(name: str, shards: bool, later: bool) -> tuple[str, bool]:
    """The error of a step in this process, and True where the model has stayed as it was."""
    net = matrices()
    if shards:
        net = sharded(net)
    else:
        fm.distributed.sync(net)
    optimizer = fm.optim.StiffnessMuon([{"params": list(net.parameters())}], lr=0.01)
    if later:
        with_gradients(net)
        optimizer.step()
        optimizer.zero_grad()
    with_gradients(net)
    SPOILED[name][0](net, optimizer)
    before, state = held(net), copy.deepcopy(optimizer.state_dict()["state"])
    said = refusal(optimizer.step)
    return said, held(net) == before and repr(optimizer.state_dict()["state"]) == repr(state)


def held(net: nn.Module) -> list[bytes]:
    each = [getattr(p, "_local_tensor", p) for p in net.parameters()]
    return [p.codes.numpy().tobytes() for p in each]


@pytest.mark.covering(2)
@pytest.mark.parametrize("later", [False, True], ids=["first step", "later step"])
@pytest.mark.parametrize("shards", [False, True], ids=["replicas", "shards"])
@pytest.mark.parametrize("name", SPOILED)
def test_what_differs_is_refused_in_every_process(pair: Pool, name: str, shards: bool, later: bool) -> None:
    for said, unchanged in pair.run(refused, name, shards, later):
        assert f"{SPOILED[name][1]}" in said
        assert "is not the same in every process" in said
        assert unchanged


def refused_alone() -> tuple[str, str]:
    """An option out of range, and a sparse gradient, in one process only: the other does not wait."""
    net = synced(matrices())
    optimizer = fm.optim.StiffnessMuon([{"params": list(net.parameters())}], lr=0.01)
    with_gradients(net)
    sparse = next(net.parameters())
    dense = sparse.grad
    if dist.get_rank():
        sparse.grad = torch.eye(16).to_sparse()
    said = []
    for _ in range(2):
        said.append(refusal(optimizer.step))
        sparse.grad = dense
    return said[0], said[1]


def test_a_refusal_in_one_process_ends_the_step_in_all(pair: Pool) -> None:
    others, own = pair.run(refused_alone)
    assert "another process refuses this step" in others[0]
    assert "dense real gradients only" in own[0]
    assert (others[1], own[1]) == ("", "")


def of_another_state(kind: str) -> str:
    """States of the same length whose averages differ; a remainder that one process lacks."""
    net = synced(model(keep_remainder=kind == "remainder"))
    options: dict[str, Any] = {"lr": 0.01, "writeback": "residual8" if kind == "remainder" else "stochastic"}
    optimizer = fm.optim.StiffnessAdamW(net.parameters(), **options)
    if kind == "remainder":
        if dist.get_rank():
            net[2].weight.remainder = None
    else:
        twin = model()
        other = fm.optim.StiffnessAdamW(twin.parameters(), **options)
        loss_of(twin, batch(dist.get_rank())).backward()
        other.step()
        optimizer.load_state_dict(other.state_dict())
    loss_of(net, batch(3)).backward()
    before, said = stored(net), refusal(optimizer.step)
    assert stored(net) == before
    return said


@pytest.mark.parametrize("kind", ["averages", "remainder"])
def test_loaded_states_and_remainders_are_compared(pair: Pool, kind: str) -> None:
    name = "2.weight" if kind == "remainder" else "0.weight"
    for said in pair.run(of_another_state, kind):
        assert f"'{name}' is not the same in every process" in said


def loaded_everywhere() -> list[Tensor]:
    """Weights after all processes load the same state in the middle: none of them is refused."""
    net = synced(model())
    optimizer = fm.optim.StiffnessAdamW(net.parameters(), lr=0.01)
    for step in range(4):
        if step == 2:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        train_on(net, optimizer, batch(step))
    return [p.detach().clone() for p in net.parameters() if not isinstance(p, fm.FP8Tensor)]


def test_a_state_that_all_processes_load_goes_on(pair: Pool) -> None:
    one, other = pair.run(loaded_everywhere)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
