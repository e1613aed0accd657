"""Bits: which codes, exponents and mantissas of its format each operand uses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import fp8manifold as fm
from nanogpt_bench.config import metrics
from nanogpt_bench.config.metrics import MonitorConfig
from nanogpt_bench.observers.capture import Capture, flowing
from nanogpt_bench.observers.figures import ALL, Monitor, Turns
from nanogpt_bench.setup.layers import is_rounded
from nanogpt_bench.training.points import Step

_FIGURES = (
    *(metrics.CODE_ENTROPY, metrics.UNIFORMITY, metrics.CODES_USED, metrics.CODES_EVER_USED, metrics.BINADES_OCCUPIED),
    *(metrics.TOP_EXPONENT, metrics.MANTISSA_UTILISATION, metrics.EXPONENT_UTILISATION, metrics.LONGEST_GAP),
)


class Bits(Monitor):
    """Records `bits/FIGURE/OPERAND/LAYER` every `monitor.interval` steps, from one code histogram an operand.

    Only what is quantised is measured, or what `monitor` gives a format to measure against. The histograms themselves
    are written every `monitor.histogram_interval` steps.
    """

    def __init__(
        self, layers: Mapping[str, nn.Linear], capture: Capture, monitor: MonitorConfig, turns: Turns = ALL
    ) -> None:
        super().__init__(monitor.interval, turns)
        self._layers, self._capture, self._monitor = layers, capture, monitor
        self._counts: dict[tuple[str, str], tuple[fm.FloatFormat, Tensor]] = {}
        self._ever: dict[tuple[str, str], Tensor] = {}

    def after_backward(self, step: Step) -> None:
        if not step.due(self.interval) or not step.at_last_micro_step:
            return
        for operand in flowing(self._layers, self._capture, self._monitor):
            if operand.format is not None and bool(operand.values.isfinite().all()):
                counts = fm.monitor.code_histogram(operand.values, operand.format, operand.scale)
                self._counts[operand.kind, operand.layer] = operand.format, counts

    def written(self, step: Step) -> None:
        if not step.number or not step.due(self.interval):
            return
        self._counts.update(self._weights(step))
        for (kind, layer), (fmt, counts) in self._counts.items():
            self._note(kind, layer, fmt, counts)
            if step.due(self._monitor.histogram_interval):
                _write(step, kind, layer, fmt, counts)
        self._counts.clear()
        super().written(step)

    def state(self) -> dict[str, Any]:
        return {"ever": self._ever, **super().state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._ever = state["ever"]
        super().load_state(state)

    @torch.no_grad()
    def _weights(self, step: Step) -> Iterator[tuple[tuple[str, str], tuple[fm.FloatFormat, Tensor]]]:
        for name, layer in self._layers.items():
            if not self.takes(step, name):
                continue
            if isinstance(layer, fm.QuantizedLinear) and is_rounded(layer):
                fmt = layer.weight_format
                assert fmt is not None
                yield ("weight", name), (fmt, fm.monitor.code_histogram(layer.weight_codes(), fmt))

    def _note(self, kind: str, layer: str, fmt: fm.FloatFormat, counts: Tensor) -> None:
        ever = self._ever.get((kind, layer))
        found = fm.monitor.bit_figures(counts, fmt, ever)
        self._ever[kind, layer] = counts if ever is None else ever + counts
        for metric in _FIGURES:
            self._figures.add(metric.by(kind), layer, getattr(found, metric.figure), found.size)
        bits = (metrics.EXPONENT_BIT, found.exponent_bits), (metrics.MANTISSA_BIT, found.mantissa_bits)
        for metric, shares in bits:
            for bit, share in enumerate(shares):
                self._figures.add(metric.number(bit).by(kind), layer, share, found.size)


def _write(step: Step, kind: str, layer: str, fmt: fm.FloatFormat, counts: Tensor) -> None:
    values, numbers = by_value(fmt, counts)
    step.add_histogram(metrics.CODE_COUNTS.by(kind).of(layer), numbers, values=values)
    gaps = fm.monitor.gap_lengths(counts, fmt)
    lengths = sorted(set(gaps))
    if lengths:
        name = metrics.GAP_LENGTHS.by(kind).of(layer)
        step.add_histogram(name, [gaps.count(length) for length in lengths], values=[float(n) for n in lengths])


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
