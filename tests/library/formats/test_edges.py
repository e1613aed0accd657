"""NaN, Inf, -0 and nothing at all, as the docstrings have it: figures and maps that no other test asks for them."""

import math
from collections.abc import Callable
from typing import Any

import torch
from laws import each
from torch import Tensor

import fp8manifold as fm

NAN, INF = math.nan, math.inf
NONE = torch.empty(0)


def of(*values: float) -> Tensor:
    return torch.tensor(values)


def alike(found: Any, expected: Any) -> bool:
    """Equal, where NaN equals NaN and -0 is not 0."""
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(alike, found, expected))
    if math.isnan(expected):
        return math.isnan(found)
    return bool(found == expected) and math.copysign(1, found) == math.copysign(1, expected)


@each(
    ("function", "expected"),
    [
        (fm.ulp, [NAN, 32.0, 2.0**-9, 2.0**-9]),
        (fm.round_to_grid, [NAN, 448.0, -0.0, 0.0]),
        (fm.to_chart, [NAN, 126.0, -0.0, 0.0]),
        (fm.from_chart, [NAN, 448.0, -0.0, 0.0]),
        (fm.fake_quantize, [NAN, 448.0, -0.0, 0.0]),  # at the scale 1, which is that of an Inf
    ],
)
def test_maps(function: Callable[..., Tensor], expected: list[float]) -> None:
    assert alike(function(of(NAN, INF, -0.0, 0.0), "E4M3").tolist(), expected)
    assert function(NONE, "E4M3").shape == (0,)


def test_codes() -> None:
    assert fm.encode(of(NAN, INF, -0.0), "E4M3").tolist() == [127, 126, 128]
    assert fm.encode(of(-0.0), "E4M3FNUZ").tolist() == [0]
    assert alike(fm.decode(torch.tensor([0x7C, 0x80], dtype=torch.uint8), "E5M2").tolist(), [INF, -0.0])
    assert fm.decode(fm.encode(NONE, "E4M3"), "E4M3").shape == (0,)


@each("amax", [0.0, -0.0, NAN])
def test_a_scale_without_a_magnitude_stays(amax: float) -> None:
    assert fm.amax_scale(of(amax), "E4M3").item() == 1.0
    assert fm.widened_scale(of(amax), of(0.25), "E4M3").tolist() == [0.25]


def test_an_infinite_magnitude_has_the_largest_scale() -> None:
    assert fm.widened_scale(of(INF), of(1.0), "E4M3").tolist() == [2.0**127]
    assert fm.widened_scale(NONE, NONE, "E4M3").shape == (0,)
