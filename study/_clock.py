"""Loss against time: each rule's loss when the baseline ends, timed by the runs' own
clocks or by a measured step.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, median

import numpy as np
from _along import losses
from _looks import EXACT, STOCHASTIC
from _markdown import markdown
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from nanogpt_bench.config.metrics import ELAPSED
from nanogpt_bench.report.paired import difference, difference_text
from nanogpt_bench.runs.load import Run

Clock = Mapping[int, float]
"""Seconds until a step, by step: the median over the runs, because other work ran at
the time of some.
"""
STEPS = Path(__file__).parent.parent / "docs" / "measured" / "study_steps.json"
DASHES = ("-", (0, (4, 1.5)))


def paces_of(stem: str) -> dict[str, float]:
    """Seconds per step by rule, each measured alone by `study/benchmarks/study_steps.py`; {}
    for other sweeps.
    """
    rows = json.loads(STEPS.read_text(encoding="utf-8"))["rows"]
    return {label: ms / 1e3 for sweep, label, ms, _ in rows if sweep == stem}


def table_by_clock(
    rules: Mapping[str, Sequence[Run]],
    references: Mapping[str, Sequence[Run]],
    name: str,
    paces: Mapping[str, float],
) -> str:
    """A line per rule, losses interpolated between validations. Rules in `paces` are
    timed by it, not by their runs.
    """
    header = (
        "rule",
        "seconds per run",
        f"loss when `{name}` ends, minus its own",
        f"`{name}`'s final loss is reached",
    )
    rows = [
        (f"`{label}`", *line(runs, references[label], paces.get(label), paces.get(name)))
        for label, runs in rules.items()
    ]
    return markdown(header, rows)


def line(
    runs: Sequence[Run],
    reference: Sequence[Run],
    pace: float | None = None,
    its: float | None = None,
) -> tuple[str, str, str]:
    """Cells of a rule: seconds, paired difference when the baseline ends, and when it
    reaches the baseline's loss.
    """
    own, others = losses(runs), losses(reference)
    times, end = clock(runs, pace), max(clock(reference, its).values())
    final = others[max(others)]
    then = {seed: at(end, times, own, seed) for seed in final.keys() & own[max(own)].keys()}
    known = {seed: loss for seed, loss in then.items() if loss is not None}
    found = difference(known, final)
    level, means = mean(final.values()), [mean(each.values()) for _, each in sorted(own.items())]
    return (
        f"{max(times.values()):.0f}",
        "-"
        if runs is reference
        else difference_text(found)
        if found
        else "before its first validation",
        reached(level, [times[step] for step in sorted(own)], means, end),
    )


def clock(runs: Sequence[Run], pace: float | None = None) -> Clock:
    """Seconds until every validated step: the runs' median, or steps times `pace`,
    which leaves validations out.
    """
    steps = losses(runs)
    if pace is not None:
        return {step: step * pace for step in steps}
    each = [dict(zip(*run.curve(ELAPSED.name), strict=True)) for run in runs]
    return {step: float(median(found[step] for found in each if step in found)) for step in steps}


def at(end: float, times: Clock, own: Mapping[int, Mapping[int, float]], seed: int) -> float | None:
    """The loss of a seed's run at a time: its last loss after its end, None before its
    first validation.
    """
    steps = sorted(step for step in own if seed in own[step])
    if end < times[steps[0]]:
        return None
    return float(
        np.interp(end, [times[step] for step in steps], [own[step][seed] for step in steps])
    )


def reached(level: float, times: Sequence[float], means: Sequence[float], end: float) -> str:
    """Text that says when the mean loss falls to a level, as a share of the baseline's
    time.
    """
    for i, loss in enumerate(means):
        if loss <= level:
            if not i:
                return f"before {times[0] / end:.0%} of its time"
            part = (means[i - 1] - level) / (means[i - 1] - loss)
            return (
                f"after {(times[i - 1] + part * (times[i] - times[i - 1])) / end:.0%} of its time"
            )
    return "not"


def drawn_by_clock(rules: Mapping[str, Sequence[Run]], paces: Mapping[str, float]) -> Figure:
    """Mean losses over seconds of training, a curve per rule: black for float weights,
    dashed for a colour's second.
    """
    figure, axis = plt.subplots(figsize=(7, 3.2), layout="constrained")
    drawn = {EXACT: 0, STOCHASTIC: 0}
    for label, runs in rules.items():
        colour = EXACT if label in ("fp32", "muon") else STOCHASTIC
        each = sorted(losses(runs).items())
        times = [step * paces[label] for step, _ in each]
        means = [mean(of.values()) for _, of in each]
        axis.plot(
            times,
            means,
            color=colour,
            linestyle=DASHES[drawn[colour]],
            marker="o",
            markersize=3.5,
            label=label,
        )
        drawn[colour] += 1
    axis.set(
        xscale="log", xlabel="seconds of training steps", ylabel="validation loss, nats per token"
    )
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.grid(color="#e5e5e5", linewidth=0.8)
    axis.legend(fontsize="small", handlelength=3.5)
    return figure
