"""The sensitivity map of a file whose runs each have one layer pattern in one format,
and its correlation with warp.
"""

from collections.abc import Mapping
from statistics import fmean

from _markdown import markdown
from _paired import losses_of
from _predictors import Predictor, early_points, rank_predictors

from nanogpt_bench.report.results_file import Exported
from nanogpt_bench.report.rows import Row, find_reference
from nanogpt_bench.report.setting_charts import sensitivity_charts
from nanogpt_bench.report.studies import SensitivityMap
from nanogpt_bench.report.svg_figures import side_by_side, svg

END = 1.0
"""Share of a run's steps after which its metrics are read."""


def is_map(file: Exported) -> bool:
    """Return whether every row but the float one is a pattern in a format:
    ``E4M3 attn.qkv``.
    """
    of_one = [row for row in file.rows if row.format != "none"]
    return bool(of_one) and all(
        formats_of(row) and row.label.split()[-1] in formats_of(row) for row in of_one
    )


def formats_of(row: Row) -> Mapping[str, object]:
    """The row's ``model.formats``."""
    return next((run.config["model"].get("formats") or {} for run in row.runs), {})


def map_of(file: Exported) -> SensitivityMap:
    """Gaps to the float row by layer pattern and format, means over the seeds that both
    rows have.
    """
    reference = find_reference(file.rows, file.baseline)
    base = losses_of(reference) if reference else {}
    gaps: dict[tuple[str, str], float] = {}
    for row in file.rows:
        if row.format != "none":
            own = losses_of(row)
            paired = [own[seed] - base[seed] for seed in own.keys() & base.keys()]
            gaps |= {(row.label.split()[-1], row.format): fmean(paired)} if paired else {}
    patterns, formats = (tuple(dict.fromkeys(place[at] for place in gaps)) for at in (0, 1))
    table = tuple(tuple(gaps.get((pattern, name)) for name in formats) for pattern in patterns)
    rule = next(row.rule for row in file.rows if row.format != "none")
    return SensitivityMap(
        tuple("all layers" if name == "*" else name for name in patterns), formats, table, rule=rule
    )


def drawn_map(file: Exported) -> str:
    """The map as the report draws it, as SVG."""
    return svg(side_by_side(sensitivity_charts([map_of(file)]), {}))


def warps(file: Exported) -> str:
    """Rank correlation of the final warp metrics with the gap, over layers and formats;
    intervals over formats.
    """
    told = rank_predictors(
        list(
            early_points(
                file.rows, find_reference(file.rows, file.baseline), at=END, over="format"
            ).values()
        )
    )
    lines = [_line(each) for each in told if each.name.startswith("geometry/warp_")]
    return markdown(("figure", "runs", "rank correlation with the gap", "95%, over formats"), lines)


def _line(told: Predictor) -> tuple[str, ...]:
    ends = "-" if told.low is None or told.high is None else f"[{told.low:+.2f}, {told.high:+.2f}]"
    return (
        f"`{told.name}`",
        str(told.runs),
        "-" if told.spearman is None else f"{told.spearman:+.2f}",
        ends,
    )
