"""Alerts: lines about a figure beyond its threshold, and about steps and weights that stand still."""

from __future__ import annotations

import json
import logging
import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from torch import nn

from nanogpt_bench.config import metrics
from nanogpt_bench.config.metrics import ABOVE, Alarm, Metric
from nanogpt_bench.config.watching import AlertsConfig
from nanogpt_bench.monitors import METRICS
from nanogpt_bench.monitors.geometry import OFF_GRID
from nanogpt_bench.monitors.points import Observer, Step
from nanogpt_bench.monitors.stall import UPDATE_LOST
from nanogpt_bench.observers.jsonl import LineFile
from nanogpt_bench.observers.trend import TrendObserver
from nanogpt_bench.setup.memory import plain_tensors
from nanogpt_bench.system.errors import nearest
from nanogpt_bench.system.words import counted

_LOG = logging.getLogger("nanogpt_bench")
NAN_KINDS = tuple(flag.name for flag in metrics.FLAGS)
_AT_MOST = {metric.name: metric.at_most for metric in METRICS if metric.at_most is not None}
_ALARMS = tuple((metric, metric.alarm) for metric in METRICS if metric.alarm is not None)


@dataclass(frozen=True)
class Alert:
    """One alert; `value` is null where it is not finite."""

    step: int
    level: str
    kind: str
    message: str
    value: float | None
    threshold: float | None


