"""The theorem of docs/serve.md: which requantisers give back the values of codes.

A requantiser writes w as s' d(round(w / s')), saturating. Weights are s d(c) with s = 1,
as scaling by a power of two changes nothing.
"""

from itertools import product
from math import log2

import pytest
import torch

import fp8manifold as fm

LARGEST = 448.0
#: every value of E4M3
VALUES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
VALUES = VALUES[~VALUES.isnan()]
#: s' in two binades of each kind of size: every significand of eight bits
SCALES = [
    pytest.param(2.0**exponent * (1 + fraction / 256), id=f"2^{exponent} x {1 + fraction / 256}")
    for exponent, fraction in product(
        (-12, -9, -8, -3, -1, 0, 1, 3, 9), (0, 1, 32, 85, 128, 171, 192, 255)
    )
]
#: sizes that times some code's significand are a power of two, or nearly: float32 rounds
#: these products to it, so that some values do come back
SCALES += [
    pytest.param(float(torch.tensor(2.0**exponent * 4 / odd)), id=f"2^{exponent} x 4/{odd}")
    for exponent in (-6, 0, 2)
    for odd in (3, 5, 7, 9, 11, 13, 15)
]


def requantised(weights: torch.Tensor, scale: float) -> torch.Tensor:
    """By torch's own dtype, in the float32 that servers use."""
    units = (weights.float() / scale).clamp(-LARGEST, LARGEST)
    return units.to(torch.float8_e4m3fn).float() * torch.tensor(scale, dtype=torch.float32)


@pytest.mark.parametrize("scale", SCALES)
def test_values_come_back_exactly_if_the_theorem_says_so(scale: float) -> None:
    in_range = VALUES[VALUES.abs() <= LARGEST * scale]
    come_back = bool((requantised(in_range, scale).double() == in_range).all())
    is_power_of_two = log2(scale) == int(log2(scale))
    # without 15/8 in range, other significands than those of the proof decide
    assert in_range.max() >= 1.875 * 2**-6
    assert come_back == (is_power_of_two and scale <= 1)
    beyond = VALUES[VALUES.abs() > LARGEST * scale]
    assert not (requantised(beyond, scale).double() == beyond).any()


@pytest.mark.parametrize("exponents", [(0, 0), (0, 3), (-2, 5)])
@pytest.mark.parametrize("offset", [-9, -1, 0, 1, 4])
def test_a_group_over_several_scales_needs_the_smallest(
    exponents: tuple[int, int], offset: int
) -> None:
    groups = [VALUES * 2.0**exponent for exponent in exponents]
    scale = 2.0 ** (min(exponents) + offset)
    weights = torch.cat(groups)
    weights = weights[weights.abs() <= LARGEST * scale]
    come_back = bool((requantised(weights, scale).double() == weights).all())
    assert come_back == (offset <= 0)


def test_a_usual_scale_of_squares_changes_most_weights_of_ours() -> None:
    torch.manual_seed(0)
    weight = fm.FP8Tensor(torch.randn(128, 128), "E4M3", granularity="square").dequantize()
    amax = weight.abs().max()
    in_floats = requantised(weight, float(amax / LARGEST))
    assert (in_floats != weight).float().mean() > 0.5
    in_powers = requantised(weight, 2.0 ** float(torch.log2(amax / LARGEST).ceil()))
    assert torch.equal(in_powers, weight)
