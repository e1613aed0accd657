"""The tables and figures of the study's results, from the files in `results` alone.

What is made of a file depends on its rows:

    a search of rates        the largest stable rates, by seed
    a map                    the gap of each layer pattern in each format
    anything else            rows against baselines: losses, verdicts, monitors, failures
        with several lengths or sizes    also the gap by that number
        otherwise                        also the course of the training, and against time
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import chain
from pathlib import Path

import matplotlib
from _along import Course, course, draw_along, table_along
from _clock import draw_by_clock, paces_of, table_by_clock
from _compared import (
    BASELINES,
    NAMES_OF_TEXTS,
    baselines,
    by_text,
    compared_table,
    measured_against,
    result_label,
    short_label,
    source_line,
    text_of,
    text_of_row,
)
from _failures import failures_table
from _floors import cells_of, draw_floors, floors_table
from _law import cells_by_training, law_table
from _lengths import gap_figure, gap_table, ladder_of
from _limits import is_search, limit_table, tuned_rates
from _looks import EXACT, STOCHASTIC, STYLE
from _maps import is_map, map_figure, warp_table
from _markdown import markdown
from _monitors import looked_early, monitors_table
from _recovered import recovered_table
from _spacing import draw_spacing, format_points, is_drawable, spacing_table
from _stiffness import stiffness_table
from _weights import kurtosis_table, logarithms_table
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nanogpt_bench.report.results import Result, measure
from nanogpt_bench.report.results_file import Exported, read_export
from nanogpt_bench.report.rows import (
    Row,
    counted_once,
    find_reference,
    references_by_label,
    row_key,
    row_label,
)
from nanogpt_bench.report.tables import tuning_table
from nanogpt_bench.sweep.plan import baseline_of

RESULTS_FOLDER = Path(__file__).parent / "results"
#: the baselines of files whose rows are not measured against BASELINES
AGAINST = {
    "study_q2_muon": (
        "muon min_lr_ratio=0.1",
        "muon min_lr_ratio=0",
        "E4M3 muon-stochastic min_lr_ratio=0.1 writeback_end=None",
    ),
    "study_q2_muon_spacing": (*BASELINES, "E4M3 muon-stochastic"),
    "study_q5": ("fp32", "E5M2 stochastic"),
    "study_q11_coarse": (
        "E7M0 muon-stochastic draws=independent",
        "E5M2 muon-stochastic draws=independent",
    ),
    "study_q11_e2m5": ("muon", "E2M5 muon-stochastic draws=independent"),
    "study_q11_law": ("muon", "E2M5 muon-stochastic draws=independent"),
    "study_q11_e4m3": ("muon", "E4M3 muon-stochastic draws=independent"),
    "study_q11_e4m3_law": ("muon", "E4M3 muon-stochastic draws=independent"),
    "study_q11_adamw": ("E4M3 stochastic draws=independent",),
    "study_q11_riemannian": ("E4M3 riemannian draws=independent",),
    "study_q11_anneal": ("E4M3 stiffness-anneal draws=independent",),
    "study_q12_e2m5": ("muon",),
    "study_q12_law": ("muon",),
    "study_q13_peers": ("fp32", "muon", "E2M5 muon-stochastic"),
    "study_q14_30m": ("muon", "muon lr=0.005657"),
    "study_q16_sdnq": ("muon", "E2M5 muon-stochastic"),
    "study_q15_draws": ("E4M3 muon-stochastic", "E5M2 muon-stochastic", "E7M0 muon-stochastic"),
    "study_q26_adafactor": ("fp32", "adafactor"),
    "study_q26_bf16": ("bf16-adafactor",),
    "study_q27_smollm2": ("bf16-mixed", "bf16-adafactor"),
    "study_q28_adafactor": ("adafactor", "fp32"),
    "study_q21_momentum": ("muon batch_size=12 momentum=0.95",),
    "study_q22_coarse": ("fp32", "E5M2 stochastic"),
    "study_q22_formats": ("fp32 init_std=0.06",),
    "study_q29_initial": ("fp32", "muon"),
    "study_q20_e4m3": (
        "E4M3 riemannian dir=data/stdlib lr=0.5 retraction=exponential",
        "E4M3 riemannian dir=data/stdlib lr=1 retraction=exponential",
    ),
    "study_q18_moments": (
        "muon",
        "E7M0 muon-stochastic-float noise=ulp",
        "E5M2 muon-stochastic-float noise=ulp",
        "E4M3 muon-stochastic-float noise=ulp",
    ),
}
#: the files whose runs Q8 uses, as its page says
MONITORED = (
    "study_q1",
    "study_q2",
    "study_q2_muon_spacing",
    "study_q2_muon_e2m5",
    "study_q9_length_cpu",
)
#: in nats: smaller differences count as none in a verdict
NEGLIGIBLE = 0.005
#: files whose rows are added to another file's in its tables and figures
ADDED_FILES = {
    "study_q1": ("study_q1_bf16",),
    "study_q2_noise": ("study_q2_twin",),
    "study_q5": ("study_q5_mixture",),
    "study_q9": ("study_q9_spacing",),
    "study_q11_e2m5": ("study_q11_scales", "study_q11_muon"),
    "study_q11_law": ("study_q11_scales_law", "study_q12_muon"),
    "study_q11_e4m3": ("study_q11_muon",),
    "study_q11_e4m3_law": ("study_q12_muon",),
    "study_q12_e2m5": ("study_q11_muon",),
    "study_q12_law": ("study_q12_muon",),
    "study_q15_draws": ("study_q15_decay", "study_q15_decay_E5M2", "study_q15_decay_E7M0"),
    "study_q13_peers": ("study_q13_adamw", "study_q13_ours", "study_q13_muon"),
    "study_q16_adamw": ("study_q16_muon", "study_q16_bf16"),
    "study_q16_sdnq": ("study_q16_muon",),
    "study_q20_e4m3": ("study_q20_next",),
    "study_q21_momentum": ("study_q21_batch",),
    "study_q22_coarse": ("study_q22_rates", "study_q22_initial"),
    "study_q22_formats": ("study_q22_initial",),
    "study_q26_adafactor": ("study_q26_lion",),
    "study_q26_bf16": ("study_q26_8bit",),
    "study_q27_smollm2": (
        "study_q27_e2m5",
        "study_q27_adamw",
        "study_q27_muon",
        "study_q27_lion",
        "study_q27_mixed",
    ),
    "study_q28_adafactor": ("study_q28_e2m5", "study_q28_adamw"),
}

#: files with runs of further seeds, made later, of another file's rows
FURTHER_SEEDS = {
    "study_q18_moments": ("study_q18_moments_seeds",),
    "study_q19_map": ("study_q19_map_seeds",),
    "study_q21_momentum": ("study_q21_momentum_43", "study_q21_batch_43"),
}


@cache
def read_with_added_rows(path: Path) -> Exported:
    """Read a results file with the rows, seeds and searches of the files added to it.

    Of two rows with one label, the one of the earlier file counts. A file is read once:
    a table asks for the same one in every line.
    """
    files = [read_export(path), *_read_all(path, ADDED_FILES)]
    rows: dict[str, Row] = {}
    for row in chain.from_iterable(file.rows for file in files):
        rows.setdefault(row.label, row)
    for file in _read_all(path, FURTHER_SEEDS):
        for row in file.rows:
            rows[row.label] = _with_further_seeds(rows[row.label], row)
    tuning = tuple(chain.from_iterable(file.tuning for file in files))
    return replace(files[0], rows=tuple(rows.values()), tuning=tuning)


def _read_all(path: Path, names: Mapping[str, Sequence[str]]) -> list[Exported]:
    """Read the files beside a results file that a table names for it."""
    paths = [path.with_stem(name) for name in names.get(path.stem, ())]
    return [read_export(path) for path in paths if path.is_file()]


def _with_further_seeds(row: Row, other: Row) -> Row:
    """Return a row with the runs that another one of the same settings has beside it."""
    runs = (*row.runs, *other.runs)
    if len({row_key(run) for run in runs}) > 1:
        raise ValueError(f"{row.label}: the runs of further seeds have other settings")
    made = {run.config["seed"] for run in runs}
    missing = tuple(seed for seed in row.missing if seed not in made)
    return counted_once(replace(row, runs=runs, missing=missing))


def against_baseline(names: str, baseline: str) -> Iterator[tuple[str, list[Result]]]:
    """Yield the results of files against their baseline, text by text.

    A file without the baseline is measured against Q1's on its texts.

    Args:
        names: names of results files, separated by blanks.
        baseline: the label of the baseline.
    """
    for name in names.split():
        file = read_with_added_rows(RESULTS_FOLDER / f"{name}.json")
        if not any(row_label(row.rule, row.format) == baseline for row in file.rows):
            texts = {text_of_row(row) for row in file.rows}
            file = replace(file, rows=(*file.rows, *_baseline_rows_of_q1(baseline, texts)))
        yield from by_text(measured_against(file, baseline))


def _baseline_rows_of_q1(baseline: str, texts: set[str]) -> Iterator[Row]:
    for row in read_with_added_rows(RESULTS_FOLDER / "study_q1.json").rows:
        if short_label(row.label) == baseline and text_of_row(row) in texts:
            yield row


def verdict_table(file: Exported, against: Sequence[str]) -> str:
    """Return the verdict on every rule against each baseline, over all texts.

    The study's page defines the verdicts.
    """
    by_baseline = {name: measured_against(file, name) for name in against}
    results_of_all = chain.from_iterable(by_baseline.values())
    rows = []
    for label in dict.fromkeys(map(result_label, results_of_all)):
        verdicts = []
        for results in by_baseline.values():
            of_rule = [result for result in results if result_label(result) == label]
            verdicts.append(_verdict(of_rule))
        rows.append([f"`{label}`", *verdicts])
    return markdown(("rule", *(f"against {name}" for name in against)), rows)


def _verdict(results: Sequence[Result]) -> str:
    """Return the verdict on one rule, from its differences to one baseline on every text.

    >>> _verdict([])
    'not decided'
    """
    if any(result.reference for result in results):
        return "-"
    lows, highs = [], []
    for result in results:
        if result.difference and not result.difference.is_lead:
            lows.append(result.difference.low)
            highs.append(result.difference.high)
    if any(low > NEGLIGIBLE for low in lows):
        return "behind"
    if not lows or len(lows) < len(results):
        return "not decided"
    if all(high < -NEGLIGIBLE for high in highs):
        return "ahead"
    return "equal" if all(high < NEGLIGIBLE for high in highs) else "not decided"


def courses_by_text(file: Exported, name: str) -> dict[str, dict[str, Course]]:
    """Return the distance of the runs from a baseline at each of their validations.

    It is by text and rule.
    """
    reference = find_reference(file.rows, baseline_of(name, file.rows))
    references = references_by_label(file.rows, reference)
    courses: dict[str, dict[str, Course]] = {}
    for text, results in by_text(measure(file.rows, reference)):
        courses[text] = {}
        for result in results:
            row = result.row
            if row.label in references and not result.reference:
                courses[text][result_label(result)] = course(row.runs, references[row.label].runs)
    return courses


def _tables_along(file: Exported, name: str) -> str:
    tables = []
    for text, courses in courses_by_text(file, name).items():
        tables.append(f"Minus the loss of `{name}`, {text}:\n\n{table_along(courses)}")
    return "\n".join(tables)


def _tables_by_clock(file: Exported, name: str, paces: Mapping[str, float]) -> str:
    reference = find_reference(file.rows, baseline_of(name, file.rows))
    references = references_by_label(file.rows, reference)
    tables = []
    for text, results in by_text(measure(file.rows, reference)):
        runs, reference_runs = {}, {}
        for result in results:
            if result.row.label in references:
                label = result_label(result)
                runs[label] = result.row.runs
                reference_runs[label] = references[result.row.label].runs
        tables.append(f"{text}:\n\n{table_by_clock(runs, reference_runs, name, paces)}")
    return "\n".join(tables)


def draw_differences(file: Exported, name: str) -> Figure:
    """Draw every row's paired difference to a baseline with its 95% interval.

    There is a panel per text. Rows are sorted by their difference on the first text
    that has one.
    """
    panels = list(by_text(measured_against(file, name)))
    means = {}
    for _, results in reversed(panels):
        for result in results:
            if result.difference:
                means[result_label(result)] = result.difference.mean
    means.pop(name, None)
    order = sorted(means, key=lambda label: -means[label])
    figure, axes = plt.subplots(
        1,
        len(panels),
        figsize=(9, 0.9 + 0.3 * len(order)),
        layout="constrained",
        squeeze=False,
        sharey=True,
    )
    for axis, (text, results) in zip(axes[0], panels, strict=True):
        _draw_results(axis, {result_label(result): result for result in results}, order)
        axis.set_title(text)
    figure.supxlabel(f"final loss minus that of {name}, nats per byte", fontsize="medium")
    return figure


def _draw_results(axis: Axes, results: Mapping[str, Result], order: Sequence[str]) -> None:
    axis.axvline(0, color="#999999", linewidth=1)
    for place, label in enumerate(order):
        result = results.get(label)
        if result is None or result.difference is None:
            continue
        difference = result.difference
        colour = EXACT if result.row.format == "none" else STOCHASTIC
        if not difference.is_lead:
            axis.hlines(place, difference.low, difference.high, color=colour, linewidth=2.2)
        axis.plot(
            difference.mean,
            place,
            "o",
            color=colour,
            markersize=5,
            fillstyle="none" if difference.is_lead else "full",
        )
    axis.set(yticks=range(len(order)), yticklabels=order, ylim=(-0.6, len(order) - 0.4))
    axis.spines["left"].set_visible(False)
    axis.tick_params(axis="y", left=False)
    axis.grid(axis="x", color="#e5e5e5", linewidth=0.8)


def tables_of_rows(name: str, file: Exported) -> Iterator[tuple[str, str]]:
    """Yield the tables of a file of rows, each after the suffix of its name."""
    against = baselines(file, AGAINST.get(name, BASELINES))
    yield (
        "",
        f"{compared_table(file, against)}\n{_verdicts(name, file, against)}{source_line(file)}",
    )
    yield "-weights", kurtosis_table(file)
    logarithms = logarithms_table(file)
    if logarithms:
        yield "-logarithms", logarithms
    yield "-monitors", monitors_table(file)
    yield "-failures", failures_table(file)
    points = format_points(file)
    if points:
        yield "-spacing", spacing_table(points)
    if file.tuning:
        yield "-tuned", tuning_table(file.tuning)
    cells = cells_by_training(file)
    if cells:
        yield "-law", law_table(cells)
    ladder = ladder_of(file)
    if ladder:
        yield f"-{ladder.name}", gap_table(ladder, file)
        return
    yield "-along", "\n".join(_tables_along(file, baseline) for baseline in against)
    yield "-clock", _tables_by_clock(file, against[0], paces_of(name))
    recovered = recovered_table(file)
    if recovered:
        yield "-recovered", recovered
    stiffness = stiffness_table(file)
    if stiffness:
        yield "-stiffness", stiffness


def _verdicts(name: str, file: Exported, against: Sequence[str]) -> str:
    """Return the verdicts over all texts, or "" for one text.

    Q16's are by another rule, in `_claims`.
    """
    texts = {text_of(result) for result in measured_against(file, against[0])}
    if len(texts) <= 1 or name.startswith("study_q16"):
        return ""
    return f"Over all texts:\n\n{verdict_table(file, against)}\n"


def write_study(folder: Path, results: Path = RESULTS_FOLDER) -> None:
    """Write the tables and figures of every results file into the folder."""
    matplotlib.use("Agg")
    added = {*chain.from_iterable((*ADDED_FILES.values(), *FURTHER_SEEDS.values()))}
    files = {}
    for path in sorted(results.glob("*.json")):
        if path.stem not in added:
            files[path.stem] = read_with_added_rows(path)
    tuned = tuned_rates(list(files.values()))
    for name, file in files.items():
        if not any(row.runs for row in file.rows):
            continue
        # rates that are rows of a comparison are no search for a limit
        if is_search(file) and name not in AGAINST:
            tables = {"": f"{limit_table(file, tuned)}\n{source_line(file)}"}
            _write_tables(folder, name, tables.items())
        elif is_map(file):
            _write_map(folder, name, file)
        else:
            _write_tables(folder, name, tables_of_rows(name, file))
            _write_figures_of_rows(folder, name, file)
    monitored = [file for name, file in files.items() if name in MONITORED and looked_early(file)]
    if len(monitored) > 1:
        _write_tables(folder, "study_monitors", [("", monitors_table(*monitored))])


def _write_map(folder: Path, name: str, file: Exported) -> None:
    """Write the figures and the table of a map: of its floors if it has some, or of warp."""
    (folder / f"{name}.svg").write_text(map_figure(file), encoding="utf-8")
    cells = cells_of(file)
    table = floors_table(cells) if cells else warp_table(file)
    _write_tables(folder, name, [("", f"{table}\n{source_line(file)}")])
    if cells:
        with plt.rc_context(STYLE):
            figure = draw_floors(cells)
            figure.savefig(folder / f"{name}-floors.svg", metadata={"Date": None})
            plt.close(figure)


def _write_tables(folder: Path, name: str, tables: Iterable[tuple[str, str]]) -> None:
    for suffix, text in tables:
        (folder / f"{name}{suffix}.md").write_text(text, encoding="utf-8")


def _write_figures_of_rows(folder: Path, name: str, file: Exported) -> None:
    """Write the figures of a file whose rows are measured against a baseline."""
    ladder = ladder_of(file)
    if ladder is not None:
        svg = gap_figure(ladder, file)
        (folder / f"{name}-{ladder.name}.svg").write_text(svg, encoding="utf-8")
    with plt.rc_context(STYLE):
        for suffix, figure in _figures_of_rows(name, file, has_ladder=ladder is not None):
            figure.savefig(folder / f"{name}{suffix}.svg", metadata={"Date": None})
            plt.close(figure)


def _figures_of_rows(
    name: str, file: Exported, *, has_ladder: bool
) -> Iterator[tuple[str, Figure]]:
    """Yield the figures of a file of rows, each after the suffix of its name."""
    baseline = baselines(file, AGAINST.get(name, BASELINES))[0]
    yield "", draw_differences(file, baseline)
    if not has_ladder:
        courses = courses_by_text(file, baseline)
        if any(courses.values()):
            yield "-along", draw_along(courses, baseline)
    paces = paces_of(name)
    if paces:
        results = measured_against(file, baseline)
        yield "-clock", draw_by_clock({result_label(r): r.row.runs for r in results}, paces)
    cells = cells_by_training(file)
    if cells:
        yield "-law", draw_floors(cells)
    points = format_points(file)
    if is_drawable(points):
        rule = (file.baseline or "").split()[0]
        yield "-spacing", draw_spacing(points, NAMES_OF_TEXTS, rule)
