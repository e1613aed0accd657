"""The tables and the figure of fine-tuning, from the results files alone.

A group of files, `NAME.json` or `NAME-RATE.json`, gives a table by what varies in it:

    every file has one rate       a line per rule, a column per text and rate, a figure
    a file has several rates      a line per row
    published FP8 folders         a line per folder and rule
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from _compared import bytes_text, measured_against, shortfall_note, source_line, with_rows_of_all
from _looks import STYLE
from _markdown import markdown
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nanogpt_bench.report.columns import format_figure
from nanogpt_bench.report.paired import Difference
from nanogpt_bench.report.results import Result, mean_of
from nanogpt_bench.report.results_file import Exported, read_export
from nanogpt_bench.report.rows import Row, row_label

FINETUNE_FOLDER = Path(__file__).parent / "measured" / "finetune"
PUBLISHED = Path(__file__).parent / "measured" / "published"
BASELINE = "fp32"
#: the format that the tables and the figure show
FORMAT = "E4M3"
#: in nats: beyond this difference the figure's axis is logarithmic
LINEAR = 0.01

ReadDifference = Callable[[Result], Difference | None]
#: the difference on the text that is trained on, and on the one of the first training
DIFFERENCES_OF_TEXTS: dict[str, ReadDifference] = {
    "new": lambda result: result.difference,
    "old": lambda result: result.also_difference,
}


def only_rate(file: Exported) -> float:
    """Return the learning rate that all runs of a file have."""
    (rate,) = rates(file)
    return rate


def rates(file: Exported) -> list[float]:
    """Return the learning rates of a file's runs, in increasing order."""
    return sorted(set().union(*map(_rates_of_row, file.rows)))


def _rates_of_row(row: Row) -> set[float]:
    return {float(run.config["optimizer"]["lr"]) for run in row.runs}


def rate_text(rate: float) -> str:
    """Return a rate with one significant digit.

    >>> rate_text(5e-5), rate_text(2e-4)
    ('5e-5', '2e-4')
    """
    return f"{rate:.0e}".replace("e-0", "e-")


def groups(folder: Path = FINETUNE_FOLDER) -> Iterator[tuple[str, list[Exported]]]:
    """Yield the name of each group and its files, by increasing rate."""
    paths = sorted(folder.glob("*.json"))
    for name, paths_of_group in groupby(paths, key=lambda path: path.stem.split("-")[0]):
        yield name, sorted(map(read_export, paths_of_group), key=rates)


def table_of_rules(files: Sequence[Exported]) -> str:
    """Return float32's losses, and a line per rule with its differences to float32.

    There is a column for each text and rate.
    """
    by_rate = {only_rate(file): measured_against(file, BASELINE) for file in files}
    parts = [_baseline_sentence(rate, results) for rate, results in by_rate.items()]
    differences = _difference_table(by_rate)
    parts.append(f"{FORMAT}, losses minus those of `{BASELINE}` on either text:\n\n{differences}")
    return "\n\n".join([*parts, source_line(with_rows_of_all(files))])


def _baseline_sentence(rate: float, results: Sequence[Result]) -> str:
    (baseline,) = (result for result in results if result.reference)
    before = _mean(baseline.row, "first_val_loss")
    after = format_figure(baseline.final_val_loss)
    seeds = len(baseline.row.runs)
    return (
        f"`{BASELINE}` at {rate_text(rate)}: from {before:.3f} to {after} on the new text, "
        f"{seeds} seed{'' if seeds == 1 else 's'}."
    )


def _difference_table(by_rate: Mapping[float, Sequence[Result]]) -> str:
    by_rule: dict[str, dict[float, Result]] = {}
    for rate, results in by_rate.items():
        for result in results:
            if result.row.format == FORMAT:
                by_rule.setdefault(result.row.rule, {})[rate] = result
    header = ["rule", "bytes"]
    for text in DIFFERENCES_OF_TEXTS:
        header += [f"{text}, {rate_text(rate)}" for rate in by_rate]
    rows = []
    for rule, result_by_rate in by_rule.items():
        first = next(iter(result_by_rate.values()))
        cells = [f"`{rule}`", bytes_text(first)]
        for read_difference in DIFFERENCES_OF_TEXTS.values():
            for rate in by_rate:
                result = result_by_rate.get(rate)
                difference = None if result is None else read_difference(result)
                cells.append(difference_text(difference))
        rows.append(cells)
    return markdown(header, rows)


def _mean(row: Row, name: str) -> float | None:
    return mean_of(run.number(name) for run in row.runs)


