"""The weights' gradients, and their updates against rounding noise.

Recorded are norms, signal to noise, zeros, dead gradients, and the power of requested
updates over the variance that stochastic rounding adds. Gradients are measured before
clipping, but for those of weights whose gradients have a format: these are clipped and
rounded first.
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

import fp8manifold as fm
from nanogpt_bench.config.metrics import ABOVE, BELOW, LINEAR, LOG, MEAN, RATIO, SHARE, Metric
from nanogpt_bench.model.weights import dequantized
from nanogpt_bench.monitors.capture import Update, UpdateMonitor, Watched
from nanogpt_bench.monitors.points import (
    PIECE_ELEMENTS,
    Scale,
    Step,
    clamp_to_format,
    pieces,
    unit_pieces,
)

_gradients = partial(Metric, monitor="gradients", over=MEAN)
GRAD_L2 = _gradients(
    "grad/l2",
    "Norm of a layer's gradient",
    "L2 norm",
    "Before clipping; gradients in a format are measured clipped and rounded.",
)
GRAD_SNR = _gradients(
    "grad/snr", "Gradient signal to noise", "|mean| / std", "Mean over the layers.", chart=LOG
)
GRAD_ZERO = _gradients(
    "grad/zero",
    "Zero gradients",
    SHARE,
    "Gradient elements that are exactly zero.",
    bad=ABOVE,
    chart=LINEAR,
)
GRAD_DEAD = _gradients(
    "grad/dead",
    "Dead gradients",
    SHARE,
    "Gradient elements below 1e-8 for 100 steps or more.",
    bad=ABOVE,
    chart=LINEAR,
)
UPDATE_TO_NOISE = _gradients(
    "grad/update_to_noise",
    "Update against rounding noise",
    RATIO,
    "The requested update's power over the variance that stochastic rounding adds.",
    bad=BELOW,
    chart=LOG,
)
#: a gradient is dead after so many steps in a row ...
DEAD_STEPS = 100
#: ... with a magnitude below this
DEAD_BELOW = 1e-8
#: the longest run that an int16 counts
_LONGEST = 32767
#: the variance, relative to the mean square, that rounding in float32 can give a
#: constant
_MEAN_SQUARE_ROUNDING = 2.0**-20


@torch.no_grad()
def gradient_figures(g: Tensor) -> dict[Metric, float | None]:
    """Return a gradient's norm, |mean| over standard deviation, and share of zeros.

    NaN or Inf make the norm NaN or Inf and the ratio None. The ratio is None for a
    constant, too, and above 1000. -0 is a zero. For an empty tensor norm and share are
    0.

    >>> list(gradient_figures(torch.tensor([3.0, 4.0, 0.0, 1.0])).values())
    [5.0990195135927845, 1.2649110640673518, 0.25]
    """
    n = g.numel()
    if n == 0:
        return {GRAD_L2: 0.0, GRAD_SNR: None, GRAD_ZERO: 0.0}
    # Each piece is summed in a unit of its own, its largest magnitude: squares of large
    # gradients could overflow float32.
    rows = []
    for (part,) in pieces(g):
        magnitude = part.abs()
        top = magnitude.amax()
        unit = torch.where((top > 0) & top.isfinite(), top, 1.0)
        scaled = part / unit
        total = scaled.sum().double()
        power = torch.dot(scaled, scaled).double()
        zeros = torch.eq(magnitude, 0.0, out=magnitude).sum(dtype=torch.float64)
        rows.append(torch.stack([unit.double(), total, power, zeros]))
    units, totals, powers, zero_counts = torch.stack(rows).unbind(1)
    mean, square, zero_share = torch.stack(
        [(totals * units).sum() / n, (powers * units * units).sum() / n, zero_counts.sum() / n]
    ).tolist()
    variance = square - mean * mean
    varies = math.isfinite(variance) and variance > square * _MEAN_SQUARE_ROUNDING
    return {
        GRAD_L2: math.sqrt(square * n),
        GRAD_SNR: abs(mean) / math.sqrt(variance) if varies else None,
        GRAD_ZERO: zero_share,
    }


@torch.no_grad()
def update_to_noise(
    weight: Tensor, requested: Tensor, fmt: fm.FloatFormat, scale: Scale = 1.0
) -> float | None:
    """Return the power of a step's updates over the variance that rounding adds.

    `requested` is stochastically rounded. With f the part of a spacing S by which it is
    above a grid value, the variance is the sum of f (1 - f) S². The result is Inf
    without variance, as beyond the range, and None if no update was requested. NaN
    gives NaN, Inf gives Inf.

    >>> e4m3 = fm.FloatFormat.from_string("E4M3")
    >>> requested = torch.tensor([1.03125])  # f = 1/4 of a spacing of 1/8
    >>> update_to_noise(torch.tensor([1.0]), requested, e4m3)
    0.3333333333333333
    """
    sums = []
    for scales, start, target in unit_pieces(scale, weight, requested):
        end = clamp_to_format(target, fmt)
        gap = fm.ulp(end, fmt)
        fraction = (end / gap).abs_().frac_()
        spacing = (gap * scales).double()
        noise = (fraction * (1 - fraction)).double() * spacing * spacing
        update = ((target - start) * scales).double()
        sums.append(torch.stack([update.square().sum(), noise.sum()]))
    update_power, noise_power = torch.stack(sums).sum(0).tolist()
    if update_power == 0:
        return None
    return float(update_power / noise_power if noise_power else update_power * math.inf)


class DeadRuns:
    """Counts the steps in a row in which each element of a gradient was dead.

    An element is dead below `DEAD_BELOW`. Counts end at 32767. NaN and Inf end a run,
    -0 is a zero. The share of an empty gradient is 0.

    >>> runs = DeadRuns()
    >>> for steps in (60, 40):
    ...     runs.update(torch.tensor([0.0, 1.0]), steps)
    >>> runs.dead
    0.5
    """

    def __init__(self) -> None:
        self.runs: Tensor | None = None
        #: an upper bound on the lengths of the runs: while it is low, no run can exceed
        #: an int16, and the tensor need not be clamped
        self._bound = 0

    @torch.no_grad()
    def update(self, g: Tensor, steps: int = 1) -> None:
        """Count a gradient, for one step, or for the `steps` since the last count."""
        if self.runs is None:
            self.runs = torch.zeros(g.shape, dtype=torch.int16, device=g.device)
        if self._bound + steps > _LONGEST:
            self.runs.clamp_(max=_LONGEST - steps)
        self._bound = min(self._bound + steps, _LONGEST)
        flat = self.runs.view(-1)
        # divided as `pieces` divides the gradient
        is_divided = g.device.type == "cpu" and g.numel()
        runs_of_pieces = flat.split(PIECE_ELEMENTS) if is_divided else [flat]
        for runs, (part,) in zip(runs_of_pieces, pieces(g), strict=True):
            # A comparison into a mask costs four times as much.
            small = part.abs().lt_(DEAD_BELOW).to(runs.dtype)
            if steps > 1:
                runs.add_(steps - 1)
            # runs = runs + steps where an element is small, and 0 elsewhere
            torch.addcmul(small, runs, small, out=runs)

    @property
    def dead(self) -> float:
        """The share of elements whose run is at least `DEAD_STEPS` long.

        It is 0 before the first update.
        """
        if self.runs is None:
            return 0.0
        return int((self.runs >= DEAD_STEPS).sum()) / max(self.runs.numel(), 1)

    def state(self) -> dict[str, Any]:
        """Return the state that `load_state` takes."""
        return {"runs": None if self.runs is None else self.runs.clone(), "bound": self._bound}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on counting from a state."""
        self.runs = state["runs"]
        self._bound = int(state["bound"])


