"""Loss against time: what each rule has reached when the baseline ends, by the runs' own clocks."""

from collections.abc import Mapping, Sequence
from statistics import mean, median

import numpy as np
from _along import losses
from _markdown import markdown

from nanogpt_bench.config.metrics import ELAPSED
from nanogpt_bench.report.results import difference, difference_text
from nanogpt_bench.runs.load import Run

Clock = Mapping[int, float]
"""Seconds by step: of each the median over the runs, some of which were made beside other work."""


def table_by_clock(rules: Mapping[str, Sequence[Run]], references: Mapping[str, Sequence[Run]], name: str) -> str:
    """A line a rule; between validations losses are interpolated."""
    header = ("rule", "seconds a run", f"loss when `{name}` ends, less its own", f"`{name}`'s final loss is reached")
    return markdown(header, [(f"`{label}`", *line(runs, references[label])) for label, runs in rules.items()])


def line(runs: Sequence[Run], reference: Sequence[Run]) -> tuple[str, str, str]:
    """Seconds, the paired difference at the baseline's end, and the share of the baseline's time until its loss."""
    own, others = losses(runs), losses(reference)
    times, end = clock(runs), max(clock(reference).values())
    final = others[max(others)]
    then = {seed: at(end, times, own, seed) for seed in final.keys() & own[max(own)].keys()}
    found = difference(then, final)
    level, means = mean(final.values()), [mean(each.values()) for _, each in sorted(own.items())]
    return (
        f"{max(times.values()):.0f}",
        "-" if found is None or runs is reference else difference_text(found),
        reached(level, [times[step] for step in sorted(own)], means, end),
    )


def clock(runs: Sequence[Run]) -> Clock:
    """The median time of every step that has a validation."""
    steps = losses(runs)
    each = [dict(zip(*run.curve(ELAPSED.name), strict=True)) for run in runs]
    return {step: float(median(found[step] for found in each if step in found)) for step in steps}


def at(end: float, times: Clock, own: Mapping[int, Mapping[int, float]], seed: int) -> float:
    """A seed's loss at a time; its last where it has ended before."""
    steps = sorted(step for step in own if seed in own[step])
    return float(np.interp(end, [times[step] for step in steps], [own[step][seed] for step in steps]))


def reached(level: float, times: Sequence[float], means: Sequence[float], end: float) -> str:
    """When the mean loss falls to a level, as a share of the baseline's time."""
    for i, loss in enumerate(means):
        if loss <= level:
            if not i:
                return f"before {times[0] / end:.0%} of its time"
            part = (means[i - 1] - level) / (means[i - 1] - loss)
            return f"after {(times[i - 1] + part * (times[i] - times[i - 1])) / end:.0%} of its time"
    return "not"
