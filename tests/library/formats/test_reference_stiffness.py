"""The mean of a stiffness field is counted in pieces, whose temporaries are small, and is what it is of the whole."""

import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from laws import each
from optimizer_cases import normal, step_from
from torch import Tensor

import fp8manifold as fm
from fp8manifold._base.blocks import BLOCK
from fp8manifold._numerics.stiffness import bounded_share, reference_stiffness


def field(count: int, dtype: torch.dtype) -> Tensor:
    exponents = torch.randint(-20, 20, (count,), generator=torch.Generator().manual_seed(count))
    return torch.ldexp(torch.ones(count, dtype=dtype), exponents.to(dtype))


@each("dtype", [torch.float32, torch.float64])
@each("count", [1, 100, BLOCK, 3 * BLOCK + 7])
def test_the_mean_and_the_share_are_those_of_the_whole(count: int, dtype: torch.dtype) -> None:
    x = field(count, dtype)
    mean = float(sum(Fraction(value) * int((x == value).sum()) for value in x.unique().tolist()) / count)
    assert math.isclose(reference_stiffness(x), mean, rel_tol=2**-52)
    ratio = x / mean
    assert bounded_share(x, mean, 0.1, 16.0) == ((ratio < 0.1) | (ratio > 16.0)).sum().item() / count
    x[-1] *= 1.5  # no power of two, in the last piece
    assert math.isclose(reference_stiffness(x), mean + 0.5 * x[-1].item() / 1.5 / count, rel_tol=2**-50)


def test_a_first_step_counts_no_more_than_a_piece_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exponents of a whole field, and their int64 copies, took 15 bytes a weight beside the weight."""
    sizes: list[int] = []
    count = torch.bincount

    def counted(x: Tensor, *rest: Any, **more: Any) -> Tensor:
        sizes.append(x.numel())
        return count(x, *rest, **more)

    monkeypatch.setattr(torch, "bincount", counted)
    p = fm.FP8Parameter(normal(600, 512, seed=1), "E4M3")
    optimizer = fm.optim.StiffnessAdamW([p], 1e-3, moments="8bit")
    step_from(optimizer, p, normal(600, 512, seed=2))
    assert sum(sizes) == p.numel()
    assert max(sizes) <= BLOCK
