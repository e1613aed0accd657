"""The tables and the figure of fine-tuning rules against each other, from the results
files alone.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from _compared import measured_against, source
from _looks import STYLE
from _markdown import markdown
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nanogpt_bench.report.columns import format_figure
from nanogpt_bench.report.paired import Difference
from nanogpt_bench.report.results import Result
from nanogpt_bench.report.results_file import Exported, read_export
from nanogpt_bench.report.rows import row_label, shortfall

FOLDER = Path(__file__).parent / "measured" / "finetune"
PUBLISHED = Path(__file__).parent / "measured" / "published"
BASELINE = "fp32"
#: the format that the tables and the figure show
FORMAT = "E4M3"
#: in nats: beyond this difference the figure's axis is logarithmic
LINEAR = 0.01

Of = Callable[[Result], Difference | None]
TEXTS: dict[str, Of] = {
    "new": lambda result: result.difference,
    "old": lambda result: result.also_difference,
}


def rate(file: Exported) -> float:
    """The learning rate that all runs of a file have."""
    (one,) = rates(file)
    return one


def rates(file: Exported) -> list[float]:
    """The learning rates of a file's runs, in increasing order."""
    return sorted({float(run.config["optimizer"]["lr"]) for row in file.rows for run in row.runs})


def named(rate: float) -> str:
    """A rate with one significant digit, as text.

    >>> named(5e-5), named(2e-4)
    ('5e-5', '2e-4')
    """
    return f"{rate:.0e}".replace("e-0", "e-")


def groups(files: Path = FOLDER) -> Iterator[tuple[str, list[Exported]]]:
    """Files measured at several rates (`NAME-RATE.json`) or at one (`NAME.json`), by
    name, by increasing rate.
    """
    paths = sorted(files.glob("*.json"))
    for name, of in groupby(paths, key=lambda path: path.stem.split("-")[0]):
        yield name, sorted(map(read_export, of), key=rates)


def tables(files: Sequence[Exported]) -> str:
    """Losses of float32 before and after; in E4M3 a line per rule and a column for each
    text and rate.
    """
    each = {rate(file): measured_against(file, BASELINE) for file in files}
    parts = [*map(_came_from, each, each.values())]
    parts.append(f"{FORMAT}, losses minus those of `{BASELINE}` on either text:\n\n{_grid(each)}")
    return "\n\n".join(
        [*parts, source(replace(files[0], rows=tuple(row for file in files for row in file.rows)))]
    )


def table_of_rows(files: Sequence[Exported]) -> str:
    """A line per row, for rows that differ in rate: the loss on either text, and its
    difference to float32's.
    """
    file = replace(files[0], rows=tuple(row for each in files for row in each.rows))
    results = measured_against(file, BASELINE)
    header = (
        "rule",
        "lr",
        "bytes",
        "seeds",
        "new text",
        f"minus `{BASELINE}`",
        "old text",
        f"minus `{BASELINE}`",
    )
    rows = []
    for result in (result for result in results if result.row.runs):
        runs = result.row.runs
        lr = ", ".join(
            named(each) for each in sorted({float(run.config["optimizer"]["lr"]) for run in runs})
        )
        old = [loss for run in runs if (loss := run.number("also_loss")) is not None]
        held = result.bytes_per_parameter
        cells = [
            f"`{row_label(result.row.rule, result.row.format)}`",
            lr,
            "-" if held is None else f"{held:.2f}",
            str(len(runs)),
        ]
        cells += [format_figure(result.final_val_loss), _apart(result, result.difference)]
        cells += [
            f"{sum(old) / len(old):.3f}" if old else "-",
            _apart(result, result.also_difference),
        ]
        rows.append(cells)
    return f"{markdown(header, rows)}\n{source(file)}"


def table_of_folders(files: Mapping[str, Exported]) -> str:
    """For each published folder how it was trained: losses before and after, and the
    difference to float training's.
    """
    header = (
        "folder",
        "rule",
        "lr",
        "bytes per parameter",
        "seeds",
        "before",
        "after",
        f"minus `{BASELINE}`",
    )
    rows = []
    for name, file in files.items():
        for result in (result for result in measured_against(file, BASELINE) if result.row.runs):
            runs, held = result.row.runs, result.bytes_per_parameter
            before = [loss for run in runs if (loss := run.number("first_val_loss")) is not None]
            cells = [name, f"`{result.row.rule}`", named(float(runs[0].config["optimizer"]["lr"]))]
            cells += [
                "-" if held is None else f"{held:.2f}",
                str(len(runs)),
                f"{sum(before) / len(before):.4f}",
            ]
            rows.append(
                [*cells, format_figure(result.final_val_loss), _apart(result, result.difference)]
            )
    every = tuple(row for file in files.values() for row in file.rows)
    short = f"({missing} were made.)\n\n" if (missing := shortfall(every)) else ""
    return f"{short}{markdown(header, rows)}\n{source(replace(next(iter(files.values())), rows=every))}"


