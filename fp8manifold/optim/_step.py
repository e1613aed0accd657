"""A step in PyTorch: a pure function of moments, direction, move and write-back, taken
in blocks and shown.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fp8manifold._base.blocks import block_on
from fp8manifold._numerics import codec
from fp8manifold._numerics.charts import Chart, UlpChart, chart_of
from fp8manifold._numerics.stiffness import bounded_ratio_power
from fp8manifold.optim._directions import DIRECTIONS, Descent, Numbers, numbers_by_name
from fp8manifold.optim._slot import Slot
from fp8manifold.optim._spec import BOUNDS, LARGEST, MOMENT_FORMAT, MOMENTUM_FORMAT, Spec
from fp8manifold.optim._writeback import to_half
from fp8manifold.random_bits import RANDOM_BITS, draw_of, word_range


class StepOutcome(NamedTuple):
    """The new values of stored tensors by name, the weights before, and the target in
    units of the scale.
    """

    stored: dict[str, Tensor]
    before: "Weights"
    target: Tensor


def step(
    spec: Spec, arrays: dict[str, Tensor], row: Tensor, noise: dict[str, Tensor]
) -> StepOutcome:
    """Take a step from ``arrays``, none of which is changed.

    The weight, its gradient, the state and the scale broadcast against each other, in
    rows of whole blocks of 8-bit moments. ``row`` has :data:`NUMBERS`, and ``noise``
    32-bit random words for the ``weight`` and the ``moments``.
    """
    numbers, weights = numbers_by_name(row), load_weights(spec, arrays, row.dtype)
    bounds: dict[str, Tensor] = {}
    gradient = arrays["gradient"].to(row.dtype)
    gradient = covector(spec, weights, -gradient if spec.maximize else gradient, arrays, numbers)
    if spec.blockwise:
        prepared = prepare(spec, arrays, gradient, numbers)
        bounds = {
            name: prepared.pop(name) for name in spec.bound_names.values() if name in prepared
        }
        arrays = arrays | prepared
    nesterov = {"nesterov": True} if spec.nesterov else {}
    descent = DIRECTIONS[spec.direction].descend(
        gradient, load_moments(spec, arrays, row.dtype), numbers, **nesterov
    )
    target, stored, moments = write(spec, weights, descent, arrays, numbers, noise)
    if spec.fitted:
        prepared = fit(moments[spec.moment_names[0]])
        bounds[LARGEST] = prepared.pop(LARGEST)
        arrays = arrays | prepared
    kept = store_moments(spec, moments, arrays, noise.get("moments"), descent.root)
    return StepOutcome(stored | kept | bounds, weights, target)


def write(
    spec: Spec,
    weights: "Weights",
    descent: Descent,
    arrays: dict[str, Tensor],
    numbers: Numbers,
    noise: dict[str, Tensor],
) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """The target along a direction, the tensors to store for it, and the moments with
    the rounding error.
    """
    if spec.storage == "direction":
        direction = torch.where(
            descent.direction == 0, 0.0, descent.direction
        )  # 0 has no sign, as in native code
        return direction, {"weight": direction}, descent.moments
    target = move(spec, weights, descent.direction, arrays, numbers)
    draws = (noise["weight"] >> 8) & 0xFFFFFF if spec.draws_for_weight else None
    ratio, under = with_next_scale(arrays)
    stored, after = store_weights(
        spec, under, weights, target if ratio is None else target * ratio, draws
    )
    after = after if ratio is None else after / ratio
    if not spec.injects:
        return target, stored, descent.moments
    return target, stored, _with_error(spec, descent, weights, target, after, arrays, numbers)


def with_next_scale(arrays: dict[str, Tensor]) -> tuple[Tensor | None, dict[str, Tensor]]:
    """The old scales in units of those that this step fits, a power of two, and the
    arrays under these; or None.
    """
    if "next_scale" not in arrays:
        return None, arrays
    return arrays["scale"] / arrays["next_scale"], arrays | {"scale": arrays["next_scale"]}


def _with_error(
    spec: Spec,
    descent: Descent,
    weights: "Weights",
    target: Tensor,
    after: Tensor,
    arrays: dict[str, Tensor],
    numbers: Numbers,
) -> dict[str, Tensor]:
    """The moments with the rounding error in the first one.

    .. math:: m \\leftarrow m + \\frac{1}{\\eta} \\left( 1 - \\frac{1}{\\beta_1} \\right) (target - after)

    where ``eta`` is what ``m`` is multiplied by in this step.
    ``w - eta beta_1 / (1 - beta_1) m`` is then as if nothing had been rounded.

    Source: ECO (arXiv 2601.22101), for momentum and Adam.
    """
    if spec.geometry == "linear":
        error = (target - after) / (1 / arrays["scale"])
        if spec.stiffness != "none":
            error = error / stiffness_factor(spec, weights, arrays, numbers)
    else:
        chart = chart_for(spec, arrays)
        error = chart.forward(target) - chart.forward(after)
    if descent.denominator is not None:
        error = error * descent.denominator
    name = spec.moment_names[0]
    return descent.moments | {name: descent.moments[name] - error * numbers["inject"]}


class Weights(NamedTuple):
    """Weights in units of the scale, and their spacing in the same units (None for an
    ordinary parameter).
    """

    x: Tensor
    ulp: Tensor | None


def load_weights(spec: Spec, arrays: dict[str, Tensor], dtype: torch.dtype) -> Weights:
    """The weights, their residual included."""
    weight, fmt = arrays["weight"], spec.fmt
    if spec.storage in ("plain", "direction"):
        return Weights(weight.to(dtype), None)
    assert fmt is not None
    bits, codes = spec.residual_bits, weight
    if spec.storage != "codes":
        x = weight.to(dtype) / arrays["scale"]
        if (
            spec.storage == "grid" and not spec.scale_is_power_of_two
        ):  # the division leaves its points a hair off it
            x = codec.round_block(x, fmt, "nearest", "saturate", None)
        if spec.storage == "free" or not bits:
            return Weights(x, chart_of(fmt, "ulp").stiffness(x))
        codes = codec.encode_finite(x.to(torch.float32), fmt)
    if bits:
        x, ulp = codec.decode_signed(
            codec.joined_codes(
                codes.to(torch.int32), arrays["residual"].to(torch.int32), fmt, bits
            ),
            fmt,
            bits,
        )
    else:
        x, ulp = codec.decode_with_ulp(codes.to(torch.int32), fmt)
    return Weights(x.to(dtype), (ulp * 2.0**bits).to(dtype))


def store_weights(
    spec: Spec, arrays: dict[str, Tensor], before: Weights, target: Tensor, draws: Tensor | None
) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors to store by name, and the weights that they mean in units of the
    scale.
    """
    weight, fmt = arrays["weight"], spec.fmt
    if spec.storage == "plain":
        return {"weight": _as_stored(target, weight.dtype, draws)}, target
    assert fmt is not None
    if spec.storage == "free":
        after = target.clamp(-fmt.max, fmt.max)
        moved = torch.where(after == before.x, weight.to(after.dtype), after * arrays["scale"])
        return {"weight": _as_stored(moved, weight.dtype, draws)}, after
    return spec.rule.store(spec.storage, fmt, arrays, target, draws)


