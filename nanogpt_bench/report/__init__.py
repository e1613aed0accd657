"""Writing a report: page, tables and figures in one folder."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from nanogpt_bench.report.merged import merged_rows, with_given_up
from nanogpt_bench.report.page import render
from nanogpt_bench.report.results import measure
from nanogpt_bench.report.results_file import is_export, read_export
from nanogpt_bench.report.row_styles import styles
from nanogpt_bench.report.rows import (
    Row,
    counted_once,
    find_reference,
    row_runs,
    shortfall,
    uncounted_lines,
)
from nanogpt_bench.report.sections import Page, all_sections
from nanogpt_bench.report.studies import Studies, read_studies
from nanogpt_bench.report.svg_figures import drawn_in, write_figures
from nanogpt_bench.report.tables import to_csv, to_markdown
from nanogpt_bench.report.vega_spec import Chart
from nanogpt_bench.runs.environment import at
from nanogpt_bench.runs.load import Run, find_runs, load_run
from nanogpt_bench.system.errors import BenchError, refused, unknown
from nanogpt_bench.system.files import refuse_to_replace, write_text

PAGE = "report.html"
TABLE_FILES = ("results.csv", "table.md")
#: the most different values that a fact lists
MOST_VALUES = 4
#: bytes of a page in which its title is looked for
_HEAD = 4096


def report(
    sources: Sequence[Path],
    *,
    out: Path,
    baseline: str | None = None,
    say: Callable[[str], None] | None = None,
) -> Path:
    """Rebuild page, figures and tables in `out`; return the page.

    `sources` are run folders, folders of them, or results files.
    """
    files = [read_export(path) for path in sources if is_export(path)]
    folders = [path for path in sources if not is_export(path)]
    run_folders = find_runs(folders, say)
    folder_runs = [load_run(folder) for folder in run_folders]
    # A file that is alone keeps its rows, with their labels, order and reference.
    # Several sources are grouped anew, since a row may be in two of them.
    if len(files) == 1 and not folder_runs:
        rows = [counted_once(row) for row in files[0].rows]
        if baseline is None:
            baseline = files[0].baseline
    else:
        rows = merged_rows(folder_runs, files)
    if not any(row.runs for row in rows):
        raise BenchError("no run folders given; give at least one")
    # A sweep's own files are in the folder of its runs.
    studies = read_studies([*folders, *(folder.parent for folder in run_folders), out])
    rows = with_given_up(rows, studies.tunings)
    if say is not None:
        _say_uncounted(rows, say)
    labels = [row.label for row in rows]
    if baseline is not None and baseline not in labels:
        raise unknown("--reference", baseline, labels)
    runs = [run for _, run in row_runs(rows)]
    title = "nanogpt-bench report" if len(runs) > 1 else f"nanogpt-bench: {runs[0].name}"
    facts = report_facts(runs)
    missing = shortfall(rows)
    if missing:
        facts["Runs"] = missing
    tunings = (*studies.tunings, *(file.tuning for file in files if file.tuning))
    return write_report(
        rows,
        out,
        title=title,
        facts=facts,
        baseline=baseline,
        studies=replace(studies, tunings=tunings),
    )


def _say_uncounted(rows: Iterable[Row], say: Callable[[str], None]) -> None:
    for row in rows:
        for line in uncounted_lines(row):
            say(line)


def check_report_folder(out: Path) -> None:
    """Refuse a folder with page, tables or figures that no report wrote.

    Those of an earlier report are replaced. They are recognised by its page.
    """
    page = out / PAGE
    for path in (page, *(out / name for name in TABLE_FILES), *drawn_in(out / "figures")):
        refuse_to_replace("--out", path, lambda _: _is_page(page), "another folder")


def _is_page(path: Path) -> bool:
    """Return whether a file is the page of a report, by its title."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return b"<title>nanogpt-bench" in file.read(_HEAD)


