"""The ten classes of failure, each a criterion over the series of a run, in the order of `KINDS`."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from nanogpt_bench.config import metrics
from nanogpt_bench.config.metrics import ABOVE, BELOW
from nanogpt_bench.failures.evidence import (
    CLEAR,
    FOUND,
    NOT_JUDGED,
    Criterion,
    Evidence,
    Facts,
    Finding,
    Series,
    judge,
    over_median,
    worst,
)
from nanogpt_bench.monitors.attention import ENTROPY
from nanogpt_bench.monitors.gradients import GRAD_DEAD, GRAD_ZERO, UPDATE_TO_NOISE
from nanogpt_bench.monitors.ranges import CLAMPED, KURTOSIS, OVERFLOW
from nanogpt_bench.monitors.stall import UPDATE_LOST
from nanogpt_bench.runs.curves import smooth
from nanogpt_bench.system.words import counted

LOSS, LOST, SIGNAL = metrics.TRAIN_LOSS.name, UPDATE_LOST.name, UPDATE_TO_NOISE.name
KURTOSIS_OF_BLOCKS = KURTOSIS.by("residual").name
#: what was not a number: the metric that says so, or the figure that then is null
LOSSES = (metrics.LOSS_IS_NAN.name, LOSS, metrics.VAL_LOSS.name)
GRADIENTS = (metrics.GRAD_HAS_NAN.name, metrics.GRAD_NORM.name)
#: steps below which a learning curve can't be judged
SHORTEST = 20
OTHER_BATCH = "a run with another batch size"
#: settings in which runs of one series of batch sizes may differ
FREE = frozenset({"train.batch_size", "train.accumulation", "seed", "data.seed", "model.seed"})


def findings(evidence: Evidence, siblings: Iterable[Evidence]) -> tuple[Finding, ...]:
    """Judge the ten classes, in the order of `KINDS`."""
    rested = plateau(evidence)
    return (
        stall(evidence),
        rounding_noise(evidence, rested, batch_effect(evidence, siblings)),
        overflow(evidence),
        outlier_explosion(evidence),
        attention_collapse(evidence),
        zero_gradients(evidence),
        exploding_gradients(evidence),
        nan(evidence),
        rested,
        divergence(evidence),
    )


def _judged(kind: str, criteria: Sequence[Criterion], facts: Facts, said: str, then: str = "") -> Finding:
    """Return a class found from its first criterion on, said with `then`; clear where none held."""
    first = _earliest(criteria)
    if first is None:
        return Finding(kind, CLEAR, None, said, facts, tuple(criteria))
    return Finding(kind, FOUND, first.step, said + then.format(step=first.step), facts, tuple(criteria))


def _clear(kind: str, message: str) -> Finding:
    return Finding(kind, CLEAR, None, message)


def _not_judged(kind: str, *missing: str, why: str | None = None) -> Finding:
    message = why or f"not judged: the run did not record {' or '.join(missing)}"
    return Finding(kind, NOT_JUDGED, None, message, missing=missing)


def _earliest(criteria: Sequence[Criterion]) -> Criterion | None:
    """The criterion that held first; None when none did."""
    fired = [criterion for criterion in criteria if criterion.step is not None]
    return min(fired, key=lambda criterion: criterion.step or 0, default=None)


def stall(evidence: Evidence) -> Finding:
    """Nearest rounding undoes requested updates: the weights stand still although they should not."""
    if evidence.rounded is False:
        return _clear("stall", "no step is rounded when it is written back")
    if evidence.losing is False:
        return _clear("stall", "the write-back keeps what rounding loses, or returns it on average")
    series = evidence.series(LOST)
    if not series:
        return _not_judged("stall", LOST)
    criterion = judge(series, UPDATE_LOST.bad, evidence.limits.stall, evidence.limits.patience)
    layer, share = evidence.worst_layer(LOST)
    facts: Facts = {"metric": LOST, "threshold": criterion.threshold, "mean": series.mean, "looks": len(series)}
    facts |= {"worst_layer": layer, "worst_share": share}
    said = f"{series.mean:.1%} of the weights lost a requested update" + (f", {share:.1%} of {layer}" if layer else "")
    return _judged("stall", [criterion], facts, said, "; from step {step} on")


def rounding_noise(evidence: Evidence, rested: Finding, effect: BatchEffect | None) -> Finding:
    """A plateau kept up by the randomness of rounding: it outweighs the updates, and larger batches lie lower.

    Both signs are needed. A plateau falls with the batch size under gradient noise too, and small updates are common
    in runs that learn.
    """
    kind, limits = "rounding_noise", evidence.limits
    if evidence.losing is not False or evidence.rounded is False:
        return _clear(kind, "no step is rounded at random when it is written back")
    if rested.step is None:
        return _clear(kind, "the loss did not come to rest on a plateau")
    late = evidence.series(SIGNAL).since(rested.step)
    if not late:
        return _not_judged(kind, SIGNAL)
    noise = judge(late, UPDATE_TO_NOISE.bad, limits.noise, limits.patience)
    facts: Facts = {"metric": SIGNAL, "threshold": noise.threshold, "lowest": noise.extreme}
    said = f"the power of the updates on the plateau was down to {noise.extreme:.3g} of the variance of their rounding"
    if noise.step is None:
        return _judged(kind, [noise], facts, said)
    if effect is None:
        return _not_judged(kind, OTHER_BATCH, why=f"not judged: {said}; {OTHER_BATCH} would tell whether it falls")
    falls = effect.fall >= limits.batch_fall
    step = noise.step if falls else None
    return Finding(kind, FOUND if falls else CLEAR, step, f"{said}; {effect.text}", facts | effect.facts(), (noise,))


@dataclass(frozen=True)
class BatchEffect:
    """The levels (nats) at which the training loss came to rest, by sequences a step, smallest batch first."""

    levels: tuple[tuple[int, float], ...]

    @property
    def fall(self) -> float:
        """Nats by which the largest batch lies below the smallest."""
        return self.levels[0][1] - self.levels[-1][1]

    @property
    def text(self) -> str:
        levels = ", ".join(f"{level:.3f} with {batch}" for batch, level in self.levels)
        return f"the training loss rests at {levels} sequences a step"

    def facts(self) -> Facts:
        """Return the effect as evidence."""
        facts: Facts = {f"level_batch_{batch}": level for batch, level in self.levels}
        return facts | {"batch_fall": self.fall}


def batch_effect(evidence: Evidence, others: Iterable[Evidence]) -> BatchEffect | None:
    """Compare a run with those of `others` that differ from it in batch size and seeds only; None without any."""
    setting = _setting(evidence)
    runs = {run.run.path: run for run in (evidence, *others) if setting is not None and _setting(run) == setting}
    levels: dict[int, list[float]] = {}
    for run in runs.values():
        batch, level = _batch(run), resting_level(run)
        if batch is not None and level is not None:
            levels.setdefault(batch, []).append(level)
    if len(levels) < 2:
        return None
    return BatchEffect(tuple((batch, statistics.fmean(levels[batch])) for batch in sorted(levels)))


def _batch(evidence: Evidence) -> int | None:
    """Sequences that one optimizer step sees."""
    size, accumulation = evidence.setting("train.batch_size"), evidence.setting("train.accumulation")
    return size * accumulation if isinstance(size, int) and isinstance(accumulation, int) else None


def _setting(evidence: Evidence) -> str | None:
    """Everything else, as a key; None when the run has no config."""
    config = evidence.run.config
    return json.dumps(_fixed(config), sort_keys=True, default=str) if config else None


def _fixed(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    return {
        key: _fixed(value, f"{prefix}{key}.") if isinstance(value, Mapping) else value
        for key, value in config.items()
        if f"{prefix}{key}" not in FREE
    }


def overflow(evidence: Evidence) -> Finding:
    """Values beyond the format's largest, which saturate."""
    shares = (*OVERFLOW.each, *CLAMPED.each)
    watched = [series for share in shares if (series := worst(evidence, share.name))]
    if not watched and not evidence.quantized:
        return _clear("overflow", "nothing is quantised")
    if not watched:
        return _not_judged("overflow", OVERFLOW.name)
    limits = evidence.limits
    criteria = [judge(series, OVERFLOW.bad, limits.overflow, limits.patience) for series in watched]
    shown = _earliest(criteria) or max(criteria, key=lambda criterion: criterion.extreme or 0.0)
    layer, share = evidence.worst_layer(shown.metric)
    facts: Facts = {"metric": shown.metric, "threshold": limits.overflow, "highest": shown.extreme}
    facts |= {"worst_layer": layer, "worst_share": share}
    operand = shown.metric.rsplit("/", 1)[-1].replace("_", " ")
    said = f"up to {shown.extreme:.2%} of the {operand} values of a layer lay beyond the format"
    where = f", most of all in {layer}" if layer else ""
    return _judged(
        "overflow", criteria, facts, said, where.replace("{", "{{").replace("}", "}}") + "; from step {step} on"
    )


