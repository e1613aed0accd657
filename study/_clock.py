"""Loss against time: each rule's loss when the baseline ends.

A step is timed by the runs' own clocks, or by a pace that was measured alone. Between
validations losses are interpolated.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, median

import numpy as np
from _along import losses_by_step
from _looks import EXACT, STOCHASTIC
from _markdown import markdown
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from nanogpt_bench.config.metrics import ELAPSED
from nanogpt_bench.report.paired import difference, difference_text
from nanogpt_bench.runs.load import Run

Clock = Mapping[int, float]
"""Seconds until a step, by step."""
STEP_TIMES_FILE = Path(__file__).parent.parent / "docs" / "measured" / "study_steps.json"
DASHES = ("-", (0, (4, 1.5)))


def paces_of(sweep: str) -> dict[str, float]:
    """Return seconds per step by rule; {} for a sweep whose steps were not measured.

    Each was measured alone, by `study/benchmarks/study_steps.py`.
    """
    rows = json.loads(STEP_TIMES_FILE.read_text(encoding="utf-8"))["rows"]
    return {label: ms / 1e3 for name, label, ms, _ in rows if name == sweep}


def table_by_clock(
    rules: Mapping[str, Sequence[Run]],
    references: Mapping[str, Sequence[Run]],
    name: str,
    paces: Mapping[str, float],
) -> str:
    """Return a line per rule, with its loss when its reference ends.

    Args:
        rules: the runs of each rule, by its label.
        references: the runs of the baseline of each rule, by the rule's label.
        name: the label of the baseline.
        paces: seconds per step by label. Other rules are timed by their runs.
    """
    header = (
        "rule",
        "seconds per run",
        f"loss when `{name}` ends, minus its own",
        f"`{name}`'s final loss is reached",
    )
    rows = []
    for label, runs in rules.items():
        cells = clock_cells(runs, references[label], paces.get(label), paces.get(name))
        rows.append((f"`{label}`", *cells))
    return markdown(header, rows)


def clock_cells(
    runs: Sequence[Run],
    reference: Sequence[Run],
    pace: float | None = None,
    reference_pace: float | None = None,
) -> tuple[str, str, str]:
    """Return the cells of a rule.

    They are its seconds, its paired difference when the baseline ends, and the time at
    which it reaches the baseline's loss.
    """
    losses = losses_by_step(runs)
    reference_losses = losses_by_step(reference)
    times = clock(runs, pace)
    end = max(clock(reference, reference_pace).values())
    final = reference_losses[max(reference_losses)]
    mean_losses = {step: mean(by_seed.values()) for step, by_seed in sorted(losses.items())}
    return (
        f"{max(times.values()):.0f}",
        "-" if runs is reference else _difference_at_text(end, times, losses, final),
        reached_text(mean(final.values()), times, mean_losses, end),
    )


def _difference_at_text(
    end: float,
    times: Clock,
    losses: Mapping[int, Mapping[int, float]],
    final: Mapping[int, float],
) -> str:
    """Return the difference of a rule's losses at a time to the baseline's final ones."""
    losses_at_end = {}
    for seed in final.keys() & losses[max(losses)].keys():
        loss = loss_at(end, times, losses, seed)
        if loss is not None:
            losses_at_end[seed] = loss
    paired = difference(losses_at_end, final)
    return difference_text(paired) if paired else "before its first validation"


def clock(runs: Sequence[Run], pace: float | None = None) -> Clock:
    """Return the seconds until every validated step.

    With a `pace` they are steps times that, which leaves validations out. Without one
    they are the median over the runs, because other work ran at the time of some.
    """
    steps = losses_by_step(runs)
    if pace is not None:
        return {step: step * pace for step in steps}
    elapsed = [dict(zip(*run.curve(ELAPSED.name), strict=True)) for run in runs]
    times = {}
    for step in steps:
        times[step] = float(median(seconds[step] for seconds in elapsed if step in seconds))
    return times


def loss_at(
    time: float, times: Clock, losses: Mapping[int, Mapping[int, float]], seed: int
) -> float | None:
    """Return the loss of a seed's run at a time.

    After the run's end it is the last loss. Before its first validation it is None.
    """
    steps = sorted(step for step in losses if seed in losses[step])
    if time < times[steps[0]]:
        return None
    known_times = [times[step] for step in steps]
    return float(np.interp(time, known_times, [losses[step][seed] for step in steps]))


def reached_text(level: float, times: Clock, mean_losses: Mapping[int, float], end: float) -> str:
    """Say when the mean loss falls to a level, as a share of the baseline's time."""
    previous_step = None
    for step, loss in mean_losses.items():
        if loss <= level:
            if previous_step is None:
                return f"before {times[step] / end:.0%} of its time"
            previous_loss = mean_losses[previous_step]
            previous_time = times[previous_step]
            share = (previous_loss - level) / (previous_loss - loss)
            time = previous_time + share * (times[step] - previous_time)
            return f"after {time / end:.0%} of its time"
        previous_step = step
    return "not"


def draw_by_clock(rules: Mapping[str, Sequence[Run]], paces: Mapping[str, float]) -> Figure:
    """Draw mean losses over seconds of training, a curve per rule.

    Float weights are black. The second rule of a colour is dashed.
    """
    figure, axis = plt.subplots(figsize=(7, 3.2), layout="constrained")
    curves_by_colour = {EXACT: 0, STOCHASTIC: 0}
    for label, runs in rules.items():
        colour = EXACT if label in ("fp32", "muon") else STOCHASTIC
        losses = sorted(losses_by_step(runs).items())
        axis.plot(
            [step * paces[label] for step, _ in losses],
            [mean(by_seed.values()) for _, by_seed in losses],
            color=colour,
            linestyle=DASHES[curves_by_colour[colour]],
            marker="o",
            markersize=3.5,
            label=label,
        )
        curves_by_colour[colour] += 1
    axis.set(
        xscale="log", xlabel="seconds of training steps", ylabel="validation loss, nats per token"
    )
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.grid(color="#e5e5e5", linewidth=0.8)
    axis.legend(fontsize="small", handlelength=3.5)
    return figure
