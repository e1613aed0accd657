"""Results files: the runs of a sweep as a list of flat mappings in JSON, read back as
rows, and merged with others.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from nanogpt_bench.config.metrics import (
    BESIDE_LOSS,
    ELAPSED,
    GRAD_NORM,
    SMOOTHED_LOSS,
    TRAIN_LOSS,
    VAL_LOSS,
    VAL_LOSS_SE,
)
from nanogpt_bench.monitors import METRICS
from nanogpt_bench.monitors.shadow import COSINE, OVERHEAD
from nanogpt_bench.report.rows import Row, group_rows, identity
from nanogpt_bench.runs.environment import at
from nanogpt_bench.runs.load import SWEEP, TRIALS, Run, has_ended, is_run_folder, load_run
from nanogpt_bench.runs.read import Records, cleaned, finite, mapping
from nanogpt_bench.system.errors import BenchError, counted, one_line, refusals
from nanogpt_bench.system.untrusted import read_json

#: kinds of entries: a run, a missing seed, a row that was given up, a search of rates
RUN, MISSING, GIVEN_UP, SEARCH = KINDS = ("run", "missing", "given up", "search")
#: keys of summary.json that are exported; its other keys follow from the settings or
#: name files
SUMMARY_KEYS = (
    *(
        "name",
        "seed",
        "status",
        "failure",
        "stop",
        "steps",
        "steps_planned",
        "tokens",
        "seconds",
        "tokens_per_s",
    ),
    *(
        "first_val_loss",
        "final_val_loss",
        "final_val_loss_se",
        "best_val_loss",
        "bits_per_byte",
        "lr",
        "arrived",
    ),
    *(
        "stall",
        "stall_metric",
        "alerts",
        "bytes_per_parameter",
        "bytes_per_quantized_parameter",
        "parameters",
    ),
    *("quantized_parameters", "cosine", *(metric.figure for metric in BESIDE_LOSS)),
)
#: series of metrics.jsonl, at the steps of a validation
CURVES = ("step", "tokens", TRAIN_LOSS.name, VAL_LOSS.name, VAL_LOSS_SE.name, ELAPSED.name)
#: keys of environment.json that are not exported, since the numbers do not depend on
#: them
PASSING = ("command", "started", "resumed")
#: prefixes of an entry's keys: settings, facts of the machine, series, measurements of
#: the monitors
CONFIG, ENVIRONMENT, CURVE, LOOK = ("config.", "environment.", "curve.", "look.")


@dataclass(frozen=True)
class Exported:
    """The content of a results file: rows, whose runs have no folder, the label of the
    reference, and the tuning.
    """

    rows: tuple[Row, ...]
    baseline: str | None
    tuning: tuple[Mapping[str, Any], ...]


def export(folder: Path) -> list[dict[str, Any]]:
    """Return the entries of a results file for the folder of a sweep: one flat mapping
    per run and per search.

    A run that has not ended is an entry of kind `missing`; a row whose trials all
    failed is one of kind `given up`.
    """
    manifest = _read(folder / SWEEP) if (folder / SWEEP).is_file() else None
    if not isinstance(manifest, Mapping):
        raise BenchError(
            f"{str(folder)!r} holds no results: give the folder of a sweep, with {SWEEP}"
        )
    tuning = _read(folder / "tuning.json") if (folder / "tuning.json").is_file() else {}
    try:
        entries = list(_entries(folder, manifest, tuning))
        searches = [_search(row, tuning) for row in tuning.get("rows") or ()]
    except (KeyError, TypeError, AttributeError):  # the file of that name is no sweep's
        raise BenchError(
            f"{str(folder)!r} holds no results: what its list of runs says can't be read"
        ) from None
    if not searches and not any(entry["kind"] == RUN for entry in entries):
        raise BenchError(f"{str(folder)!r} has no run to export yet: none has ended")
    for entry in entries:
        entry["reference"] = entry["label"] == manifest.get("baseline")
    return [*entries, *searches]


def _read(path: Path) -> Any:
    with refusals(f"{str(path)!r} can't be read", OSError, ValueError):
        return read_json(path, times=8)


def flat_run(label: str, run: Run) -> dict[str, Any]:
    """Return a run as a flat mapping: outcome, settings, facts of its machine, series
    and monitors' measurements.
    """
    settings: dict[str, Any] = {}
    for section, content in run.config.items():
        if isinstance(content, Mapping):
            settings |= {f"{CONFIG}{section}.{key}": value for key, value in content.items()}
        elif section != "seed":  # the seed is among the keys of the summary
            settings[CONFIG + section] = content
    looks = monitored_figures(run)
    seen = [name for name in MONITORED if any(name in look for look in looks.values())]
    validations = [row for row, loss in run.metrics.rows(VAL_LOSS.name) if loss is not None]
    series = {name: dict(run.metrics.rows(name)) for name in CURVES}
    cosines = [value for value in run.curve(COSINE.name)[1] if value is not None]
    return {
        "kind": RUN,
        "label": label,
        "rule": run.rule,
        "format": run.format,
        **{
            key: run.summary[key]
            for key in SUMMARY_KEYS
            if run.summary.get(key) not in (None, {}, [])
        },
        **({"cosine": fmean(cosines)} if cosines else {}),
        "failures": [finding.kind for finding in run.failures],
        **settings,
        **{
            ENVIRONMENT + key: value for key, value in run.environment.items() if key not in PASSING
        },
        **{
            CURVE + name: [values.get(row) for row in validations]
            for name, values in series.items()
        },
        **({f"{LOOK}step": list(looks)} if looks else {}),
        **{LOOK + name: [look.get(name) for look in looks.values()] for name in seen},
    }


def _search(row: Mapping[str, Any], tuning: Mapping[str, Any]) -> dict[str, Any]:
    trials = row.get("trials") or ()
    parts = {part: row.get(part) or {} for part in ("start", "best", "inside", "cost")}
    confirm = tuning.get("confirm") or {}
    return {
        "kind": SEARCH,
        **{key: row.get(key) for key in ("label", "rule", "format", "rows", "over")},
        **{
            f"{part}.{key}": value
            for part, content in parts.items()
            for key, value in content.items()
        },
        **{
            f"trial.{key}": [trial["values"].get(key) for trial in trials] for key in parts["start"]
        },
        "trial.loss": [trial.get("loss") for trial in trials],
        **{
            f"trial.loss.{seed}": [(trial.get("losses") or {}).get(str(seed)) for trial in trials]
            for seed in tuning.get("seeds") or ()
        },
        **{f"tune.{key}": tuning.get(key) for key in ("factor", "span", "seeds", "steps")},
        **{f"confirm.{key}": confirm.get(key) for key in ("seeds", "steps")},
    }


def is_export(path: Path) -> bool:
    """True if a path is a JSON file, and so may be a results file."""
    return path.suffix == ".json" and path.is_file()


def is_of_kind(content: Any) -> bool:
    """True for the content of a results file: a list of entries of known kinds."""
    return (
        isinstance(content, list)
        and bool(content)
        and all(_kind(entry) in KINDS for entry in content)
    )


def _kind(entry: Any) -> Any:
    return entry.get("kind") if isinstance(entry, Mapping) else None


def read_export(path: Path) -> Exported:
    """Return the content of a results file."""
    if not path.exists():
        raise BenchError(f"results file {str(path)!r} does not exist")
    if path.is_dir():
        advice = f"nanogpt-bench results export {shlex.quote(str(path))} --out FILE.json"
        raise BenchError(
            f"{str(path)!r} is a folder, no results file; of a sweep's folder one is made by: "
            f"{advice}"
        )
    unread = (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError)
    with refusals(f"{str(path)!r} can't be read", *unread):
        content = cleaned(read_json(path, times=8))
        if _kind(content) == "nanogpt-bench results":
            raise BenchError(
                f"{str(path)!r} is of the former layout; export the sweep's folder again"
            )
        if not is_of_kind(content):
            raise BenchError(
                f"{str(path)!r} holds no results; nanogpt-bench results export SWEEP --out "
                f"FILE.json writes some"
            )
        rows: dict[str, Row] = {}
        for entry in (entry for entry in content if entry["kind"] != SEARCH):
            label = str(entry["label"])
            row = rows.get(label) or Row(label, str(entry["rule"]), str(entry["format"]), ())
            rows[label] = _with_entry(row, entry, path)
        baseline = next((str(entry["label"]) for entry in content if entry.get("reference")), None)
        tuning = tuple(_tuned(entry) for entry in content if entry["kind"] == SEARCH)
        return Exported(tuple(rows.values()), baseline, tuning)


def _with_entry(row: Row, entry: Mapping[str, Any], path: Path) -> Row:
    if entry["kind"] == RUN:
        rule, fmt = str(entry["rule"]), str(entry["format"])
        return replace(row, rule=rule, format=fmt, runs=(*row.runs, _read_run(entry, path)))
    if entry["kind"] == GIVEN_UP:
        return replace(row, reason=one_line(str(entry.get("why", ""))))
    seed = entry.get("seed")
    return replace(row, missing=(*row.missing, seed if isinstance(seed, int) else None))


def _read_run(entry: Mapping[str, Any], path: Path) -> Run:
    summary = {key: entry[key] for key in SUMMARY_KEYS if key in entry} | {
        key: entry[key] for key in ("rule", "format")
    }
    summary["failures"] = [{"kind": kind} for kind in entry["failures"]]
    config: dict[str, Any] = {}
    for key, value in _part(entry, CONFIG).items():
        section, dot, name = key.partition(".")
        if dot:
            config.setdefault(section, {})[name] = value
        else:
            config[key] = value
    config["seed"] = entry.get("seed")
    series, looks = _part(entry, CURVE), dict(_part(entry, LOOK))
    curve = [
        dict(zip(series, values, strict=True)) for values in zip(*series.values(), strict=True)
    ]
    steps = [int(step) for step in looks.pop("step", ())]
    return Run(
        path / str(entry.get("name") or entry.get("seed")),
        config,
        _part(entry, ENVIRONMENT),
        Records(
            [
                {name: value for name, value in record.items() if value is not None}
                for record in curve
            ]
        ),
        summary,
        looks={
            step: {
                name: value
                for name, values in looks.items()
                if (value := finite(values[at])) is not None
            }
            for at, step in enumerate(steps)
        },
    )


def _part(entry: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {
        key.removeprefix(prefix): value for key, value in entry.items() if key.startswith(prefix)
    }


def _tuned(entry: Mapping[str, Any]) -> dict[str, Any]:
    tried = _part(entry, "trial.")
    keys = [key for key in _part(entry, "start.") if isinstance(tried.get(key), list)]
    losses = tried.get("loss")
    trials = [
        {"values": {key: tried[key][at] for key in keys}, "loss": loss}
        for at, loss in enumerate(losses if isinstance(losses, list) else ())
    ]
    parts = {part: _part(entry, f"{part}.") for part in ("start", "best", "inside", "cost")}
    return {
        **{key: entry.get(key) for key in ("label", "rule", "format", "rows", "over")},
        **parts,
        "trials": trials,
    }


def to_json(content: Sequence[Mapping[str, Any]]) -> str:
    """Return a results file's text, one line per entry, so that a diff of two files is
    readable.
    """
    lines = (json.dumps(entry, ensure_ascii=False, separators=(",", ":")) for entry in content)
    return "[\n" + ",\n".join(lines) + "\n]\n"


def _entries(
    folder: Path, manifest: Mapping[str, Any], tuning: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """The entries of the rows of sweep.json and tuning.json, in the order of the table."""
    rows: dict[str, dict[str, Any]] = {}
    runs: dict[
        str, list[tuple[Any, str | None]]
    ] = {}  # seed and folder, None until the run is planned
    why: dict[str, str] = {}

    def name(label: Any, facts: Mapping[str, Any]) -> str:
        row = rows.setdefault(
            label := str(label), {"label": label, "rule": "unknown", "format": "none"}
        )
        row |= {key: str(facts[key]) for key in ("rule", "format") if facts.get(key)}
        runs.setdefault(label, [])
        return label

    for label in manifest.get("order") or ():
        name(label, {})
    for run in manifest.get("runs") or ():
        if run.get("of_plan", True) and not str(run["name"]).startswith(f"{TRIALS}/"):
            runs[name(run["label"], run)].append((run.get("seed"), str(run["name"])))
    for search in tuning.get("rows") or ():
        for label in (name(label, search) for label in search.get("rows") or ()):
            if not runs[label]:
                why[label] = given_up(search)
                seeds = () if why[label] else (tuning.get("confirm") or {}).get("seeds") or ()
                runs[label] = [(seed, None) for seed in seeds]
    for label, row in rows.items():
        for seed, place in runs[label]:
            run = (
                load_run(folder / place)
                if place is not None and is_run_folder(folder / place)
                else None
            )
            ended = run is not None and has_ended(run.summary)
            yield (
                flat_run(label, run)
                if run is not None and ended
                else {"kind": MISSING, **row, "seed": seed}
            )
        if why.get(label):
            yield {"kind": GIVEN_UP, **row, "why": why[label]}


def given_up(search: Mapping[str, Any]) -> str:
    """Return the message of a search whose trials all failed, from its row of
    tuning.json; "" if one succeeded.
    """
    if not search.get("over") or search.get("best"):
        return ""
    runs = int(finite(at(search, "cost.runs")) or 0)
    return f"failed: none of {counted(runs, 'trial')} came to its end with a loss"


#: share of a run's steps at which monitors' measurements are exported, beside its end
TENTH = 0.1
#: metrics in every record, whether or not monitors ran
ALWAYS = (TRAIN_LOSS.name, SMOOTHED_LOSS.name, GRAD_NORM.name)
#: significant digits of an exported value: enough for ranks
DIGITS = 4


#: monitors' metrics, in the order of display, without those of the machine
_WATCHED = [m for m in METRICS if m.monitor not in (None, "", "resources") and m != OVERHEAD]
MONITORED = tuple(
    dict.fromkeys((*ALWAYS, *(one.name for metric in _WATCHED for one in metric.each)))
)


def monitored_figures(run: Run) -> dict[int, Mapping[str, float]]:
    """Return monitors' measurements at two steps: the last ones within a tenth of the
    run's steps, and the last ones.

    If the monitors ran too seldom, there is only the second step; a run from a results
    file has those of the file. Values that are not finite are left out.
    """
    planned = run.number("steps_planned")
    if run.looks or not planned:
        return dict(run.looks)
    curves = {name: list(zip(*run.curve(name), strict=True)) for name in MONITORED}
    seen = sorted(
        {step for name in MONITORED if name not in ALWAYS for step, _ in curves[name] if step > 0}
    )
    ends = [
        max((step for step in seen if step <= limit), default=None)
        for limit in (TENTH * planned, planned)
    ]
    looks: dict[int, Mapping[str, float]] = {}
    for end in (end for end in ends if end is not None):
        # the last value up to that step, since monitors have different intervals
        known = {
            name: [y for x, y in points if 0 < x <= end and y is not None]
            for name, points in curves.items()
        }
        looks[int(end)] = {
            name: float(f"{values[-1]:.{DIGITS}g}") for name, values in known.items() if values
        }
    return looks


def merged_rows(runs: Sequence[Run], files: Sequence[Exported]) -> list[Row]:
    """Return the rows of run folders and results files together, with one run per seed,
    the longest.

    A row without runs stays if no file has runs under its label. A seed counts as
    missing if no file has it.
    """
    every = [*runs, *(run for file in files for row in file.rows for run in row.runs)]
    rows = group_rows(every)
    places = {
        identity(run): at for at, row in enumerate(rows) for run in (*row.runs, *row.uncounted)
    }
    labels = {row.label: at for at, row in enumerate(rows)}
    of_files = [row for file in files for row in file.rows]
    labels |= {row.label: places[identity(row.runs[0])] for row in of_files if row.runs}
    for row in of_files:
        at = places[identity(row.runs[0])] if row.runs else labels.get(row.label)
        known = (
            set()
            if at is None
            else {run.seed for run in rows[at].runs} - {None} | {*rows[at].missing}
        )
        missing = tuple(seed for seed in row.missing if seed not in known)
        if at is not None:
            rows[at] = replace(rows[at], missing=(*rows[at].missing, *missing))
        elif missing or row.reason:
            labels[row.label] = len(rows)
            rows.append(replace(row, missing=missing))
    return rows


def with_given_up(
    rows: Sequence[Row], tunings: Iterable[Iterable[Mapping[str, Any]]], order: Sequence[str] = ()
) -> list[Row]:
    """Return the rows and those of tunings whose trials all failed; labels in `order`
    come first, in that order.
    """
    found, labels = list(rows), {row.label for row in rows}
    for search in (search for tuning in tunings for search in tuning):
        named = search.get("rows")
        for label in map(
            str, named if isinstance(named, list) and (why := given_up(search)) else ()
        ):
            if label not in labels:
                labels.add(label)
                rule, fmt = (str(search.get(key) or "none") for key in ("rule", "format"))
                found.append(Row(label, rule, fmt, (), reason=why))
    places = {label: at for at, label in enumerate(order)}
    return sorted(found, key=lambda row: places.get(row.label, len(places)))


@dataclass(frozen=True)
class SensitivityMap:
    """The table of loss gaps (nats) with one layer pattern alone in one format; None
    without a loss.
    """

    patterns: tuple[str, ...]
    formats: tuple[str, ...]
    gap: tuple[tuple[float | None, ...], ...]
    operand: str = ""
    rule: str = ""
    status: tuple[tuple[str, ...], ...] = ()
    #: the checkpoint whose weights were rounded; "" if every cell was trained
    of: str = ""

    def ending(self, pattern: int, fmt: int) -> str:
        """Return in a word or two how the runs of a cell without a gap ended."""
        known = self.status[pattern][fmt] if self.status else ""
        return known or "no loss"


@dataclass(frozen=True)
class Studies:
    """The contents of all sensitivity.json and tuning.json in the folders of a report."""

    sensitivities: tuple[SensitivityMap, ...] = ()
    #: the rows of every tuning.json, unchanged
    tunings: tuple[tuple[Mapping[str, Any], ...], ...] = ()
    notes: tuple[str, ...] = field(default=())


def read_studies(folders: Iterable[Path]) -> Studies:
    """Read sensitivity.json and tuning.json of folders; `notes` names each malformed
    file.
    """
    notes: list[str] = []
    sensitivities: list[SensitivityMap] = []
    tunings: list[tuple[Mapping[str, Any], ...]] = []
    for folder in dict.fromkeys(folders):
        sensitivities += _read_sensitivity(folder / "sensitivity.json", notes)
        tunings += [tuned] if (tuned := tuple(_read_rows(folder / "tuning.json", notes))) else []
    return Studies(tuple(sensitivities), tuple(tunings), tuple(notes))


def _read_sensitivity(path: Path, notes: list[str]) -> list[SensitivityMap]:
    if not path.is_file():
        return []
    content = mapping(path, notes)
    patterns, formats, gap, status = (
        content.get(key) or () for key in ("patterns", "formats", "gap", "status")
    )
    if not _is_table(patterns, formats, gap):
        notes.append(f"{path.name}: expected patterns, formats and a gap for each pair; left out")
        return []
    ends = status if _is_table(patterns, formats, status) else ()
    operand, rule, of = (str(content.get(key) or "") for key in ("operand", "rule", "of"))
    return [
        SensitivityMap(
            tuple(map(str, patterns)),
            tuple(map(str, formats)),
            tuple(tuple(finite(cell) for cell in line) for line in gap),
            operand,
            rule,
            tuple(tuple(str(cell or "") for cell in line) for line in ends),
            of,
        )
    ]


def _is_table(patterns: Any, formats: Any, gap: Any) -> bool:
    if not all(isinstance(part, list) and part for part in (patterns, formats, gap)):
        return False
    return len(gap) == len(patterns) and all(
        isinstance(row, list) and len(row) == len(formats) for row in gap
    )


def _read_rows(path: Path, notes: list[str]) -> list[Mapping[str, Any]]:
    if not path.is_file():
        return []
    rows = mapping(path, notes).get("rows")
    if not isinstance(rows, list):
        notes.append(f"{path.name}: expected rows; left out")
        return []
    return [row for row in rows if isinstance(row, Mapping)]
