"""Distance of each rule from a baseline in the course of the training: paired
differences at every validation.
"""

from collections.abc import Mapping, Sequence

from _looks import STOCHASTIC
from _markdown import markdown
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from nanogpt_bench.config.metrics import VAL_LOSS
from nanogpt_bench.report.paired import Difference, difference, difference_text
from nanogpt_bench.runs.load import Run

Course = Mapping[int, Difference]
"""Differences by step."""
WIDE = 4
"""Panels in a row of the figure."""
LINES = ({"color": STOCHASTIC, "linestyle": "-"}, {"color": "#E69F00", "linestyle": (0, (4, 1.5))})
"""Line styles of the first and the second text."""


def course(runs: Sequence[Run], reference: Sequence[Run]) -> Course:
    """The differences of validation losses by step, over the seeds that both have; the
    untrained model's left out.
    """
    own, others = losses(runs), losses(reference)
    found = {
        step: difference(own[step], others[step]) for step in sorted(own.keys() & others.keys())
    }
    return {step: each for step, each in found.items() if each is not None}


def losses(runs: Sequence[Run]) -> dict[int, dict[int, float]]:
    """Validation losses by step and seed."""
    found: dict[int, dict[int, float]] = {}
    for run in runs:
        for step, loss in zip(*run.curve(VAL_LOSS.name), strict=True):
            if step > 0 and loss is not None and run.seed is not None:
                found.setdefault(int(step), {})[run.seed] = loss
    return found


def table_along(courses: Mapping[str, Course]) -> str:
    """A Markdown table with a line per rule and a column per validated step."""
    steps = sorted({step for each in courses.values() for step in each})
    lines = [
        [f"`{label}`", *(difference_text(each[step]) if step in each else "-" for step in steps)]
        for label, each in courses.items()
    ]
    return markdown(("rule", *(f"{step:,} steps" for step in steps)), lines)


def drawn_along(texts: Mapping[str, Mapping[str, Course]], name: str) -> Figure:
    """A panel per rule with a curve per text and its 95% intervals; the line at 0 is
    the baseline `name`.
    """
    labels = list(dict.fromkeys(label for courses in texts.values() for label in courses))
    deep = -(-len(labels) // WIDE)
    figure, axes = plt.subplots(
        deep,
        WIDE,
        figsize=(9, 0.6 + 1.5 * deep),
        layout="constrained",
        squeeze=False,
        sharex=True,
        sharey=True,
    )
    for axis, label in zip(axes.flat, labels, strict=False):
        axis.axhline(0, color="#999999", linewidth=1)
        axis.set_title(label, fontsize=8.5)
        axis.grid(axis="y", color="#e5e5e5", linewidth=0.8)
        for (text, courses), look in zip(texts.items(), LINES, strict=False):
            each = courses.get(label, {})
            middles = [found.mean for found in each.values()]
            axis.plot(list(each), middles, **look, linewidth=1.4, label=text)
            known = [
                (step, f.low, f.high)
                for step, f in each.items()
                if f.low is not None and f.high is not None
            ]
            if known:
                axis.vlines(*zip(*known, strict=True), color=look["color"], linewidth=1.4)
    for axis in axes.flat[len(labels) :]:
        axis.set_axis_off()
    handles, words = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, words, loc="outside lower right", ncols=len(words), fontsize="small")
    figure.supxlabel("step", fontsize="medium")
    figure.supylabel(f"loss minus that of {name}, nats per byte", fontsize="medium")
    return figure
