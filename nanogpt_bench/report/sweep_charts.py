"""Files that a sweep leaves beside its runs, and charts of formats by layer, learning rates and all settings."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanogpt_bench.report.chart import Chart, Look, Spec, category, curves, ink, names, of_row, over, quantity
from nanogpt_bench.report.results import mean_cosine
from nanogpt_bench.report.rows import Row, flat, learning_rate, loss_unit, row_label, setting_without
from nanogpt_bench.runs.load import Run
from nanogpt_bench.runs.read import finite, mapping

LONGEST_MARK = 18
RATE_KEYS = frozenset({"optimizer.lr", "optimizer.float_lr"})
MOST_SETTINGS = 5
# Settings that follow from format, rule and learning rate, or name a place.
LEFT_OUT = frozenset(
    {"rule", "seed", "data.seed", "model.seed", "data.dir", "optimizer.lr", "optimizer.float_lr", "runtime.threads"}
)
NOTHING = 1.08  # place of a missing value: above the axis


@dataclass(frozen=True)
class Sensitivity:
    """The loss gap (nats) with one layer pattern alone in one format; None without a loss."""

    patterns: tuple[str, ...]
    formats: tuple[str, ...]
    gap: tuple[tuple[float | None, ...], ...]
    operand: str = ""
    rule: str = ""
    status: tuple[tuple[str, ...], ...] = ()
    #: the checkpoint whose weights were rounded; "" if every cell was trained
    of: str = ""

    def ending(self, pattern: int, fmt: int) -> str:
        """Return the ending of a cell without a gap, in a word or two."""
        known = self.status[pattern][fmt] if self.status else ""
        return known or "no loss"


@dataclass(frozen=True)
class Studies:
    """All such files in the folders of a report."""

    sensitivities: tuple[Sensitivity, ...] = ()
    #: the rows of every tuning.json, unchanged
    tunings: tuple[tuple[Mapping[str, Any], ...], ...] = ()
    notes: tuple[str, ...] = field(default=())


def read_studies(folders: Iterable[Path]) -> Studies:
    """Read sensitivity.json and tuning.json of folders; `notes` names each malformed file."""
    notes: list[str] = []
    sensitivities: list[Sensitivity] = []
    tunings: list[tuple[Mapping[str, Any], ...]] = []
    for folder in dict.fromkeys(folders):
        sensitivities += _read_sensitivity(folder / "sensitivity.json", notes)
        tunings += [tuned] if (tuned := tuple(_read_rows(folder / "tuning.json", notes))) else []
    return Studies(tuple(sensitivities), tuple(tunings), tuple(notes))


def _read_sensitivity(path: Path, notes: list[str]) -> list[Sensitivity]:
    if not path.is_file():
        return []
    content = mapping(path, notes)
    patterns, formats, gap = (content.get(key) for key in ("patterns", "formats", "gap"))
    if not _is_table(patterns, formats, gap):
        notes.append(f"{path.name}: expected patterns, formats and a gap for each pair; left out")
        return []
    status = content.get("status")
    ends = status if isinstance(status, list) and _is_table(patterns, formats, status) else []
    operand, rule, of = (str(content.get(key) or "") for key in ("operand", "rule", "of"))
    return [
        Sensitivity(
            tuple(map(str, patterns or ())),
            tuple(map(str, formats or ())),
            tuple(tuple(finite(cell) for cell in line) for line in gap or ()),
            operand,
            rule,
            tuple(tuple(str(cell or "") for cell in line) for line in ends),
            of,
        )
    ]


def _is_table(patterns: Any, formats: Any, gap: Any) -> bool:
    if not all(isinstance(part, list) and part for part in (patterns, formats, gap)):
        return False
    return len(gap) == len(patterns) and all(isinstance(row, list) and len(row) == len(formats) for row in gap)


def _read_rows(path: Path, notes: list[str]) -> list[Mapping[str, Any]]:
    if not path.is_file():
        return []
    rows = mapping(path, notes).get("rows")
    if not isinstance(rows, Sequence) or isinstance(rows, str):
        notes.append(f"{path.name}: expected rows; left out")
        return []
    return [row for row in rows if isinstance(row, Mapping)]


def sensitivity_charts(studies: Sequence[Sensitivity]) -> list[Chart]:
    """Return a heat map for each table: the loss gap with one layer pattern alone quantised."""
    return [_sensitivity_chart(f"sensitivity-{i}", study) for i, study in enumerate(studies)]


def _sensitivity_chart(name: str, study: Sensitivity) -> Chart:
    reach = max((abs(gap) for line in study.gap for gap in line if gap is not None), default=0.0) or 1.0
    patterns, formats = (list(map(category, found)) for found in (study.patterns, study.formats))
    values = [
        {"pattern": pattern, "format": formats, "gap": line, "text": _cell_texts(study, i)}
        for i, (pattern, line) in enumerate(zip(patterns, study.gap, strict=True))
    ]
    places = {
        "x": names("format", formats, orient="top", labelAngle=0, ticks=False, domain=False, labelOverlap=True),
        "y": names("pattern", patterns, ticks=False, domain=False),
    }
    scale = {"domain": [-reach, 0, reach], "range": ink("diverging"), "interpolate": "rgb"}
    bar = {"title": None, "gradientThickness": 10, "tickCount": 5, "gradientLength": 34 * len(study.patterns)}
    colour = {"field": "gap", "type": "quantitative", "scale": scale, "legend": bar}
    # The ends of the scale are dark in the light theme and light in the dark one.
    far = {"test": f"abs(datum.gap) > {0.6 * reach!r}", "value": ink("page")}
    spec = {
        "data": {"values": values},
        "transform": [{"flatten": ["format", "gap", "text"]}],
        "layer": [
            {"transform": [{"filter": "isValid(datum.gap)"}], "mark": "rect", "encoding": {**places, "color": colour}},
            {
                "mark": {"type": "text", "limit": 90},
                "encoding": {**places, "text": {"field": "text"}, "color": {"condition": far, "value": ink("ink")}},
            },
        ],
    }
    of = f"; the weights of {study.of}, rounded after the training" if study.of else ""
    loss = "Validation loss" if study.of else "Final validation loss"
    words = (
        f"{loss} above that of the unquantised model, in nats; one pattern at a time in a format"
        f"{f' ({study.operand}s)' if study.operand else ''}{f', under {study.rule}' if study.rule else ''}{of}."
    )
    height = 50 + 34 * len(study.patterns)
    return Chart(name, "Which format works where", words, spec, height, wide=True, drag="")


def _cell_texts(study: Sensitivity, pattern: int) -> list[str]:
    return [study.ending(pattern, j) if gap is None else f"{gap:+z.3f}" for j, gap in enumerate(study.gap[pattern])]


def rate_chart(rows: Sequence[Row], looks: Mapping[str, Look]) -> Chart | None:
    """Return final validation loss by learning rate, with crosses along the top for failed runs."""
    found = rate_curves(rows)
    losses = [point.loss for curve in found for point in curve.points if point.loss is not None]
    if not losses:
        return None
    top = max(losses) + 0.12 * ((max(losses) - min(losses)) or 1.0)
    x = quantity("x", "learning rate", log=True, format=".3~g")
    y = quantity("y", f"final val loss, {loss_unit(rows)}")
    spec = curves([_rate_curve(curve, i) for i, curve in enumerate(found)], looks, x, y)
    spec["layer"] += _crosses(found, looks, top, x, y)
    words = "Final validation loss, mean over seeds; a cross at the top is a learning rate at which runs failed."
    shown = tuple(dict.fromkeys(curve.row for curve in found))
    return Chart("rates", "Loss by learning rate", words, spec, 400, wide=True, rows=shown)


def _rate_curve(curve: RateCurve, place: int) -> dict[str, Any]:
    points = {"x": [point.rate for point in curve.points], "y": [point.loss for point in curve.points]}
    return {"row": curve.row, "name": curve.label, "line": place, "few": True, **points}


def _crosses(found: Sequence[RateCurve], looks: Mapping[str, Look], top: float, x: Spec, y: Spec) -> list[Spec]:
    values = [
        {
            "row": curve.row,
            "x": p.rate,
            "y": top,
            "text": f"{curve.label}, learning rate {p.rate:.3g}: {p.failed} failed",
        }
        for curve in found
        for p in curve.points
        if p.failed
    ]
    colour = of_row("color", looks)
    cross = {"type": "point", "shape": "cross", "angle": 45, "size": 90, "filled": True, "opacity": 1}
    return [over(values, cross, x=x, y=y, color=colour, tooltip={"field": "text"})] if values else []


def parallel_chart(rows: Sequence[Row], looks: Mapping[str, Look]) -> Chart | None:
    """Return parallel coordinates: each run a line across settings and outcomes."""
    found = parallel(rows)
    if found is None:
        return None
    count = len(found.axes)
    x = quantity("x", None, (-0.1, count - 0.4), labels=False, ticks=False, grid=False, domain=False)
    y = quantity("y", None, (-0.05, NOTHING + 0.16), labels=False, ticks=False, grid=False, domain=False)
    spec = curves([_run_line(found, i) for i in range(len(found.runs))], looks, x, y)
    axes = [{"x": place, "y": 0, "end": 1} for place in range(count)]
    heads = [{"x": place, "y": NOTHING + 0.11, "text": axis.name} for place, axis in enumerate(found.axes)]
    head = {"type": "text", "fontWeight": "bold", "align": "left", "limit": 140, "color": ink("ink")}
    # On the page's colour, so that no line crosses the text.
    ground = {"type": "text", "align": "left", "dx": 5, "stroke": ink("page"), "strokeWidth": 4, "opacity": 0.85}
    text = {"x": x, "y": y, "text": {"field": "text"}}
    spec["layer"] = [
        over(axes, {"type": "rule", "color": ink("ink")}, x=x, y=y, y2={"field": "end"}),
        *spec["layer"],
        over(_axis_marks(found), ground, **text),
        over(_axis_marks(found), {"type": "text", "align": "left", "dx": 5, "color": ink("ink")}, **text),
        over(heads, head, **text),
    ]
    words = (
        "A line a run, coloured as its row. Above an axis passes what has no value there, such as a run that failed."
    )
    shown = tuple(dict.fromkeys(found.rows))
    return Chart("parallel", "All runs across all axes", words, spec, 440, wide=True, least=150 * count, rows=shown)


def _run_line(found: Parallel, index: int) -> dict[str, Any]:
    places = {"x": list(range(len(found.axes))), "y": [axis.places[index] for axis in found.axes]}
    return {"row": found.rows[index], "name": found.runs[index].name, "line": index, "few": False, **places}


def _axis_marks(found: Parallel) -> list[dict[str, Any]]:
    return [
        {"x": place, "y": height, "text": text if len(text) <= LONGEST_MARK else text[: LONGEST_MARK - 1] + "…"}
        for place, axis in enumerate(found.axes)
        for height, text in axis.marks
    ]


@dataclass(frozen=True)
class RatePoint:
    """The mean final val loss (nats) over the seeds at one learning rate, None if all failed, and the failures."""

    rate: float
    loss: float | None
    failed: int


@dataclass(frozen=True)
class RateCurve:
    """One setting at several learning rates, in the look of its first row, `row`."""

    label: str
    row: str
    points: list[RatePoint]


def rate_curves(rows: Sequence[Row]) -> list[RateCurve]:
    """Return a curve for each setting with two learning rates or more."""
    groups: dict[str, list[tuple[Row, Run, float]]] = {}
    for row in rows:
        for run in row.runs:
            rate = learning_rate(run)
            if rate is not None and run.config:
                groups.setdefault(setting_without(run, RATE_KEYS), []).append((row, run, rate))
    several = [group for group in groups.values() if len({rate for _, _, rate in group}) > 1]
    labels = _rate_labels([group[0][0] for group in several])
    return [_curve_of_rates(label, group) for label, group in zip(labels, several, strict=True)]


def _rate_labels(rows: Sequence[Row]) -> list[str]:
    """Return labels of format and rule, numbered where several settings share them."""
    plain = [row_label(row.rule, row.format) for row in rows]
    return [
        f"{label} ({plain[: i + 1].count(label)})" if plain.count(label) > 1 else label for i, label in enumerate(plain)
    ]


def _curve_of_rates(label: str, group: Sequence[tuple[Row, Run, float]]) -> RateCurve:
    rates = sorted({rate for _, _, rate in group})
    return RateCurve(
        label, group[0][0].label, [_rate_point(rate, [run for _, run, r in group if r == rate]) for rate in rates]
    )


def _rate_point(rate: float, runs: Sequence[Run]) -> RatePoint:
    finished = [run.at_end("final_val_loss") for run in runs]
    losses = [loss for loss in finished if loss is not None]
    return RatePoint(rate, statistics.fmean(losses) if losses else None, len(runs) - len(losses))


@dataclass(frozen=True)
class ParallelAxis:
    """A vertical axis: its name, its marks at places from 0 to 1, and the place of each run."""

    name: str
    marks: list[tuple[float, str]]
    places: list[float]


@dataclass(frozen=True)
class Parallel:
    """All axes from left to right, and the row and run of each line."""

    axes: list[ParallelAxis]
    rows: list[str]
    runs: list[Run]


def parallel(rows: Sequence[Row]) -> Parallel | None:
    """Return the axes on which runs differ; None with fewer than two runs or three axes."""
    lines = [(row, run) for row in rows for run in row.runs]
    runs = [run for _, run in lines]
    columns: dict[str, list[Any]] = {
        "format": [run.format for run in runs],
        "rule": [run.rule for run in runs],
        "learning rate": [run.summary.get("lr") for run in runs],
        **_varying(runs),
        **{name: [outcome(run) for run in runs] for name, outcome in OUTCOMES.items()},
    }
    axes = [axis for name, values in columns.items() if (axis := _parallel_axis(name, values)) is not None]
    if len(runs) < 2 or len(axes) < 3:
        return None
    return Parallel(axes, [row.label for row, _ in lines], runs)


OUTCOMES: dict[str, Callable[[Run], float | None]] = {
    "bytes/param": lambda run: run.number("bytes_per_parameter"),
    "tokens/s": lambda run: run.number("tokens_per_s"),
    "stall": lambda run: run.stall,
    "arrived": lambda run: run.number("arrived"),
    "grad cosine": mean_cosine,
    "final val loss": lambda run: run.at_end("final_val_loss"),
}


def _varying(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Return settings in which runs of one rule and format differ, by the last word of their key."""
    configs = [flat(run.config) for run in runs]
    keys = [key for key in dict.fromkeys(key for config in configs for key in config) if key not in LEFT_OUT]
    by_kind: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for run, config in zip(runs, configs, strict=True):
        by_kind.setdefault((run.rule, run.format), []).append(config)
    chosen = [key for key in keys if any(_differ(group, key) for group in by_kind.values())]
    return {key.rsplit(".", 1)[-1]: [c.get(key) for c in configs] for key in chosen[:MOST_SETTINGS]}


