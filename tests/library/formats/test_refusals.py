"""Refusals of formats, grids, scales and manifolds, a line each, with the whole
message.
"""

import pytest
import torch
from optimizer_cases import normal, stored_weight
from refused import calls, check_refused, named
from tensor_cases import parameter

import fp8manifold as fm
from fp8manifold.ops import fp8_mm

#: two rows with a scale each
ROWS = torch.tensor([[0.25], [2.0]])
HELPERS = {"fp8_mm": fp8_mm, "normal": normal, "ROWS": ROWS, "read": fm.FloatFormat.from_string}


#: what a refused call leaves as it was
SUBJECTS = {
    "x": lambda: torch.ones(2, 3),
    "p": parameter,
    "one": lambda: torch.ones(2),
    "codes": lambda: torch.zeros(3, dtype=torch.uint8),
    "stored": stored_weight,
    "chart": lambda: fm.StiffnessManifold("E4M3", 0.3),
}

FIELDS = named(
    "ValueError",
    "exponent_bits=0; exponent_bits=-1; mantissa_bits=-1; mantissa_bits=4; exponent_bits=8; "
    "bias=1000; bias=-1000",
)
FIELDS |= named(
    "TypeError",
    "exponent_bits=4.0; exponent_bits='4'; mantissa_bits=None; bias=7.5; exponent_bits=True",
)
FORMATS = {
    **{f"read('E4M3').decode_code({code})": f"ValueError: {code}" for code in (-1, 256)},
    "read('E2M1').decode_code(16)": "ValueError: 16",
    "read('E4M3FNUS')": "ValueError: did you mean 'E4M3FNUZ'",
    "read('P3109_8Q4')": "ValueError: did you mean 'P3109_8P4'",
    **{
        f"read({value})": f"TypeError: format name must be a str & {value}"
        for value in ("None", "4.3", "b'E4M3'")
    },
    **calls("FloatFormat(**{'exponent_bits': 4, 'mantissa_bits': 3} | dict(...))", FIELDS),
    "FloatFormat(4, 3, 7, 'fnn')": "ValueError: 'fnn'",
    "FloatFormat(1, 0, 0, 'ieee')": "ValueError: ieee",
}
BITS = {
    "random_bits((3,))": "TypeError: seed",
    "random_bits((3, -1), seed=0)": "ValueError: shape=(3, -1) has a negative size",
    "random_bits(3, seed=0, draws='dithered')": "ValueError: draws='dithered' is unknown: one of "
    "independent, dither",
    **dict.fromkeys(
        (
            "round_to_grid(one, 'E4M3', 'stochastic', seed=0, draws='even')",
            "FP8Manifold('E4M3', draws='even')",
            "FP8Parameter(one, 'E4M3', draws='even')",
            "StiffnessAdamW([FP8Parameter(one, 'E4M3')], draws='even')",
            "StiffnessWrapper(SGD([one], 0.1), draws='even')",
        ),
        "ValueError: draws='even' is unknown: one of independent, dither",
    ),
}
for word in ("seed", "step", "stream", "offset"):
    form = "random_bits((3,), **{'seed': 0} | dict(...))"
    out_of_range = f"{word}=-1; {word}={2**64}"
    no_integers = f"{word}=1.5; {word}='1'; {word}=None; {word}=True"
    BITS |= calls(form, named("ValueError", out_of_range))
    BITS |= calls(form, named("TypeError", no_integers))
