"""The shadow: a float32 model with the run's current weights.

The run's gradients are compared with those of the shadow.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nanogpt_bench.config.metrics import ABOVE, BELOW, LINEAR, MEAN, Metric
from nanogpt_bench.model.gpt import GPT, GPTShape, build_model
from nanogpt_bench.model.weights import dequantized, forward_weight, linear_layers
from nanogpt_bench.monitors.capture import Watched
from nanogpt_bench.monitors.points import Observer, Step, pieces

_shadow = partial(Metric, monitor="shadow")
COSINE = _shadow(
    "grad/cosine",
    "Gradient cosine",
    "cosine",
    "With the float32 shadow's gradient, mean over the layers.",
    over=MEAN,
    bad=BELOW,
    chart=LINEAR,
)
COSINE_MIN = _shadow(
    "grad/cosine_min",
    "Lowest gradient cosine",
    "cosine",
    "With the float32 shadow's gradient, in the layer where it is lowest.",
    bad=BELOW,
    chart=LINEAR,
)
QUANT_SNR = _shadow(
    "grad/quant_snr_db",
    "Signal to quantisation noise",
    "dB",
    "10 log10 of |g32|² / |g8 - g32|², g32 being the float32 shadow's gradient.",
    over=MEAN,
    bad=BELOW,
    chart=LINEAR,
)
SHADOW_OVERHEAD = _shadow(
    "shadow/overhead", "Time of the shadow", "steps", "Time of one comparison.", bad=ABOVE
)


class ShadowFigures(NamedTuple):
    """A gradient compared with the shadow's; None where a figure is undefined."""

    cosine: float | None
    snr_db: float | None


@torch.no_grad()
def shadow_figures(g: Tensor, reference: Tensor) -> ShadowFigures:
    """Return the cosine of a gradient and the shadow's, and the signal to noise in dB.

    Signal is the power of the shadow's gradient, noise that of the difference. Equal
    gradients have a cosine of exactly 1 and Inf dB. Both are None if either tensor has
    NaN or Inf, if both tensors are zero, and for empty tensors. The cosine is None if
    one tensor is zero.

    >>> tuple(shadow_figures(torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1.0])))
    (0.7071067811865475, 3.010299956639812)
    """
    if g.numel() == 0:
        return ShadowFigures(None, None)
    # Each gradient is measured in a unit of its own, its largest magnitude: squares of
    # large or small gradients could leave float32's range.
    tops_of_pieces = []
    for pair in pieces(g, reference):
        tops_of_pieces.append(torch.stack([piece.abs().amax().double() for piece in pair]))
    tops = torch.stack(tops_of_pieces).amax(0).tolist()
    unit, reference_unit = (top if top != 0 else 1.0 for top in tops)
    if not (math.isfinite(unit) and math.isfinite(reference_unit)):
        return ShadowFigures(None, None)
    dtype = torch.promote_types(g.dtype, reference.dtype)
    products = []
    for piece, reference_piece in pieces(g.to(dtype), reference.to(dtype)):
        products.append(_products(piece, reference_piece, unit, reference_unit))
    dot, power, reference_power, noise = torch.stack(products).sum(0).tolist()
    cosine = None
    if power and reference_power:
        cosine = max(-1.0, min(1.0, dot / math.sqrt(power * reference_power)))
    signal = reference_power * (reference_unit / max(unit, reference_unit)) ** 2
    return ShadowFigures(cosine, _decibels(signal, noise))


def _products(g: Tensor, reference: Tensor, unit: float, reference_unit: float) -> Tensor:
    """Return (g·r, g·g, r·r, d·d) with d = g - r.

    g and r are each in its own unit, d in the larger unit.
    """
    first = g / unit
    second = reference / reference_unit
    difference = (g - reference) / max(unit, reference_unit)
    return torch.stack(
        [
            torch.dot(first, second),
            torch.dot(first, first),
            torch.dot(second, second),
            torch.dot(difference, difference),
        ]
    ).double()


def _decibels(signal: float, noise: float) -> float | None:
    if noise == 0:
        return math.inf if signal else None
    return 10 * math.log10(signal / noise) if signal else -math.inf