def _apart(result: Result, found: Difference | None) -> str:
    return "" if result.reference else written(found)


def _came_from(rate: float, results: Sequence[Result]) -> str:
    (exact,) = (result for result in results if result.reference)
    runs = exact.row.runs
    before = [loss for run in runs if (loss := run.number("first_val_loss")) is not None]
    ends = f"from {sum(before) / len(before):.3f} to {format_figure(exact.final_val_loss)}"
    return f"`{BASELINE}` at {named(rate)}: {ends} on the new text, {len(runs)} seed{'s' * (len(runs) > 1)}."


def _grid(each: Mapping[float, Sequence[Result]]) -> str:
    by_rule = {
        rate: {r.row.rule: r for r in results if r.row.format == FORMAT}
        for rate, results in each.items()
    }
    columns = [(text, rate) for text in TEXTS for rate in each]
    rows = []
    for rule in dict.fromkeys(rule for of in by_rule.values() for rule in of):
        held = next(of[rule].bytes_per_parameter for of in by_rule.values() if rule in of)
        there = [(TEXTS[text], by_rule[rate].get(rule)) for text, rate in columns]
        cells = ["-" if result is None else written(of(result)) for of, result in there]
        rows.append([f"`{rule}`", "-" if held is None else f"{held:.2f}", *cells])
    return markdown(("rule", "bytes", *(f"{text}, {named(rate)}" for text, rate in columns)), rows)


def written(found: Difference | None) -> str:
    """A difference with half of its 95% interval, which one seed does not have.

    >>> written(Difference(0.0312, 3, 0.0302, 0.0322)), written(Difference(-0.02, 1)), written(None)
    ('+0.031 ± 0.001', '-0.020', '-')
    """
    if found is None:
        return "-"
    half = (
        "" if found.low is None or found.high is None else f" ± {(found.high - found.low) / 2:.3f}"
    )
    return f"{found.mean:+.3f}{half}"


def drawn(files: Sequence[Exported]) -> Figure:
    """A panel per text with a curve per rule over the rates, in one format."""
    figure, axes = plt.subplots(1, len(TEXTS), figsize=(9, 3.6), layout="constrained", sharey=True)
    for axis, (text, of) in zip(axes, TEXTS.items(), strict=True):
        _panel(axis, files, of)
        axis.set_title(f"the {text} text")
    axes[0].set_ylabel(f"loss minus that of {BASELINE}, nats")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    return figure


def _panel(axis: Axes, files: Sequence[Exported], of: Of) -> None:
    axis.axhline(0, color="#999999", linewidth=1)
    lines: dict[str, list[tuple[float, float]]] = {}
    for file in files:
        for result in measured_against(file, BASELINE):
            if result.row.format == FORMAT and (found := of(result)) is not None:
                lines.setdefault(result.row.rule, []).append((rate(file), found.mean))
    for rule, points in lines.items():
        axis.plot(*zip(*points, strict=True), "o-", markersize=4, linewidth=1.4, label=rule)
    axis.set_xscale("log")
    axis.set_yscale("symlog", linthresh=LINEAR)
    axis.set(xlabel="learning rate", xticks=[rate(file) for file in files])
    axis.set_xticklabels([named(rate(file)) for file in files])
    axis.minorticks_off()
    axis.grid(axis="y", color="#e5e5e5", linewidth=0.8)


def write_finetune(folder: Path, files: Path = FOLDER) -> None:
    """Write the tables of every group of results files into the folder, and a figure of
    groups with several rates.
    """
    folders = {
        path.stem: read_export(path) for path in sorted(PUBLISHED.glob("*.json"), reverse=True)
    }
    (folder / "finetune-published.md").write_text(table_of_folders(folders), encoding="utf-8")
    for name, of in groups(files):
        if any(len(rates(file)) > 1 for file in of):
            (folder / f"finetune-{name}.md").write_text(table_of_rows(of), encoding="utf-8")
            continue
        (folder / f"finetune-{name}.md").write_text(tables(of), encoding="utf-8")
        if len(of) == 1:
            continue
        with plt.rc_context(STYLE):
            figure = drawn(of)
            figure.savefig(folder / f"finetune-{name}.svg", metadata={"Date": None})
            plt.close(figure)
