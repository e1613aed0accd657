"""A step of one parameter as a pure function: moments, direction, move, write-back."""

from typing import NamedTuple

import torch
from torch import Tensor

from fp8manifold._numerics.codec import decode_magnitude, decode_with_ulp, encode_finite, encoding_steps, largest_bits
from fp8manifold.optim._directions import DIRECTIONS, Descent, Numbers, named
from fp8manifold.optim._geometry import (
    Weights,
    chart_for,
    covector,
    load_weights,
    move,
    reciprocal_scale,
    stiffness_factor,
    store_weights,
)
from fp8manifold.optim._spec import BOUNDS, LARGEST, MOMENT_FORMAT, MOMENTUM_FORMAT, Spec
from fp8manifold.random_bits import RANDOM_BITS, draw_of

_FIELD, _BIAS = 23, 127
_CARRY = ~largest_bits(MOMENTUM_FORMAT) & ((1 << _FIELD) - 1)  # what is above the format's largest is of the next power
_HEADROOM = 7  # the bound is placed at 2^7 of MOMENT_FORMAT's 448: rounding noise has room above it


def prepare(spec: Spec, arrays: dict[str, Tensor], gradient: Tensor, numbers: Numbers) -> dict[str, Tensor]:
    """What there is of 8-bit averages for each block, a row of the view.

    It is the scale of the stored average, and, where that does not follow from the average itself, the bound after the
    step and 1 over its scale.
    """
    if spec.fitted:
        return {"avg_scale": _fitted_scale(arrays[LARGEST])}
    largest = gradient.to(torch.float32).abs().amax(dim=-1, keepdim=True)
    prepared = {}
    for name in spec.stores:
        root, n = name == "exp_avg_sq", "2" if name == "exp_avg_sq" or spec.direction == "lion" else "1"
        decay, gain = numbers[f"beta{n}"].to(torch.float32), numbers[f"gain{n}"].to(torch.float32).abs()
        before = arrays[BOUNDS[name]]
        after = before * decay + gain * (largest * largest if root else largest)
        prefix = "sq" if root else "avg"
        prepared[BOUNDS[name]] = after
        prepared[f"{prefix}_scale"] = _scale(before, root=root)
        prepared[f"{prefix}_inverse"] = _reciprocal(_scale(after, root=root))
    return prepared


def fit(average: Tensor) -> dict[str, Tensor]:
    """The largest magnitude in each block of an average, and 1 over the scale that follows from it."""
    largest = average.to(torch.float32).abs().amax(dim=-1, keepdim=True)
    return {LARGEST: largest, "avg_inverse": _reciprocal(_fitted_scale(largest))}


