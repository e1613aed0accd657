"""Distance of each rule from a baseline in the course of the training.

The distance is the paired difference of the losses, at every validation.
"""

from collections.abc import Mapping, Sequence
from itertools import chain

from _looks import STOCHASTIC
from _markdown import markdown
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nanogpt_bench.config.metrics import VAL_LOSS
from nanogpt_bench.report.paired import Difference, difference, difference_text
from nanogpt_bench.runs.load import Run

Course = Mapping[int, Difference]
"""Differences by step."""
PANELS_IN_A_ROW = 4
LINES_OF_TEXTS = (
    {"color": STOCHASTIC, "linestyle": "-"},
    {"color": "#E69F00", "linestyle": (0, (4, 1.5))},
)
"""Line styles of the first and the second text."""


def course(runs: Sequence[Run], reference: Sequence[Run]) -> Course:
    """Return the differences of validation losses by step, over the seeds that both have.

    The untrained model is left out.
    """
    losses = losses_by_step(runs)
    reference_losses = losses_by_step(reference)
    differences = {}
    for step in sorted(losses.keys() & reference_losses.keys()):
        paired = difference(losses[step], reference_losses[step])
        if paired is not None:
            differences[step] = paired
    return differences


def losses_by_step(runs: Sequence[Run]) -> dict[int, dict[int, float]]:
    """Return the validation losses by step and seed."""
    losses: dict[int, dict[int, float]] = {}
    for run in runs:
        for step, loss in zip(*run.curve(VAL_LOSS.name), strict=True):
            if step > 0 and loss is not None and run.seed is not None:
                losses.setdefault(int(step), {})[run.seed] = loss
    return losses


def table_along(courses: Mapping[str, Course]) -> str:
    """Return a line per rule and a column per validated step."""
    steps = sorted(set().union(*courses.values()))
    lines = []
    for label, differences in courses.items():
        lines.append([f"`{label}`", *(difference_text(differences.get(step)) for step in steps)])
    return markdown(("rule", *(f"{step:,} steps" for step in steps)), lines)


def draw_along(courses_by_text: Mapping[str, Mapping[str, Course]], name: str) -> Figure:
    """Draw a panel per rule with a curve per text and its 95% intervals.

    The line at 0 is the baseline `name`.
    """
    labels = list(dict.fromkeys(chain.from_iterable(courses_by_text.values())))
    panel_rows = -(-len(labels) // PANELS_IN_A_ROW)
    figure, axes = plt.subplots(
        panel_rows,
        PANELS_IN_A_ROW,
        figsize=(9, 0.6 + 1.5 * panel_rows),
        layout="constrained",
        squeeze=False,
        sharex=True,
        sharey=True,
    )
    for axis, label in zip(axes.flat, labels, strict=False):
        differences_by_text = {
            text: courses.get(label, {}) for text, courses in courses_by_text.items()
        }
        _draw_courses(axis, label, differences_by_text)
    for axis in axes.flat[len(labels) :]:
        axis.set_axis_off()
    handles, words = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, words, loc="outside lower right", ncols=len(words), fontsize="small")
    figure.supxlabel("step", fontsize="medium")
    figure.supylabel(f"loss minus that of {name}, nats per byte", fontsize="medium")
    return figure


def _draw_courses(axis: Axes, label: str, differences_by_text: Mapping[str, Course]) -> None:
    axis.axhline(0, color="#999999", linewidth=1)
    axis.set_title(label, fontsize=8.5)
    axis.grid(axis="y", color="#e5e5e5", linewidth=0.8)
    for (text, differences), look in zip(differences_by_text.items(), LINES_OF_TEXTS, strict=False):
        means = [paired.mean for paired in differences.values()]
        axis.plot(list(differences), means, **look, linewidth=1.4, label=text)
        with_interval = {step: paired for step, paired in differences.items() if not paired.is_lead}
        if with_interval:
            lows = [paired.low for paired in with_interval.values()]
            highs = [paired.high for paired in with_interval.values()]
            axis.vlines(list(with_interval), lows, highs, color=look["color"], linewidth=1.4)
