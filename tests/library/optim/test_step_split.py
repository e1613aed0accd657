"""A step of a part of a tensor is the part of the step, and nothing but its key decides what is drawn."""

import itertools
from typing import Any

import pytest
import torch
from laws import each
from optimizer_cases import normal
from torch import Tensor

import fp8manifold as fm
from fp8manifold import optim
from fp8manifold.optim import _step, anneal
from fp8manifold.optim._backends import run_all
from fp8manifold.optim._slot import Slot, View

ANNEALED: dict[str, Any] = {"stiffness": anneal(1.0, 0.0, 5), "draws": "dither"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "adamw stochastic": ("StiffnessAdamW", {"lr": 0.02, "weight_decay": 0.1}),
    "adamw residual8, 8 bits": ("StiffnessAdamW", {"lr": 0.02, "writeback": "residual8", "moments": "8bit"}),
    "adamw residual8, annealed": ("StiffnessAdamW", {"lr": 0.02, "writeback": "residual8", **ANNEALED}),
    "sgd injected": ("StiffnessSGD", {"lr": 0.3, "momentum": 0.9, "writeback": "momentum", "moments": "bfloat16"}),
    "lion, 8 bits": ("StiffnessLion", {"lr": 0.02, "moments": "8bit"}),
    "madam": ("Madam", {"lr": 0.1, "moments": "bfloat16"}),
    "riemannian adam, 8 bits": ("RiemannianAdam", {"lr": 1.7, "moments": "8bit"}),
    "riemannian sgd injected": ("RiemannianSGD", {"lr": 90.0, "momentum": 0.9, "writeback": "momentum"}),
}
cases = pytest.mark.parametrize(("kind", "options"), CASES.values(), ids=CASES)
#: shape, options of the weight; blocks of averages are rows of 31, 64 (from 320: 160) and 32 elements
SHAPES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "channels": ((9, 31), {}),
    "one scale, long rows": ((4, 320), {"granularity": "tensor"}),
    "blocks": ((3, 96), {"granularity": "block"}),
    "three axes": ((5, 4, 11), {}),
}


pytestmark = pytest.mark.usefixtures("each_path")


def third_step(kind: str, p: Any, options: dict[str, Any]) -> Slot:
    optimizer = getattr(optim, kind)([p], seed=2**40 + 1, **options)
    for t in range(3):
        p.grad = normal(*p.shape, seed=t)
        if t < 2:
            optimizer.step()
    slots = [optimizer._slot(optimizer.param_groups[0], p)]
    optimizer._check_schedules(slots)
    slot: Slot = optimizer._begin(slots)[0]
    return slot


def copied(slot: Slot) -> dict[str, Tensor]:
    return {name: array.clone() for name, array in slot.arrays.items()}


def stepped(slot: Slot, arrays: dict[str, Tensor], dims: tuple[int, ...], offset: int) -> None:
    """Take the step of a part, whose first element has a position in the whole."""
    rows = (dims[0], *slot.view.row_dims[1:]) if slot.view.row_dims else ()
    tensors = {name: array for name, array in arrays.items() if name not in ("scale", "lowest", "highest")}
    run_all([slot.replaced(view=View(dims, rows), tensors=tensors, kept_scale=arrays["scale"], offset=offset)])


def parts_of(array: Tensor, start: int, end: int, rows: int) -> Tensor:
    return array[start:end] if array.dim() and array.shape[0] == rows else array


def same_in_parts(slot: Slot, cuts: list[int], offset: int = 0) -> dict[str, Tensor]:
    whole, cut = copied(slot), copied(slot)
    rows, inner = slot.view.dims[0], slot.view.numel // slot.view.dims[0]
    stepped(slot, whole, slot.view.dims, offset)
    for start, end in itertools.pairwise([0, *cuts, rows]):
        arrays = {name: parts_of(array, start, end, rows) for name, array in cut.items()}
        stepped(slot, arrays, (end - start, *slot.view.dims[1:]), offset + start * inner)
    for name, array in whole.items():
        assert torch.equal(array, cut[name]), name
    assert not torch.equal(whole["weight"], slot.arrays["weight"])
    return whole


@cases
@each(("shape", "how"), SHAPES.values(), ids=SHAPES)
def test_rows_in_parts(kind: str, options: dict[str, Any], shape: tuple[int, ...], how: dict[str, Any]) -> None:
    """In single rows, in two and in uneven parts; rows are multiples of the blocks of 8-bit averages."""
    p = fm.FP8Parameter(normal(*shape, seed=3, std=0.1), "E4M3", **how)
    slot = third_step(kind, p, options)
    rows = slot.view.dims[0]
    for cuts in ([1], list(range(1, rows)), [rows // 2, rows - 1]):
        same_in_parts(slot, cuts)


def test_positions_beyond_32_bits() -> None:
    """A part that starts below 2^32 and ends above it, and one far out: none draws what the first one does."""
    kind, options = CASES["adamw residual8, 8 bits"]
    slot = third_step(kind, fm.FP8Parameter(normal(9, 31, seed=3, std=0.1), "E4M3", seed=3), options)
    found = [same_in_parts(slot, [2, 4], offset)["residual"] for offset in (0, 2**32 - 100, 2**40)]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(found, 2))


def test_the_blocks_in_which_eager_code_runs_are_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager steps run some rows at a time; of a different number of rows the same bits come out."""
    for kind, options in CASES.values():
        results = []
        for block in (1, 70, 1 << 20):
            monkeypatch.setattr(_step, "block_on", lambda _, size=block: size)
            p = fm.FP8Parameter(normal(9, 31, seed=3, std=0.1), "E4M3", seed=3)
            slot = third_step(kind, p, options)
            results.append(copied(slot) | {"after": same_in_parts(slot, [4])["weight"]})
        for other in results[1:]:
            assert all(torch.equal(results[0][name], array) for name, array in other.items())