def load_averages(spec: Spec, arrays: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The averages as floats."""
    if spec.moments != "8bit":
        return {name: arrays[name].to(dtype) for name in spec.stores}
    averages = {}
    for name in spec.stores:
        if name == "exp_avg_sq":
            root = decode_magnitude(arrays[name].to(torch.int32), MOMENT_FORMAT)[0] * arrays["sq_scale"]
            averages[name] = (root * root).to(dtype)
        else:
            averages[name] = (decode_with_ulp(arrays[name], spec.first_format)[0] * arrays["avg_scale"]).to(dtype)
    return averages


def store_averages(
    spec: Spec, averages: dict[str, Tensor], arrays: dict[str, Tensor], noise: Tensor | None, root: Tensor | None
) -> dict[str, Tensor]:
    """The averages as they are kept; ``noise`` is one 32-bit word a value, whose halves serve one average each.

    A fitted average has the draw of the whole word.  The root in 8 bits takes 24 of its bits: with the odds of 16 a
    bias of ``2^-17`` a step would add up to 0.1% of a second moment of decay 0.999.  Of the first average's draw it
    shares no more than what is below these 16.
    """
    if spec.moments == "float32" or not averages:
        return averages
    assert noise is not None
    halves = (noise & 0xFFFF, (noise >> 16) & 0xFFFF)
    kept = {}
    for name, draws in zip(averages, halves, strict=False):
        value = averages[name].to(torch.float32)
        if spec.moments == "bfloat16":
            kept[name] = _to_bfloat16(value, draws)
        elif name == "exp_avg_sq":
            assert root is not None
            kept[name] = _root_codes(root.to(torch.float32), arrays["sq_inverse"], (noise >> 8) & 0xFFFFFF)
        else:
            draws = draw_of(noise) if spec.fitted else draws << 8
            kept[name] = encode_finite(value * arrays["avg_inverse"], spec.first_format, draws).to(torch.uint8)
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


def _fitted_scale(largest: Tensor) -> Tensor:
    """The smallest power of two that takes the largest magnitude within the format: to ``3.94 .. 7.875``."""
    field = ((largest.view(torch.int32) + _CARRY) >> _FIELD) - MOMENTUM_FORMAT.emax
    return (field.clamp(min=1) << _FIELD).view(torch.float32)


def _reciprocal(power_of_two: Tensor) -> Tensor:
    return ((2 * _BIAS << _FIELD) - power_of_two.view(torch.int32)).view(torch.float32)


def _to_bfloat16(x: Tensor, draws: Tensor) -> Tensor:
    """Random bits below the kept ones carry into them with the probability of what is cut off."""
    return ((x.view(torch.int32) + draws) & -65536).view(torch.float32).to(torch.bfloat16)


# ----------------------------------------------------------------------------------------------------------------- step


class Outcome(NamedTuple):
    """The new values of what is stored, by name, and what the step asked for, in units of the scale."""

    stored: dict[str, Tensor]
    before: Weights
    target: Tensor


def step(spec: Spec, arrays: dict[str, Tensor], row: Tensor, noise: dict[str, Tensor]) -> Outcome:
    """Take a step from ``arrays``, none of which is changed.

    Args:
        spec: what is stepped and how.
        arrays: the weight, its gradient, the state and the scale, all views that broadcast against each other; rows of
            them are whole blocks of 8-bit averages.
        row: one of :data:`NUMBERS`, in the dtype that is computed in.
        noise: 32-bit random words: ``weight`` for the write-back, ``moments`` for the averages.
    """
    numbers, dtype = named(row), row.dtype
    weights = load_weights(spec, arrays, dtype)
    gradient = _gradient(spec, weights, arrays, numbers, dtype)
    bounds = {}
    if spec.moments == "8bit" and spec.stores:
        prepared = prepare(spec, arrays, gradient, numbers)
        bounds = {name: prepared.pop(name) for name in spec.bounds.values() if name in prepared}
        arrays = arrays | prepared
    descent = _direction(spec, gradient, load_averages(spec, arrays, dtype), numbers)
    target = move(spec, weights, descent.direction, arrays, numbers)
    draws = (noise["weight"] >> 8) & 0xFFFFFF if spec.draws_for_weight else None
    stored, after = store_weights(spec, arrays, weights, target, draws)
    averages = descent.averages
    if spec.injects:
        averages = _with_error(spec, descent, weights, target, after, arrays, numbers)
    if spec.fitted:
        prepared = fit(averages[spec.stores[0]])
        bounds[LARGEST] = prepared.pop(LARGEST)
        arrays = arrays | prepared
    kept = store_averages(spec, averages, arrays, noise.get("moments"), descent.root)
    return Outcome(stored | kept | bounds, weights, target)


def _gradient(spec: Spec, weights: Weights, arrays: dict[str, Tensor], numbers: Numbers, dtype: torch.dtype) -> Tensor:
    gradient = arrays["gradient"].to(dtype)
    return covector(spec, weights, -gradient if spec.maximize else gradient, arrays, numbers)


def _direction(spec: Spec, gradient: Tensor, averages: dict[str, Tensor], numbers: Numbers) -> Descent:
    descend = DIRECTIONS[spec.direction].descend
    return (
        descend(gradient, averages, numbers, nesterov=True) if spec.nesterov else descend(gradient, averages, numbers)
    )


def _with_error(
    spec: Spec,
    descent: Descent,
    weights: Weights,
    target: Tensor,
    after: Tensor,
    arrays: dict[str, Tensor],
    numbers: Numbers,
) -> dict[str, Tensor]:
    """The averages with the rounding error in the first one.

    .. math:: m \\leftarrow m + \\frac{1}{\\eta} \\left( 1 - \\frac{1}{\\beta_1} \\right) (target - after)

    where ``eta`` is what ``m`` is multiplied by in this step, element by element.  A weight and its momentum then move
    together as an unrounded weight would: ``w - eta beta_1 / (1 - beta_1) m`` is as if nothing had been rounded.

    Source: ECO (arXiv 2601.22101), for momentum and Adam.
    """
    if spec.geometry == "linear":
        error = (target - after) / reciprocal_scale(spec, arrays)
        if spec.stiffness != "none":
            error = error / stiffness_factor(spec, weights, arrays, numbers)
    else:
        chart = chart_for(spec, arrays)
        error = chart.forward(target) - chart.forward(after)
    if descent.denominator is not None:
        error = error * descent.denominator
    name = spec.stores[0]
    return descent.averages | {name: descent.averages[name] - error * numbers["inject"]}
