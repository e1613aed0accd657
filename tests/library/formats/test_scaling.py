"""Amax scales, storage scales, and the Scale module that freezes or follows them."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from optimizer_cases import normal, through_disk

import fp8manifold as fm
from fp8manifold import SaturationWarning, Scale, amax_scale, storage_scale
from fp8manifold.scaling import refitted_scale

settings = hypothesis_settings(derandomize=True, deadline=None, database=None, max_examples=200)
FORMATS = ("E4M3", "E5M2", "E3M4", "E1M6", "E7M0", "E2M1")


def is_power_of_two(x):
    return bool((torch.frexp(x).mantissa == 0.5).all())


@settings
@given(st.floats(2.0**-60, 2.0**60, width=32), st.sampled_from(FORMATS))
def test_amax_lands_on_the_largest_value_and_pow2_is_the_next_power_of_two(amax, name):
    fmt = fm.FloatFormat.from_string(name)
    x = torch.tensor([amax / 3, -amax, 0.0])
    scale = amax_scale(x, fmt)
    next_power = amax_scale(x, fmt, pow2=True)
    assert scale.dtype == torch.float32
    assert scale.item() == pytest.approx(amax / fmt.max, rel=1e-6)
    assert fm.round_to_grid(x / scale, fmt)[1].item() == -fmt.max
    assert is_power_of_two(next_power)
    assert scale <= next_power < 2 * scale


def test_channels_have_a_scale_each_along_any_axis():
    x = torch.tensor([[1.0, -896.0, 2.0], [0.0, 0.0, 0.0], [44.8, 1.0, 1.0]])
    rows = amax_scale(x, "E4M3", "channel")
    assert rows.shape == (3, 1)
    assert rows.flatten().tolist() == pytest.approx([2.0, 1.0, 0.1], rel=1e-6)
    columns = amax_scale(x, "E4M3", "channel", axis=-1)
    assert columns.shape == (1, 3)
    assert columns.flatten().tolist() == pytest.approx([0.1, 2.0, 2 / 448], rel=1e-6)
    assert amax_scale(x[0], "E4M3", "channel").tolist() == pytest.approx([1 / 448, 2.0, 2 / 448])
    assert amax_scale(x.expand(2, 3, 3), "E4M3", "channel", axis=1).shape == (1, 3, 1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_scales_of_other_dtypes_are_float32(dtype):
    scale = amax_scale(torch.tensor([224.0, -1.0], dtype=dtype), "E4M3")
    assert (scale.dtype, scale.item()) == (torch.float32, 0.5)


@pytest.mark.parametrize(
    "row",
    [[0.0, -0.0], [math.nan, 1.0], [math.inf, 1.0], [-math.inf, math.nan]],
    ids=["zeros", "NaN", "Inf", "-Inf and NaN"],
)
@pytest.mark.parametrize("granularity", ["tensor", "channel"])
def test_what_has_no_magnitude_has_scale_one(granularity, row):
    assert (amax_scale(torch.tensor([row]), "E4M3", granularity) == 1).all()


@pytest.mark.parametrize("granularity", ["tensor", "channel"])
def test_what_is_empty_has_scale_one(granularity):
    assert (amax_scale(torch.empty(0, 3), "E4M3", granularity) == 1).all()


def test_rows_without_columns_have_scale_one():
    assert amax_scale(torch.empty(3, 0), "E4M3", "channel").tolist() == [[1.0], [1.0], [1.0]]


def test_the_largest_and_the_tiniest_magnitudes_have_normal_scales():
    infinite = torch.tensor([math.inf])
    empty = torch.empty(0)
    assert fm.widened_scale(infinite, torch.ones(1), "E4M3").tolist() == [2.0**127]
    assert fm.widened_scale(empty, empty, "E4M3").shape == (0,)
    # dividing by a subnormal would give Inf
    x = torch.tensor([2.0**-149, 0.0])
    assert amax_scale(x, "E4M3").item() == 2.0**-126
    assert (x / amax_scale(x, "E4M3")).isfinite().all()


@settings
@given(
    st.floats(2.0**-30, 2.0**30, width=32),
    st.sampled_from(FORMATS),
    st.sampled_from([1.0, 2.0, 16.0, 100.0]),
)
def test_storage_leaves_headroom(amax, name, headroom):
    fmt = fm.FloatFormat.from_string(name)
    scale = storage_scale(torch.tensor([[amax, -amax / 2]]), fmt, headroom=headroom)
    assert is_power_of_two(scale)
    assert scale.item() * fmt.max * (1 + 1e-6) >= amax * headroom
    deep = scale.item() * fmt.ulp_min * 2.0**40 / 2 < amax  # 40 binades are enough
    assert scale.item() / 2 * fmt.max < amax * headroom or deep


def test_storage_is_per_row_by_default_and_squares_of_the_stiffness_of_stored_weights_stay_within_float32():
    w = torch.tensor([[0.25, -0.5], [0.0, 0.0], [4.0, 1.0]])
    assert storage_scale(w, "E4M3").flatten().tolist() == [2.0**-5, 1.0, 2.0**-2]
    assert storage_scale(w, "E4M3", "tensor").item() == 2.0**-2
    w = normal(4, 50, std=0.02)
    manifold = fm.FP8Manifold("E7M0", storage_scale(w, "E7M0"))
    stiffness = manifold.stiffness(manifold.projx(w))
    assert stiffness.square().isfinite().all()
    assert (stiffness.square() > 0).all()
    assert (manifold.projx(w).abs() >= w.abs() / 2).all()


def test_scales_follow_each_tensor():
    scale = Scale("E4M3")
    magnitudes = [448.0, 44.8, 896.0]
    scales = []
    values = []
    for amax in magnitudes:
        scales.append(scale(torch.tensor([amax, 1.0])).item())
        values.append(scale.value.item())
    assert scales == pytest.approx([amax / 448 for amax in magnitudes], rel=1e-6)
    assert values == scales


def test_scales_have_no_gradient():
    x = normal(5).requires_grad_()
    assert not Scale("E4M3")(x).requires_grad
    assert not amax_scale(x, "E4M3").requires_grad
    assert not storage_scale(x, "E4M3").requires_grad


def test_a_scale_says_what_it_is():
    assert repr(Scale("E4M3", "channel", "static")) == "Scale(E4M3, channel, static)"


@pytest.mark.parametrize("granularity", ["tensor", "channel"])
def test_static_is_frozen_survives_saving_and_warns_when_it_saturates(granularity):
    scale = Scale("E4M3", granularity, "static")
    x = torch.tensor([[448.0, 1.0], [896.0, 1.0]])
    first = scale(x).clone()
    loaded = Scale("E4M3", granularity, "static")
    loaded.load_state_dict(through_disk(scale.state_dict()))
    assert torch.equal(loaded(x / 4), first)
    assert loaded.value.data_ptr() != scale.value.data_ptr()
    assert torch.equal(scale(x / 2), first)
    with pytest.warns(
        SaturationWarning, match="E4M3 scale saturates: the largest magnitude is 2 times"
    ):
        assert torch.equal(scale(x * 2), first)
    assert torch.equal(scale(x), first)


@settings
@given(
    st.lists(st.floats(-(2.0**40), 2.0**40, width=32), min_size=1, max_size=8),
    st.sampled_from(FORMATS),
)
def test_what_a_scale_was_made_from_does_not_saturate(x, name):
    for pow2 in (False, True):
        scale = Scale(name, policy="static", pow2=pow2)
        for _ in range(2):  # a warning is an error
            scale(torch.tensor(x))


def delayed_scales(scale, magnitudes):
    return [scale(torch.tensor([[m, m / 2]])).max().item() * 448 for m in magnitudes]


@pytest.mark.parametrize("granularity", ["tensor", "channel"])
def test_delayed_is_the_largest_of_the_tensors_before(granularity):
    scale = Scale("E4M3", granularity, "delayed", history=3)
    magnitudes = [1.0, 8.0, 2.0, 4.0, 2.0, 2.0, 2.0]
    assert delayed_scales(scale, magnitudes) == pytest.approx([1.0, 1.0, 8.0, 8.0, 8.0, 4.0, 4.0])
    assert scale.preview(torch.tensor([[100.0, 1.0]])).max().item() * 448 == pytest.approx(2.0)


def test_delayed_leaves_out_what_is_not_finite_or_only_looked_at_and_rows_have_their_own_past():
    scale = Scale("E4M3", policy="delayed", history=4)
    assert delayed_scales(scale, [2.0, math.inf, math.nan, 1.0]) == pytest.approx([2.0] * 4)
    scale.eval()
    delayed_scales(scale, [1000.0])
    assert scale.train().preview(torch.ones(1)).item() * 448 == pytest.approx(2.0)
    scale = Scale("E4M3", "channel", "delayed")
    scale(torch.tensor([[448.0], [0.0]]))
    assert scale(torch.tensor([[1.0], [896.0]])).flatten().tolist() == [1.0, 2.0]
    assert scale(torch.tensor([[1.0], [1.0]])).flatten().tolist() == [1.0, 2.0]
    loaded = Scale("E4M3", "channel", "delayed")
    loaded.load_state_dict(through_disk(scale.state_dict()))
    assert loaded(torch.ones(2, 1)).flatten().tolist() == [1.0, 2.0]


def test_blocks_have_scales_that_are_powers_of_two():
    x = normal(3, 96, std=0.3)
    scale = amax_scale(x, "E3M4", "block")
    assert scale.shape == (3, 3)
    assert is_power_of_two(scale)
    assert torch.equal(scale[:, 1], amax_scale(x[:, 32:64], "E3M4", "channel", pow2=True).flatten())
    quantized = fm.fake_quantize(x, "E3M4", granularity="block")
    assert torch.equal(quantized, fm.fake_quantize(x, "E3M4", scale, granularity="block"))
    assert torch.equal(quantized, fm.fake_quantize(x, "E3M4", scale.repeat_interleave(32, 1)))
    assert amax_scale(torch.empty(0, 32), "E3M4", "block").shape == (0, 1)
    assert (
        amax_scale(torch.full((2, 32), -math.inf, dtype=torch.float64), "E3M4", "block") == 1
    ).all()


@pytest.mark.parametrize(
    ("name", "headroom"),
    [("E4M3", 16), ("E5M2", 16), ("E7M0", 16), ("E3M4", 7.75), ("E2M5", 2), ("E2M1", 2)],
)
def test_default_headroom_leaves_weights_their_precision(name, headroom):
    w = torch.randn(4, 256, generator=torch.Generator().manual_seed(0)) * 0.02
    scale = storage_scale(w, name)
    assert torch.equal(scale, storage_scale(w, name, headroom=headroom))
    # The coarsest is E2M1: amax, about 3 sd, lies in (1.5, 3], and what is below 0.25
    # is lost: at most P(|z| < 1/2).
    assert (fm.round_to_grid(w / scale, name) == 0).float().mean() < 0.39


@pytest.mark.parametrize("name", ["E4M3", "E5M2", "E2M1"])
def test_replaced_weights_keep_a_scale_at_which_the_largest_is_rounded_to_the_end(name):
    fmt = fm.FloatFormat.from_string(name)
    end = fmt.max + fmt.ulp_max / 2
    amax = torch.tensor([fmt.max, math.nextafter(end, 0.0) * (1 - 1e-6), end])
    scale = refitted_scale(amax, torch.ones(3), fmt)
    assert scale[:2].tolist() == [1.0, 1.0]
    assert scale[2] > 1.0
