"""Bits: which codes and exponents of its format each operand uses."""

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial

import torch
from torch import Tensor

import fp8manifold as fm
from nanogpt_bench.config.metrics import LINEAR, MEAN, OPERANDS, SHARE, Metric
from nanogpt_bench.model.weights import is_rounded
from nanogpt_bench.monitors.capture import Watched, flowing
from nanogpt_bench.monitors.points import Monitor, Scale, Step, unit_blocks

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


def code_histogram(x: Tensor, fmt: fm.FloatFormat, scale: Scale = 1.0) -> Tensor:
    """Return how many elements have each code, after rounding `x / scale` to the
    nearest value: int64, in code order.

    `x` may be the uint8 codes themselves. NaN has the code that `fm.encode` gives it,
    Inf that of the largest value, and -0 its own if the format has one.

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


def bit_figures(counts: Tensor, fmt: fm.FloatFormat) -> tuple[int, dict[Metric, float]]:
    """Return the number of elements with finite codes in a histogram, and its metrics,
    all shares of that number.

    +0 and -0 are two codes; all metrics of an empty histogram are 0.

    >>> fmt = fm.FloatFormat.from_string("E2M1")
    >>> size, found = bit_figures(code_histogram(torch.tensor([1.0, 1.5, 1.0, 1.5]), fmt), fmt)
    >>> size, found[UNIFORMITY], found[TOP_EXPONENT]
    (4, 0.25, 0.0)
    """

    def exponent(code: int) -> int:
        return (code & (fmt.sign_bit - 1)) >> fmt.mantissa_bits

    finite = _finite_codes(fmt)
    used, top = [int(n) for n in counts[finite].tolist()], max(map(exponent, finite))
    used_top = sum(n for code, n in zip(finite, used, strict=True) if exponent(code) == top)
    total = sum(used)
    return total, {
        UNIFORMITY: _entropy(used) / math.log2(len(finite)),
        CODES_USED: sum(n > 0 for n in used) / len(finite),
        TOP_EXPONENT: used_top / max(total, 1),
    }


@lru_cache(maxsize=64)
def _finite_codes(fmt: fm.FloatFormat) -> list[int]:
    return [code for code in range(2 * fmt.sign_bit) if math.isfinite(fmt.decode_code(code))]


def _entropy(counts: Sequence[int]) -> float:
    total = sum(counts)
    return math.fsum(n / total * math.log2(total / n) for n in counts if n)


class Bits(Monitor):
    """Records `bits/FIGURE/OPERAND/LAYER` of operands that are quantised or have a
    format to be measured against.
    """

    def __init__(self, watched: Watched) -> None:
        super().__init__(watched.turns)
        self._layers, self._capture, self._monitor = (
            watched.layers,
            watched.capture,
            watched.config.monitor,
        )
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
        self._counts.clear()
        super().written(step)

    @torch.no_grad()
    def _weights(
        self, step: Step
    ) -> Iterator[tuple[tuple[str, str], tuple[fm.FloatFormat, Tensor]]]:
        for name, layer in self._layers.items():
            if (
                self.takes(step, name)
                and isinstance(layer, fm.QuantizedLinear)
                and is_rounded(layer)
            ):
                fmt = layer.weight_format
                assert fmt is not None
                yield ("weight", name), (fmt, code_histogram(layer.weight_codes(), fmt))


#: returns the monitor of a run
build = Bits