def _as_stored(x: Tensor, dtype: torch.dtype, draws: Tensor | None) -> Tensor:
    return x.to(dtype) if draws is None else to_half(x, dtype, draws)


_LONGEST = 2.0**24  # steps of the chart: far past either end, and far from overflow


def move(
    spec: Spec, weights: Weights, direction: Tensor, arrays: dict[str, Tensor], numbers: Numbers
) -> Tensor:
    """The target in units of the scale, before anything is rounded."""
    start = weights.x * numbers["keep"] if spec.decays else weights.x
    if spec.storage == "plain":
        return start - direction * numbers["rate"]
    if spec.geometry == "linear":
        if spec.stiffness != "none":
            direction = direction * stiffness_factor(spec, weights, arrays, numbers)
        return start - direction * (numbers["rate"] * (1 / arrays["scale"]))
    chart, steps = (
        chart_for(spec, arrays),
        (direction * -numbers["rate"]).clamp(-_LONGEST, _LONGEST),
    )
    if spec.geometry == "tangent":
        moved = start + steps * chart.stiffness(start)
    else:
        moved = torch.where(steps == 0, start, chart.shift(start, steps))
    assert spec.fmt is not None
    return moved.clamp(-spec.fmt.max, spec.fmt.max)


def covector(
    spec: Spec, weights: Weights, gradient: Tensor, arrays: dict[str, Tensor], numbers: Numbers
) -> Tensor:
    """The gradient with respect to the coordinates that the direction is taken in; of
    codes in their unit.
    """
    if spec.geometry not in ("exponential", "tangent"):
        return gradient
    return gradient * (
        chart_for(spec, arrays).stiffness(weights.x) * (arrays["scale"] * numbers["per_unit"])
    )


