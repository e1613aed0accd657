"""Bits: which codes and exponents of its format each operand uses."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor

import fp8manifold as fm
from nanogpt_bench.config.metrics import LINEAR, MEAN, OPERANDS, SHARE, Metric
from nanogpt_bench.model.weights import is_rounded
from nanogpt_bench.monitors.capture import Watched, captured_operands
from nanogpt_bench.monitors.points import Monitor, Scale, Step, unit_pieces

_bits = partial(Metric, monitor="bits", over=MEAN, operands=OPERANDS)
UNIFORMITY = _bits(
    "bits/uniformity",
    "Evenness of code use",
    SHARE,
    "Entropy over that of an even use of all codes.",
    chart=LINEAR,
)
CODES_USED = _bits("bits/codes_used", "Codes in use", SHARE, "Of all finite codes.", chart=LINEAR)
TOP_EXPONENT = _bits(
    "bits/top_exponent",
    "Share in the top binade",
    SHARE,
    "Values with the largest exponent.",
    chart=LINEAR,
)


@dataclass(frozen=True)
class Histogram:
    """How many elements of an operand have each code of its format."""

    format: fm.FloatFormat
    counts: Tensor


def code_histogram(x: Tensor, fmt: fm.FloatFormat, scale: Scale = 1.0) -> Tensor:
    """Return how many elements have each code after rounding `x / scale` to nearest.

    The result is int64, in code order. `x` may be the uint8 codes themselves. NaN has
    the code that `fm.encode` gives it, Inf that of the largest value. -0 has a code of
    its own if the format has one.

    >>> fmt = fm.FloatFormat.from_string("E2M1")
    >>> code_histogram(torch.tensor([1.0, 1.0, -6.0]), fmt).nonzero().flatten().tolist()
    [2, 15]
    """
    size = 2 * fmt.sign_bit
    if x.dtype is torch.uint8:
        return torch.bincount(x.flatten(), minlength=size)
    counts = torch.zeros(size, dtype=torch.int64, device=x.device)
    for _, units in unit_pieces(scale, x):
        counts += torch.bincount(fm.encode(units, fmt), minlength=size)
    return counts


def bit_figures(counts: Tensor, fmt: fm.FloatFormat) -> tuple[int, dict[Metric, float]]:
    """Return the number of elements with finite codes in a histogram, and its metrics.

    All metrics are shares of that number. +0 and -0 are two codes. All metrics of an
    empty histogram are 0.

    >>> fmt = fm.FloatFormat.from_string("E2M1")
    >>> counts = code_histogram(torch.tensor([1.0, 1.5, 1.0, 1.5]), fmt)
    >>> size, figures = bit_figures(counts, fmt)
    >>> size, figures[UNIFORMITY], figures[TOP_EXPONENT]
    (4, 0.25, 0.0)
    """

    def exponent(code: int) -> int:
        return (code & (fmt.sign_bit - 1)) >> fmt.mantissa_bits

    codes = _finite_codes(fmt)
    uses = [int(count) for count in counts[codes].tolist()]
    top = max(exponent(code) for code in codes)
    uses_of_top = 0
    for code, count in zip(codes, uses, strict=True):
        if exponent(code) == top:
            uses_of_top += count
    total = sum(uses)
    return total, {
        UNIFORMITY: _entropy(uses) / math.log2(len(codes)),
        CODES_USED: sum(count > 0 for count in uses) / len(codes),
        TOP_EXPONENT: uses_of_top / max(total, 1),
    }


@lru_cache(maxsize=64)
def _finite_codes(fmt: fm.FloatFormat) -> list[int]:
    return [code for code in range(2 * fmt.sign_bit) if math.isfinite(fmt.decode_code(code))]


def _entropy(counts: Sequence[int]) -> float:
    total = sum(counts)
    return math.fsum(n / total * math.log2(total / n) for n in counts if n)


class Bits(Monitor):
    """Records `bits/FIGURE/OPERAND/LAYER`.

    It measures operands that are quantised or have a format to be measured against.
    """

    def __init__(self, watched: Watched) -> None:
        super().__init__(watched.turns)
        self._layers = watched.layers
        self._capture = watched.capture
        self._settings = watched.config.monitor
        #: histograms by operand and layer
        self._histograms: dict[tuple[str, str], Histogram] = {}

    def after_backward(self, step: Step) -> None:
        if not self.is_measured(step) or not step.at_last_micro_step:
            return
        for operand in captured_operands(self._layers, self._capture, self._settings):
            if operand.format is not None and bool(operand.values.isfinite().all()):
                counts = code_histogram(operand.values, operand.format, operand.scale)
                self._histograms[operand.kind, operand.layer] = Histogram(operand.format, counts)

    def complete_record(self, step: Step) -> None:
        if not step.number or not self.is_measured(step):
            return
        self._count_weights(step)
        for (kind, layer), histogram in self._histograms.items():
            size, figures = bit_figures(histogram.counts, histogram.format)
            for metric, value in figures.items():
                self._figures.add(metric.part(kind), layer, value, size)
        self._histograms.clear()
        super().complete_record(step)

    @torch.no_grad()
    def _count_weights(self, step: Step) -> None:
        for name, layer in self._layers.items():
            if not self.takes(step, name):
                continue
            if isinstance(layer, fm.QuantizedLinear) and is_rounded(layer):
                fmt = layer.weight_format
                assert fmt is not None
                counts = code_histogram(layer.weight_codes(), fmt)
                self._histograms["weight", name] = Histogram(fmt, counts)


#: returns the monitor of a run
build = Bits
