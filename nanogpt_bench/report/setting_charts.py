"""Charts across settings: loss gaps by layer and format, and losses by learning rate."""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nanogpt_bench.config.endings import RunStatus
from nanogpt_bench.report.results import FIGURES
from nanogpt_bench.report.row_styles import Style
from nanogpt_bench.report.rows import (
    Row,
    learning_rate,
    loss_unit,
    row_label,
    row_runs,
    setting_key,
)
from nanogpt_bench.report.studies import SensitivityMap
from nanogpt_bench.report.vega_spec import (
    Chart,
    Spec,
    category,
    category_axis,
    curves,
    data_layer,
    named_colour,
    quantity,
    row_channel,
)
from nanogpt_bench.runs.load import Run

RATE_KEYS = frozenset({"optimizer.lr", "optimizer.float_lr"})
#: pixels of a line of a heat map, and of what is above its lines
LINE_PIXELS = 34
HEAD_PIXELS = 50
#: nats; trainings that differ only by chance end up to about a third as far apart
LEAST_REACH = 0.05
#: the mark of failed runs
CROSS = {
    "type": "point",
    "shape": "cross",
    "angle": 45,
    "size": 90,
    "filled": True,
    "opacity": 1,
}
RATE_CAPTION = (
    "Final validation loss, mean over seeds; a cross at the top marks a learning rate at which "
    "runs failed."
)


def sensitivity_charts(studies: Sequence[SensitivityMap]) -> list[Chart]:
    """Return a heat map for each table: the loss gap with one layer pattern quantised."""
    return [
        _sensitivity_chart(f"sensitivity-{number}", study) for number, study in enumerate(studies)
    ]


def _sensitivity_chart(name: str, study: SensitivityMap) -> Chart:
    reach = _colour_reach(study)
    patterns = [category(pattern) for pattern in study.patterns]
    formats = [category(fmt) for fmt in study.formats]
    columns = category_axis(
        "format",
        formats,
        orient="top",
        labelAngle=0,
        ticks=False,
        domain=False,
        labelOverlap=True,
    )
    lines = category_axis("pattern", patterns, ticks=False, domain=False)
    # The ends of the scale are dark in the light theme and light in the dark one.
    far = {"test": f"abs(datum.gap) > {0.6 * reach!r}", "value": named_colour("page")}
    rectangles = {
        "transform": [{"filter": "isValid(datum.gap)"}],
        "mark": "rect",
        "encoding": {"x": columns, "y": lines, "color": _gap_colour(study, reach)},
    }
    texts = {
        "mark": {"type": "text", "limit": 90},
        "encoding": {
            "x": columns,
            "y": lines,
            "text": {"field": "text"},
            "color": {"condition": far, "value": named_colour("ink")},
        },
    }
    spec = {
        "data": {"values": _heat_map_values(study, patterns, formats)},
        "transform": [{"flatten": ["format", "gap", "text"]}],
        "layer": [rectangles, texts],
    }
    height = HEAD_PIXELS + LINE_PIXELS * len(study.patterns)
    caption = _sensitivity_caption(study)
    return Chart(name, "Which format works where", caption, spec, height, wide=True, drag="")


def _colour_reach(study: SensitivityMap) -> float:
    """Return the magnitude of a gap at which colours end; 1 if all are 0 or unknown.

    It is the largest gap. Of trained cells it is at least `LEAST_REACH`, so that the
    noise of training is pale. Weights that are rounded once have no such noise.
    """
    largest = 0.0 if study.checkpoint else LEAST_REACH
    for line in study.gaps:
        for gap in line:
            if gap is not None:
                largest = max(largest, abs(gap))
    return largest or 1.0


def _gap_colour(study: SensitivityMap, reach: float) -> Spec:
    scale = {"domain": [-reach, 0, reach], "range": named_colour("diverging"), "interpolate": "rgb"}
    legend = {
        "title": None,
        "gradientThickness": 10,
        "tickCount": 5,
        "gradientLength": LINE_PIXELS * len(study.patterns),
    }
    return {"field": "gap", "type": "quantitative", "scale": scale, "legend": legend}


def _heat_map_values(
    study: SensitivityMap, patterns: Sequence[str], formats: Sequence[str]
) -> list[dict[str, Any]]:
    """Return an object per pattern, with lists over the formats."""
    values = []
    for i, pattern in enumerate(patterns):
        texts = []
        for j, gap in enumerate(study.gaps[i]):
            texts.append(study.ending(i, j) if gap is None else f"{gap:+z.3f}")
        line = {"pattern": pattern, "format": formats, "gap": study.gaps[i], "text": texts}
        values.append(line)
    return values


