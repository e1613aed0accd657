"""Muon's steps by what the products are computed in, which the processor decides: every shape, storage and backend."""

from typing import Any

import pytest
import torch
from family_cases import VALID
from laws import each
from optimizer_cases import bits_of, frozen, grid_weight, normal, put_gradients, step_from, stored_weight
from paths import PATHS, by
from rank_pool import Pool
from test_ranks_fsdp import stepped
from torch import Tensor, nn

from fp8manifold.optim import StiffnessMuon
from fp8manifold.optim._muon import COEFFICIENTS, adjusted_rate, orthogonal_factor

SHAPES = {"tall": (24, 8), "wide": (8, 24), "square": (16, 16), "column": (33, 1), "row": (1, 33)}
SHAPES |= {"batch": (3, 24, 8), "convolution": (24, 2, 2, 2)}
STORAGES = ("codes", "grid", "float32", "bfloat16")


def weight_of(storage: str, shape: tuple[int, ...]) -> Any:
    if storage == "codes":
        return stored_weight(shape=shape, granularity="tensor")
    if storage == "grid":
        return grid_weight(shape=shape, rounding="stochastic")
    return nn.Parameter(normal(*shape, std=0.1).to(getattr(torch, storage)))


def muon(weight: Tensor, shape: str, **options: Any) -> StiffnessMuon:
    group = {"params": [weight], "matrix_shape": "batch" if shape == "batch" else "flatten"}
    return StiffnessMuon([group], **{"lr": 0.02, "seed": 3, **options})


@pytest.mark.covering(2)
@each(("writeback", "moments"), [c[1:] for c in VALID if c[0] == "StiffnessMuon"])
@each("storage", STORAGES)
@each("shape", SHAPES)
def test_native_steps_have_the_bits_of_eager_ones(
    products: str, shape: str, storage: str, writeback: str, moments: str
) -> None:
    found = []
    for path in PATHS:
        weight = weight_of(storage, SHAPES[shape])
        optimizer = by(path, muon(weight, shape, writeback=writeback, moments=moments))
        for step in range(3):
            put_gradients([weight], step)
            optimizer.step()
        found.append((bits_of(weight), frozen(optimizer.state_dict()["state"])))
    assert found[0][0] != bits_of(weight_of(storage, SHAPES[shape]))
    assert found[0] == found[1]


@each("storage", STORAGES)
@each("shape", SHAPES)
def test_a_step_goes_along_the_factor(products: str, shape: str, storage: str) -> None:
    """Whatever a factor's memory looks like: what is asked for, beside float64."""
    weight, gradient = weight_of(storage, SHAPES[shape]), normal(*SHAPES[shape], seed=9)
    matrices = gradient.double() if shape == "batch" else gradient.double().flatten(1)
    factor = orthogonal_factor(matrices, COEFFICIENTS, 5, 1e-7, torch.float64)
    rate = adjusted_rate(1.0, None, *matrices.shape[-2:])
    before = weight.detach().clone().double()
    optimizer = muon(weight, shape, lr=1.0, momentum=0.0, weight_decay=0.0)
    step_from(optimizer, weight, gradient.to(weight.dtype))
    error = (before - weight.detach().double() - rate * factor.view(weight.shape)).norm() / (rate * factor.norm())
    assert float(error) < 0.1  # that of a write-back among it


@each("dtype", [torch.float32, torch.bfloat16])
@each("moments", ["8bit", "bfloat16"])
def test_rows_are_stepped_as_the_whole(pair: Pool, moments: str, dtype: torch.dtype) -> None:
    pair.run(stepped, "StiffnessMuon", "stochastic", moments, {"granularity": "channel"}, ns_dtype=dtype)