#: calls of `encode` and `round_to_grid`
ROUNDED = {
    "x, 'E3M4', overflow='wrap'": "overflow='wrap'",
    "x, 'E3M4', 'odd'": "rounding='odd'",
    "x, 'E3M4', 'stochastic'": "needs seed",
    "x, 'E3M4', 'stochastic', seed=1, offset=-1": "offset=-1 is out of range",
}
GRID = {
    "round_to_grid(x, 'E4M3', 'nearest_even')": "ValueError: nearest_even & nearest",
    "round_to_grid(x, 'E4M3', overflow='saturated')": "ValueError: saturated & saturate",
    "round_to_grid(x.long(), 'E4M3')": "TypeError: int64",
    "round_to_grid([1.0, 2.0], 'E4M3')": "TypeError: list",
    "round_to_grid(x, 43)": "TypeError: 43",
    "round_to_grid(x, 'E4M3', 'stochastic', bits=zeros(4).int())": "ValueError: bits & (4,)",
    "round_to_grid(x, 'E4M3', 'stochastic', bits=zeros(2, 3))": "ValueError: bits must be int32",
    "round_to_grid(x.half(), 'E7M0')": "TypeError: float16",  # why halves go through float32
    "decode(x, 'E4M3')": "TypeError: uint8",
    "decode(codes, 'E7M0', float16)": "TypeError: float16",
    **calls("encode(...)", ROUNDED, "ValueError: "),
    **calls("round_to_grid(...)", ROUNDED, "ValueError: "),
    **{
        f"{name}(x.int(), 'E4M3')": "TypeError: int32" for name in ("ulp", "to_chart", "from_chart")
    },
    **{
        f"{name}(x, 'E4N3')": "ValueError: E4N3"
        for name in ("ulp", "to_chart", "from_chart", "round_to_grid")
    },
}
FAKE_QUANTIZE = {
    "'E4M3', ste='clip'": "ValueError: ste='clip' & did you mean 'clipped'",
    "'E4M3', granularity='rows'": "ValueError: granularity='rows'",
    "'E4M3', granularity='channel', axis=5": "ValueError: axis=5",
    "'E4M3', rounding='up_down'": "ValueError: rounding='up_down'",
    "'E4M3', rounding='stochastic'": "ValueError: seed",
    **{
        f"'E4M3', scale={bad}": f"ValueError: scale holds {bad}"
        for bad in ("0.0", "-1.0", "nan", "inf")
    },
    "'E4M3', scale=tensor([1.0, -2.0, 3.0])": "ValueError: scale holds -2.0",
    "'E4M3', scale=ones(4)": "ValueError: scale of shape (4,) does not fit x of shape (2, 3)",
    "'E4M3', scale=ones(2, 2, 3)": "ValueError: scale of shape (2, 2, 3)",
    "'E4M4'": "ValueError: E4M4",
    "3": "TypeError: int",
}
PRODUCT = {
    "ones(4), x": "ValueError: a has shape (4,): it must be a matrix",
    "x, x": "ValueError: a of shape (2, 3) and b of shape (2, 3) can't be multiplied",
    "x, x.T.long()": "TypeError: b has dtype torch.int64",
    "[[1.0]], x": "TypeError: a must be a tensor, not list",
    "x, x.T, a_format='E4M33'": "ValueError: E4M33",
    "x, x.T, gradient_format=5": "TypeError: int",
    "x, x.T, out_dtype=int32": "TypeError: out_dtype=torch.int32 must be a float dtype",
    "x, x.T, granularity='block'": "ValueError: granularity='block' is unknown: one of tensor, "
    "channel",
    "x, x.T, a_scale=-1.0": "ValueError: scale holds -1.0",
    "x, x.T, a_scale=ones(2, 1)": "ValueError: granularity='tensor' needs a single number",
    "x, x.T, b_scale=ones(4, 1), granularity='channel'": "ValueError: does not fit x of shape",
    "x, x.T, b_scale=ones(3, 1), granularity='channel'": "ValueError: (3, 1) does not fit (1, 2), "
    "one per column",
    "x, x.T, a_scale=ones(1, 3), granularity='channel'": "ValueError: (1, 3) does not fit (2, 1), "
    "one per row",
}
HUGE = "full((2, 32), -1e60, dtype=float64), 'E4M3'"
#: calls of `amax_scale` and `storage_scale`
OF_NO_SCALE = {
    f"{HUGE}, 'tensor'": "1e+60 is beyond float32",
    f"{HUGE}, 'channel'": "1e+60 is beyond float32",
    f"{HUGE}, 'block'": "1e+60 is beyond float32",
    "ones((4, 33)), 'E4M3', 'block'": "'block' needs a last dimension that 32 divides",
    "ones((4, 1)), 'E4M3', 'block'": "'block' needs a last dimension that 32 divides",
    "ones(()), 'E4M3', 'block'": "'block' needs a last dimension that 32 divides",
}
SCALES = {
    "amax_scale(x, 'E4M3', 'row')": "ValueError: granularity='row'",
    "storage_scale(x, 'E4M3', 'row', axis=1)": "ValueError: granularity='row'",
    "amax_scale(x, 'E4M3', 'chanel')": "ValueError: did you mean 'channel'",
    "amax_scale(x, 'E4M3', 'channel', axis=2)": "ValueError: axis=2",
    "amax_scale(x, 'E4MM3')": "ValueError: E4MM3",
    **{
        f"storage_scale(x, 'E4M3', headroom={bad})": f"ValueError: headroom={bad}"
        for bad in ("0.5", "nan")
    },
    "Scale('E4M3', policy='frozen')": "ValueError: policy='frozen'",
    "Scale('E4M3', 'blocks')": "ValueError: granularity='blocks'",
    "Scale('E4M3', policy='delayed', history=0)": "ValueError: history=0",
    "Scale('E4M3', policy='delayed', history=1.5)": "TypeError: history=1.5",
    "widened_scale(x, ones(2, 1), 'E4M3', 0.9)": "ValueError: headroom=0.9",
    "fake_quantize(ones(3, 96), 'E3M4', ones(3, 2), granularity='block')": "ValueError: (3, 2) & "
    "(3, 3), the blocks of",
    **calls("amax_scale(...)", OF_NO_SCALE, "ValueError: "),
    **calls("storage_scale(...)", OF_NO_SCALE, "ValueError: "),
    **{
        f"storage_scale(tensor([[1.0, 2.0], [{bad}, 0.0]]), 'E4M3')": "ValueError: (2, 2) hold NaN "
        "or Inf & E4M3"
        for bad in ("nan", "inf", "-inf")
    },
    "storage_scale(full((1, 32), nan), 'E4M3', 'block')": "ValueError: NaN or Inf",
    "p.rescale_(-0.3)": "ValueError: scale holds -0.3",
    "p.rescale_(tensor([1.0, nan, 1.0, 1.0])[:, None])": "ValueError: scale holds nan",
    "p.rescale_(ones(4, 2))": "ValueError: (4, 2): it must fit (4, 1)",
    "p.rescale_(ones(3, 1))": "ValueError: (3, 1): it must fit (4, 1)",
    "p.rescale_(2.0**-30)": "ValueError: too small: a stored value of 0.3125 needs a scale of at "
    "least 0.0006975",
}
#: of both manifolds, and of the grid alone
BOTH_MANIFOLDS = {
    "'E9M9'": "ValueError: E9M9",
    "'E4M4'": "ValueError: 'E4M4' & did you mean",
    "8": "TypeError: int & 8",
    **{f"'E4M3', {bad}": f"ValueError: scale & {bad}" for bad in ("0.0", "-2.0", "nan", "inf")},
    "'E4M3', 1e-60": "ValueError: scale & 0.0",
    "'E4M3', tensor([1.0, -3.0])": "ValueError: scale & -3.0",
    "'E4M3', '1'": "TypeError: scale & str",
    "'E4M3', None": "TypeError: scale & NoneType",
    "'E4M3', True": "TypeError: scale & bool",
    "'E4M3', metric='ulps'": "ValueError: metric='ulps' & ulp, log, euclidean & 'ulp'",
    "'E4M3', metric=None": "TypeError: metric & NoneType",
}
KINDS = ("StiffnessManifold", "FP8Manifold")
#: what a metric function gives
METRICS = {
    "-x": "ValueError: metric function gave & -",
    "0.0": "ValueError: metric function gave & 0.0",
    "x * nan": "ValueError: metric function gave & nan",
    "x / 0": "ValueError: metric function gave & inf",
    "ones(3)": "ValueError: metric function gave & (3,)",
    "'wide'": "TypeError: metric function gave & str",
}
MANIFOLDS = {
    **calls("StiffnessManifold(...)", BOTH_MANIFOLDS),
    **calls("FP8Manifold(...)", BOTH_MANIFOLDS),
    **{
        f"{kind}('E4M3', ROWS).random(3)": "ValueError: scale of shape & (3,) & (2, 1)"
        for kind in KINDS
    },
    "FP8Manifold('E4M3', rounding='nearset')": "ValueError: rounding='nearset' & nearest, "
    "stochastic & 'nearest'",
    "FP8Manifold('E4M3', rounding='up')": "ValueError: rounding='up' & nearest, stochastic",
    "FP8Manifold('E4M3', rounding=None)": "ValueError: rounding=None",
    "FP8Manifold('E4M3', retraction='exp')": "ValueError: retraction='exp' & exponential",
    **calls("FP8Manifold('E4M3', ...)", named("ValueError", f"seed=-1; seed={2**63}")),
    **calls("FP8Manifold('E4M3', ...)", named("TypeError", "seed=1.5; seed=True")),
    **calls("StiffnessManifold('E4M3', metric=lambda x, fmt: ...)", METRICS),
    **{
        f"chart.load_state_dict(StiffnessManifold('{saved}').state_dict())": f"RuntimeError: "
        f"{saved}, but & is "
        f"in E4M3"
        for saved in ("E5M2", "E4M3FNUZ", "P3109_8P4F", "E4M3_B9")
    },
    # they would truncate the scale
    **{
        f"chart.{method}(tensor([1, 2]))": "TypeError: int64"
        for method in ("projx", "stiffness", "to_chart", "from_chart")
    },
}
REFUSED = {
    **FORMATS,
    **BITS,
    **GRID,
    **calls("fake_quantize(x, ...)", FAKE_QUANTIZE),
    "fake_quantize(x.long(), 'E4M3')": "TypeError: int64",
    "fake_quantize([1.0], 'E4M3')": "TypeError: list",
    **calls("fp8_mm(...)", PRODUCT),
    **SCALES,
    **MANIFOLDS,
}


@pytest.mark.parametrize("call", REFUSED)
def test_a_call_is_refused_in_one_line_and_nothing_is_changed(call):
    check_refused(call, REFUSED[call], SUBJECTS, **HELPERS)