class ShadowObserver(Observer):
    """Compares gradients with those of a float32 model every `interval` steps.

    The same micro-batches pass through the model. Recorded, by layer and over all
    layers, are the cosine between the two gradients of the weight and `quant_snr_db` =
    10 log10(|g32|^2 / |g - g32|^2). The time of a comparison is recorded as a share of
    the step's.
    """

    def __init__(self, shadow: nn.Module, interval: int) -> None:
        self.model: Any = shadow
        self._interval = interval
        self._dropout_state: Tensor | None = None
        #: when the current step began, and the time that the shadow has taken in it
        self._start = 0.0
        self._shadow_seconds = 0.0
        #: seconds of the latest step without a comparison
        self._plain_step: float | None = None
        #: sum of the overheads so far, and their number
        self._overheads = 0.0
        self._comparisons = 0

    @property
    def overhead(self) -> float | None:
        """Mean time of a comparison as a share of a step without one.

        It is None before the first comparison.
        """
        return self._overheads / self._comparisons if self._comparisons else None

    def before_forward(self, step: Step) -> None:
        if step.micro_step == 0:
            self._start = perf_counter()
            self._shadow_seconds = 0.0
        if not step.due(self._interval):
            return
        if step.micro_step == 0:
            self._time(self._copy, step)
        # So that dropout drops the same elements in the shadow.
        self._dropout_state = _dropout_generator(_device(step)).get_state()

    def after_backward(self, step: Step) -> None:
        if not step.due(self._interval):
            return
        self._time(self._accumulate, step)
        if step.at_last_micro_step:
            self._time(self._compare, step)

    def after_step(self, step: Step) -> None:
        step_seconds = perf_counter() - self._start - self._shadow_seconds
        if not step.due(self._interval):
            self._plain_step = step_seconds
            return
        # Over a step without measurements, if there has been one, since monitors take
        # time in the same steps.
        overhead = self._shadow_seconds / (self._plain_step or step_seconds)
        step.record[SHADOW_OVERHEAD.name] = overhead
        self._overheads += overhead
        self._comparisons += 1

    def state(self) -> dict[str, Any]:
        """Return the times.

        The shadow's weights are copied from the model for every comparison.
        """
        return {
            "overheads": self._overheads,
            "looks": self._comparisons,
            "plain_step": self._plain_step,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._overheads = state["overheads"]
        self._comparisons = state["looks"]
        self._plain_step = state["plain_step"]

    def _time(self, action: Callable[[Step], None], step: Step) -> None:
        start = perf_counter()
        action(step)
        self._shadow_seconds += perf_counter() - start

    @torch.no_grad()
    def _copy(self, step: Step) -> None:
        layers = linear_layers(step.model)
        layers_by_weight = {f"{name}.weight": layer for name, layer in layers.items()}
        shadow_parameters = dict(self.model.named_parameters())
        for name, parameter in step.model.named_parameters():
            layer = layers_by_weight.get(name)
            value = forward_weight(layer) if layer is not None else dequantized(parameter)
            shadow_parameters[name].copy_(value)
        self.model.zero_grad(set_to_none=True)

    def _accumulate(self, step: Step) -> None:
        assert step.batch is not None
        device = _device(step)
        forked_devices = [device] if device.type == "cuda" else []
        with (
            torch.random.fork_rng(devices=forked_devices),
            torch.autocast(device.type, enabled=False),
        ):
            if self._dropout_state is not None:
                _dropout_generator(device).set_state(self._dropout_state)
            loss = self.model.loss(*step.batch) / step.micro_steps * step.clip_factor
            loss.backward()

    @torch.no_grad()
    def _compare(self, step: Step) -> None:
        shadow_layers = linear_layers(self.model)
        cosines: dict[str, float | None] = {}
        snrs: dict[str, float | None] = {}
        for name, layer in linear_layers(step.model).items():
            gradient = layer.weight.grad
            reference = shadow_layers[name].weight.grad
            if gradient is None or reference is None:
                continue
            figures = shadow_figures(dequantized(gradient).float(), reference)
            cosines[name] = figures.cosine
            snrs[name] = figures.snr_db
        step.add(COSINE.name, cosines)
        step.add(QUANT_SNR.name, snrs)
        defined = [cosine for cosine in cosines.values() if cosine is not None]
        if defined:
            step.record[COSINE_MIN.name] = min(defined)


def _device(step: Step) -> torch.device:
    assert step.batch is not None
    return step.batch[0].device


def _dropout_generator(device: torch.device) -> torch.Generator:
    """Return the generator from which dropout on a device draws."""
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index or 0]
    return torch.default_generator


def build(watched: Watched) -> ShadowObserver:
    """Return the shadow of a run.

    Its head is tied if the run's model, after quantisation, has a tied one.
    """
    model: Any = watched.model
    shape: GPTShape = model.shape
    tied = model.lm_head.weight is model.token_embedding.weight
    shadow: GPT = build_model(replace(shape, tie_weights=tied), 0).to(watched.device)
    return ShadowObserver(shadow, watched.config.shadow.interval)
