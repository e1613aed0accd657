"""The weights' gradients before clipping: norms, signal to noise, zeros, dead weights,
and the noise of rounding.
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

import fp8manifold as fm
from nanogpt_bench.config.metrics import ABOVE, BELOW, LINEAR, LOG, MEAN, RATIO, SHARE, Metric
from nanogpt_bench.model.weights import plain
from nanogpt_bench.monitors.capture import Update, UpdateMonitor, Watched
from nanogpt_bench.monitors.points import BLOCK, Scale, Step, blocks, inside, unit_blocks

_gradients = partial(Metric, monitor="gradients", over=MEAN)
GRAD_L2 = _gradients("grad/l2", "Norm of a layer's gradient", "L2 norm", "Before clipping.")
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
    "Elements below 1e-8 for 100 steps or more.",
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
#: a gradient is dead after so many steps in a row with a magnitude below this
DEAD_STEPS, DEAD_BELOW = 100, 1e-8
#: the longest run that an int16 counts
_LONGEST = 32767
#: the variance, relative to the mean square, that rounding in float32 can give a
#: constant
_ROUNDING = 2.0**-20


@torch.no_grad()
def gradient_figures(g: Tensor) -> dict[Metric, float | None]:
    """Return the norm of a gradient, the magnitude of its mean over its standard
    deviation, and its share of zeros.

    NaN or Inf make the norm NaN or Inf and the ratio None. It is None for a constant,
    too, and above 1000. -0 is a zero; for an empty tensor the others are 0.

    >>> list(gradient_figures(torch.tensor([3.0, 4.0, 0.0, 1.0])).values())
    [5.0990195135927845, 1.2649110640673518, 0.25]
    """
    n = g.numel()
    if n == 0:
        return {GRAD_L2: 0.0, GRAD_SNR: None, GRAD_ZERO: 0.0}
    found = []
    for (part,) in blocks(g):
        magnitude = part.abs()
        top = magnitude.amax()
        unit = torch.where((top > 0) & top.isfinite(), top, 1.0)
        scaled = part / unit
        zeros = torch.eq(magnitude, 0.0, out=magnitude).sum(dtype=torch.float64)
        found.append(
            torch.stack(
                [unit.double(), scaled.sum().double(), torch.dot(scaled, scaled).double(), zeros]
            )
        )
    unit, sums, squares, zeros = torch.stack(found).unbind(1)
    mean, square, none = torch.stack(
        [(sums * unit).sum() / n, (squares * unit * unit).sum() / n, zeros.sum() / n]
    ).tolist()
    variance = square - mean * mean
    noisy = math.isfinite(variance) and variance > square * _ROUNDING
    return {
        GRAD_L2: math.sqrt(square * n),
        GRAD_SNR: abs(mean) / math.sqrt(variance) if noisy else None,
        GRAD_ZERO: none,
    }


@torch.no_grad()
def update_to_noise(
    before: Tensor, target: Tensor, fmt: fm.FloatFormat, scale: Scale = 1.0
) -> float | None:
    """Return the power of a step's updates over the variance that stochastic rounding
    of `target` adds to them.

    With f the part of a spacing S by which a target is above a grid value, the variance
    is the sum of f (1 - f) S². Inf without variance, as beyond the range, and None if
    no update was requested. NaN gives NaN, Inf gives Inf.

    >>> e4m3 = fm.FloatFormat.from_string("E4M3")
    >>> update_to_noise(torch.tensor([1.0]), torch.tensor([1.03125]), e4m3)  # f = 1/4 of a step of 1/8
    0.3333333333333333
    """
    sums = []
    for scales, start, wanted in unit_blocks(scale, before, target):
        end = inside(wanted, fmt)
        gap = fm.ulp(end, fmt)
        fraction = (end / gap).abs_().frac_()
        step = (gap * scales).double()
        noise = (fraction * (1 - fraction)).double() * step * step
        sums.append(torch.stack([((wanted - start) * scales).double().square().sum(), noise.sum()]))
    asked, added = torch.stack(sums).sum(0).tolist()
    if asked == 0:
        return None
    return float(asked / added if added else asked * math.inf)


class DeadRuns:
    """Counts, up to 32767, of the steps in a row in which each element of a gradient
    has been below `DEAD_BELOW`.

    NaN and Inf end a run, -0 is a zero; the share of an empty gradient is 0.

    >>> runs = DeadRuns()
    >>> for steps in (60, 40):
    ...     runs.update(torch.tensor([0.0, 1.0]), steps)
    >>> runs.dead
    0.5
    """

    def __init__(self) -> None:
        self.runs: Tensor | None = None
        self._bound = 0  # on the length of the runs

    @torch.no_grad()
    def update(self, g: Tensor, steps: int = 1) -> None:
        """Count a gradient, for one step, or for the `steps` since the last count."""
        if self.runs is None:
            self.runs = torch.zeros(g.shape, dtype=torch.int16, device=g.device)
        if self._bound + steps > _LONGEST:
            self.runs.clamp_(max=_LONGEST - steps)
        self._bound = min(self._bound + steps, _LONGEST)
        flat = self.runs.view(-1)
        pieces = flat.split(BLOCK) if g.device.type == "cpu" and g.numel() else [flat]
        for runs, (part,) in zip(pieces, blocks(g), strict=True):
            small = (
                part.abs().lt_(DEAD_BELOW).to(runs.dtype)
            )  # a comparison into a mask costs four times as much
            if steps > 1:
                runs.add_(steps - 1)
            torch.addcmul(small, runs, small, out=runs)

    @property
    def dead(self) -> float:
        """The share of elements whose run is at least `DEAD_STEPS` long; 0 before the
        first update.
        """
        if self.runs is None:
            return 0.0
        return int((self.runs >= DEAD_STEPS).sum()) / max(self.runs.numel(), 1)

    def state(self) -> dict[str, Any]:
        """Return the state that `load_state` takes."""
        return {"runs": None if self.runs is None else self.runs.clone(), "bound": self._bound}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on counting from a state."""
        self.runs, self._bound = state["runs"], int(state["bound"])


