"""torch's distributed checkpoints take an optimizer's state flat, by name, and give it back to the bit."""

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

import fp8manifold as fm
from fp8manifold import optim

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
KINDS: dict[str, Any] = {
    "adamw": lambda p: optim.StiffnessAdamW(p, lr=1e-2, moments="8bit", writeback="residual8"),
    "lion": lambda p: optim.StiffnessLion(p, lr=1e-2, writeback="residual8"),
    "sgd": lambda p: optim.StiffnessSGD(p, lr=1e-1, momentum=0.5, writeback="momentum"),
    "riemannian": lambda p: optim.RiemannianAdam(p, lr=0.5, float_lr=1e-2),
    "madam": lambda p: optim.Madam(p, lr=1e-2),
    "annealed": lambda p: optim.StiffnessAdamW(p, lr=1e-2, stiffness=optim.anneal(1.0, 0.0, 4)),
    "annealed muon": lambda p: optim.StiffnessMuon(
        [{"params": q, "direction": "muon" if q.dim() == 2 else "adam"} for q in p], stiffness=lambda t: 1 / (1 + t)
    ),
}
by_kind = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)


def model_of(storage: Any = "fp8") -> torch.nn.Module:
    torch.manual_seed(0)
    return fm.quantize_model(torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.Linear(6, 2)), "E4M3", storage)


def step(model: torch.nn.Module, optimizer: Any, t: int) -> None:
    torch.manual_seed(t)
    for p in model.parameters():
        p.grad = torch.randn(p.shape)
    optimizer.step()


@by_kind
@pytest.mark.parametrize("storage", ["fp8", "grid"])
def test_a_flat_state_goes_on_to_the_bit(make: Any, storage: str) -> None:
    model = model_of(storage)
    optimizer = make(model.parameters())
    for t in range(3):
        step(model, optimizer, t)
    weights = copy.deepcopy(model.state_dict())
    flat = get_optimizer_state_dict(model, optimizer, options=FLAT)
    state = {k: v for k, v in flat.items() if k.startswith("state.")}
    assert all(type(v) in (int, float, torch.Tensor) for v in state.values())
    other = model_of(storage)
    resumed = make(other.parameters())
    set_optimizer_state_dict(other, resumed, flat, options=FLAT)
    other.load_state_dict(weights)
    for t in range(3, 5):
        step(model, optimizer, t)
        step(other, resumed, t)
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(p, q)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("kind", ["annealed", "annealed muon"])
def test_a_schedule_is_left_to_the_constructor_by_a_checkpoint(kind: str, flat: bool, tmp_path: Path) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model = model_of()
    optimizer = KINDS[kind](model.parameters())
    for t in range(2):
        step(model, optimizer, t)
    saved = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer, options=options)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group is known
        dcp.save(saved, checkpoint_id=tmp_path)
        other = model_of()
        resumed = KINDS[kind](other.parameters())
        read = {"model": other.state_dict(), "optimizer": get_optimizer_state_dict(other, resumed, options=options)}
        dcp.load(read, checkpoint_id=tmp_path)
    other.load_state_dict(read["model"])
    set_optimizer_state_dict(other, resumed, read["optimizer"], options=options)
    assert all(callable(group["stiffness"]) for group in resumed.param_groups)
    for t in range(2, 5):
        step(model, optimizer, t)
        step(other, resumed, t)
        assert all(map(torch.equal, model.parameters(), other.parameters()))


@by_kind
def test_a_state_with_its_format_in_a_tuple_goes_on(make: Any) -> None:
    """As it was saved before: also refused as before where it does not fit."""
    model = model_of()
    optimizer = make(model.parameters())
    for t in range(3):
        step(model, optimizer, t)
    saved = copy.deepcopy(optimizer.state_dict())
    del saved["streams_begun"], saved["skipped_in_row"]
    for entry in saved["state"].values():
        if "grid" in entry:
            entry["grid"] = tuple(entry["grid"].tolist())
    other = copy.deepcopy(model)
    resumed = make(other.parameters())
    resumed.load_state_dict(saved)
    for t in range(3, 5):
        step(model, optimizer, t)
        step(other, resumed, t)
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(p, q)
    next(entry for entry in saved["state"].values() if "grid" in entry)["grid"] = (5, 2, 15, 0, 1)
    with pytest.raises(ValueError, match="was made for E5M2"):
        resumed.load_state_dict(saved)
