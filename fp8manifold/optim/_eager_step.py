"""A step in PyTorch: the definition that native code and a GPU's kernels reproduce.

`step` is a pure function of one parameter's arrays::

    codes, residual   -> load_weights -> x, ulp             in units of the scale
    gradient          -> covector     -> gradient           of codes on a curved chart
    stored moments    -> load_moments -> moments            floats
    gradient, moments -> descend      -> direction, moments (_directions.py)
    x, direction      -> move         -> target             not rounded yet
    target            -> store_weights                      the one rounding of the step
    moments           -> store_moments                      rounded too if they are not float32

With the write-back ``momentum`` the rounding error of the weight is added to the first
moment before that is stored (`_add_error`).

`run_eager` takes the step of a slot some rows at a time (`blocks_of`), so that temporaries
stay in a cache. `observed_step` also shows the values before and after it. `_muon.py`
takes the two halves of a step, with an orthogonal factor between them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fp8manifold._base.blocks import block_on
from fp8manifold._interface import (
    POSITIONS,
    Geometry,
    MomentStorage,
    StiffnessPower,
    WeightStorage,
)
from fp8manifold._numerics import codec
from fp8manifold._numerics.charts import Chart, MetricName, UlpChart, chart_of
from fp8manifold._numerics.stiffness import bounded_ratio_power
from fp8manifold.optim._directions import DIRECTIONS, Descent, Numbers, numbers_by_name
from fp8manifold.optim._slot import Slot
from fp8manifold.optim._spec import BOUNDS, LARGEST, MOMENT_FORMAT, MOMENTUM_FORMAT, Spec
from fp8manifold.optim._writeback import to_half
from fp8manifold.random_bits import RANDOM_BITS, draw_of, word_range


class Weights(NamedTuple):
    """Weights in units of the scale, and their spacing in the same units."""

    x: Tensor
    #: None for an ordinary parameter
    ulp: Tensor | None


class StepOutcome(NamedTuple):
    """What a step stores, and what an observer may see of it."""

    #: the new values of stored tensors by name
    stored: dict[str, Tensor]
    before: Weights
    #: in units of the scale
    target: Tensor


class _NewWeights(NamedTuple):
    """The weights of a step, as they are stored."""

    target: Tensor
    #: the tensors to store for the weights, by name
    stored: dict[str, Tensor]
    #: the moments in floats, with the rounding error where the write-back adds it
    moments: dict[str, Tensor]


def step(
    spec: Spec, arrays: dict[str, Tensor], row: Tensor, noise: dict[str, Tensor]
) -> StepOutcome:
    """Take a step from ``arrays``, none of which is changed.

    Args:
        spec: of the step.
        arrays: the weight, its gradient, the state and the scale, which broadcast
            against each other, in rows of whole blocks of 8-bit moments.
        row: the numbers of the step in the order of :data:`NUMBERS`.
        noise: 32-bit random words for the ``weight`` and the ``moments``.
    """
    numbers = numbers_by_name(row)
    weights = load_weights(spec, arrays, row.dtype)
    gradient = arrays["gradient"].to(row.dtype)
    gradient = covector(spec, weights, -gradient if spec.maximize else gradient, arrays, numbers)
    new_bounds: dict[str, Tensor] = {}
    if spec.blockwise:
        scales = moment_scales(spec, arrays, gradient, numbers)
        # bounds after the step; that of a fitted moment follows below, when it is known
        for name in spec.bound_names.values():
            if name in scales:
                new_bounds[name] = scales.pop(name)
        arrays = arrays | scales
    options = {"nesterov": True} if spec.nesterov else {}
    moments = load_moments(spec, arrays, row.dtype)
    descent = DIRECTIONS[spec.direction].descend(gradient, moments, numbers, **options)
    new_weights = _write(spec, weights, descent, arrays, numbers, noise)
    if spec.fitted:
        scales = fit_moment(new_weights.moments[spec.moment_names[0]])
        new_bounds[LARGEST] = scales.pop(LARGEST)
        arrays = arrays | scales
    new_moments = store_moments(
        spec, new_weights.moments, arrays, noise.get("moments"), descent.root
    )
    return StepOutcome(new_weights.stored | new_moments | new_bounds, weights, new_weights.target)


def _write(
    spec: Spec,
    weights: Weights,
    descent: Descent,
    arrays: dict[str, Tensor],
    numbers: Numbers,
    noise: dict[str, Tensor],
) -> _NewWeights:
    """Round the target of a step once, and add the error to a moment that takes it.

    For a step that ends with its direction, that is the target.
    """
    if spec.storage == WeightStorage.DIRECTION:
        # 0 has no sign, as in native code
        direction = torch.where(descent.direction == 0, 0.0, descent.direction)
        return _NewWeights(direction, {"weight": direction}, descent.moments)
    target = move(spec, weights, descent.direction, arrays, numbers)
    draws = (noise["weight"] >> 8) & 0xFFFFFF if spec.draws_for_weight else None
    ratio, arrays_then = with_next_scale(arrays)
    target_then = target if ratio is None else target * ratio
    stored, after = store_weights(spec, arrays_then, weights, target_then, draws)
    if not spec.injects:
        return _NewWeights(target, stored, descent.moments)
    after = after if ratio is None else after / ratio
    moments = _add_error(spec, descent, weights, target, after, arrays, numbers)
    return _NewWeights(target, stored, moments)


def with_next_scale(arrays: dict[str, Tensor]) -> tuple[Tensor | None, dict[str, Tensor]]:
    """Return the ratio of the old scales to those that this step fits, and the arrays.

    The arrays have the new scales in place of the old ones. The ratio is a power of two,
    or None for a step that fits no scale.
    """
    if "next_scale" not in arrays:
        return None, arrays
    return arrays["scale"] / arrays["next_scale"], arrays | {"scale": arrays["next_scale"]}


def _add_error(
    spec: Spec,
    descent: Descent,
    weights: Weights,
    target: Tensor,
    after: Tensor,
    arrays: dict[str, Tensor],
    numbers: Numbers,
) -> dict[str, Tensor]:
    r"""Return the moments with the rounding error in the first one.

    .. math:: m \leftarrow m
              + \frac{1}{\eta} \left( 1 - \frac{1}{\beta_1} \right) (target - after)

    where ``eta`` is what ``m`` is multiplied by in this step.
    ``w - eta beta_1 / (1 - beta_1) m`` is then as if nothing had been rounded.

    Source: ECO (arXiv 2601.22101), for momentum and Adam.
    """
    if spec.geometry == Geometry.LINEAR:
        # by the reciprocal, as native code has it
        error = (target - after) / (1 / arrays["scale"])
        if spec.stiffness != StiffnessPower.NONE:
            error = error / stiffness_factor(spec, weights, arrays, numbers)
    else:
        chart = chart_for(spec, arrays)
        error = chart.forward(target) - chart.forward(after)
    if descent.denominator is not None:
        error = error * descent.denominator
    name = spec.moment_names[0]
    # ``inject`` is (1 - beta1) / beta1 / eta: the factor above with the other sign
    return descent.moments | {name: descent.moments[name] - error * numbers["inject"]}


# Weights


def load_weights(spec: Spec, arrays: dict[str, Tensor], dtype: torch.dtype) -> Weights:
    """Return the weights, their residual included."""
    weight, fmt = arrays["weight"], spec.fmt
    if spec.storage in (WeightStorage.PLAIN, WeightStorage.DIRECTION):
        return Weights(weight.to(dtype), None)
    assert fmt is not None
    bits = spec.residual_bits
    codes = weight
    if spec.storage != WeightStorage.CODES:
        x = weight.to(dtype) / arrays["scale"]
        if spec.storage == WeightStorage.GRID and not spec.scale_is_power_of_two:
            # the division leaves points of the grid a hair off it
            x = codec.round_block(x, fmt, "nearest", "saturate", None)
        if spec.storage == WeightStorage.FREE or not bits:
            return Weights(x, chart_of(fmt, "ulp").stiffness(x))
        codes = codec.encode_finite(x.to(torch.float32), fmt)
    codes = codes.to(torch.int32)
    if bits:
        residual = arrays["residual"].to(torch.int32)
        x, ulp = codec.decode_signed(codec.joined_codes(codes, residual, fmt, bits), fmt, bits)
    else:
        x, ulp = codec.decode_with_ulp(codes, fmt)
    return Weights(x.to(dtype), (ulp * 2.0**bits).to(dtype))


def store_weights(
    spec: Spec, arrays: dict[str, Tensor], before: Weights, target: Tensor, draws: Tensor | None
) -> tuple[dict[str, Tensor], Tensor]:
    """Round a target. Return the tensors to store by name, and the weights they stand for.

    The weights are in units of the scale, as the target is.
    """
    weight, fmt = arrays["weight"], spec.fmt
    if spec.storage == WeightStorage.PLAIN:
        return {"weight": _as_stored(target, weight.dtype, draws)}, target
    assert fmt is not None
    if spec.storage == WeightStorage.FREE:
        after = target.clamp(-fmt.max, fmt.max)
        # a weight that does not move has its bits: x / s * s may differ from x
        moved = torch.where(after == before.x, weight.to(after.dtype), after * arrays["scale"])
        return {"weight": _as_stored(moved, weight.dtype, draws)}, after
    return spec.rule.store(spec.storage, fmt, arrays, target, draws)


def _as_stored(x: Tensor, dtype: torch.dtype, draws: Tensor | None) -> Tensor:
    return x.to(dtype) if draws is None else to_half(x, dtype, draws)


# The move


_LONGEST = 2.0**24
"""The longest move in steps of the chart: far past either end, and far from overflow."""


def move(
    spec: Spec, weights: Weights, direction: Tensor, arrays: dict[str, Tensor], numbers: Numbers
) -> Tensor:
    """Return the target in units of the scale, before anything is rounded."""
    start = weights.x * numbers["keep"] if spec.decays else weights.x
    if spec.storage == WeightStorage.PLAIN:
        return start - direction * numbers["rate"]
    if spec.geometry == Geometry.LINEAR:
        if spec.stiffness != StiffnessPower.NONE:
            direction = direction * stiffness_factor(spec, weights, arrays, numbers)
        return start - direction * (numbers["rate"] * (1 / arrays["scale"]))
    chart = chart_for(spec, arrays)
    steps = (direction * -numbers["rate"]).clamp(-_LONGEST, _LONGEST)
    if spec.geometry == Geometry.TANGENT:
        moved = start + steps * chart.stiffness(start)
    else:
        moved = torch.where(steps == 0, start, chart.shift(start, steps))
    assert spec.fmt is not None
    return moved.clamp(-spec.fmt.max, spec.fmt.max)


def covector(
    spec: Spec, weights: Weights, gradient: Tensor, arrays: dict[str, Tensor], numbers: Numbers
) -> Tensor:
    """Return the gradient with respect to the coordinates that the direction is taken in.

    On a chart these are codes, and the gradient is in units of ``1 / per_unit``.
    """
    if spec.geometry not in (Geometry.EXPONENTIAL, Geometry.TANGENT):
        return gradient
    stiffness = chart_for(spec, arrays).stiffness(weights.x)
    return gradient * (stiffness * (arrays["scale"] * numbers["per_unit"]))


def chart_for(spec: Spec, arrays: dict[str, Tensor]) -> Chart:
    """Return the chart of the metric; that of ``ulp`` has ends that bound its stiffness."""
    assert spec.fmt is not None
    if spec.metric != MetricName.ULP:
        return chart_of(spec.fmt, spec.metric)
    return UlpChart(spec.fmt.mantissa_bits, arrays["lowest"], arrays["highest"])


def stiffness_factor(
    spec: Spec, weights: Weights, arrays: dict[str, Tensor], numbers: Numbers
) -> Tensor:
    """Return ``(S / S_ref)^k`` of the spec's metric."""
    stiffness = weights.ulp
    if spec.metric != MetricName.ULP:
        assert spec.fmt is not None
        stiffness = chart_of(spec.fmt, spec.metric).stiffness(weights.x)
    assert stiffness is not None
    in_value = stiffness * arrays["scale"]
    # of these metrics S is a power of two in units of the scale
    is_power_of_two = spec.metric in (MetricName.ULP, MetricName.EUCLIDEAN)
    unit = arrays["scale"] if is_power_of_two else in_value
    return bounded_ratio_power(in_value, unit, spec.stiffness, numbers)


