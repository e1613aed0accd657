"""Stall: weights that stayed where they were despite an update, and movement made.

On grid and codes storage the optimizer hands over each parameter before the step, as
requested and after the write-back. With master weights a step loses nothing, and the
share of updated weights whose *code* did not change is measured. Under an unbiased
write-back neither is a failure: there the share of the requested movement that was made
is what to look at.
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
from nanogpt_bench.config.schema import ROUNDED, Storage
from nanogpt_bench.monitors.capture import Update, UpdateMonitor, Watched
from nanogpt_bench.monitors.points import Scale, Step, clamp_to_format, pieces, share, unit_pieces

_stall_metric = partial(Metric, monitor="stall", over=MEAN)
UPDATE_LOST = _stall_metric(
    "stall/update_lost",
    "Updates lost",
    SHARE,
    "Weights without a master copy that a requested update left where they were.",
    bad=ABOVE,
)
CODE_UNCHANGED = _stall_metric(
    "stall/code_unchanged",
    "Codes unchanged",
    SHARE,
    "Weights whose master copy moved while their code did not.",
)
ARRIVED = _stall_metric(
    "stall/arrived",
    "Movement that arrived",
    SHARE,
    "Share of the requested movement that the write-back made, along its direction.",
    over=TOGETHER,
    chart=LINEAR,
)
UPDATE_ULPS = _stall_metric(
    "stall/update_ulps", "Size of the updates", ULPS, "Mean over the requested updates.", chart=LOG
)
RESIDUAL_SATURATION = _stall_metric(
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


def update_lost(old: Tensor, requested: Tensor, new: Tensor) -> float:
    """Return the share of all weights whose update was lost in the write-back.

    The requested update was not zero, and the weight stayed. A NaN in `requested`
    counts as a request, one in `old` as a move. +0 and -0 are the same weight.

    >>> old = torch.tensor([1.0, 1.0, 1.0, 1.0])
    >>> requested = torch.tensor([1.0, 1.01, 1.01, 1.2])
    >>> update_lost(old, requested, new=torch.tensor([1.0, 1.0, 1.125, 1.25]))
    0.25
    """
    return share((requested != old) & (new == old))


def code_unchanged(old_codes: Tensor, new_codes: Tensor, old: Tensor, new: Tensor) -> float:
    """Return the share of all master weights that moved while their code did not.

    >>> old, new = torch.tensor([1.0, 1.0]), torch.tensor([1.01, 1.0])
    >>> codes = torch.tensor([56, 56], dtype=torch.uint8)
    >>> code_unchanged(codes, codes, old, new)
    0.5
    """
    return share((new != old) & (new_codes == old_codes))


@dataclass(frozen=True)
class Arrival:
    """The sums of `update_arrived` for a step of one tensor.

    Those of several tensors can be added.
    """

    #: sum of (new - old) (requested - old), in value squared
    projected: float
    #: sum of (requested - old)²
    requested: float

    @property
    def share(self) -> float | None:
        """The share of the requested movement that was made.

        It is None where none was requested.
        """
        return self.projected / self.requested if self.requested else None

    def __add__(self, arrival: Arrival) -> Arrival:
        return Arrival(self.projected + arrival.projected, self.requested + arrival.requested)


@torch.no_grad()
def update_arrived(old: Tensor, requested: Tensor, new: Tensor) -> Arrival:
    """Return how much of a step's requested movement the write-back made.

    Movement is measured along the requested direction. An unbiased write-back, such as
    stochastic rounding, has an expected share of 1 however many weights stay: the few
    that move go as much too far as the others fall short. Over n weights with updates
    of u spacings the share of one step scatters around 1 by about 1 / sqrt(n u).
    Rounding to nearest has 0 if every update is below half a spacing. Movement beyond
    the format's largest value is requested, but never made. NaN or Inf make the sums
    NaN or Inf.

    >>> old = torch.tensor([1.0, 1.0, 1.0, 1.0])
    >>> requested = old + 0.03125  # a quarter of a spacing of E4M3: one in four moves
    >>> update_arrived(old, requested, new=torch.tensor([1.0, 1.125, 1.0, 1.0])).share
    1.0
    """
    sums = []
    for start, target, end in pieces(old, requested, new):
        wanted_move = target.double() - start.double()
        actual_move = end.double() - start.double()
        sums.append(torch.stack([wanted_move.dot(actual_move), wanted_move.dot(wanted_move)]))
    projected, requested_power = torch.stack(sums).sum(0).tolist()
    return Arrival(projected, requested_power)


@torch.no_grad()
def update_ulps(old: Tensor, requested: Tensor, fmt: fm.FloatFormat, scale: Scale = 1.0) -> float:
    """Return the mean size of the requested updates, in spacings at the weight.

    It is 0 for an empty tensor.

    >>> fmt = fm.FloatFormat.from_string("E4M3")
    >>> update_ulps(torch.tensor([1.0, 1.0]), torch.tensor([1.03125, 0.96875]), fmt)
    0.25
    """
    sums = []
    for _, start, target in unit_pieces(scale, old, requested):
        spacings = fm.ulp(clamp_to_format(start, fmt), fmt)
        sums.append((target - start).abs_().div_(spacings).sum().double())
    return float(torch.stack(sums).sum()) / max(old.numel(), 1)


def residual_saturation(residual: Tensor) -> float:
    """Return the share of int8 ULP residuals at an end of their range.

    It is 2/256 if they are spread evenly.

    >>> residual_saturation(torch.tensor([-128, 5, 127, 0], dtype=torch.int8))
    0.5
    """
    return share((residual == -128) | (residual == 127))


class Stall(UpdateMonitor):
    """Records the stall at every measurement, by layer and over all layers.

    It has the mean of the stall over the run.
    """

    def __init__(self, watched: Watched) -> None:
        super().__init__(watched.turns)
        self._on_grid = watched.config.model.storage in ROUNDED
        self._metric = UPDATE_LOST if self._on_grid else CODE_UNCHANGED
        self._names = list(watched.quantized)
        self._arrivals: dict[str, Arrival] = {}
        self._mean_stall = _Mean()
        self._mean_arrived = _Mean()
        #: whether this step has had an update
        self._has_update = False
        #: whether the last measured step had none
        self._last_had_none = False

    @property
    def metric(self) -> str:
        """Name of the metric that is the stall."""
        return self._metric.name

    @property
    def mean(self) -> float | None:
        """Mean of the stall over the measured steps; None before the first."""
        return self._mean_stall.value

    @property
    def arrived(self) -> float | None:
        """Mean share of requested movement that was made.

        It is None with a master copy, or if the last measured step had no update.
        """
        return None if self._last_had_none else self._mean_arrived.value

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            **self._mean_stall.state(),
            "arrived": self._mean_arrived.state(),
            "unseen": self._last_had_none,
        }
        figures = super().state()
        if figures:
            moved = {}
            for name, arrival in self._arrivals.items():
                moved[name] = (arrival.projected, arrival.requested)
            state.update(figures, moved=moved)
        return state

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._mean_stall.load_state(state)
        self._mean_arrived.load_state(state["arrived"])
        self._last_had_none = state["unseen"]
        super().load_state(state)
        self._arrivals = {name: Arrival(*sums) for name, sums in state.get("moved", {}).items()}

    def measure_update(self, step: Step, update: Update) -> None:
        self._has_update = True
        ulps = update_ulps(update.old, update.requested, update.format, update.scale)
        self._add(UPDATE_ULPS, update, ulps)
        if self._on_grid:
            self._measure_write_back(step, update)
        if update.codes is not None:
            unchanged = code_unchanged(update.codes, update.new_codes, update.old, update.new)
            self._add(CODE_UNCHANGED, update, unchanged)

    def _measure_write_back(self, step: Step, update: Update) -> None:
        self._add(UPDATE_LOST, update, update_lost(update.old, update.requested, update.new))
        arrival = update_arrived(update.old, update.requested, update.new)
        self._add(ARRIVED, update, arrival.share)
        if arrival.share is not None and math.isfinite(arrival.share):
            self._arrivals[update.name] = arrival
        else:
            self._arrivals.pop(update.name, None)
        residual = step.optimizer.state.get(update.layer.weight, {}).get("residual")
        if residual is not None and residual.dtype is torch.int8:
            self._add(RESIDUAL_SATURATION, update, residual_saturation(residual))

    def _add(self, metric: Metric, update: Update, value: float | None) -> None:
        self._figures.add(metric, update.name, value, update.old.numel())

    def finish(self, step: Step) -> None:
        is_due = any(self.takes(step, name) for name in self._names)
        # With layers to measure, but without any update, `arrived` says nothing.
        self._last_had_none = is_due and not self._has_update
        self._has_update = False
        # Asked before `write`, which empties the figures.
        has_arrivals = ARRIVED in self._figures
        has_stall = self._metric in self._figures
        self._figures.write(step)
        if has_arrivals:
            # Over all layers together, and not a mean of shares: a layer with hardly
            # any movement says little.
            total = sum(self._arrivals.values(), Arrival(0.0, 0.0))
            step.record[ARRIVED.name] = total.share
            self._mean_arrived.add(total.share)
        # With turns the latest sums of the other layers stay for the next measurement.
        if self._turns.count == 1:
            self._arrivals.clear()
        if has_stall:
            self._mean_stall.add(step.record[self.metric] or 0.0)

    def complete_record(self, step: Step) -> None:
        """Do nothing: `finish` has written the figures, and a skipped step has none."""


class _Mean:
    """A mean as a sum and a count, so that a checkpoint does not grow with the run."""

    def __init__(self) -> None:
        self._total = 0.0
        self._count = 0

    @property
    def value(self) -> float | None:
        return self._total / self._count if self._count else None

    def add(self, figure: float | None) -> None:
        if figure is not None:
            self._total += figure
            self._count += 1

    def state(self) -> dict[str, Any]:
        return {"total": self._total, "looks": self._count}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._total = state["total"]
        self._count = state["looks"]


def build(watched: Watched) -> Stall | None:
    """Return the monitor of a run whose weights have codes; None for others."""
    return Stall(watched) if watched.config.model.storage in (Storage.MASTER, *ROUNDED) else None
