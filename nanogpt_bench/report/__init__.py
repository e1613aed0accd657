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
from nanogpt_bench.report.rows import Row, counted_once, find_reference, shortfall, uncounted_lines
from nanogpt_bench.report.sections import Page, all_sections
from nanogpt_bench.report.studies import Studies, read_studies
from nanogpt_bench.report.svg_figures import drawn_in, write_figures
from nanogpt_bench.report.tables import to_csv, to_markdown
from nanogpt_bench.runs.environment import at
from nanogpt_bench.runs.load import Run, find_runs, load_run
from nanogpt_bench.system.errors import BenchError, refused, unknown
from nanogpt_bench.system.files import refuse_to_replace, write_text

PAGE = "report.html"
TABLES = ("results.csv", "table.md")
MOST_VALUES = 4  # shown of a fact
#: bytes of a page in which its title is looked for
_HEAD = 4096


def report(
    runs: Sequence[Path],
    *,
    out: Path,
    baseline: str | None = None,
    say: Callable[[str], None] | None = None,
) -> Path:
    """Rebuild page, figures and tables in `out` from run folders, folders of them or
    results files; return the page.
    """
    files = [read_export(path) for path in runs if is_export(path)]
    given = [path for path in runs if not is_export(path)]
    folders = find_runs(given, say)
    own = [load_run(path) for path in folders]
    loaded = [*own, *(run for file in files for row in file.rows for run in row.runs)]
    if not loaded:
        raise BenchError("no run folders given: expected at least one")
    one_file = files[0] if len(files) == 1 and not own else None
    # A sweep's own files are in the folder of its runs.
    studies = read_studies([*given, *(folder.parent for folder in folders), out])
    rows = with_given_up(
        merged_rows(own, files) if one_file is None else list(map(counted_once, one_file.rows)),
        studies.tunings,
    )
    if say is not None:
        for row in rows:
            for line in uncounted_lines(row):
                say(line)
    loaded = [run for row in rows for run in row.runs]
    title = "nanogpt-bench report" if len(loaded) > 1 else f"nanogpt-bench: {loaded[0].name}"
    if baseline is None and one_file is not None:
        baseline = one_file.baseline
    labels = [row.label for row in rows]
    if baseline is not None and baseline not in labels:
        raise unknown("--reference", baseline, labels)
    tunings = (*studies.tunings, *(file.tuning for file in files if file.tuning))
    facts = facts_of(loaded) | ({"Runs": there} if (there := shortfall(rows)) else {})
    return write_report(
        rows,
        out,
        title=title,
        facts=facts,
        baseline=baseline,
        studies=replace(studies, tunings=tunings),
    )


def check_folder(out: Path) -> None:
    """Refuse a folder with page, tables or figures that no report wrote: a report's
    have its page beside them.
    """
    page = out / PAGE
    for path in (page, *(out / name for name in TABLES), *drawn_in(out / "figures")):
        refuse_to_replace("--out", path, lambda _: _is_page(page), "another folder")


def _is_page(path: Path) -> bool:
    """True for the page of a report, by its title."""
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
    """Write report.html, tables and figures; return the page's path. `studies` defaults
    to those in `out`.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise refused(f"output folder {str(out)!r} can't be made", error) from error
    reference = find_reference(rows, baseline)
    results = measure(rows, reference)
    chosen = styles(rows, reference, *(result.row for result in results if result.reference))
    found = read_studies([out]) if studies is None else studies
    sections = all_sections(Page(facts, results, chosen, found))
    page = write_text(out / PAGE, render(title, sections))
    for name, table in zip(TABLES, (to_csv(results), to_markdown(results)), strict=True):
        write_text(out / name, table)
    write_figures(
        [chart for section in sections for chart in section.charts], chosen, out / "figures"
    )
    return page


def facts_of(runs: Sequence[Run]) -> dict[str, str]:
    """Return facts about the runs from their records; if a fact differs, each value is
    listed once.
    """
    records = [run.environment for run in runs]
    found = {
        "Command": _listed(record.get("command") for record in records),
        "Machine": _listed(map(_machine, records)),
        "Date": _dates(records),
        "Corpus": _listed(map(_corpus, records)),
        "Model": _model(runs),
        "Steps": _listed(run.summary.get("steps") for run in runs),
        "Versions": _listed(map(_versions, records)),
        "Runs": str(len(runs)),
    }
    return {name: text for name, text in found.items() if text}


def _listed(values: Iterable[Any]) -> str:
    different = list(dict.fromkeys(str(value) for value in values if value not in (None, "")))
    more = f" and {len(different) - MOST_VALUES} more" if len(different) > MOST_VALUES else ""
    return "; ".join(different[:MOST_VALUES]) + more


def _machine(record: Mapping[str, Any]) -> str:
    threads = f"threads per run: {record['threads']}" if record.get("threads") else None
    return ", ".join(
        str(part) for part in (*map(record.get, ("gpu", "cpu", "platform")), threads) if part
    )


def _dates(records: Sequence[Mapping[str, Any]]) -> str:
    """First and last start, to the minute, in UTC."""
    starts = sorted(
        str(record["started"])[:16].replace("T", " ") for record in records if record.get("started")
    )
    return (" to ".join(dict.fromkeys((starts[0], starts[-1]))) + " UTC") if starts else ""


def _corpus(record: Mapping[str, Any]) -> str:
    """The corpus' source, with files by name and the start of their SHA-256, and the
    tokens of each split.
    """
    source, splits = at(record, "corpus.source"), at(record, "corpus.splits")
    parts = [] if isinstance(source, Mapping) else [str(source or "")]
    for name, value in source.items() if isinstance(source, Mapping) else ():
        files = value.items() if isinstance(value, Mapping) else ()
        text = (
            " ".join(f"{file} ({str(digest)[:8]}…)" for file, digest in files)
            if files
            else str(value)
        )
        parts += [] if value is None else [f"{name}: {text}"]
    sizes = [
        f"{name} {tokens:,} tokens"
        for name in (splits if isinstance(splits, Mapping) else ())
        if isinstance(tokens := at(splits, f"{name}.tokens"), int)
    ]
    return "; ".join(part for part in (", ".join(parts), ", ".join(sizes)) if part)


def _model(runs: Sequence[Run]) -> str:
    whole, part = (
        _listed(
            f"{n:,.0f}"
            for run in runs
            if (n := run.number(key)) is not None and (n or key == "parameters")
        )
        for key in ("parameters", "quantized_parameters")
    )
    quantised = f", {part} of them quantised in the rows with a format" if part else ""
    return f"{whole} parameters{quantised}" if whole else ""


def _versions(record: Mapping[str, Any]) -> str:
    libraries = record.get("libraries")
    named = {"Python": record.get("python")} | (
        dict(libraries) if isinstance(libraries, Mapping) else {}
    )
    return ", ".join(f"{name} {version}" for name, version in named.items() if version)
