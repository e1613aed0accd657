"""The sensitivity map of a file, and its correlation with warp.

Each run of such a file has one layer pattern in one format, and the rest in float.
"""

from collections.abc import Mapping
from statistics import fmean

from _markdown import markdown
from _paired import losses_of
from _predictors import Group, Predictor, early_points, rank_predictors

from nanogpt_bench.report.results_file import Exported
from nanogpt_bench.report.rows import Row, find_reference
from nanogpt_bench.report.setting_charts import sensitivity_charts
from nanogpt_bench.report.studies import SensitivityMap
from nanogpt_bench.report.svg_figures import side_by_side, svg

RUN_END = 1.0
"""Share of a run's steps after which its metrics are read."""


def is_map(file: Exported) -> bool:
    """Return whether every row but the float one is a pattern in a format: ``E4M3 attn.qkv``."""
    rows = _quantised_rows(file)
    return bool(rows) and all(_pattern(row) in formats_of(row) for row in rows)


def _quantised_rows(file: Exported) -> list[Row]:
    return [row for row in file.rows if row.format != "none" and row.runs]


def _pattern(row: Row) -> str:
    return row.label.split()[-1]


def formats_of(row: Row) -> Mapping[str, object]:
    """Return the row's ``model.formats``."""
    if not row.runs:
        return {}
    return row.runs[0].config["model"].get("formats") or {}


def map_of(file: Exported) -> SensitivityMap:
    """Return the gaps to the float row by layer pattern and format.

    They are means over the seeds that both rows have.
    """
    reference = find_reference(file.rows, file.baseline)
    float_losses = losses_of(reference) if reference else {}
    rows = _quantised_rows(file)
    gaps: dict[tuple[str, str], float] = {}
    for row in rows:
        losses = losses_of(row)
        differences = [losses[seed] - float_losses[seed] for seed in losses.keys() & float_losses]
        if differences:
            gaps[_pattern(row), row.format] = fmean(differences)
    patterns = tuple(dict.fromkeys(pattern for pattern, _ in gaps))
    formats = tuple(dict.fromkeys(fmt for _, fmt in gaps))
    table = []
    for pattern in patterns:
        table.append(tuple(gaps.get((pattern, fmt)) for fmt in formats))
    titles = tuple("all layers" if pattern == "*" else pattern for pattern in patterns)
    return SensitivityMap(titles, formats, tuple(table), rule=rows[0].rule)


def map_figure(file: Exported) -> str:
    """Return the map as the report draws it, as SVG."""
    return svg(side_by_side(sensitivity_charts([map_of(file)]), {}))


def warp_table(file: Exported) -> str:
    """Return the rank correlation of each warp metric at the end with the gap.

    It is over layers and formats, and its interval over formats.
    """
    reference = find_reference(file.rows, file.baseline)
    points = early_points(file.rows, reference, at=RUN_END, group=Group.FORMAT)
    lines = []
    for predictor in rank_predictors(list(points.values())):
        if predictor.name.startswith("geometry/warp_"):
            lines.append(_warp_row(predictor))
    header = ("figure", "runs", "rank correlation with the gap", "95%, over formats")
    return markdown(header, lines)


def _warp_row(predictor: Predictor) -> tuple[str, ...]:
    if predictor.low is None or predictor.high is None:
        interval = "-"
    else:
        interval = f"[{predictor.low:+.2f}, {predictor.high:+.2f}]"
    correlation = "-" if predictor.spearman is None else f"{predictor.spearman:+.2f}"
    return f"`{predictor.name}`", str(predictor.runs), correlation, interval