class Gradients(UpdateMonitor):
    """Records `grad/FIGURE/LAYER` at measurements.

    Dead gradients are counted every `monitor.dead_interval` steps.
    """

    def __init__(self, watched: Watched) -> None:
        super().__init__(watched.turns)
        self._layers = watched.layers
        self._dead_interval = watched.config.monitor.dead_interval
        self._dead = {name: DeadRuns() for name in watched.layers}

    @torch.no_grad()
    def after_backward(self, step: Step) -> None:
        if not step.at_last_micro_step:
            return
        counts_dead = step.number % self._dead_interval == 0
        for name, layer in self._layers.items():
            is_measured = self.takes(step, name)
            if layer.weight.grad is None or not (counts_dead or is_measured):
                continue
            gradient = dequantized(layer.weight.grad)
            if counts_dead:
                self._dead[name].update(gradient, self._dead_interval)
            if is_measured:
                self._measure(name, gradient)

    def measure_update(self, step: Step, update: Update) -> None:
        """Compare a requested update with the noise that rounding it adds."""
        ratio = update_to_noise(update.old, update.requested, update.format, update.scale)
        self._figures.add(UPDATE_TO_NOISE, update.name, ratio, update.old.numel())

    def state(self) -> dict[str, Any]:
        dead = {name: runs.state() for name, runs in self._dead.items()}
        return {"dead": dead, **super().state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        for name, runs in self._dead.items():
            runs.load_state(state["dead"][name])
        super().load_state(state)

    def _measure(self, name: str, gradient: Tensor) -> None:
        figures = gradient_figures(gradient)
        figures[GRAD_DEAD] = self._dead[name].dead
        for metric, value in figures.items():
            self._figures.add(metric, name, value, gradient.numel())


def build(watched: Watched) -> Gradients | None:
    """Return the monitor of a run.

    It is None with steps in the backward pass, which leave no gradients.
    """
    return None if watched.config.train.step_in_backward else Gradients(watched)