def table_of_rows(files: Sequence[Exported]) -> str:
    """Return a line per row, for rows that differ in rate.

    It has the loss on either text, and its difference to float32's.
    """
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
    file = with_rows_of_all(files)
    rows = []
    for result in measured_against(file, BASELINE):
        row = result.row
        if not row.runs:
            continue
        old_loss = _mean(row, "also_loss")
        rows.append(
            [
                f"`{row_label(row.rule, row.format)}`",
                ", ".join(rate_text(rate) for rate in sorted(_rates_of_row(row))),
                bytes_text(result),
                str(len(row.runs)),
                format_figure(result.final_val_loss),
                _finetuned_difference(result, result.difference),
                "-" if old_loss is None else f"{old_loss:.3f}",
                _finetuned_difference(result, result.also_difference),
            ]
        )
    return f"{markdown(header, rows)}\n{source_line(file)}"


def table_of_folders(files: Mapping[str, Exported]) -> str:
    """Return a line per published folder and rule.

    It has the losses before and after training, and the difference to float training's.
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
        for result in measured_against(file, BASELINE):
            row = result.row
            if not row.runs:
                continue
            rows.append(
                [
                    name,
                    f"`{row.rule}`",
                    rate_text(float(row.runs[0].config["optimizer"]["lr"])),
                    bytes_text(result),
                    str(len(row.runs)),
                    f"{_mean(row, 'first_val_loss'):.4f}",
                    format_figure(result.final_val_loss),
                    _finetuned_difference(result, result.difference),
                ]
            )
    together = with_rows_of_all(list(files.values()))
    parts = [*shortfall_note(together.rows), markdown(header, rows), source_line(together)]
    return "\n".join(parts)


def _finetuned_difference(result: Result, difference: Difference | None) -> str:
    return "" if result.reference else difference_text(difference)


def difference_text(difference: Difference | None) -> str:
    """Return a difference with half of its 95% interval, which one seed does not have.

    >>> difference_text(Difference(0.0312, 3, 0.0302, 0.0322))
    '+0.031 ± 0.001'
    >>> difference_text(Difference(-0.02, 1)), difference_text(None)
    ('-0.020', '-')
    """
    if difference is None:
        return "-"
    text = f"{difference.mean:+.3f}"
    if difference.low is None or difference.high is None:
        return text
    return f"{text} ± {(difference.high - difference.low) / 2:.3f}"


def draw(files: Sequence[Exported]) -> Figure:
    """Draw a panel per text with a curve per rule over the rates, in one format."""
    figure, axes = plt.subplots(
        1, len(DIFFERENCES_OF_TEXTS), figsize=(9, 3.6), layout="constrained", sharey=True
    )
    for panel, (text, read_difference) in zip(axes, DIFFERENCES_OF_TEXTS.items(), strict=True):
        _draw_panel(panel, files, read_difference)
        panel.set_title(f"the {text} text")
    axes[0].set_ylabel(f"loss minus that of {BASELINE}, nats")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    return figure


def _draw_panel(axis: Axes, files: Sequence[Exported], read_difference: ReadDifference) -> None:
    axis.axhline(0, color="#999999", linewidth=1)
    curves: dict[str, list[tuple[float, float]]] = {}
    for file in files:
        for result in measured_against(file, BASELINE):
            difference = read_difference(result)
            if result.row.format == FORMAT and difference is not None:
                point = (only_rate(file), difference.mean)
                curves.setdefault(result.row.rule, []).append(point)
    for rule, points in curves.items():
        axis.plot(*zip(*points, strict=True), "o-", markersize=4, linewidth=1.4, label=rule)
    ticks = [only_rate(file) for file in files]
    axis.set_xscale("log")
    axis.set_yscale("symlog", linthresh=LINEAR)
    axis.set(xlabel="learning rate", xticks=ticks)
    axis.set_xticklabels(list(map(rate_text, ticks)))
    axis.minorticks_off()
    axis.grid(axis="y", color="#e5e5e5", linewidth=0.8)


def write_finetune(folder: Path, results: Path = FINETUNE_FOLDER) -> None:
    """Write the tables of all groups into the folder, and figures of groups by rate."""
    paths = sorted(PUBLISHED.glob("*.json"), reverse=True)
    published = {path.stem: read_export(path) for path in paths}
    _write_table(folder, "published", table_of_folders(published))
    for name, files in groups(results):
        if any(len(rates(file)) > 1 for file in files):
            _write_table(folder, name, table_of_rows(files))
            continue
        _write_table(folder, name, table_of_rules(files))
        if len(files) > 1:
            with plt.rc_context(STYLE):
                figure = draw(files)
                figure.savefig(folder / f"finetune-{name}.svg", metadata={"Date": None})
                plt.close(figure)


def _write_table(folder: Path, name: str, text: str) -> None:
    (folder / f"finetune-{name}.md").write_text(text, encoding="utf-8")
