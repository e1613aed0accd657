"""How running averages are stored: float32, bfloat16 or 8 bits a value, the last two with stochastic rounding.

An average with decay 0.999 moves by a thousandth a step, less than half the spacing of either format: rounded to
nearest it would stall as weights do.
"""

from typing import Final

import torch
from torch import Tensor

from fp8manifold._numerics.codec import decode_magnitude, decode_with_ulp, encode_finite, encoding_steps
from fp8manifold.formats import FloatFormat
from fp8manifold.optim._hyper import Hyper
from fp8manifold.optim._variant import BOUNDS, Variant
from fp8manifold.random_bits import RANDOM_BITS

__all__ = ["MOMENT_FORMAT", "SCALES", "load_averages", "prepare", "store_averages"]

MOMENT_FORMAT: Final = FloatFormat(4, 3)
"""Of both averages; the second is stored as its square root, which doubles the range: 36 binades of ``v``."""

_FIELD, _BIAS = 23, 127
_HEADROOM = 7  # the bound is placed at 2^7 of MOMENT_FORMAT's 448: rounding noise has room above it


SCALES: Final = ("avg_scale", "avg_inverse", "sq_scale", "sq_inverse")
"""What :func:`prepare` gives for each block: the scale of the stored average, and 1 over that of the next one."""


def prepare(variant: Variant, arrays: dict[str, Tensor], gradient: Tensor, hyper: Hyper) -> dict[str, Tensor]:
    """The bounds after a step and the scales before and after it, of 8-bit averages; a block is a row of the view."""
    largest = gradient.to(torch.float32).abs().amax(dim=-1, keepdim=True)
    prepared = {}
    for name in variant.stores:
        root, n = name == "exp_avg_sq", "2" if name == "exp_avg_sq" or variant.direction == "lion" else "1"
        decay, gain = hyper[f"beta{n}"].to(torch.float32), hyper[f"gain{n}"].to(torch.float32).abs()
        before = arrays[BOUNDS[name]]
        after = before * decay + gain * (largest * largest if root else largest)
        prefix = "sq" if root else "avg"
        prepared[BOUNDS[name]] = after
        prepared[f"{prefix}_scale"] = _scale(before, root=root)
        prepared[f"{prefix}_inverse"] = _reciprocal(_scale(after, root=root))
    return prepared


def load_averages(variant: Variant, arrays: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The averages as floats."""
    if variant.moments != "8bit":
        return {name: arrays[name].to(dtype) for name in variant.stores}
    averages = {}
    for name in variant.stores:
        if name == "exp_avg_sq":
            root = decode_magnitude(arrays[name].to(torch.int32), MOMENT_FORMAT)[0] * arrays["sq_scale"]
            averages[name] = (root * root).to(dtype)
        else:
            averages[name] = (decode_with_ulp(arrays[name], MOMENT_FORMAT)[0] * arrays["avg_scale"]).to(dtype)
    return averages


def store_averages(
    variant: Variant, averages: dict[str, Tensor], arrays: dict[str, Tensor], noise: Tensor | None, root: Tensor | None
) -> dict[str, Tensor]:
    """The averages as they are kept; ``noise`` is one 32-bit word a value, whose halves serve one average each.

    The root in 8 bits takes 24 of its bits: with the odds of 16 a bias of ``2^-17`` a step would add up to 0.1% of a
    second moment of decay 0.999.  Of the first average's draw it shares no more than what is below these 16.
    """
    if variant.moments == "float32" or not averages:
        return averages
    assert noise is not None
    halves = (noise & 0xFFFF, (noise >> 16) & 0xFFFF)
    kept = {}
    for name, draws in zip(averages, halves, strict=False):
        value = averages[name].to(torch.float32)
        if variant.moments == "bfloat16":
            kept[name] = _to_bfloat16(value, draws)
        elif name == "exp_avg_sq":
            assert root is not None
            kept[name] = _root_codes(root.to(torch.float32), arrays["sq_inverse"], (noise >> 8) & 0xFFFFFF)
        else:
            kept[name] = encode_finite(value * arrays["avg_inverse"], MOMENT_FORMAT, draws << 8).to(torch.uint8)
    return kept


def _root_codes(root: Tensor, inverse: Tensor, draws: Tensor) -> Tensor:
    """Codes of a square root, whose squares are right in the mean; one that is not zero stays so: it is divided by.

    .. math:: P(n + 1) = \\frac{r^2 - n^2}{(n + 1)^2 - n^2} = \\frac{(r - n)(r - n + 2 n)}{2 n + 1}

    for ``r`` spacings, ``n`` of them whole: what is kept is squared when it is read, and the noise of a root that were
    right in the mean would add its variance to that.  Draws have 24 bits.
    """
    steps, below = encoding_steps(root * inverse, MOMENT_FORMAT)
    whole = steps.to(torch.int32)
    twice = (whole + whole).to(torch.float32)
    part = steps - whole.to(torch.float32)
    away = draws.to(torch.float32) * 2.0**-RANDOM_BITS * (twice + 1) < part * (part + twice)
    codes = whole + below + away.to(torch.int32)
    return torch.maximum(codes, root.view(torch.int32).clamp(max=1)).to(torch.uint8)


def _scale(bound: Tensor, *, root: bool) -> Tensor:
    """The power of two that takes a bound, or its square root, to ``2^6 .. 2^7``."""
    field = bound.view(torch.int32) >> _FIELD
    halved = ((field + (2 - _BIAS)) >> 1) + (_BIAS - _HEADROOM)
    scale = halved if root else (field + (1 - _HEADROOM)).clamp(min=1)
    return (scale << _FIELD).view(torch.float32)


def _reciprocal(power_of_two: Tensor) -> Tensor:
    return ((2 * _BIAS << _FIELD) - power_of_two.view(torch.int32)).view(torch.float32)


def _to_bfloat16(x: Tensor, draws: Tensor) -> Tensor:
    """Random bits below the kept ones carry into them with the probability of what is cut off."""
    return ((x.view(torch.int32) + draws) & -65536).view(torch.float32).to(torch.bfloat16)