def chart_for(spec: Spec, arrays: dict[str, Tensor]) -> Chart:
    """The chart of the metric; that of ``ulp`` with the ends that bound its stiffness."""
    assert spec.fmt is not None
    if spec.metric != "ulp":
        return chart_of(spec.fmt, spec.metric)
    return UlpChart(spec.fmt.mantissa_bits, arrays["lowest"], arrays["highest"])


def stiffness_factor(
    spec: Spec, weights: Weights, arrays: dict[str, Tensor], numbers: Numbers
) -> Tensor:
    """``(S / S_ref)^k`` of the spec's metric."""
    stiffness = weights.ulp
    if spec.metric != "ulp":
        assert spec.fmt is not None
        stiffness = chart_of(spec.fmt, spec.metric).stiffness(weights.x)
    assert stiffness is not None
    in_value = stiffness * arrays["scale"]
    powers_of_two = spec.metric in ("ulp", "euclidean")  # in units of the scale
    return bounded_ratio_power(
        in_value, arrays["scale"] if powers_of_two else in_value, spec.stiffness, numbers
    )


_FIELD, _BIAS = 23, 127
_CARRY = ~codec.largest_bits(MOMENTUM_FORMAT) & (
    (1 << _FIELD) - 1
)  # a mantissa above that of the format's largest value carries into the exponent
_HEADROOM = 7  # the bound is placed at 2^7 of MOMENT_FORMAT's 448: rounding noise has room above it


def prepare(
    spec: Spec, arrays: dict[str, Tensor], gradient: Tensor, numbers: Numbers
) -> dict[str, Tensor]:
    """Scales of 8-bit moments by block, and the bounds after the step unless they
    follow from the moments.
    """
    if spec.fitted:
        return {"avg_scale": _fitted_scale(arrays[LARGEST])}
    largest = gradient.to(torch.float32).abs().amax(dim=-1, keepdim=True)
    prepared = {}
    for name in spec.moment_names:
        root, n = (
            name == "exp_avg_sq",
            "2" if name == "exp_avg_sq" or spec.direction == "lion" else "1",
        )
        decay, gain = (
            numbers[f"beta{n}"].to(torch.float32),
            numbers[f"gain{n}"].to(torch.float32).abs(),
        )
        before = arrays[BOUNDS[name]]
        after = before * decay + gain * (largest * largest if root else largest)
        prefix = "sq" if root else "avg"
        prepared[BOUNDS[name]] = after
        prepared[f"{prefix}_scale"] = _scale(before, root=root)
        prepared[f"{prefix}_inverse"] = _reciprocal(_scale(after, root=root))
    return prepared


def fit(moment: Tensor) -> dict[str, Tensor]:
    """The largest magnitude in each block of a moment, and 1 over the scale that
    follows from it.
    """
    largest = moment.to(torch.float32).abs().amax(dim=-1, keepdim=True)
    return {LARGEST: largest, "avg_inverse": _reciprocal(_fitted_scale(largest))}


