"""The shadow: a float32 model with the run's current weights, with whose gradients the
run's are compared.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from nanogpt_bench.config.metrics import ABOVE, BELOW, LINEAR, MEAN, Metric
from nanogpt_bench.model.gpt import GPT, GPTShape, build_model
from nanogpt_bench.model.weights import forward_weight, linear_layers, plain
from nanogpt_bench.monitors.capture import Watched
from nanogpt_bench.monitors.points import Observer, Step, blocks

_shadow = partial(Metric, monitor="shadow")
COSINE = _shadow(
    "grad/cosine",
    "Gradient cosine",
    "cosine",
    "Against the float32 shadow, mean over the layers.",
    over=MEAN,
    bad=BELOW,
    chart=LINEAR,
)
COSINE_MIN = _shadow(
    "grad/cosine_min",
    "Lowest gradient cosine",
    "cosine",
    "Against the shadow, the layer that is furthest off.",
    bad=BELOW,
    chart=LINEAR,
)
QUANT_SNR = _shadow(
    "grad/quant_snr_db",
    "Signal to quantisation noise",
    "dB",
    "10 log10 of |g32|² / |g8 - g32|².",
    over=MEAN,
    bad=BELOW,
    chart=LINEAR,
)
OVERHEAD = _shadow(
    "shadow/overhead", "Time of the shadow", "steps", "Of one comparison.", bad=ABOVE
)


@torch.no_grad()
def shadow_figures(g: Tensor, reference: Tensor) -> tuple[float | None, float | None]:
    """Return the cosine of a gradient and the shadow's, and the power of the shadow's
    over the difference's, in dB.

    Equal gradients have a cosine of exactly 1 and Inf dB. Both are None if either
    tensor has NaN or Inf, if both tensors are zero, and for empty tensors; the cosine
    is None if one tensor is zero.

    >>> shadow_figures(torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1.0]))
    (0.7071067811865475, 3.010299956639812)
    """
    if g.numel() == 0:
        return None, None
    tops = torch.stack(
        [torch.stack([x.abs().amax().double() for x in pair]) for pair in blocks(g, reference)]
    ).amax(0)
    units = [top if top != 0 else 1.0 for top in tops.tolist()]
    if not all(map(math.isfinite, units)):
        return None, None
    dtype = torch.promote_types(g.dtype, reference.dtype)
    pieces = [_products(a, b, units) for a, b in blocks(g.to(dtype), reference.to(dtype))]
    both, own, shadow, noise = torch.stack(pieces).sum(0).tolist()
    cosine = max(-1.0, min(1.0, both / math.sqrt(own * shadow))) if own and shadow else None
    return cosine, _decibels(shadow * (units[1] / max(units)) ** 2, noise)


def _products(a: Tensor, b: Tensor, units: list[float]) -> Tensor:
    """Products of the two tensors, each in its own unit, and the power of their
    difference in the larger unit.
    """
    first, second, difference = a / units[0], b / units[1], (a - b) / max(units)
    pairs = (first, second), (first, first), (second, second), (difference, difference)
    return torch.stack([torch.dot(*pair) for pair in pairs]).double()


def _decibels(signal: float, noise: float) -> float | None:
    if noise == 0:
        return math.inf if signal else None
    return 10 * math.log10(signal / noise) if signal else -math.inf


class ShadowObserver(Observer):
    """Passes the same micro-batches through a float32 model every `interval` steps, and
    compares gradients.

    Records, by layer and over all layers, the cosine between the two gradients of the
    weight and `quant_snr_db` = 10 log10(|g32|^2 / |g - g32|^2), and the time it takes
    as a share of the step's.
    """

    def __init__(self, shadow: nn.Module, interval: int) -> None:
        self.model: Any = shadow
        self._interval = interval
        self._random: Tensor | None = None
        self._begun = self._spent = 0.0
        self._plain_step: float | None = None
        self._overheads, self._looks = 0.0, 0

    @property
    def overhead(self) -> float | None:
        """Mean time of a comparison as a share of a step without one; None before the
        first.
        """
        return self._overheads / self._looks if self._looks else None

    def before_forward(self, step: Step) -> None:
        if step.micro_step == 0:
            self._begun, self._spent = perf_counter(), 0.0
        if not step.due(self._interval):
            return
        if step.micro_step == 0:
            self._take(self._copy, step)
        self._random = _dropout(
            _device(step)
        ).get_state()  # so that dropout drops the same elements

    def after_backward(self, step: Step) -> None:
        if not step.due(self._interval):
            return
        self._take(self._accumulate, step)
        if step.at_last_micro_step:
            self._take(self._compare, step)

    def after_step(self, step: Step) -> None:
        rest = perf_counter() - self._begun - self._spent
        if not step.due(self._interval):
            self._plain_step = rest
            return
        # Over a step without measurements, if there has been one, since monitors take
        # time in the same steps.
        overhead = self._spent / (self._plain_step or rest)
        step.record[OVERHEAD.name] = overhead
        self._overheads += overhead
        self._looks += 1

    def state(self) -> dict[str, Any]:
        """Return the times; the shadow's weights are copied from the model for every
        comparison.
        """
        return {"overheads": self._overheads, "looks": self._looks, "plain_step": self._plain_step}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._overheads, self._looks = state["overheads"], state["looks"]
        self._plain_step = state["plain_step"]

    def _take(self, act: Any, step: Step) -> None:
        begun = perf_counter()
        act(step)
        self._spent += perf_counter() - begun

    @torch.no_grad()
    def _copy(self, step: Step) -> None:
        layers = linear_layers(step.model)
        weights = {f"{name}.weight": layer for name, layer in layers.items()}
        own = dict(self.model.named_parameters())
        for name, parameter in step.model.named_parameters():
            layer = weights.get(name)
            value = forward_weight(layer) if layer is not None else plain(parameter)
            own[name].copy_(value)
        self.model.zero_grad(set_to_none=True)

    def _accumulate(self, step: Step) -> None:
        assert step.batch is not None
        device = _device(step)
        forked = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices=forked), torch.autocast(device.type, enabled=False):
            if self._random is not None:
                _dropout(device).set_state(self._random)
            loss = self.model.loss(*step.batch) / step.micro_steps * step.clip_factor
            loss.backward()

    @torch.no_grad()
    def _compare(self, step: Step) -> None:
        own = linear_layers(self.model)
        cosines, noises = {}, {}
        for name, layer in linear_layers(step.model).items():
            mine, reference = layer.weight.grad, own[name].weight.grad
            if mine is None or reference is None:
                continue
            cosines[name], noises[name] = shadow_figures(plain(mine).float(), reference)
        step.add(COSINE.name, cosines)
        step.add(QUANT_SNR.name, noises)
        known = [value for value in cosines.values() if value is not None]
        if known:
            step.record[COSINE_MIN.name] = min(known)


def _device(step: Step) -> torch.device:
    assert step.batch is not None
    return step.batch[0].device


def _dropout(device: torch.device) -> torch.Generator:
    """The generator from which dropout on a device draws."""
    return (
        torch.cuda.default_generators[device.index or 0]
        if device.type == "cuda"
        else torch.default_generator
    )


def build(watched: Watched) -> ShadowObserver:
    """Return the shadow of a run; its head is tied if the run's model, after
    quantisation, has a tied one.
    """
    model: Any = watched.model
    shape: GPTShape = model.shape
    tied = model.lm_head.weight is model.token_embedding.weight
    shadow: GPT = build_model(replace(shape, tie_weights=tied), 0).to(watched.device)
    return ShadowObserver(shadow, watched.config.shadow.interval)
