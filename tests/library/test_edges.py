"""NaN, Inf, -0 and nothing at all, as the docstrings have it: figures and maps that no other test asks for them."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fp8manifold as fm
from fp8manifold import monitor

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


@pytest.mark.parametrize(
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


@pytest.mark.parametrize("amax", [0.0, -0.0, NAN])
def test_a_scale_without_a_magnitude_stays(amax: float) -> None:
    assert fm.amax_scale(of(amax), "E4M3").item() == 1.0
    assert fm.widened_scale(of(amax), of(0.25), "E4M3").tolist() == [0.25]


def test_an_infinite_magnitude_has_the_largest_scale() -> None:
    assert fm.widened_scale(of(INF), of(1.0), "E4M3").tolist() == [2.0**127]
    assert fm.widened_scale(NONE, NONE, "E4M3").shape == (0,)


TWO_WEIGHTS: list[tuple[Callable[..., Any], float, float, float]] = [
    (lambda a, b: monitor.chart_distance(a, b, "E4M3"), NAN, 1.0, NAN),
    (lambda a, b: monitor.chart_distance(a, b, "E4M3"), INF, INF, 0.0),
    (lambda a, b: monitor.chart_distance(a, b, "E4M3"), -0.0, 0.0, 0.0),
    (lambda a, b: monitor.warp_figures(a, b, "E4M3").warp_crossings, NAN, 1.0, 1.0),
    (lambda a, b: monitor.warp_figures(a, b, "E4M3").warp_distortion, NAN, 1.0, NAN),
    (lambda a, b: monitor.update_to_noise(a, b, "E4M3"), NAN, 1.0, NAN),
    (lambda a, b: monitor.update_to_noise(a, b, "E4M3"), 1.0, INF, INF),
    (lambda a, b: monitor.update_to_noise(a, b, "E4M3"), INF, INF, NAN),
    (lambda a, b: monitor.update_lost(a, b, a), NAN, 1.0, 0.0),
    (lambda a, b: monitor.update_lost(a, b, a), 1.0, NAN, 1.0),
    (lambda a, b: monitor.update_lost(a, b, a), -0.0, 0.0, 0.0),
    (lambda a, b: monitor.stall_figures(a, b, b, "E4M3").update_ulps, 1.0, INF, INF),
    (lambda a, b: monitor.stall_figures(a, b, b, "E4M3").update_ulps, INF, INF, NAN),
    (monitor.scale_changes, NAN, NAN, 1.0),
    (monitor.scale_changes, INF, INF, 0.0),
    (monitor.scale_changes, -0.0, 0.0, 0.0),
]


@pytest.mark.parametrize(("figure", "before", "after", "expected"), TWO_WEIGHTS)
def test_figures_of_a_step(figure: Callable[..., Any], before: float, after: float, expected: float) -> None:
    assert alike(figure(of(before), of(after)), expected)


@pytest.mark.parametrize(
    ("value", "stiffness"), [(NAN, []), (INF, [32.0]), (-0.0, [2.0**-9]), (1.0, [0.125])], ids=["nan", "inf", "-0", "1"]
)
def test_the_stiffness_histogram_leaves_out_nan(value: float, stiffness: list[float]) -> None:
    found = monitor.stiffness_histogram(of(value), "E4M3")
    assert [edge for edge, n in zip(found.edges, found.counts, strict=False) if n] == stiffness


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 0)])
def test_an_empty_weight_has_no_zone(shape: tuple[int, int]) -> None:
    assert monitor.zero_gradient_zone(torch.empty(shape), torch.ones(2, shape[1]), "E4M3") == 0.0


@pytest.mark.parametrize("tracker", [monitor.DeadRuns(), monitor.PathTracker(of(1.0), "E4M3")], ids=["dead", "path"])
def test_a_state_that_lacks_something_is_refused(tracker: Any) -> None:
    state = tracker.state_dict()
    for name in state:
        rest = {key: value for key, value in state.items() if key != name}
        with pytest.raises(ValueError, match=rf"^state lacks {name}: it has "):
            tracker.load_state_dict(rest)
