"""Tables of a results file: its rows against its baselines, and where its runs were made.

A file has rows on several texts. A row is measured against the baseline on its own
text, and each text has a table.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

from _markdown import markdown

from nanogpt_bench.report.columns import format_figure, format_rates
from nanogpt_bench.report.paired import MARK, difference_text
from nanogpt_bench.report.results import Result, measure
from nanogpt_bench.report.results_file import Exported
from nanogpt_bench.report.rows import Row, find_reference, row_label, row_runs, shortfall
from nanogpt_bench.sweep.plan import baseline_of

#: names of texts on pages, by the last part of `data.dir`
NAMES_OF_TEXTS = {
    "stdlib": "STDLIB",
    "eurlex": "EULAW",
    "stdlib_pairs": "STDLIB in byte pairs",
    "prose": "STDLIB in SmolLM2's tokens",
}
#: float rows that serve as baselines where a file has them
BASELINES = ("fp32", "muon")


def measured_against(file: Exported, baseline: str) -> list[Result]:
    """Return the results of a file's rows, measured against `baseline` on the same text."""
    return measure(file.rows, find_reference(file.rows, baseline_of(baseline, file.rows)))


def baselines(file: Exported, among: Sequence[str] = BASELINES) -> list[str]:
    """Return those of `among` that a file has, or else the baseline that it names."""
    names = set()
    for row in file.rows:
        names |= {row.label, row.rule, row_label(row.rule, row.format)}
    present = [name for name in among if name in names]
    if present or file.baseline is None:
        return present
    return [file.baseline]


def with_rows_of_all(files: Sequence[Exported]) -> Exported:
    """Return the first of several files, with the rows of all."""
    return replace(files[0], rows=tuple(chain.from_iterable(file.rows for file in files)))


def text_of(result: Result) -> str:
    """Return the name of a result's text."""
    return text_of_row(result.row)


def text_of_row(row: Row) -> str:
    """Return the name of a row's text: the last part of its `data.dir`."""
    if not row.runs:
        return ""
    return Path(str(row.runs[0].config["data"]["dir"])).name


def result_label(result: Result) -> str:
    """Return the short label of a result's row."""
    return short_label(result.row.label)


def short_label(label: str) -> str:
    """Return a label without its text and without settings that are None.

    >>> short_label("E4M3 nearest dir=data/stdlib granularity=None")
    'E4M3 nearest'
    """
    words = [word for word in label.split() if not word.startswith("dir=")]
    return " ".join(word for word in words if not word.endswith("=None"))


def by_text(results: Sequence[Result]) -> Iterator[tuple[str, list[Result]]]:
    """Yield the name of each text, with the results of its rows that have runs."""
    with_runs = [result for result in results if result.row.runs]
    for text in dict.fromkeys(map(text_of, with_runs)):
        yield (
            NAMES_OF_TEXTS.get(text, text),
            [result for result in with_runs if text_of(result) == text],
        )


def compared_table(file: Exported, against: Sequence[str]) -> str:
    """Return a table for each text.

    A line has a row's rates, bytes and losses, and its paired difference to each of the
    baselines `against`.
    """
    by_label = {}
    for name in against:
        by_label[name] = {result.row.label: result for result in measured_against(file, name)}
    header = ["rule", "lr", "bytes per parameter", "seeds", "final loss ± s.d."]
    header += [f"minus that of {short_label(name)}" for name in against]
    parts = shortfall_note(file.rows)
    for text, results in by_text(list(by_label[against[0]].values())):
        rows = []
        for result in results:
            differences = [
                _compared_difference(by_label[name][result.row.label]) for name in against
            ]
            rows.append([*_row_cells(result), *differences])
        parts.append(f"{text}:\n\n" + markdown(header, rows))
    return "\n".join(parts)


def shortfall_note(rows: Sequence[Row]) -> list[str]:
    """Return a line that says how many of the planned runs were made; none for all."""
    missing = shortfall(rows)
    return [f"({missing} were made.)\n"] if missing else []


def _row_cells(result: Result) -> list[str]:
    return [
        f"`{result_label(result)}`",
        rates_text(result),
        bytes_text(result),
        str(len(result.row.runs)),
        format_figure(result.final_val_loss).replace(" ", "\N{NO-BREAK SPACE}"),
    ]


def bytes_text(result: Result) -> str:
    """Return a row's bytes per parameter, or a dash."""
    size = result.bytes_per_parameter
    return "-" if size is None else f"{size:.2f}"


def rates_text(result: Result) -> str:
    """Return the rate of a row, followed by its `float_lr` if it has one."""
    float_rates = {run.config["optimizer"].get("float_lr") for run in result.row.runs} - {None}
    return "; ".join([format_rates(result), *(f"{rate:g}" for rate in sorted(float_rates))])


def _compared_difference(result: Result) -> str:
    if result.reference or result.difference is None:
        return "-"
    return difference_text(result.difference)


def source_line(file: Exported) -> str:
    """Return commit, torch and machine of the runs; an unknown commit is left out."""
    runs = [run for _, run in row_runs(file.rows)]
    commits = [str(run.environment["commit"])[:7] for run in runs if run.environment.get("commit")]
    versions = [str(run.environment["libraries"]["torch"]) for run in runs]
    processors = [str(run.environment.get("gpu") or run.environment.get("cpu")) for run in runs]
    start = f"Commit {_distinct(commits)}, torch" if commits else "Torch"
    on_gpu = any(run.environment.get("gpu") for run in runs)
    threads = "several runs at a time" if on_gpu else "one thread per run"
    line = f"{start} {_distinct(versions)}, {_distinct(processors)}, {threads}."
    if _is_paired_across_processors(file):
        line += f" {MARK.strip()}: on two processors."
    return f"{line}\n"


def _distinct(texts: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(texts))


def _is_paired_across_processors(file: Exported) -> bool:
    """Return whether a row and one of its baselines ran on two processors."""
    for name in baselines(file):
        for result in measured_against(file, name):
            if result.difference and result.difference.apart:
                return True
    return False
