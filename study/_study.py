"""The tables and figures of the study's results, from the files in `results` alone."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import matplotlib
from _along import Course, course, drawn_along, table_along
from _clock import drawn_by_clock, paces_of, table_by_clock
from _compared import (
    BASELINES,
    TEXTS,
    baselines,
    brief,
    by_text,
    measured_against,
    short,
    source,
    table,
    text_of,
    text_of_row,
)
from _failures import failures_table
from _lengths import drawn_by, gap_by, ladder_of
from _limits import is_search, limit_table, tuned_rates
from _looks import EXACT, STOCHASTIC, STYLE
from _maps import drawn_map, is_map, warps
from _markdown import markdown
from _monitors import looked_early, monitors
from _recovered import recovered
from _spacing import drawn_spacing, is_drawn, spaced, spacing_table
from _stiffness import stiffness_table
from _weights import kurtosis_table, logarithms_table
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nanogpt_bench.report.results import Result, measure
from nanogpt_bench.report.results_file import Exported, read_export
from nanogpt_bench.report.rows import find_reference, references_of, row_label
from nanogpt_bench.report.tables import tuning_table
from nanogpt_bench.sweep.plan import baseline_of

FOLDER = Path(__file__).parent / "results"
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
WORTH = 0.005
#: files whose rows are added to another file's in its tables and figures
BESIDE = {
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
}


def read(path: Path) -> Exported:
    """A results file with the rows and searches of the files that BESIDE adds to it."""
    beside = [path.with_stem(name) for name in BESIDE.get(path.stem, ())]
    files = [read_export(each) for each in (path, *beside) if each.is_file()]
    rows = {row.label: row for file in reversed(files) for row in file.rows}
    order = dict.fromkeys(row.label for file in files for row in file.rows)
    tuning = [each for file in files for each in file.tuning]
    return replace(files[0], rows=tuple(rows[label] for label in order), tuning=tuple(tuning))


def against_baseline(stems: str, baseline: str) -> Iterator[tuple[str, list[Result]]]:
    """The rows of files, text by text, measured against their baseline, or Q1's on that
    text if they lack it.
    """
    for file in (read(FOLDER / f"{stem}.json") for stem in stems.split()):
        if not any(row_label(row.rule, row.format) == baseline for row in file.rows):
            texts = {text_of_row(row) for row in file.rows}
            lent = read(FOLDER / "study_q1.json").rows
            lent = tuple(
                row for row in lent if brief(row.label) == baseline and text_of_row(row) in texts
            )
            file = replace(file, rows=(*file.rows, *lent))
        yield from by_text(measured_against(file, baseline))


def decided(file: Exported, against: Sequence[str]) -> str:
    """A table of the verdict on every rule, from its intervals on all texts; the
    study's page defines the verdicts.
    """
    each = {name: measured_against(file, name) for name in against}
    labels = dict.fromkeys(short(result) for results in each.values() for result in results)
    rows = [
        (
            f"`{label}`",
            *(_decision([r for r in results if short(r) == label]) for results in each.values()),
        )
        for label in labels
    ]
    return markdown(("rule", *(f"against {name}" for name in each)), rows)


def _decision(results: Sequence[Result]) -> str:
    """The verdict on one rule, from its differences to one baseline on every text.

    >>> _decision([])
    'not decided'
    """
    ends = [
        (r.difference.low, r.difference.high) for r in results if r.difference and not r.reference
    ]
    if any(r.reference for r in results):
        return "-"
    known = [(low, high) for low, high in ends if low is not None and high is not None]
    if any(low > WORTH for low, _ in known):
        return "behind"
    if not known or len(known) < len(results):
        return "not decided"
    if all(high < -WORTH for _, high in known):
        return "ahead"
    return "equal" if all(high < WORTH for _, high in known) else "not decided"


def along(file: Exported, name: str) -> dict[str, dict[str, Course]]:
    """The distance of the runs from a baseline at each of their validations, by text
    and rule.
    """
    reference = find_reference(file.rows, baseline_of(name, file.rows))
    against = references_of(file.rows, reference)
    return {
        text: {
            short(r): course(r.row.runs, against[r.row.label].runs)
            for r in results
            if r.row.label in against and not r.reference
        }
        for text, results in by_text(measure(file.rows, reference))
    }


def _tables_along(file: Exported, name: str) -> str:
    each = along(file, name).items()
    return "\n".join(
        f"Minus the loss of `{name}`, {text}:\n\n{table_along(courses)}" for text, courses in each
    )


def _tables_by_clock(file: Exported, name: str, paces: Mapping[str, float]) -> str:
    reference = find_reference(file.rows, baseline_of(name, file.rows))
    against = references_of(file.rows, reference)
    tables = []
    for text, results in by_text(measure(file.rows, reference)):
        there = [result for result in results if result.row.label in against]
        rules = {short(result): result.row.runs for result in there}
        references = {short(result): against[result.row.label].runs for result in there}
        tables.append(f"{text}:\n\n{table_by_clock(rules, references, name, paces)}")
    return "\n".join(tables)


def forest(file: Exported, name: str) -> Figure:
    """Every row's paired difference to a baseline with its 95% interval, a panel per
    text.
    """
    panels = list(by_text(measured_against(file, name)))
    means = {
        short(r): r.difference.mean
        for _, results in reversed(panels)
        for r in results
        if r.difference
    }
    order = sorted((label for label in means if label != name), key=lambda label: -means[label])
    figure, axes = plt.subplots(
        1,
        len(panels),
        figsize=(9, 0.9 + 0.3 * len(order)),
        layout="constrained",
        squeeze=False,
        sharey=True,
    )
    for axis, (text, results) in zip(axes[0], panels, strict=True):
        _panel(axis, {short(result): result for result in results}, order)
        axis.set_title(text)
    figure.supxlabel(f"final loss minus that of {name}, nats per byte", fontsize="medium")
    return figure


def _panel(axis: Axes, results: Mapping[str, Result], order: Sequence[str]) -> None:
    axis.axvline(0, color="#999999", linewidth=1)
    for place, label in enumerate(order):
        result = results.get(label)
        if result is None or result.difference is None:
            continue
        found, colour = result.difference, EXACT if result.row.format == "none" else STOCHASTIC
        if found.low is not None and found.high is not None:
            axis.hlines(place, found.low, found.high, color=colour, linewidth=2.2)
        axis.plot(
            found.mean,
            place,
            "o",
            color=colour,
            markersize=5,
            fillstyle="none" if found.is_lead else "full",
        )
    axis.set(yticks=range(len(order)), yticklabels=order, ylim=(-0.6, len(order) - 0.4))
    axis.spines["left"].set_visible(False)
    axis.tick_params(axis="y", left=False)
    axis.grid(axis="x", color="#e5e5e5", linewidth=0.8)


def parts(stem: str, file: Exported) -> Iterator[tuple[str, str]]:
    """The tables of a file, each with the suffix of its name."""
    against = baselines(file, AGAINST.get(stem, BASELINES))
    several = len({text_of(result) for result in measured_against(file, against[0])}) > 1
    several = several and not stem.startswith(
        "study_q16"
    )  # whose claims are by another rule, `_claims`
    decisions = f"Over all texts:\n\n{decided(file, against)}\n" if several else ""
    yield "", f"{table(file, against)}\n{decisions}{source(file)}"
    yield "-weights", kurtosis_table(file)
    if logarithms := logarithms_table(file):
        yield "-logarithms", logarithms
    yield "-monitors", monitors(file)
    yield "-failures", failures_table(file)
    if formats := spaced(file):
        yield "-spacing", spacing_table(formats)
    if file.tuning:
        yield "-tuned", tuning_table(file.tuning)
    if ladder := ladder_of(file):
        yield f"-{ladder.name}", gap_by(ladder, file)
    else:
        yield "-along", "\n".join(_tables_along(file, name) for name in against)
        yield "-clock", _tables_by_clock(file, against[0], paces_of(stem))
        if shares := recovered(file):
            yield "-recovered", shares
        if stiffness := stiffness_table(file):
            yield "-stiffness", stiffness


def write_study(folder: Path, files: Path = FOLDER) -> None:
    """Write the tables and figures of every results file into the folder."""
    matplotlib.use("Agg")
    of_others = {name for names in BESIDE.values() for name in names}
    found = {
        path.stem: read(path) for path in sorted(files.glob("*.json")) if path.stem not in of_others
    }
    tuned = tuned_rates(list(found.values()))
    for stem, file in found.items():
        if not any(row.runs for row in file.rows):
            continue
        if is_search(file):
            (folder / f"{stem}.md").write_text(
                f"{limit_table(file, tuned)}\n{source(file)}", encoding="utf-8"
            )
        elif is_map(file):
            (folder / f"{stem}.md").write_text(f"{warps(file)}\n{source(file)}", encoding="utf-8")
            (folder / f"{stem}.svg").write_text(drawn_map(file), encoding="utf-8")
        else:
            _write_rows(folder, stem, file)

    if (
        len(
            early := [
                file for stem, file in found.items() if stem in MONITORED and looked_early(file)
            ]
        )
        > 1
    ):
        (folder / "study_monitors.md").write_text(monitors(*early), encoding="utf-8")


def _write_rows(folder: Path, stem: str, file: Exported) -> None:
    """The tables and figures of a file whose rows are measured against a baseline."""
    for end, text in parts(stem, file):
        (folder / f"{stem}{end}.md").write_text(text, encoding="utf-8")
    ladder = ladder_of(file)
    if ladder is not None:
        (folder / f"{stem}-{ladder.name}.svg").write_text(drawn_by(ladder, file), encoding="utf-8")
    name = baselines(file, AGAINST.get(stem, BASELINES))[0]
    with plt.rc_context(STYLE):
        drawn = {"": forest(file, name)}
        if ladder is None and any((courses := along(file, name)).values()):
            drawn["-along"] = drawn_along(courses, name)
        if paces := paces_of(stem):
            drawn["-clock"] = drawn_by_clock(
                {short(r): r.row.runs for r in measured_against(file, name)}, paces
            )
        if is_drawn(formats := spaced(file)):
            drawn["-spacing"] = drawn_spacing(formats, TEXTS, (file.baseline or "").split()[0])
        for end, picture in drawn.items():
            picture.savefig(folder / f"{stem}{end}.svg", metadata={"Date": None})
            plt.close(picture)