def outlier_explosion(evidence: Evidence) -> Finding:
    """Block outputs whose kurtosis is high and has grown: a few features dwarf all others.

    Other activations tell nothing here: those behind a nonlinearity pass any such bound in runs that are well.
    """
    kind, limits, series = "outlier_explosion", evidence.limits, worst(evidence, KURTOSIS_OF_BLOCKS)
    if not series:
        return _not_judged(kind, KURTOSIS_OF_BLOCKS)
    if len(series) < 2:
        return _not_judged(kind, why="not judged: one look at the kurtosis does not show it grow")
    bound = max(limits.kurtosis, limits.kurtosis_growth * series.values[0])
    criterion = judge(series, KURTOSIS.bad, bound, limits.patience, cut_off=evidence.died)
    facts: Facts = {
        "metric": KURTOSIS_OF_BLOCKS,
        "threshold": bound,
        "first": series.values[0],
        "highest": criterion.extreme,
    }
    facts |= {"highest_step": criterion.extreme_step, "worst_block": evidence.worst_layer(KURTOSIS_OF_BLOCKS)[0]}
    said = f"the kurtosis of the blocks' outputs went from {series.values[0]:.3g} to {criterion.extreme:.3g}"
    said += f" (step {criterion.extreme_step})"
    return _judged(kind, [criterion], facts, said, f", beyond {bound:.3g} from step {{step}} on")


