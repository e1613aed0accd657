"""Cases of the manifolds: formats, scales, metrics, and an oracle made of nothing but a
list of values.

The oracle reads the geometry off the representable numbers by linear interpolation,
with no exponent, bias or bit in sight: the chart interpolates codes over values, its
inverse values over codes, and the stiffness is the gap above.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import settings

import fp8manifold as fm
from fp8manifold import reference

EPS = torch.finfo(torch.float64).eps

FORMATS = {fmt.name: fmt for fmt in fm.NAMED_FORMATS.values()}
#: One of each kind: the OCP ones, a uniform grid, powers of two, no -0, powers of two
#: without -0, four bits.
KINDS_OF_FORMATS = {
    name: FORMATS[name]
    for name in ("E4M3", "E5M2", "E3M4", "E1M6", "E7M0", "E4M3FNUZ", "P3109_8P1", "E2M1")
}
SCALES = {
    "1": 1.0,
    "2^-7": 2.0**-7,
    "0.3": 0.3,
    "rows": torch.tensor([[0.25], [1.7], [3.0]], dtype=torch.float64),
}

deterministic = settings(derandomize=True, deadline=None, database=None, max_examples=200)


def ulp_as_function(x, fmt):
    return fm.ulp(x, fmt)


def smooth_function(x, fmt):
    return (x.abs() + fmt.min_normal) * 2.0**-fmt.mantissa_bits


METRICS = {name: name for name in ("ulp", "log", "euclidean")}
METRICS |= {"function-ulp": ulp_as_function, "function-smooth": smooth_function}


every_format = pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
few_formats = pytest.mark.parametrize("fmt", KINDS_OF_FORMATS.values(), ids=KINDS_OF_FORMATS)
every_metric = pytest.mark.parametrize("metric", METRICS.values(), ids=METRICS)
every_scale = pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
exact_scale = pytest.mark.parametrize("scale", [1.0, 2.0**-7], ids=["1", "2^-7"])
both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


@dataclass(frozen=True)
class Ruler:
    """Values of a format in ascending order, zero once, their signed codes, and the
    value that would come next.
    """

    values: np.ndarray
    codes: np.ndarray
    beyond: float

    def chart(self, x):
        return np.interp(x, self.values, self.codes)

    def inverse(self, c):
        return np.interp(c, self.codes, self.values)

    def stiffness(self, x):
        """The gap that holds |x|, or begins there."""
        knots = np.append(self.values[self.values >= 0], self.beyond)
        gap = np.searchsorted(knots, np.abs(x), side="right") - 1
        return np.diff(knots)[np.minimum(gap, len(knots) - 2)]


@cache
def ruler(fmt):
    top = reference.max_code(fmt)
    positive = np.array([float(reference.magnitude(m, fmt)) for m in range(top + 2)])
    values = np.concatenate([-positive[top:0:-1], positive[: top + 1]])
    return Ruler(values, np.arange(-top, top + 1, dtype=np.float64), float(positive[-1]))


def grid(fmt, dtype=torch.float64):
    return torch.tensor([*ruler(fmt).values, -0.0], dtype=torch.float64).to(dtype)


def off_grid(fmt, count, seed=0, share=1.0):
    """Values uniform in the chart, so in every binade and subnormal, over a share of
    the range.
    """
    top = share * ruler(fmt).codes[-1]
    return torch.from_numpy(
        ruler(fmt).inverse(np.random.default_rng(seed).uniform(-top, top, count))
    )


def spread(x, scale):
    """Return points from values in units of the scale, one row for each entry of it."""
    return x * torch.as_tensor(
        scale, dtype=torch.float64 if isinstance(scale, torch.Tensor) else None
    ).to(x.dtype)


def same_bits(a, b):
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    nan = a.isnan() & b.isnan()
    return bool((((a == b) & (a.signbit() == b.signbit())) | nan).all())


def lands_on_grid(y, fmt, scale):
    points = spread(grid(fmt, y.dtype), scale)
    if points.ndim == 1:
        return bool(torch.isin(y, points).all())
    return all(bool(torch.isin(row, allowed).all()) for row, allowed in zip(y, points, strict=True))


def pairs(x):
    return x.repeat_interleave(x.numel()), x.repeat(x.numel())


def interior_and_grid(fmt, scale):
    """Start and end points: off the grid and on it, in every combination, all binades,
    both signs.
    """
    loose, fixed = off_grid(fmt, 400, seed=1), grid(fmt)
    fixed = fixed[torch.from_numpy(np.random.default_rng(2).integers(0, len(fixed), 400))]
    start = torch.cat([loose, loose, fixed, fixed])
    end = torch.cat([loose.flip(0), fixed, loose, fixed.flip(0)])
    return spread(start, scale), spread(end, scale)


def chart_error(manifold, *points):
    """The error in steps that float64 may make: a few EPS of the coordinates that were
    added and subtracted.
    """
    return 64 * EPS * (1 + sum(manifold.to_chart(point).abs() for point in points))
