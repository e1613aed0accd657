"""Bits: which codes, exponents and mantissas of its format each operand uses."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial

import torch
from torch import Tensor

import fp8manifold as fm
from nanogpt_bench.config.metrics import LINEAR, MEAN, OPERANDS, SHARE, Metric, Spread
from nanogpt_bench.model.weights import is_rounded
from nanogpt_bench.monitors.capture import Watched, flowing
from nanogpt_bench.monitors.figures import Monitor, Scale, unit_blocks
from nanogpt_bench.monitors.points import HISTOGRAM_INTERVAL, Step

_bits = partial(Metric, monitor="bits", over=MEAN, operands=OPERANDS)
UNIFORMITY = _bits(
    "bits/uniformity", "Evenness of code use", SHARE, "Entropy over that of all finite codes alike.", chart=LINEAR
)
CODES_USED = _bits("bits/codes_used", "Codes in use", SHARE, "Of all finite codes.", chart=LINEAR)
TOP_EXPONENT = _bits(
    "bits/top_exponent", "Share in the top binade", SHARE, "Values in the largest exponent.", chart=LINEAR
)
MANTISSA_UTILISATION = _bits("bits/mantissa_utilisation", "Use of the mantissa", SHARE, "Its entropy over its bits.")
EXPONENT_BIT = _bits("bits/exponent_bit_I", "Exponent bit I", SHARE, "Values that have it set.")
MANTISSA_BIT = _bits("bits/mantissa_bit_I", "Mantissa bit I", SHARE, "Values that have it set.")
CODE_COUNTS = Spread(
    "bits/code_histogram",
    "Code use",
    "value",
    "Elements by the value of their code.",
    monitor="bits",
    operands=OPERANDS,
)


def code_histogram(x: Tensor, fmt: fm.FloatFormat, scale: Scale = 1.0) -> Tensor:
    """Return how many elements have each code, after rounding `x / scale` to the nearest value: int64, in code order.

    `x` may be the uint8 codes themselves. NaN has the code of `fm.encode`, Inf that of the largest value, -0 its own
    where the layout has it.

    >>> code_histogram(torch.tensor([1.0, 1.0, -6.0]), fm.FloatFormat.from_string("E2M1")).nonzero().flatten().tolist()
    [2, 15]
    """
    size = 2 * fmt.sign_bit
    if x.dtype is torch.uint8:
        return torch.bincount(x.flatten(), minlength=size)
    counts = torch.zeros(size, dtype=torch.int64, device=x.device)
    for _, units in unit_blocks(scale, x):
        counts += torch.bincount(fm.encode(units, fmt), minlength=size)
    return counts


def bit_figures(counts: Tensor, fmt: fm.FloatFormat) -> tuple[int, dict[Metric, float | None]]:
    """Return the size and the figures of a code histogram, all shares of the elements whose code is finite.

    +0 and -0 are two codes; all figures are 0 of an empty histogram, and None of a mantissa without bits.

    >>> fmt = fm.FloatFormat.from_string("E2M1")
    >>> size, found = bit_figures(code_histogram(torch.tensor([1.0, 1.5, 1.0, 1.5]), fmt), fmt)
    >>> size, found[UNIFORMITY], found[MANTISSA_BIT.number(0)], found[EXPONENT_BIT.number(1)]
    (4, 0.25, 0.5, 0.0)
    """
    finite, listed = _finite_codes(fmt), counts.tolist()
    used = [int(listed[code]) for code in finite]
    by_field = _grouped([(code & (fmt.sign_bit - 1)) >> fmt.mantissa_bits for code in finite], used)
    by_mantissa = _grouped([code & ((1 << fmt.mantissa_bits) - 1) for code in finite], used)
    total = sum(used)
    figures: dict[Metric, float | None] = {
        UNIFORMITY: _entropy(used) / math.log2(len(finite)),
        CODES_USED: sum(n > 0 for n in used) / len(finite),
        TOP_EXPONENT: by_field[-1] / max(total, 1),
        MANTISSA_UTILISATION: _entropy(by_mantissa) / fmt.mantissa_bits if fmt.mantissa_bits else None,
    }
    for metric, groups, width in (
        (EXPONENT_BIT, by_field, fmt.exponent_bits),
        (MANTISSA_BIT, by_mantissa, fmt.mantissa_bits),
    ):
        for bit in range(width):
            figures[metric.number(bit)] = sum(n for i, n in enumerate(groups) if i >> bit & 1) / max(total, 1)
    return total, figures


@lru_cache(maxsize=64)
def _finite_codes(fmt: fm.FloatFormat) -> list[int]:
    return [code for code in range(2 * fmt.sign_bit) if math.isfinite(fmt.decode_code(code))]


def _grouped(keys: Sequence[int], counts: Sequence[int]) -> list[int]:
    sums = [0] * (max(keys) + 1)
    for key, n in zip(keys, counts, strict=True):
        sums[key] += n
    return sums


def _entropy(counts: Sequence[int]) -> float:
    total = sum(counts)
    return math.fsum(n / total * math.log2(total / n) for n in counts if n)


def by_value(fmt: fm.FloatFormat, counts: Tensor) -> tuple[list[float], list[int]]:
    """Return the format's values in increasing order and the elements at each; both zeros are one value.

    >>> values, numbers = by_value(fm.FloatFormat.from_string("E2M1"), torch.ones(16, dtype=torch.int64))
    >>> values[7:9], numbers[7:9]
    ([0.0, 0.5], [2, 1])
    """
    found: dict[float, int] = dict.fromkeys(sorted(set(fmt.values)), 0)
    for code, number in enumerate(counts.tolist()):
        value = fmt.decode_code(code)
        if value in found:
            found[value] += number
    return [value + 0.0 for value in found], list(found.values())


class Bits(Monitor):
    """Records `bits/FIGURE/OPERAND/LAYER`, from one code histogram an operand, and the histograms themselves.

    Only what is quantised is measured, or what `monitor` gives a format to measure against.
    """

    def __init__(self, watched: Watched) -> None:
        super().__init__(watched.turns)
        self._layers, self._capture, self._monitor = watched.layers, watched.capture, watched.config.monitor
        self._counts: dict[tuple[str, str], tuple[fm.FloatFormat, Tensor]] = {}

    def after_backward(self, step: Step) -> None:
        if not self.looks(step) or not step.at_last_micro_step:
            return
        for operand in flowing(self._layers, self._capture, self._monitor):
            if operand.format is not None and bool(operand.values.isfinite().all()):
                counts = code_histogram(operand.values, operand.format, operand.scale)
                self._counts[operand.kind, operand.layer] = operand.format, counts

    def written(self, step: Step) -> None:
        if not step.number or not self.looks(step):
            return
        self._counts.update(self._weights(step))
        for (kind, layer), (fmt, counts) in self._counts.items():
            size, found = bit_figures(counts, fmt)
            for metric, value in found.items():
                self._figures.add(metric.by(kind), layer, value, size)
            if step.due(HISTOGRAM_INTERVAL):
                values, numbers = by_value(fmt, counts)
                step.add_histogram(CODE_COUNTS.by(kind).of(layer), numbers, values=values)
        self._counts.clear()
        super().written(step)

    @torch.no_grad()
    def _weights(self, step: Step) -> Iterator[tuple[tuple[str, str], tuple[fm.FloatFormat, Tensor]]]:
        for name, layer in self._layers.items():
            if self.takes(step, name) and isinstance(layer, fm.QuantizedLinear) and is_rounded(layer):
                fmt = layer.weight_format
                assert fmt is not None
                yield ("weight", name), (fmt, code_histogram(layer.weight_codes(), fmt))


def build(watched: Watched) -> Bits:
    """Return the monitor of a run."""
    return Bits(watched)