def attention_collapse(evidence: Evidence) -> Finding:
    """Attention that looks at one token only: its entropy, meant over the heads, goes towards 0."""
    kind, series, block = (
        "attention_collapse",
        evidence.series(ENTROPY.name),
        evidence.setting("model.block_size"),
    )
    if not series:
        return _not_judged(kind, ENTROPY.name)
    if not isinstance(block, int) or block < 2:
        return _not_judged(kind, why="not judged: the config does not give model.block_size")
    uniform = uniform_entropy(block)
    criterion = judge(series, ENTROPY.bad, evidence.limits.entropy * uniform, evidence.limits.patience)
    head, entropy = evidence.worst_layer(ENTROPY.name, lowest=True)
    facts: Facts = {
        "metric": ENTROPY.name,
        "threshold": criterion.threshold,
        "uniform": uniform,
        "lowest": criterion.extreme,
    }
    facts |= {"lowest_step": criterion.extreme_step, "lowest_head": head, "lowest_head_entropy": entropy}
    said = f"attention's entropy fell to {criterion.extreme:.3f} nats of the {uniform:.3f} of uniform attention"
    return _judged(kind, [criterion], facts, said, "; collapsed from step {step} on")


def uniform_entropy(block: int) -> float:
    """Mean entropy (nats) of causal attention that looks at all tokens alike: the mean of ln i for i up to `block`.

    >>> round(uniform_entropy(2), 4)
    0.3466
    """
    return math.lgamma(block + 1) / block


def zero_gradients(evidence: Evidence) -> Finding:
    """Gradients that are zero, or were too small for too long."""
    kind, limits = "zero_gradients", evidence.limits
    bounds = (
        (metrics.GRAD_NORM.name, BELOW, limits.gradient_norm),
        (GRAD_ZERO.name, GRAD_ZERO.bad, limits.zero_gradients),
        (GRAD_DEAD.name, GRAD_DEAD.bad, limits.zero_gradients),
    )
    watched = [(series, side, bound) for name, side, bound in bounds if (series := evidence.series(name))]
    if not watched:
        return _not_judged(kind, *(name for name, _, _ in bounds))
    criteria = [judge(series, side, bound, limits.patience) for series, side, bound in watched]
    facts: Facts = {criterion.metric: criterion.extreme for criterion in criteria}
    if (first := _earliest(criteria)) is not None:
        layer = evidence.worst_layer(GRAD_ZERO.name)[0]
        facts |= {"metric": first.metric, "threshold": first.threshold, "worst_layer": layer}
    return _judged(kind, criteria, facts, _zero_text(criteria), "; from step {step} on")