class Gradients(UpdateMonitor):
    """Records `grad/FIGURE/LAYER` at measurements; dead gradients are counted every
    `monitor.dead_interval` steps.
    """

    def __init__(self, watched: Watched) -> None:
        super().__init__(watched.turns)
        self._layers, self._dead_interval = watched.layers, watched.config.monitor.dead_interval
        self._dead = {name: DeadRuns() for name in watched.layers}

    @torch.no_grad()
    def after_backward(self, step: Step) -> None:
        if not step.at_last_micro_step:
            return
        counted = step.number % self._dead_interval == 0
        for name, layer in self._layers.items():
            taken = self.takes(step, name)
            if layer.weight.grad is None or not (counted or taken):
                continue
            gradient = plain(layer.weight.grad)
            if counted:
                self._dead[name].update(gradient, self._dead_interval)
            if taken:
                self._measure(name, gradient)

    def see(self, step: Step, update: Update) -> None:
        """Compare a requested update with the noise that rounding it adds."""
        ratio = update_to_noise(update.before, update.target, update.format, update.scale)
        self._figures.add(UPDATE_TO_NOISE, update.name, ratio, update.before.numel())

    def state(self) -> dict[str, Any]:
        return {
            "dead": {name: runs.state() for name, runs in self._dead.items()},
            **super().state(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        for name, runs in self._dead.items():
            runs.load_state(state["dead"][name])
        super().load_state(state)

    def _measure(self, name: str, gradient: Tensor) -> None:
        for metric, value in {
            **gradient_figures(gradient),
            GRAD_DEAD: self._dead[name].dead,
        }.items():
            self._figures.add(metric, name, value, gradient.numel())


def build(watched: Watched) -> Gradients | None:
    """Return the monitor of a run; None with steps in the backward pass, which leave no
    gradients.
    """
    return None if watched.config.train.step_in_backward else Gradients(watched)
