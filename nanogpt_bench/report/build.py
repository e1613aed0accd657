"""Write a report: page, tables and figures in one folder."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from nanogpt_bench.report.chart import drawn_in, looks, write_figures
from nanogpt_bench.report.page import render
from nanogpt_bench.report.results import Result, measure
from nanogpt_bench.report.results_file import Studies, is_export, merged_rows, read_export, read_studies, with_given_up
from nanogpt_bench.report.rows import Row, counted_once, find_reference, left_aside, shortfall
from nanogpt_bench.report.sections import Page, all_sections
from nanogpt_bench.report.tables import to_csv, to_markdown
from nanogpt_bench.runs.environment import at
from nanogpt_bench.runs.find import find_runs
from nanogpt_bench.runs.load import Run, load_run
from nanogpt_bench.system.errors import BenchError, refused, unknown
from nanogpt_bench.system.files import refuse_to_replace, write_text

PAGE = "report.html"
TABLES = ("results.csv", "table.md")
MOST_VALUES = 4  # of a fact
#: bytes of a page that have its title
_HEAD = 4096


def report(
    runs: Sequence[Path], *, out: Path, baseline: str | None = None, say: Callable[[str], None] | None = None
) -> Path:
    """Rebuild page, figures and tables in `out` from run folders, folders of these, or results files; return the page.

    `say` receives the number of runs found and where.

    Raises:
        BenchError: a path neither is nor holds a run folder, no row is labelled `baseline`, or `out` is a file.
    """
    files = [read_export(path) for path in runs if is_export(path)]
    given = [path for path in runs if not is_export(path)]
    folders = find_runs(given, say)
    own = [load_run(path) for path in folders]
    loaded = [*own, *(run for file in files for row in file.rows for run in row.runs)]
    if not loaded:
        raise BenchError("no run folders given: expected at least one")
    one_file = files[0] if len(files) == 1 and not own else None
    # Files of a sweep lie beside its runs.
    studies = read_studies([*given, *(folder.parent for folder in folders), out])
    rows = with_given_up(
        merged_rows(own, files) if one_file is None else list(map(counted_once, one_file.rows)), studies.tunings
    )
    for line in (line for row in rows for line in left_aside(row.label, row.runs, row.aside)):
        if say is not None:
            say(line)
    loaded = [run for row in rows for run in row.runs]
    title = "nanogpt-bench report" if len(loaded) > 1 else f"nanogpt-bench: {loaded[0].name}"
    if baseline is None and one_file is not None:
        baseline = one_file.baseline
    _check_baseline(rows, baseline)
    tunings = (*studies.tunings, *(file.tuning for file in files if file.tuning))
    facts = facts_of(loaded) | ({"Runs": there} if (there := shortfall(rows)) else {})
    return write_report(
        rows, out, title=title, facts=facts, baseline=baseline, studies=replace(studies, tunings=tunings)
    )


def _check_baseline(rows: Sequence[Row], label: str | None) -> None:
    labels = [row.label for row in rows]
    if label is not None and label not in labels:
        raise unknown("--baseline", label, labels)


def check_folder(out: Path) -> None:
    """Refuse a folder whose page, tables or figures are somebody else's; those of a report have its page beside them.

    Raises:
        BenchError: names the file.
    """
    page = out / PAGE
    for path in (page, *(out / name for name in TABLES), *drawn_in(out / "figures")):
        refuse_to_replace("--out", path, lambda _: _is_page(page), "a folder of its own")


def _is_page(path: Path) -> bool:
    """Whether a file is the page of a report: its title says so."""
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
    """Write report.html, the tables and the figures; return the page's path.

    `studies` are the files of sweeps beside their runs, by default those in `out`.

    Raises:
        BenchError: the folder can't be made, or `baseline` is no row.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise refused(f"output folder {str(out)!r} can't be made", error) from error
    reference = find_reference(rows, baseline)
    results = measure(rows, reference)
    chosen = looks(rows, reference, *(result.row for result in results if result.reference))
    found = read_studies([out]) if studies is None else studies
    sections = all_sections(Page(facts, results, chosen, found))
    page = write_text(out / PAGE, render(title, sections))
    write_tables(results, out)
    write_figures([chart for section in sections for chart in section.charts], chosen, out / "figures")
    return page


def write_tables(results: Sequence[Result], out: Path) -> None:
    """Write results.csv and table.md."""
    for name, made in zip(TABLES, (to_csv, to_markdown), strict=True):
        write_text(out / name, made(results))


def facts_of(runs: Sequence[Run]) -> dict[str, str]:
    """Return the facts of the runs from their records; a fact that differs lists each value once."""
    found = {
        "Command": _listed(run.environment.get("command") for run in runs),
        "Machine": _listed(_machine(run.environment) for run in runs),
        "Date": _dates(runs),
        "Corpus": _listed(_corpus(run.environment) for run in runs),
        "Model": _model(runs),
        "Steps": _listed(run.summary.get("steps") for run in runs),
        "Versions": _listed(_versions(run.environment) for run in runs),
        "Runs": str(len(runs)),
    }
    return {name: text for name, text in found.items() if text}


def _listed(values: Any) -> str:
    different = list(dict.fromkeys(str(value) for value in values if value not in (None, "")))
    more = f" and {len(different) - MOST_VALUES} more" if len(different) > MOST_VALUES else ""
    return "; ".join(different[:MOST_VALUES]) + more


def _machine(environment: Mapping[str, Any]) -> str:
    parts = [environment.get("gpu"), environment.get("cpu"), environment.get("platform")]
    threads = environment.get("threads")
    return ", ".join(str(part) for part in [*parts, f"threads a run: {threads}" if threads else None] if part)


def _dates(runs: Sequence[Run]) -> str:
    """Return first and last start, to the minute, in UTC."""
    starts = sorted(str(run.environment["started"])[:16] for run in runs if run.environment.get("started"))
    different = list(dict.fromkeys(start.replace("T", " ") for start in starts))
    return (" to ".join(dict.fromkeys((different[0], different[-1]))) + " UTC") if different else ""


def _words(value: Any) -> str:
    """Format a fact of the source; for files their names and the start of their SHA-256."""
    if not isinstance(value, Mapping):
        return str(value)
    return " ".join(f"{name} ({str(digest)[:8]}…)" for name, digest in value.items())


def _corpus(environment: Mapping[str, Any]) -> str:
    source, splits = at(environment, "corpus.source"), at(environment, "corpus.splits")
    text = (
        ", ".join(f"{k}: {_words(v)}" for k, v in source.items() if v is not None)
        if isinstance(source, Mapping)
        else str(source or "")
    )
    sizes = [
        f"{name} {tokens:,} tokens"
        for name in (splits if isinstance(splits, Mapping) else ())
        if isinstance(tokens := at(splits, f"{name}.tokens"), int)
    ]
    return "; ".join(part for part in (text, ", ".join(sizes)) if part)


def _model(runs: Sequence[Run]) -> str:
    whole = _listed(f"{n:,.0f}" for run in runs if (n := run.number("parameters")) is not None)
    part = _listed(f"{n:,.0f}" for run in runs if (n := run.number("quantized_parameters")))
    return (
        f"{whole} parameters" + (f", {part} of them quantised in the rows with a format" if part else "")
        if whole
        else ""
    )


def _versions(environment: Mapping[str, Any]) -> str:
    libraries = environment.get("libraries")
    named = {"Python": environment.get("python")} | (dict(libraries) if isinstance(libraries, Mapping) else {})
    return ", ".join(f"{name} {version}" for name, version in named.items() if version)
