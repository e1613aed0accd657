"""Rows of a results file against a baseline: a table with the paired differences, and
the machine of the runs.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from _markdown import markdown

from nanogpt_bench.report.columns import format_figure, format_rates
from nanogpt_bench.report.paired import MARK, difference_text
from nanogpt_bench.report.results import Result, measure
from nanogpt_bench.report.results_file import Exported
from nanogpt_bench.report.rows import Row, find_reference, row_label, shortfall
from nanogpt_bench.sweep.plan import baseline_of

#: names of texts on pages, by the last part of `data.dir`
TEXTS = {"stdlib": "STDLIB", "eurlex": "EULAW", "stdlib_pairs": "STDLIB in byte pairs"}
#: float rows that serve as baselines where a file has them
BASELINES = ("fp32", "muon")


def measured_against(file: Exported, baseline: str) -> list[Result]:
    """The rows of a file, with their differences to the row `baseline` on the same
    text.
    """
    return measure(file.rows, find_reference(file.rows, baseline_of(baseline, file.rows)))


def baselines(file: Exported, among: Sequence[str] = BASELINES) -> list[str]:
    """The baselines of a file: those of `among` that it has, or else the one that the
    file names.
    """
    known = {
        name for row in file.rows for name in (row.label, row.rule, row_label(row.rule, row.format))
    }
    there = [name for name in among if name in known]
    return there or ([] if file.baseline is None else [file.baseline])


def text_of(result: Result) -> str:
    """Name of a result's text."""
    return text_of_row(result.row)


def text_of_row(row: Row) -> str:
    """Name of a row's text: the last part of its `data.dir`."""
    return Path(next((str(run.config["data"]["dir"]) for run in row.runs), "")).name


def short(result: Result) -> str:
    """The row's label without its text and without settings that are None.

    >>> from nanogpt_bench.report.rows import Row
    >>> short(measure([Row("E4M3 nearest dir=data/stdlib granularity=None", "nearest", "E4M3", ())], None)[0])
    'E4M3 nearest'
    """
    return brief(result.row.label)


def brief(label: str) -> str:
    """A label without `dir=` and without settings that are None."""
    return " ".join(
        word for word in label.split() if not word.startswith("dir=") and not word.endswith("=None")
    )


def by_text(results: Sequence[Result]) -> Iterator[tuple[str, list[Result]]]:
    """The rows that have runs, text by text."""
    there = [result for result in results if result.row.runs]
    for text in dict.fromkeys(map(text_of, there)):
        yield TEXTS.get(text, text), [result for result in there if text_of(result) == text]


def table(file: Exported, against: Sequence[str]) -> str:
    """Every text's rows: rates, bytes, losses and the paired differences to each
    baseline.
    """
    each = {name: {r.row.label: r for r in measured_against(file, name)} for name in against}
    first = list(next(iter(each.values())).values())
    parts = [f"({missing} were made.)\n"] if (missing := shortfall(file.rows)) else []
    for text, results in by_text(first):
        header = ["rule", "lr", "bytes per parameter", "seeds", "final loss ± s.d."]
        header += [f"minus that of {brief(name)}" for name in each]
        rows = [
            (
                f"`{short(result)}`",
                rates(result),
                "-" if result.bytes_per_parameter is None else f"{result.bytes_per_parameter:.2f}",
                str(len(result.row.runs)),
                format_figure(result.final_val_loss).replace(" ", "\N{NO-BREAK SPACE}"),
                *(_difference(each[name][result.row.label]) for name in each),
            )
            for result in results
        ]
        parts.append(f"{text}:\n\n" + markdown(header, rows))
    return "\n".join(parts)


def rates(result: Result) -> str:
    """The rate of a row, followed by its `float_lr` if it has one."""
    own = {run.config["optimizer"].get("float_lr") for run in result.row.runs} - {None}
    return "; ".join([format_rates(result), *(f"{rate:g}" for rate in sorted(own))])


def _difference(result: Result) -> str:
    return (
        "-" if result.reference or result.difference is None else difference_text(result.difference)
    )


def source(file: Exported) -> str:
    """Commit and machine of the runs; the commit is left out where it is not known."""
    runs = [run for row in file.rows for run in row.runs]
    commits = dict.fromkeys(
        str(known)[:7] for run in runs if (known := run.environment.get("commit"))
    )
    made = f"Commit {', '.join(commits)}, torch" if commits else "Torch"
    torches = dict.fromkeys(str(run.environment["libraries"]["torch"]) for run in runs)
    on = dict.fromkeys(
        str(run.environment.get("gpu") or run.environment.get("cpu")) for run in runs
    )
    how = (
        "several runs at a time"
        if any(run.environment.get("gpu") for run in runs)
        else "one thread per run"
    )
    note = "".join(f" {mark}: on two processors." for mark in [MARK.strip()] if _apart(file))
    return f"{made} {', '.join(torches)}, {', '.join(on)}, {how}.{note}\n"


def _apart(file: Exported) -> bool:
    """Return whether a row is paired across two processors with one that it may be
    measured against.
    """
    each = [measured_against(file, name) for name in baselines(file)]
    return any(
        result.difference.apart for results in each for result in results if result.difference
    )