def _differ(configs: Sequence[Mapping[str, Any]], key: str) -> bool:
    return len({str(config.get(key)) for config in configs}) > 1


def _parallel_axis(name: str, values: Sequence[Any]) -> ParallelAxis | None:
    """Return an axis of numbers if all values are numbers, else of words; None if all are equal."""
    known = [value for value in values if value is not None]
    if len({str(value) for value in known}) < 2:
        return None
    if all(finite(value) is not None for value in known):
        return _number_axis(name, [None if value is None else float(value) for value in values])
    words = list(dict.fromkeys(str(value) for value in known))
    place = {word: i / (len(words) - 1) for i, word in enumerate(words)}
    return ParallelAxis(
        name, [(place[word], word) for word in words], [NOTHING if v is None else place[str(v)] for v in values]
    )


def _number_axis(name: str, values: Sequence[float | None]) -> ParallelAxis:
    known = [value for value in values if value is not None]
    low, high = min(known), max(known)
    logarithmic = low > 0 and high / low >= 30
    bend: Callable[[float], float] = math.log if logarithmic else float
    width = bend(high) - bend(low)
    middle = math.sqrt(low * high) if logarithmic else (low + high) / 2
    marks = [((bend(value) - bend(low)) / width, _mark_text(value)) for value in (low, middle, high)]
    return ParallelAxis(
        name, marks, [NOTHING if value is None else (bend(value) - bend(low)) / width for value in values]
    )


def _mark_text(value: float) -> str:
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"