def load_moments(spec: Spec, arrays: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    if spec.moments != "8bit":
        return {name: arrays[name].to(dtype) for name in spec.moment_names}
    moments = {}
    for name in spec.moment_names:
        if name == "exp_avg_sq":
            root = (
                codec.decode_magnitude(arrays[name].to(torch.int32), MOMENT_FORMAT)[0]
                * arrays["sq_scale"]
            )
            moments[name] = (root * root).to(dtype)
        else:
            moments[name] = (
                codec.decode_with_ulp(arrays[name], spec.first_format)[0] * arrays["avg_scale"]
            ).to(dtype)
    return moments


def store_moments(
    spec: Spec,
    moments: dict[str, Tensor],
    arrays: dict[str, Tensor],
    noise: Tensor | None,
    root: Tensor | None,
) -> dict[str, Tensor]:
    """The moments as they are stored; ``noise`` is one 32-bit word per value, each half
    of which serves one moment.

    A fitted moment has the draw of the whole word. The root in 8 bits takes 24 of its
    bits: with 16 the error of the odds would add up to 0.1% of a second moment of decay
    0.999.
    """
    if spec.moments == "float32" or not moments:
        return moments
    assert noise is not None
    halves = (noise & 0xFFFF, (noise >> 16) & 0xFFFF)
    kept = {}
    for name, draws in zip(moments, halves, strict=False):
        value = moments[name].to(torch.float32)
        if spec.moments == "bfloat16":
            kept[name] = _to_bfloat16(value, draws)
        elif name == "exp_avg_sq":
            assert root is not None
            kept[name] = _root_codes(
                root.to(torch.float32), arrays["sq_inverse"], (noise >> 8) & 0xFFFFFF
            )
        else:
            draws = draw_of(noise) if spec.fitted else (draws << 8) | 0x80  # the middle of the odds
            kept[name] = codec.encode_finite(
                value * arrays["avg_inverse"], spec.first_format, draws
            ).to(torch.uint8)
    return kept


def _root_codes(root: Tensor, inverse: Tensor, draws: Tensor) -> Tensor:
    """Codes of a square root, for which the mean of ``1 / sqrt(v)`` is right; a root
    that is not 0 does not become 0.

    .. math:: P(n + 1) = \\frac{\\delta (4 n + 3 - \\delta)}{4 n + 2}
                       \\approx \\frac{\\sqrt{r} - \\sqrt{n}}{\\sqrt{n + 1} - \\sqrt{n}}, \\qquad \\delta = r - n

    for ``r`` spacings, ``n`` of them whole: the mean of the root's root, ``v^{1/4}``,
    is preserved. A rounding that preserves the mean of ``v^p``, with relative variance
    ``s`` of ``v``, raises that of ``1 / sqrt(v)`` by the share
    ``3/8 s - (1 - p) s / 2``: nothing for ``p = 1/4``, up to 3% for ``p = 1``.
    """
    steps, below = codec.encoding_steps(root * inverse, MOMENT_FORMAT)
    whole = steps.to(torch.int32)
    unit = (4 * whole + 2).to(torch.float32)
    part = steps - whole.to(torch.float32)
    away = draws.to(torch.float32) * 2.0**-RANDOM_BITS * unit < part * (unit + (1 - part))
    codes = whole + below + away.to(torch.int32)
    return torch.maximum(codes, root.view(torch.int32).clamp(max=1)).to(torch.uint8)


def _scale(bound: Tensor, *, root: bool) -> Tensor:
    """The power of two that takes a bound, or its square root, to ``2^6 .. 2^7``."""
    field = bound.view(torch.int32) >> _FIELD
    halved = ((field + (2 - _BIAS)) >> 1) + (_BIAS - _HEADROOM)
    scale = halved if root else (field + (1 - _HEADROOM)).clamp(min=1)
    return (scale << _FIELD).view(torch.float32)


def _fitted_scale(largest: Tensor) -> Tensor:
    """The smallest power of two that takes the largest magnitude within the format: to
    ``3.94 .. 7.875``.
    """
    field = ((largest.view(torch.int32) + _CARRY) >> _FIELD) - MOMENTUM_FORMAT.emax
    return (field.clamp(min=1) << _FIELD).view(torch.float32)


def _reciprocal(power_of_two: Tensor) -> Tensor:
    return ((2 * _BIAS << _FIELD) - power_of_two.view(torch.int32)).view(torch.float32)


def _to_bfloat16(x: Tensor, draws: Tensor) -> Tensor:
    """Random bits are added to the lower half, which carry into the upper one with the
    probability of what is lost.
    """
    return ((x.view(torch.int32) + draws) & -65536).view(torch.float32).to(torch.bfloat16)


def run_eager(slot: Slot, *, observed: bool = False) -> list[StepOutcome]:
    """Take the step in place, and if it is observed return the outcome of each part."""
    outcomes = []
    for arrays, start in blocks_of(slot):
        outcome = step(
            slot.spec, arrays, slot.number_row, block_noise(slot, arrays["gradient"], start)
        )
        for name, value in outcome.stored.items():
            arrays[name].copy_(value)
        if observed:
            outcomes.append(outcome)
    return outcomes


def blocks_of(slot: Slot) -> Iterator[tuple[dict[str, Tensor], int]]:
    """The arrays some rows at a time, and the position of their first element in the
    slot.
    """
    first, inner = slot.view.dims[0], slot.view.numel // slot.view.dims[0]
    rows = max(1, block_on(slot.device) // inner)
    if len(slot.view.dims) == 1 and slot.spec.blockwise:
        rows = first  # its one block is not cut up
    for start in range(0, first, rows):
        ends, each = start + rows, slot.arrays.items()
        yield (
            {name: a[start:ends] if a.dim() and a.shape[0] == first else a for name, a in each},
            start * inner,
        )


def block_noise(slot: Slot, part: Tensor, start: int) -> dict[str, Tensor]:
    """The random words for a part of a slot, for ``weight`` and ``moments`` if they are
    drawn.
    """
    wanted = {"weight": slot.spec.draws_for_weight, "moments": slot.spec.draws_for_moments}
    keys = {"weight": slot.rounding_key, "moments": slot.moments_key}
    noise = {}
    for name in (name for name, draws in wanted.items() if draws):
        words, phase = keys[name]
        noise[name] = word_range(
            slot.offset + start, part.numel(), words, part.device, phase=phase
        ).view(part.shape)
    return noise


@dataclass(frozen=True)
class StepView:
    """One quantised parameter in one step, for an observer; the tensors are detached
    and not to be changed.
    """

    parameter: Tensor  #: The parameter itself, after the step.
    before: Tensor
    """Its values before the step; like all of these in its shape, in float32 (float64
    for float64 parameters).
    """
    target: Tensor  #: The value requested, before the write-back rounds it.
    after: Tensor  #: The value after the write-back.
    stiffness: Tensor  #: One step of the metric at ``before``: an ULP if the metric is ``ulp``.


def observed_step(slot: Slot) -> StepView:
    """Take the step eagerly and show the values before it, its targets and the values
    after it, residuals included.
    """
    return observe(slot, lambda: run_eager(slot, observed=True))


def observe(slot: Slot, take: Callable[[], list[StepOutcome]]) -> StepView:
    """Show the step of a slot that ``take`` takes, part by part."""
    shape, scale = slot.weight.shape, slot.arrays["scale"]
    before = load_weights(slot.spec, slot.arrays, slot.dtype).x * scale
    outcomes = take()
    target = torch.cat([outcome.target for outcome in outcomes]) * scale
    x = torch.cat([outcome.before.x for outcome in outcomes])
    assert slot.spec.fmt is not None
    stiffness = chart_of(slot.spec.fmt, slot.spec.metric).stiffness(x) * scale
    after = load_weights(slot.spec, slot.arrays, slot.dtype).x * slot.arrays.get(
        "next_scale", scale
    )
    return StepView(slot.parameter, *(x.reshape(shape) for x in (before, target, after, stiffness)))