# Moments. In 8 bits they are codes in blocks of a row. A block's scale is a power of two
# that follows from its bound (two moments of Adam, one of SGD or Lion), or from its
# largest magnitude (the momentum of Muon, whose grid is fitted).


_FIELD, _BIAS = 23, 127
"""Position of the exponent's field in a float32, and its bias."""
_CARRY = ~codec.largest_bits(MOMENTUM_FORMAT) & ((1 << _FIELD) - 1)
"""Added to a float32's bits, it carries into the exponent where the mantissa is above
that of the format's largest value.
"""
_HEADROOM = 7
"""A bound is placed at 2^6 .. 2^7 of MOMENT_FORMAT's 448, with room for rounding noise."""


def moment_scales(
    spec: Spec, arrays: dict[str, Tensor], gradient: Tensor, numbers: Numbers
) -> dict[str, Tensor]:
    """Return arrays of one number for each block of moments in 8 bits.

    They are the scales to load moments with (``avg_scale``, ``sq_scale``). Where scales
    follow from bounds, they are also the bounds after the step, and 1 over the scales to
    store moments with (``avg_inverse``, ``sq_inverse``).
    """
    if spec.fitted:
        return {"avg_scale": _fitted_scale(arrays[LARGEST])}
    largest = gradient.to(torch.float32).abs().amax(dim=-1, keepdim=True)
    scales = {}
    for name in spec.moment_names:
        is_second = name == "exp_avg_sq"
        # the one moment of Lion decays by its second beta
        n = "2" if is_second or spec.direction == "lion" else "1"
        decay = numbers[f"beta{n}"].to(torch.float32)
        gain = numbers[f"gain{n}"].to(torch.float32).abs()
        bound = arrays[BOUNDS[name]]
        new_bound = bound * decay + gain * (largest * largest if is_second else largest)
        prefix = "sq" if is_second else "avg"
        scales[BOUNDS[name]] = new_bound
        scales[f"{prefix}_scale"] = scale_of_bound(bound, of_root=is_second)
        scales[f"{prefix}_inverse"] = _reciprocal(scale_of_bound(new_bound, of_root=is_second))
    return scales