def _sensitivity_caption(study: SensitivityMap) -> str:
    loss = "Validation loss" if study.checkpoint else "Final validation loss"
    operand = f" ({study.operand}s)" if study.operand else ""
    rule = f", under {study.rule}" if study.rule else ""
    checkpoint = (
        f"; weights of {study.checkpoint}, rounded after the training" if study.checkpoint else ""
    )
    return (
        f"{loss} above that of the unquantised model, in nats, with one layer pattern at a time in "
        f"a format{operand}{rule}{checkpoint}."
    )


@dataclass(frozen=True)
class _RateRun:
    """A run with its learning rate, and its row."""

    row: Row
    run: Run
    rate: float


@dataclass(frozen=True)
class _RateGroup:
    """The runs of one setting, at several learning rates."""

    label: str
    runs: list[_RateRun]


def rate_chart(rows: Sequence[Row], styles: Mapping[str, Style]) -> Chart | None:
    """Return final validation loss by learning rate; None without a loss.

    A curve joins the runs of one setting that has two learning rates or more, in the
    style of its first row; losses are means over the seeds. Crosses along the top stand
    for failed runs.
    """
    values: list[dict[str, Any]] = []
    crosses: list[dict[str, Any]] = []
    for number, group in enumerate(_rate_groups(rows)):
        row = group.runs[0].row.label
        xs: list[float] = []
        ys: list[float | None] = []
        for rate in sorted({run.rate for run in group.runs}):
            runs = [one.run for one in group.runs if one.rate == rate]
            losses = [FIGURES["final_val_loss"](run) for run in runs]
            known = [loss for loss in losses if loss is not None]
            xs.append(rate)
            ys.append(statistics.fmean(known) if known else None)
            failed = sum(run.status == RunStatus.FAILED for run in runs)
            if failed:
                text = f"{group.label}, learning rate {rate:.3g}: {failed} failed"
                crosses.append({"row": row, "x": rate, "text": text})
        values.append(
            {"row": row, "name": group.label, "line": number, "few": True, "x": xs, "y": ys}
        )
    all_losses: list[float] = []
    for value in values:
        all_losses += [loss for loss in value["y"] if loss is not None]
    if not all_losses:
        return None
    x = quantity("x", "learning rate", log=True, format=".3~g")
    y = quantity("y", f"final val loss, {loss_unit(rows)}")
    spec = curves(values, styles, x, y)
    if crosses:
        span = (max(all_losses) - min(all_losses)) or 1.0
        top = max(all_losses) + 0.12 * span
        spec["layer"].append(_crosses_layer(crosses, top, styles, x, y))
    shown = tuple(dict.fromkeys(value["row"] for value in values))
    return Chart("rates", "Loss by learning rate", RATE_CAPTION, spec, 400, wide=True, rows=shown)


def _crosses_layer(
    crosses: Sequence[Mapping[str, Any]],
    top: float,
    styles: Mapping[str, Style],
    x: Spec,
    y: Spec,
) -> Spec:
    points = [
        {"row": cross["row"], "x": cross["x"], "y": top, "text": cross["text"]} for cross in crosses
    ]
    colour = row_channel("color", styles)
    return data_layer(points, CROSS, x=x, y=y, color=colour, tooltip={"field": "text"})


def _rate_groups(rows: Sequence[Row]) -> list[_RateGroup]:
    """Return the runs of each setting with several learning rates.

    Labels are numbered where several settings share one.
    """
    groups: dict[str, list[_RateRun]] = {}
    for row, run in row_runs(rows):
        rate = learning_rate(run)
        if run.config and rate is not None:
            setting = setting_key(run, RATE_KEYS)
            groups.setdefault(setting, []).append(_RateRun(row, run, rate))
    several = [group for group in groups.values() if len({run.rate for run in group}) > 1]
    labels = [row_label(group[0].row.rule, group[0].row.format) for group in several]
    totals = Counter(labels)
    numbers: Counter[str] = Counter()
    labelled = []
    for label, group in zip(labels, several, strict=True):
        numbers[label] += 1
        ending = f" ({numbers[label]})" if totals[label] > 1 else ""
        labelled.append(_RateGroup(label + ending, group))
    return labelled