class AlertObserver(Observer):
    """Compares every record with the thresholds; an alert is repeated only after its cool-down, an ERROR always.

    `stall` says whether a lost update is a loss: stochastic rounding makes up for what it loses.
    """

    def __init__(
        self,
        settings: AlertsConfig,
        path: Path,
        trend: TrendObserver | None,
        *,
        stall: bool,
        ends: bool = False,
        tell: Callable[[Alert], None] = lambda alert: None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._settings, self._lines, self._trend, self._stall = settings, LineFile(path), trend, stall
        self._tell, self._clock = tell, clock
        self._becomes = "the run ends" if ends else "the step is skipped"
        self._at_most = {**_AT_MOST, **settings.at_most}
        self._budgets_given = {**settings.at_most, **settings.at_least}
        self._recorded: set[str] = set()
        self._last: dict[str, float] = {}
        self._streak, self._standstill = 0, Standstill()
        #: how many were raised, by kind
        self.counts: Counter[str] = Counter()

    def written(self, step: Step) -> None:
        if self._budgets_given:
            self._recorded.update(step.record)
        for alert in self._found(step):
            self._raise(alert)

    def close(self) -> None:
        """Say which budgets no record was ever compared with: a misspelt metric would go unnoticed."""
        for metric, limit in self._budgets_given.items():
            if self._recorded and limit is not None and metric not in self._recorded:
                guess = nearest(metric, self._recorded)
                hint = f"; did you mean {guess!r}?" if guess else ""
                _LOG.warning("alerts: the run recorded no %r, which has a budget%s", metric, hint)

    def state(self) -> dict[str, Any]:
        """Return counts, and cool-downs by their age: the clock of another process begins elsewhere."""
        return {
            "bytes": self._lines.length(),
            "ages": {kind: self._clock() - last for kind, last in self._last.items()},
            "recorded": sorted(self._recorded),
            "streak": self._streak,
            "counts": dict(self.counts),
            "standstill": self._standstill.state(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._lines.cut(state["bytes"])
        self._last = {kind: self._clock() - age for kind, age in state["ages"].items()}
        self._recorded, self._streak = set(state["recorded"]), state["streak"]
        self.counts = Counter(state["counts"])
        self._standstill.load_state(state["standstill"])

    def _raise(self, alert: Alert) -> None:
        level = str(self._settings.levels.get(alert.kind, alert.level))
        if alert.level == "ERROR" and level != "off":
            level = "ERROR"
        if level == "off" or (alert.level != "ERROR" and self._cooling(alert.kind)):
            return
        self._last[alert.kind] = self._clock()
        alert = Alert(**{**asdict(alert), "level": level})
        self.counts[alert.kind] += 1
        self._lines.append([json.dumps(asdict(alert), allow_nan=False)])
        self._lines.close()  # alerts are rare
        self._tell(alert)

    def _cooling(self, kind: str) -> bool:
        cooldown = self._settings.nan_cooldown_s if kind in NAN_KINDS else self._settings.cooldown_s
        return kind in self._last and self._clock() - self._last[kind] < cooldown

    def _found(self, step: Step) -> Iterator[Alert]:
        yield from self._anomalies(step)
        for kind, text in self._standstill.see(step):
            yield Alert(step.number, "WARN", kind, text, None, None)
        for metric, alarm in _ALARMS:
            if self._stall or metric is not UPDATE_LOST:
                yield from self._worst(step, metric, alarm)
        yield from self._divergence(step)
        yield from self._budgets(step)

    def _anomalies(self, step: Step) -> Iterator[Alert]:
        found = [kind for kind in NAN_KINDS if step.record.get(kind)]
        self._streak = self._streak + 1 if found else 0
        patience = self._settings.nan_patience
        for kind in found:
            text = f"{_not_finite(step, kind)} at step {step.number}{_origin(step, self._becomes)}"
            yield Alert(step.number, "WARN", kind, text, None, None)
        if self._streak == patience:
            kind = found[0]
            text = f"{kind} for {counted(patience, 'step')} in a row, up to step {step.number}"
            yield Alert(step.number, "ERROR", kind, text, float(self._streak), float(patience))

    def _worst(self, step: Step, metric: Metric, alarm: Alarm) -> Iterator[Alert]:
        """The worst of a figure, by layer where it has layers, if it is beyond its limit."""
        found = metric.in_record(step.record).items()
        values = {at: value for at, value in found if value is not None and at.split("/")[0] not in alarm.leaves_out}
        if not values:
            return
        limit: float = getattr(self._settings, alarm.setting)
        at = (max if metric.bad == ABOVE else min)(values, key=values.__getitem__)
        if values[at] > limit if metric.bad == ABOVE else values[at] < limit:
            text = alarm.text.format(value=values[at], where=at.replace("/", " of "))
            yield Alert(step.number, "WARN", alarm.kind, f"{text} at step {step.number}", _number(values[at]), limit)

    def _divergence(self, step: Step) -> Iterator[Alert]:
        trend = self._trend
        if trend is None or metrics.EXCESS.name not in step.record or not trend.diverging or trend.excess is None:
            return
        against = "the baseline's" if self._settings.baseline else "its own best"
        text = (
            f"the smoothed training loss is {trend.excess:.1%} above {against} at step {step.number}, "
            f"for {trend.evals_above} validations in a row"
        )
        yield Alert(step.number, "WARN", "early_divergence", text, trend.excess, self._settings.divergence)

    def _budgets(self, step: Step) -> Iterator[Alert]:
        for limits, word, beyond in (
            (self._at_most, "above", float.__gt__),
            (self._settings.at_least, "below", float.__lt__),
        ):
            for metric, limit in limits.items():
                value = step.record.get(metric)
                if limit is not None and value is not None and beyond(float(value), float(limit)):
                    kind = "geometry_budget" if metric.startswith(f"{OFF_GRID.namespace}/") else "budget"
                    text = f"{metric} is {value:.4g}, {word} its budget of {limit:g}, at step {step.number}"
                    yield Alert(step.number, "WARN", kind, text, _number(value), float(limit))


def _not_finite(step: Step, kind: str) -> str:
    if kind in (metrics.WEIGHT_HAS_NAN.name, metrics.STATE_HAS_NAN.name):
        return f"{'a weight' if kind == metrics.WEIGHT_HAS_NAN.name else 'the optimizer state'} is not finite"
    name = (metrics.TRAIN_LOSS if kind == metrics.LOSS_IS_NAN.name else metrics.GRAD_NORM).name
    return f"{name} is {step.record.get(name)}"


def _origin(step: Step, becomes: str) -> str:
    """Where it was first seen, if that is known, and what becomes of it; what lasts ends the run in any case."""
    if step.anomaly is None:
        return f"; {becomes}"
    return f"; first seen in {step.anomaly.where}; {'the run ends' if step.anomaly.lasting else becomes}"


def _number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


_FLAGS = tuple(flag.name for flag in metrics.FLAGS)


@dataclass
class _Look:
    """What was there at a validation: the step's number, the optimizer's count of steps, and a hash of the weights."""

    number: int
    #: summed over parameters; None where the optimizer counts none
    steps: float | None
    weights: int


class Standstill:
    """Compares every validation with the one before; a state of it lets a run that goes on compare with that before.

    >>> from nanogpt_bench.monitors.points import Step
    >>> layer = nn.Linear(2, 1)
    >>> adamw = torch.optim.AdamW(layer.parameters())
    >>> seen = Standstill()
    >>> found = [list(seen.see(Step(n, layer, adamw, record={"val/loss": 1.0}))) for n in (0, 4)]
    >>> found[1]
    [('no_change', 'no weight changed from step 0 to step 4, in 1 step')]
    """

    def __init__(self) -> None:
        self._last: _Look | None = None
        #: steps since then whose loss and gradient were finite
        self._due = 0

    def see(self, step: Step) -> Iterator[tuple[str, str]]:
        """Take in a step whose record is complete; yield kind and message of what stood still."""
        if step.number > 0 and not any(step.record.get(flag) for flag in _FLAGS):
            self._due += 1
        if metrics.VAL_LOSS.name not in step.record:
            return
        last, now = self._last, _Look(step.number, _steps(step.optimizer), _hash(step.model))
        if last is not None and self._due:
            between = f"from step {last.number} to step {now.number}, in {counted(self._due, 'step')}"
            if now.steps is not None and now.steps == last.steps:
                yield "no_step", f"the optimizer took no step {between}"
            if now.weights == last.weights:
                yield "no_change", f"no weight changed {between}"
        self._last, self._due = now, 0

    def state(self) -> dict[str, Any]:
        return {"last": None if self._last is None else asdict(self._last), "due": self._due}

    def load_state(self, state: Mapping[str, Any]) -> None:
        last = state["last"]
        self._last, self._due = None if last is None else _Look(**last), state["due"]


def _steps(optimizer: torch.optim.Optimizer) -> float | None:
    states = [state for state in optimizer.state.values() if isinstance(state, Mapping) and "step" in state]
    return sum(float(state["step"]) for state in states) if states else None


@torch.no_grad()
def _hash(model: nn.Module) -> int:
    """A hash of the bits of all trained weights that this process holds."""
    found = 0
    for parameter in model.parameters():
        for part in plain_tensors(parameter) if parameter.requires_grad else ():
            flat = torch.empty(part.numel(), dtype=part.dtype).copy_(part.detach().reshape(-1))  # of any strides
            found = zlib.crc32(flat.view(torch.uint8).numpy().data, found)
    return found