def fit_moment(moment: Tensor) -> dict[str, Tensor]:
    """Return the largest magnitude in each block, and 1 over the scale that follows."""
    largest = moment.to(torch.float32).abs().amax(dim=-1, keepdim=True)
    return {LARGEST: largest, "avg_inverse": _reciprocal(_fitted_scale(largest))}


def load_moments(spec: Spec, arrays: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the moments in floats, by name."""
    if spec.moments != MomentStorage.EIGHT_BIT:
        return {name: arrays[name].to(dtype) for name in spec.moment_names}
    moments = {}
    for name in spec.moment_names:
        if name == "exp_avg_sq":
            codes = arrays[name].to(torch.int32)
            root = codec.decode_magnitude(codes, MOMENT_FORMAT)[0] * arrays["sq_scale"]
            value = root * root
        else:
            value = codec.decode_with_ulp(arrays[name], spec.first_format)[0] * arrays["avg_scale"]
        moments[name] = value.to(dtype)
    return moments


def store_moments(
    spec: Spec,
    moments: dict[str, Tensor],
    arrays: dict[str, Tensor],
    noise: Tensor | None,
    root: Tensor | None,
) -> dict[str, Tensor]:
    """Return the moments as they are stored.

    A fitted moment and a root in 8 bits take 24 bits of the word: with 16 the error of
    the root's odds would add up to 0.1% of a second moment of decay 0.999.

    Args:
        spec: of the step.
        moments: in floats, by name.
        arrays: with 1 over the scales of moments in 8 bits.
        noise: one 32-bit word per value. In bfloat16 each half serves one moment. In 8
            bits the lower half serves the first moment, and the upper 24 bits serve the
            root, or a fitted moment. It may be None for moments in float32.
        root: of the second moment, where that is stored in 8 bits.
    """
    if spec.moments == MomentStorage.FLOAT32 or not moments:
        return moments
    assert noise is not None
    halves = (noise & 0xFFFF, (noise >> 16) & 0xFFFF)
    stored = {}
    for name, draws in zip(moments, halves, strict=False):
        value = moments[name].to(torch.float32)
        if spec.moments == MomentStorage.BFLOAT16:
            stored[name] = _to_bfloat16(value, draws)
        elif name == "exp_avg_sq":
            assert root is not None
            wide_draws = (noise >> 8) & 0xFFFFFF
            stored[name] = _root_codes(root.to(torch.float32), arrays["sq_inverse"], wide_draws)
        else:
            # 16 bits of a draw are in the middle of the odds that they stand for
            wide_draws = draw_of(noise) if spec.fitted else (draws << 8) | 0x80
            scaled = value * arrays["avg_inverse"]
            codes = codec.encode_finite(scaled, spec.first_format, wide_draws)
            stored[name] = codes.to(torch.uint8)
    return stored


def _root_codes(root: Tensor, inverse: Tensor, draws: Tensor) -> Tensor:
    r"""Return codes of a square root, for which the mean of ``1 / sqrt(v)`` is right.

    .. math:: P(n + 1) = \frac{\delta (4 n + 3 - \delta)}{4 n + 2}
              \approx \frac{\sqrt{r} - \sqrt{n}}{\sqrt{n + 1} - \sqrt{n}},
              \qquad \delta = r - n

    for ``r`` spacings, ``n`` of them whole: the mean of the root's root, ``v^{1/4}``,
    is preserved. A rounding that preserves the mean of ``v^p``, with relative variance
    ``s`` of ``v``, raises that of ``1 / sqrt(v)`` by the share
    ``3/8 s - (1 - p) s / 2``: nothing for ``p = 1/4``, up to 3% for ``p = 1``. A root
    that is not 0 does not become 0.
    """
    steps, below = codec.encoding_steps(root * inverse, MOMENT_FORMAT)
    whole = steps.to(torch.int32)
    unit = (4 * whole + 2).to(torch.float32)
    part = steps - whole.to(torch.float32)
    away = draws.to(torch.float32) * 2.0**-RANDOM_BITS * unit < part * (unit + (1 - part))
    codes = whole + below + away.to(torch.int32)
    # the bits of a float32 are an integer of at least 1 unless it is 0
    return torch.maximum(codes, root.view(torch.int32).clamp(max=1)).to(torch.uint8)


def scale_of_bound(bound: Tensor, *, of_root: bool) -> Tensor:
    """Return the power of two by which a bound, or its root, becomes ``2^6 .. 2^7``."""
    field = bound.view(torch.int32) >> _FIELD
    # A bound is below 2^(field + 1 - bias), and its root below 2 to the half of that,
    # which the shift rounds up: hence 2 in place of 1.
    halved = ((field + (2 - _BIAS)) >> 1) + (_BIAS - _HEADROOM)
    scale = halved if of_root else (field + (1 - _HEADROOM)).clamp(min=1)
    return (scale << _FIELD).view(torch.float32)


def _fitted_scale(largest: Tensor) -> Tensor:
    """Return the smallest power of two that takes a magnitude within the format.

    Divided by it the magnitude is in ``3.94 .. 7.875``.
    """
    field = ((largest.view(torch.int32) + _CARRY) >> _FIELD) - MOMENTUM_FORMAT.emax
    return (field.clamp(min=1) << _FIELD).view(torch.float32)


def _reciprocal(power_of_two: Tensor) -> Tensor:
    return ((2 * _BIAS << _FIELD) - power_of_two.view(torch.int32)).view(torch.float32)


def _to_bfloat16(x: Tensor, draws: Tensor) -> Tensor:
    """Round float32 at random, by 16-bit draws that are added to the lower half.

    They carry into the upper half with the probability of what is lost.
    """
    return ((x.view(torch.int32) + draws) & -65536).view(torch.float32).to(torch.bfloat16)


# Taking the step of a slot


def run_eager(slot: Slot, *, observed: bool = False) -> list[StepOutcome]:
    """Take the step in place, and if it is observed return the outcome of each part."""
    outcomes = []
    for arrays, start in blocks_of(slot):
        noise = block_noise(slot, arrays["gradient"], start)
        outcome = step(slot.spec, arrays, row_of(slot), noise)
        for name, value in outcome.stored.items():
            arrays[name].copy_(value)
        if observed:
            outcomes.append(outcome)
    return outcomes


def row_of(slot: Slot) -> Tensor:
    """Return the numbers of a step, whose rate Adafactor multiplies by the weights' size."""
    if slot.factors is None:
        return slot.number_row
    row = slot.number_row.clone()
    row[POSITIONS["rate"]] *= slot.factors.size
    row[POSITIONS["inject"]] /= slot.factors.size
    return row


def blocks_of(slot: Slot) -> Iterator[tuple[dict[str, Tensor], int]]:
    """Yield the arrays some rows at a time, and the position of their first element.

    A gradient is multiplied by the factors that a slot has.
    """
    dims = slot.view.dims
    rows_in_all = dims[0]
    row_numel = slot.view.numel // rows_in_all
    rows = max(1, block_on(slot.device) // row_numel)
    if len(dims) == 1 and slot.spec.blockwise:
        # its one block is not cut up
        rows = rows_in_all
    for start in range(0, rows_in_all, rows):
        arrays = {}
        for name, array in slot.arrays.items():
            has_rows = array.dim() and array.shape[0] == rows_in_all
            arrays[name] = array[start : start + rows] if has_rows else array
        position = start * row_numel
        if slot.factors is not None:
            gradient = arrays["gradient"].to(slot.dtype)
            arrays["gradient"] = gradient * slot.factors.multiplier(position, gradient.shape)
        yield arrays, position


def block_noise(slot: Slot, part: Tensor, start: int) -> dict[str, Tensor]:
    """Return the random words for a part of a slot.

    Args:
        slot: whose spec says whether words are drawn for ``weight`` and ``moments``.
        part: in the shape of the words.
        start: the position of its first element in the slot.
    """
    keys = {}
    if slot.spec.draws_for_weight:
        keys["weight"] = slot.rounding_key
    if slot.spec.draws_for_moments:
        keys["moments"] = slot.moments_key
    noise = {}
    for name, (words, phase) in keys.items():
        flat = word_range(slot.offset + start, part.numel(), words, part.device, phase=phase)
        noise[name] = flat.view(part.shape)
    return noise


# Observers


@dataclass(frozen=True)
class StepView:
    """One quantised parameter in one step, for an observer.

    All tensors but the parameter have its shape and are in float32 (float64 for float64
    parameters). They are detached and must not be changed.
    """

    parameter: Tensor
    """The parameter itself, after the step."""
    before: Tensor
    """Its values before the step."""
    target: Tensor
    """The value requested, before the write-back rounds it."""
    after: Tensor
    """The value after the write-back."""
    stiffness: Tensor
    """One step of the metric at ``before``: an ULP if the metric is ``ulp``."""


def observed_step(slot: Slot) -> StepView:
    """Take the step eagerly and show it. Values include residuals."""
    return observe(slot, lambda: run_eager(slot, observed=True))


def observe(slot: Slot, take: Callable[[], list[StepOutcome]]) -> StepView:
    """Show the step of a slot that ``take`` takes, part by part."""
    spec, shape = slot.spec, slot.weight.shape
    scale = slot.arrays["scale"]
    before = load_weights(spec, slot.arrays, slot.dtype).x * scale
    outcomes = take()
    target = torch.cat([outcome.target for outcome in outcomes]) * scale
    x = torch.cat([outcome.before.x for outcome in outcomes])
    assert spec.fmt is not None
    stiffness = chart_of(spec.fmt, spec.metric).stiffness(x) * scale
    new_scale = slot.arrays.get("next_scale", scale)
    after = load_weights(spec, slot.arrays, slot.dtype).x * new_scale
    return StepView(
        slot.parameter,
        before=before.reshape(shape),
        target=target.reshape(shape),
        after=after.reshape(shape),
        stiffness=stiffness.reshape(shape),
    )