def write_report(
    rows: Sequence[Row],
    out: Path,
    *,
    title: str,
    facts: Mapping[str, str],
    baseline: str | None = None,
    studies: Studies | None = None,
) -> Path:
    """Write report.html, tables and figures; return the page's path.

    `studies` defaults to those in `out`.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise refused(f"output folder {str(out)!r} can't be made", error) from error
    reference = find_reference(rows, baseline)
    results = measure(rows, reference)
    # Rows of another corpus or length have references of their own. The first gets the
    # solid line.
    references = [result.row for result in results if result.reference]
    row_styles = styles(rows, reference, *references)
    if studies is None:
        studies = read_studies([out])
    sections = all_sections(Page(facts, results, row_styles, studies))
    page = write_text(out / PAGE, render(title, sections))
    for name, table in zip(TABLE_FILES, (to_csv(results), to_markdown(results)), strict=True):
        write_text(out / name, table)
    charts: list[Chart] = []
    for section in sections:
        charts += section.charts
    write_figures(charts, row_styles, out / "figures")
    return page


def report_facts(runs: Sequence[Run]) -> dict[str, str]:
    """Return facts about the runs from their records.

    If a fact differs, each value is listed once.
    """
    records = [run.environment for run in runs]
    facts = {
        "Command": _list_text(record.get("command") for record in records),
        "Machine": _list_text(_machine_text(record) for record in records),
        "Date": _dates_text(records),
        "Corpus": _list_text(_corpus_text(record) for record in records),
        "Model": _model_text(runs),
        "Steps": _list_text(run.summary.get("steps") for run in runs),
        "Versions": _list_text(_versions_text(record) for record in records),
        "Runs": str(len(runs)),
    }
    return {name: text for name, text in facts.items() if text}


def _list_text(values: Iterable[Any]) -> str:
    different = list(dict.fromkeys(str(value) for value in values if value not in (None, "")))
    text = "; ".join(different[:MOST_VALUES])
    hidden_count = len(different) - MOST_VALUES
    return f"{text} and {hidden_count} more" if hidden_count > 0 else text


def _machine_text(record: Mapping[str, Any]) -> str:
    parts = [record.get("gpu"), record.get("cpu"), record.get("platform")]
    if record.get("threads"):
        parts.append(f"threads per run: {record['threads']}")
    return ", ".join(str(part) for part in parts if part)


def _dates_text(records: Sequence[Mapping[str, Any]]) -> str:
    """Return the first and the last start, to the minute, in UTC."""
    starts = [str(record["started"]) for record in records if record.get("started")]
    minutes = sorted(start[:16].replace("T", " ") for start in starts)
    if not minutes:
        return ""
    if minutes[0] == minutes[-1]:
        return f"{minutes[0]} UTC"
    return f"{minutes[0]} to {minutes[-1]} UTC"


def _corpus_text(record: Mapping[str, Any]) -> str:
    """Return the corpus' source and the tokens of each split."""
    source = _source_text(at(record, "corpus.source"))
    splits = at(record, "corpus.splits")
    sizes = []
    for name in splits if isinstance(splits, Mapping) else ():
        tokens = at(splits, f"{name}.tokens")
        if isinstance(tokens, int):
            sizes.append(f"{name} {tokens:,} tokens")
    return "; ".join(part for part in (source, ", ".join(sizes)) if part)


def _source_text(source: Any) -> str:
    """Return a corpus' source, its files by name and the start of their SHA-256."""
    if not isinstance(source, Mapping):
        return str(source or "")
    parts = []
    for name, value in source.items():
        if isinstance(value, Mapping) and value:
            files = [f"{file} ({str(digest)[:8]}…)" for file, digest in value.items()]
            parts.append(f"{name}: {' '.join(files)}")
        elif value is not None:
            parts.append(f"{name}: {value}")
    return ", ".join(parts)


def _model_text(runs: Sequence[Run]) -> str:
    parameters = [run.number("parameters") for run in runs]
    all_text = _list_text(f"{number:,.0f}" for number in parameters if number is not None)
    if not all_text:
        return ""
    quantised = [run.number("quantized_parameters") for run in runs]
    part_text = _list_text(f"{number:,.0f}" for number in quantised if number)
    if not part_text:
        return f"{all_text} parameters"
    return f"{all_text} parameters, {part_text} of them quantised in the rows with a format"


def _versions_text(record: Mapping[str, Any]) -> str:
    versions = {"Python": record.get("python")}
    libraries = record.get("libraries")
    if isinstance(libraries, Mapping):
        versions |= libraries
    return ", ".join(f"{name} {version}" for name, version in versions.items() if version)
