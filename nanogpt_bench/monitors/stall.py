"""Stall: the share of weights that stayed where they were despite an update, and the
share of movement that was made.

On grid and fp8 storage the optimizer hands over each parameter before the step, as
requested and after the write-back. With master weights a step loses nothing, and the
share of updated weights whose *code* did not change is measured. Under an unbiased
write-back neither is a failure, and the share of the requested movement that was made
counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import fp8manifold as fm
from nanogpt_bench.config.metrics import ABOVE, LINEAR, LOG, MEAN, SHARE, TOGETHER, ULPS, Metric
from nanogpt_bench.config.schema import ROUNDED
from nanogpt_bench.monitors.capture import Update, UpdateMonitor, Watched
from nanogpt_bench.monitors.points import Scale, Step, blocks, inside, share, unit_blocks

_stall = partial(Metric, monitor="stall", over=MEAN)
UPDATE_LOST = _stall(
    "stall/update_lost",
    "Updates lost",
    SHARE,
    "Weights without a master copy that a requested update left where they were.",
    bad=ABOVE,
)
CODE_UNCHANGED = _stall(
    "stall/code_unchanged",
    "Codes unchanged",
    SHARE,
    "Weights whose master copy moved while their code did not.",
)
ARRIVED = _stall(
    "stall/arrived",
    "Movement that arrived",
    SHARE,
    "Share of the requested movement that the write-back made, along its direction.",
    over=TOGETHER,
    chart=LINEAR,
)
UPDATE_ULPS = _stall(
    "stall/update_ulps", "Size of the updates", ULPS, "Mean over the requested ones.", chart=LOG
)
RESIDUAL_SATURATION = _stall(
    "stall/residual_saturation",
    "Residuals at their bound",
    SHARE,
    "Stored residuals at an end of their range.",
    bad=ABOVE,
    chart=LINEAR,
)
#: the metrics that are called a run's stall: of weights on a grid, and of those with a
#: master copy
STALLS = (UPDATE_LOST, CODE_UNCHANGED)


def update_lost(before: Tensor, target: Tensor, after: Tensor) -> float:
    """Return the share of all weights whose requested update was not zero and was lost
    in the write-back.

    A NaN in `target` counts as a request, one in `before` as a move; +0 and -0 are the
    same weight.

    >>> before = torch.tensor([1.0, 1.0, 1.0, 1.0])
    >>> update_lost(before, torch.tensor([1.0, 1.01, 1.01, 1.2]), torch.tensor([1.0, 1.0, 1.125, 1.25]))
    0.25
    """
    return share((target != before) & (after == before))


def code_unchanged(
    before_codes: Tensor, after_codes: Tensor, before: Tensor, after: Tensor
) -> float:
    """Return the share of all master weights that moved while their code did not.

    >>> codes = torch.tensor([56, 56], dtype=torch.uint8)
    >>> code_unchanged(codes, codes, torch.tensor([1.0, 1.0]), torch.tensor([1.01, 1.0]))
    0.5
    """
    return share((after != before) & (after_codes == before_codes))


@dataclass(frozen=True)
class Arrival:
    """The sums of `update_arrived` for a step of one tensor; those of several tensors
    can be added.
    """

    #: sum of (after - before) (target - before), in value squared
    projected: float
    #: sum of (target - before)²
    requested: float

    @property
    def share(self) -> float | None:
        """The share of the requested movement that was made; None where none was
        requested.
        """
        return self.projected / self.requested if self.requested else None

    def __add__(self, other: Arrival) -> Arrival:
        return Arrival(self.projected + other.projected, self.requested + other.requested)


@torch.no_grad()
def update_arrived(before: Tensor, target: Tensor, after: Tensor) -> Arrival:
    """Return how much of a step's requested movement the write-back made, along the
    requested direction.

    An unbiased write-back, such as stochastic rounding, has an expected share of 1
    however many weights stay: the few that move go as much too far as the others fall
    short. Over n weights with updates of u spacings the share of one step scatters
    around 1 by about 1 / sqrt(n u). Rounding to nearest has 0 if every update is below
    half a spacing. Movement beyond the format's largest value is requested, but never
    made. NaN or Inf make the sums NaN or Inf.

    >>> before = torch.tensor([1.0, 1.0, 1.0, 1.0])
    >>> target = before + 0.03125  # a quarter of a spacing of E4M3: one in four moves
    >>> update_arrived(before, target, torch.tensor([1.0, 1.125, 1.0, 1.0])).share
    1.0
    """
    sums = []
    for start, wanted, end in blocks(before, target, after):
        asked = wanted.double() - start.double()
        sums.append(torch.stack([asked.dot(end.double() - start.double()), asked.dot(asked)]))
    projected, requested = torch.stack(sums).sum(0).tolist()
    return Arrival(projected, requested)


@torch.no_grad()
def update_ulps(before: Tensor, target: Tensor, fmt: fm.FloatFormat, scale: Scale = 1.0) -> float:
    """Return the mean size of the requested updates, in spacings at the weight; 0 for
    an empty tensor.

    >>> update_ulps(torch.tensor([1.0, 1.0]), torch.tensor([1.03125, 0.96875]), fm.FloatFormat.from_string("E4M3"))
    0.25
    """
    sums = []
    for _, start, wanted in unit_blocks(scale, before, target):
        sums.append((wanted - start).abs_().div_(fm.ulp(inside(start, fmt), fmt)).sum().double())
    return float(torch.stack(sums).sum()) / max(before.numel(), 1)


def residual_saturation(residual: Tensor) -> float:
    """Return the share of int8 ULP residuals at an end of their range; it is 2/256 if
    they are spread evenly.

    >>> residual_saturation(torch.tensor([-128, 5, 127, 0], dtype=torch.int8))
    0.5
    """
    return share((residual == -128) | (residual == 127))


class Stall(UpdateMonitor):
    """Records the stall at every measurement, by layer and over all layers; has its
    mean over the run.
    """

    def __init__(self, watched: Watched) -> None:
        super().__init__(watched.turns)
        self._grid = watched.config.model.storage in ROUNDED
        self._metric = UPDATE_LOST if self._grid else CODE_UNCHANGED
        self._names = list(watched.quantized)
        self._moved: dict[str, Arrival] = {}
        self._stall, self._arrived = _Mean(), _Mean()
        #: whether this step has had an update; whether the last measured step had none
        self._seen, self._unseen = False, False

    @property
    def metric(self) -> str:
        """Name of the metric that is the stall."""
        return self._metric.name

    @property
    def mean(self) -> float | None:
        """Mean of the stall over the measured steps; None before the first."""
        return self._stall.value

    @property
    def arrived(self) -> float | None:
        """Mean share of requested movement that was made; None with a master copy, or
        if none was measured last.
        """
        return None if self._unseen else self._arrived.value

    def state(self) -> dict[str, Any]:
        more: dict[str, Any] = super().state()
        if more:
            more["moved"] = {
                name: (found.projected, found.requested) for name, found in self._moved.items()
            }
        return {
            **self._stall.state(),
            "arrived": self._arrived.state(),
            "unseen": self._unseen,
            **more,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._stall.load_state(state)
        self._arrived.load_state(state["arrived"])
        self._unseen = state["unseen"]
        super().load_state(state)
        self._moved = {name: Arrival(*sums) for name, sums in state.get("moved", {}).items()}

    def see(self, step: Step, update: Update) -> None:
        self._seen = True
        before, target, after = update.before, update.target, update.after
        self._note(UPDATE_ULPS, update, update_ulps(before, target, update.format, update.scale))
        if self._grid:
            self._note(UPDATE_LOST, update, update_lost(before, target, after))
            moved = update_arrived(before, target, after)
            self._note(ARRIVED, update, moved.share)
            if moved.share is not None and math.isfinite(moved.share):
                self._moved[update.name] = moved
            else:
                self._moved.pop(update.name, None)
            residual = step.optimizer.state.get(update.layer.weight, {}).get("residual")
            if residual is not None and residual.dtype is torch.int8:
                self._note(RESIDUAL_SATURATION, update, residual_saturation(residual))
        if update.codes is not None:
            self._note(
                CODE_UNCHANGED,
                update,
                code_unchanged(update.codes, update.codes_after, before, after),
            )

    def _note(self, metric: Metric, update: Update, value: float | None) -> None:
        self._figures.add(metric, update.name, value, update.before.numel())

    def finish(self, step: Step) -> None:
        self._unseen = not self._seen and any(self.takes(step, name) for name in self._names)
        self._seen = False
        arrivals, found = ARRIVED in self._figures, self._metric in self._figures
        self._figures.write(step)
        if arrivals:
            # Over all layers together, and not a mean of shares: a layer with hardly
            # any movement says little.
            moved = sum(self._moved.values(), Arrival(0.0, 0.0))
            step.record[ARRIVED.name] = moved.share
            self._arrived.add(moved.share)
        if self._turns.count == 1:
            self._moved.clear()
        if found:
            self._stall.add(step.record[self.metric] or 0.0)

    def written(self, step: Step) -> None:
        """Do nothing: `finish` has written the figures, and a skipped step has none."""


class _Mean:
    """A mean as a sum and a count, so that a checkpoint does not grow with the run."""

    def __init__(self) -> None:
        self._total, self._looks = 0.0, 0

    @property
    def value(self) -> float | None:
        return self._total / self._looks if self._looks else None

    def add(self, figure: float | None) -> None:
        if figure is not None:
            self._total, self._looks = self._total + figure, self._looks + 1

    def state(self) -> dict[str, Any]:
        return {"total": self._total, "looks": self._looks}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._total, self._looks = state["total"], state["looks"]


def build(watched: Watched) -> Stall | None:
    """Return the monitor of a run whose weights have codes; None for others."""
    return Stall(watched) if watched.config.model.storage in ("master", *ROUNDED) else None