def _zero_text(criteria: list[Criterion]) -> str:
    words = {
        metrics.GRAD_NORM.name: "gradient norm down to {:.2g}",
        GRAD_ZERO.name: "up to {:.1%} of it zero",
        GRAD_DEAD.name: "up to {:.1%} dead",
    }
    return ", ".join(words[criterion.metric].format(criterion.extreme) for criterion in criteria)


def exploding_gradients(evidence: Evidence) -> Finding:
    """Gradient norms far above those of the steps before."""
    kind, limits = "exploding_gradients", evidence.limits
    norms = evidence.series(metrics.GRAD_NORM.name)
    ratios = over_median(norms)
    if not norms:
        return _not_judged(kind, metrics.GRAD_NORM.name)
    if not ratios:
        return _not_judged(kind, why="not judged: no gradient norm has one above 0 before it")
    criterion = judge(ratios, ABOVE, limits.exploding, limits.patience, cut_off=evidence.died)
    facts: Facts = {
        "metric": metrics.GRAD_NORM.name,
        "threshold": criterion.threshold,
        "largest_ratio": criterion.extreme,
    }
    facts |= {"largest_norm": max(norms.values), "median_norm": sorted(norms.values)[len(norms) // 2]}
    said = f"the gradient norm reached {criterion.extreme:.3g} times its median (step {criterion.extreme_step})"
    return _judged(kind, [criterion], facts, said)


def nan(evidence: Evidence) -> Finding:
    """A loss or a gradient that is not finite."""
    if not evidence.records:
        return _not_judged("nan", LOSS)
    criteria = [_not_finite(evidence, metrics) for metrics in (LOSSES, GRADIENTS)]
    first = _earliest(criteria)
    if first is None:
        return _judged("nan", criteria, {}, "every loss and every gradient norm was finite")
    what = "loss" if first.metric == LOSSES[0] else "gradient"
    facts: Facts = {"first": what, "steps_with_bad_loss": len(_bad_rows(evidence, LOSSES))}
    return _judged("nan", criteria, facts, f"the {what} was not finite at step {first.step}")


def _not_finite(evidence: Evidence, metrics: Sequence[str]) -> Criterion:
    """The criterion over a series that is 1 at a step where one of the figures was not finite, 0 elsewhere."""
    bad = _bad_rows(evidence, metrics)
    rows = [(int(step or 0), float(row in bad)) for row, step in evidence.records.rows("step")]
    return judge(Series(metrics[0], tuple(step for step, _ in rows), tuple(flag for _, flag in rows)), ABOVE, 1.0, 1)


def _bad_rows(evidence: Evidence, metrics: Sequence[str]) -> set[int]:
    """The records whose flag (the first metric) is set, or in which a figure is null: not finite when written."""
    flag, *figures = metrics
    flagged = {row for row, value in evidence.records.rows(flag) if value == 1}
    return flagged | {row for name in figures for row, value in evidence.records.rows(name) if value is None}


@dataclass(frozen=True)
class Rest:
    """Where the training loss came to rest: `level` in nats, from `step` on, within `band`, after `fall` nats."""

    step: int
    level: float
    band: float
    fall: float
    #: mean of the last quarter
    end: float

    @property
    def stayed(self) -> bool:
        """Whether the loss has not risen again; the lowest of many means lies a band below their mean by chance."""
        return self.end <= self.level + 2 * self.band


def resting_level(evidence: Evidence) -> float | None:
    """The lowest mean of the training loss over a window; None for a run too short to tell."""
    rest = find_rest(evidence.series(LOSS), evidence.limits.smoothing, evidence.limits.plateau)
    return None if rest is None else rest.level


def find_rest(series: Series, window: int, share: float) -> Rest | None:
    """Find the first step whose windowed mean lies within a band of the lowest; None below SHORTEST steps.

    The band is `share` of the fall, or two standard errors of a windowed mean where those are more.
    """
    if len(series) < SHORTEST:
        return None
    width = max(window, len(series) // 40)
    means = _centred(series.values, width)
    level = min(means)
    fall = max(series.values[0] - level, 0.0)
    scatter = statistics.pstdev([v - m for v, m in zip(series.values[width:], means[width:], strict=True)] or [0.0])
    band = max(share * fall, 2 * scatter / width**0.5)
    first = next(index for index, mean in enumerate(means) if mean <= level + band)
    end = statistics.fmean(series.values[-max(len(series) // 4, 1) :])
    return Rest(series.steps[first], level, band, fall, end)


def _centred(values: Sequence[float], width: int) -> list[float]:
    """Means over `width` steps around each; fewer at the ends."""
    half, sums = width // 2, [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    bounds = [(max(0, i - half), min(len(values), i + half + 1)) for i in range(len(values))]
    return [(sums[high] - sums[low]) / (high - low) for low, high in bounds]


def plateau(evidence: Evidence) -> Finding:
    """A training loss that ceased to fall early in the run and stayed where it was."""
    series, limits = evidence.series(LOSS), evidence.limits
    rest = find_rest(series, limits.smoothing, limits.plateau)
    if rest is None:
        return _too_short("plateau", series, SHORTEST)
    # A run that the loop ended on its plateau would have stayed there: however late, it is one.
    share = limits.plateau_share if evidence.ended_by("plateau") is None else 1.0
    latest = share * series.steps[-1]
    criterion = _rest_criterion(rest, latest, len(series))
    facts: Facts = {
        "level": rest.level,
        "band": rest.band,
        "fall": rest.fall,
        "steps": series.steps[-1],
        "latest": latest,
    }
    said = (
        f"the training loss came within {rest.band:.3f} nats of its lowest level {rest.level:.3f} at step {rest.step}"
    )
    after = ": it fell until then" if rest.step > latest else ": it rose again after that"
    stayed = " and stayed there" if criterion.fired else after
    return _judged("plateau", [criterion], facts, f"{said} of {series.steps[-1]}{stayed}")


def _rest_criterion(rest: Rest, latest: float, looks: int) -> Criterion:
    fired = rest.stayed and rest.step <= latest
    step = rest.step if fired else None
    return Criterion("step of the plateau", "below", latest, step, step, rest.step, rest.step, looks)


def _too_short(kind: str, series: Series, needed: int) -> Finding:
    if not series:
        return _not_judged(kind, LOSS)
    verb = "is" if len(series) == 1 else "are"
    return _not_judged(kind, why=f"not judged: {counted(len(series), 'step')} {verb} too few, {needed} would tell")


def divergence(evidence: Evidence) -> Finding:
    """A training loss that rose above where it began, or above its lowest and never came back."""
    series = evidence.series(LOSS)
    if len(series) < 2:
        return _too_short("divergence", series, 2)
    criteria = _rises(series, evidence)
    alert = evidence.first_alert("early_divergence")
    alert_step = None if alert is None else alert.step
    starts = [criterion.step for criterion in criteria] + [alert_step, evidence.ended_by("divergence")]
    step = min((start for start in starts if start is not None), default=None)
    if step is None:
        return _judged("divergence", criteria, {}, "the training loss did not rise for good")
    highest = max(series.values)
    facts: Facts = {
        "first_loss": series.values[0],
        "lowest": min(series.values),
        "highest": highest,
        "last": series.values[-1],
    }
    message = f"the training loss rose to {highest:.3f} (first {facts['first_loss']:.3f}, last {facts['last']:.3f})"
    return Finding("divergence", FOUND, step, message, facts | {"alert_step": alert_step}, tuple(criteria))


def _rises(series: Series, evidence: Evidence) -> list[Criterion]:
    """The two rises of the smoothed loss: above the first loss, and above the lowest so far up to the end."""
    limits = evidence.limits
    smoothed = [value for value in smooth(series.values, limits.smoothing) if value is not None]
    above_first = [value - series.values[0] for value in smoothed]
    above_lowest = [value - low for value, low in zip(smoothed, accumulate(smoothed, min), strict=True)]
    return [
        judge(
            Series(f"{LOSS} over its {name}", series.steps, tuple(rise)),
            ABOVE,
            limits.divergence,
            limits.patience,
            cut_off=evidence.died,
            lasting=lasting,
        )
        for name, rise, lasting in (("first", above_first, False), ("lowest", above_lowest, True))
    ]
