"""Results files: a sweep or comparison as one small JSON file, read back as rows, and merged with others."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nanogpt_bench.config.metrics import (
    BESIDE_LOSS,
    ELAPSED,
    GRAD_NORM,
    SMOOTHED_LOSS,
    TRAIN_LOSS,
    VAL_LOSS,
    VAL_LOSS_SE,
    Metric,
)
from nanogpt_bench.monitors import METRICS
from nanogpt_bench.monitors.shadow import OVERHEAD
from nanogpt_bench.report.rows import SEED_KEYS, Row, distinct, group_rows, identity
from nanogpt_bench.runs.earlier import has_ended
from nanogpt_bench.runs.find import SWEEP, TRIALS
from nanogpt_bench.runs.load import Run, is_run_folder, load_run
from nanogpt_bench.runs.read import Records, cleaned, finite
from nanogpt_bench.system.errors import BenchError, one_line
from nanogpt_bench.system.untrusted import read_json
from nanogpt_bench.system.words import counted

KIND = "nanogpt-bench results"
VERSION = 1
COMPARISON = "compare.json"
#: keys of summary.json; its other keys follow from the settings or name files
OUTCOMES = (
    *("name", "seed", "status", "failure", "stop", "steps", "steps_planned", "tokens", "seconds", "tokens_per_s"),
    *("first_val_loss", "final_val_loss", "final_val_loss_se", "best_val_loss", "bits_per_byte", "lr", "arrived"),
    *("stall", "stall_metric", "alerts", "bytes_per_parameter", "bytes_per_quantized_parameter", "parameters"),
    *("quantized_parameters", *(metric.figure for metric in BESIDE_LOSS)),
)
#: series of metrics.jsonl, at the steps of a validation
CURVES = ("step", "tokens", TRAIN_LOSS.name, VAL_LOSS.name, VAL_LOSS_SE.name, ELAPSED.name)
#: keys of environment.json that describe one start, not what the numbers depend on
PASSING = ("command", "started", "resumed")
#: settings in which the runs of a row differ
OWN = {key.rpartition(".")[::2] for key in SEED_KEYS}


@dataclass(frozen=True)
class Exported:
    """A results file as read: rows whose runs have no folder, the label of the reference, and the tuning."""

    rows: tuple[Row, ...]
    baseline: str | None
    tuning: tuple[Mapping[str, Any], ...]
    #: the trials of each search, as a row of runs
    trials: tuple[Row, ...] = ()


def export(folder: Path) -> dict[str, Any]:
    """Return the content of a results file for the folder of a sweep or a comparison, run by run.

    Settings that all runs share are written once, those of a row once per row, equal environments once. A run that has
    not ended is left out, and its row lists the missing seeds.

    Raises:
        BenchError: the folder holds neither a sweep nor a comparison, or none of its runs has ended.
    """
    manifest, tuned = _manifest(folder), folder / "tuning.json"
    tuning = _read(tuned) if tuned.is_file() else None
    try:
        planned, searched = planned_rows(manifest, tuning or {}), planned_trials(tuning or {})
        loaded, trials = ([_ended(folder, row) for row in rows] for rows in (planned, searched))
    except (KeyError, TypeError, AttributeError):  # of something else of that name
        raise BenchError(f"{str(folder)!r} holds no results: what its list of runs says can't be read") from None
    runs = [run for of_row in loaded for run in of_row.values()]
    if not runs and not any(trials):
        raise BenchError(f"{str(folder)!r} has no run to export yet: none has ended")
    shared = _shared([_settings(run) for run in runs])
    seen = {name for run in runs for figures in monitored_figures(run).values() for name in figures}
    columns = _Columns([name for name in MONITORED if name in seen])
    return {
        "kind": KIND,
        "version": VERSION,
        "command": _without_folders(manifest.get("command")),
        "mode": manifest.get("mode", "compare"),
        "baseline": manifest.get("baseline"),
        "runs": {"ended": len(runs), "planned": sum(len(row.runs) for row in planned)},
        "settings": _nested(shared),
        "rows": [_row(row, of_row, shared, columns) for row, of_row in zip(planned, loaded, strict=True)],
        "trials": _trials(searched, trials, columns),
        "environments": columns.environments,
        "monitors": columns.figures,
        "tuning": tuning,
    }


def _without_folders(command: Any) -> Any:
    """Shorten the absolute paths of a command to their last part, so that no private folder is published.

    >>> _without_folders("nanogpt-bench sweep a.yaml --from /data/mine/b.json --out runs/a")
    'nanogpt-bench sweep a.yaml --from b.json --out runs/a'
    """
    if not isinstance(command, str):
        return command
    try:
        words = shlex.split(command)
    except ValueError:  # written by something else
        return command
    return shlex.join(Path(word).name if Path(word).is_absolute() else word for word in words)


def _trials(rows: Sequence[PlannedRow], of_rows: Sequence[Mapping[int, Run]], columns: _Columns) -> dict[str, Any]:
    """Return the trials of searches as rows, from which a search elsewhere continues (`nanogpt_bench.sweep.record`)."""
    shared = _shared([_settings(run) for runs in of_rows for run in runs.values()])
    plain = replace(columns, figures=[])
    told = [_row(row, runs, shared, plain) for row, runs in zip(rows, of_rows, strict=True) if runs]
    return {"settings": _nested(shared), "rows": told}


@dataclass
class _Columns:
    """Lists that runs refer to by index: names of monitored figures, and environments in order of appearance."""

    figures: list[str]
    environments: list[dict[str, Any]] = field(default_factory=list)


def _read(path: Path) -> Any:
    try:
        return read_json(path, times=8)
    except (OSError, ValueError) as error:
        raise BenchError(f"{str(path)!r} can't be read: {one_line(error)}") from None


def _manifest(folder: Path) -> Mapping[str, Any]:
    for name in (SWEEP, COMPARISON):
        if (folder / name).is_file():
            content = _read(folder / name)
            if isinstance(content, Mapping):
                return content
    raise BenchError(f"{str(folder)!r} holds no results: give the folder of a sweep or a comparison, with {SWEEP}")


def _ended(folder: Path, row: PlannedRow) -> dict[int, Run]:
    """Return the ended runs of a row by their index in its plan."""
    paths = {at: folder / name for at, (_, name) in enumerate(row.runs) if name is not None}
    found = {at: load_run(path) for at, path in paths.items() if is_run_folder(path)}
    return {at: run for at, run in found.items() if has_ended(run.summary)}


Setting = tuple[str, str]


def _settings(run: Run) -> dict[Setting, Any]:
    """Return a run's settings by (section, key), without those that follow from its seed."""
    found = {("", key): value for key, value in run.config.items() if not isinstance(value, Mapping)}
    for section, content in run.config.items():
        if isinstance(content, Mapping):
            found |= {(section, key): value for key, value in content.items()}
    seeds = (run.seed, None)
    return {
        key: value for key, value in found.items() if key != ("", "seed") and (key not in OWN or value not in seeds)
    }


def _shared(each: Sequence[Mapping[Setting, Any]]) -> dict[Setting, Any]:
    if not each:
        return {}
    first, *others = each
    return {key: value for key, value in first.items() if all(key in one and one[key] == value for one in others)}


def _nested(settings: Mapping[Setting, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for (section, key), value in settings.items():
        (tree.setdefault(section, {}) if section else tree)[key] = value
    return tree


def _row(row: PlannedRow, runs: Mapping[int, Run], shared: Mapping[Setting, Any], columns: _Columns) -> dict[str, Any]:
    own = _shared([_settings(run) for run in runs.values()]) if runs else {}
    settings = {key: value for key, value in own.items() if key not in shared}
    missing = [seed for at, (seed, _) in enumerate(row.runs) if at not in runs]
    told = {
        "label": row.label,
        "rule": next((run.rule for run in runs.values()), row.rule),
        "format": next((run.format for run in runs.values()), row.format),
        "settings": _nested(settings),
        **({"missing": missing} if missing else {}),
        **({"why": row.why} if row.why else {}),
    }
    return {**told, "runs": [_run(run, own, columns) for run in runs.values()]}


def _run(run: Run, of_row: Mapping[Setting, Any], columns: _Columns) -> dict[str, Any]:
    environment = {key: value for key, value in run.environment.items() if key not in PASSING}
    if environment not in columns.environments:
        columns.environments.append(environment)
    own = {key: value for key, value in _settings(run).items() if key not in of_row}
    seen = monitored_figures(run) if columns.figures else {}
    looks = {str(step): [look.get(name) for name in columns.figures] for step, look in seen.items()}
    losses = [[record.get(name) for name in CURVES] for record in run.metrics if record.get(VAL_LOSS.name) is not None]
    return {
        **{key: run.summary[key] for key in OUTCOMES if run.summary.get(key) not in (None, {}, [])},
        **({"settings": _nested(own)} if own else {}),
        "failures": [finding.kind for finding in run.findings],
        "environment": columns.environments.index(environment),
        "curve": losses,
        **({"looks": looks} if looks else {}),
    }


def is_export(path: Path) -> bool:
    """True if a path is a JSON file, and so may be a results file."""
    return path.suffix == ".json" and path.is_file()


def is_of_kind(content: Any) -> bool:
    """Whether the content of a JSON file says that it is a results file."""
    return isinstance(content, Mapping) and content.get("kind") == KIND


def read_export(path: Path) -> Exported:
    """Read a results file.

    Raises:
        BenchError: the file can't be read or is no results file; in one line.
    """
    if not path.exists():
        raise BenchError(f"results file {str(path)!r} does not exist")
    if path.is_dir():
        advice = f"nanogpt-bench results export {shlex.quote(str(path))} --out FILE.json"
        raise BenchError(f"{str(path)!r} is a folder, no results file; of a sweep's folder one is made by: {advice}")
    try:
        content = cleaned(read_json(path, times=8))
        if not is_of_kind(content):
            raise BenchError(
                f"{str(path)!r} holds no results; nanogpt-bench results export SWEEP --out FILE.json writes some"
            )
        if content.get("version") != VERSION:
            raise BenchError(f"{str(path)!r} is of version {content.get('version')!r}; this one reads {VERSION}")
        rows = tuple(_read_row(path, row, content["settings"], content) for row in content["rows"])
        searched = content.get("trials") or {"settings": {}, "rows": ()}
        trials = tuple(_read_row(path, row, searched["settings"], content) for row in searched["rows"])
        tuning = content.get("tuning") or {}
        tuned = tuple(row for row in tuning.get("rows") or () if isinstance(row, Mapping))
        return Exported(rows, content.get("baseline"), tuned, trials)
    except BenchError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise BenchError(f"{str(path)!r} can't be read: {one_line(error)}") from None


def _read_row(path: Path, row: Mapping[str, Any], shared: Mapping[str, Any], content: Mapping[str, Any]) -> Row:
    config = _over(shared, row["settings"])
    runs = tuple(_read_run(path, row, config, entry, content) for entry in row["runs"])
    missing = tuple(seed if isinstance(seed, int) else None for seed in row.get("missing") or ())
    return Row(
        str(row["label"]), str(row["rule"]), str(row["format"]), runs, missing, one_line(str(row.get("why", "")))
    )


def _over(settings: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings updated by those of a row or a run, section by section."""
    config = {**settings}
    for section, content in own.items():
        config[section] = {**config.get(section, {}), **content} if isinstance(content, Mapping) else content
    return config


def _read_run(
    path: Path, row: Mapping[str, Any], config: Mapping[str, Any], entry: Mapping[str, Any], content: Mapping[str, Any]
) -> Run:
    summary = {key: entry[key] for key in OUTCOMES if key in entry} | {"rule": row["rule"], "format": row["format"]}
    summary["failures"] = [{"kind": kind} for kind in entry["failures"]]
    curve = Records([dict(zip(CURVES, values, strict=True)) for values in entry["curve"] if int(values[0]) >= 0])
    environment = content["environments"][entry["environment"]]
    if not isinstance(environment, Mapping):
        raise TypeError(f"an environment is {environment!r}")
    names = content.get("monitors") or ()
    looks = {
        int(step): {str(name): value for name, number in pairs if (value := finite(number)) is not None}
        for step, figures in (entry.get("looks") or {}).items()
        for pairs in [list(zip(names, figures, strict=True))]
    }
    place = path / str(entry.get("name") or entry.get("seed"))
    config = _over(config, {**(entry.get("settings") or {}), "seed": entry.get("seed")})
    return Run(place, config, environment, curve, summary, looks=looks)


def to_json(content: Mapping[str, Any]) -> str:
    """Return a results file's text, one line per run, so that a diff of two files is readable."""
    parts = {key: json.dumps(value, ensure_ascii=False) for key, value in content.items()}
    parts["rows"] = _lines(content["rows"])
    settings = json.dumps(content["trials"]["settings"], ensure_ascii=False)
    parts["trials"] = f'{{"settings": {settings}, "rows": {_lines(content["trials"]["rows"])}}}'
    return "{\n" + ",\n".join(f'"{key}": {parts[key]}' for key in content) + "\n}\n"


def _lines(rows: Sequence[Mapping[str, Any]]) -> str:
    told = [
        json.dumps({key: value for key, value in row.items() if key != "runs"}, ensure_ascii=False)[:-1]
        + ', "runs": [\n  '
        + ",\n  ".join(json.dumps(run, ensure_ascii=False, separators=(",", ":")) for run in row["runs"])
        + "]}"
        for row in rows
    ]
    return "[\n " + ",\n ".join(told) + "\n]"


@dataclass
class PlannedRow:
    """A planned row: (seed, folder) of each of its runs, folder None until the run is planned."""

    label: str
    rule: str = "unknown"
    format: str = "none"
    runs: list[tuple[int | None, str | None]] = field(default_factory=list)
    #: why no run will follow
    why: str = ""


def planned_rows(manifest: Mapping[str, Any], tuning: Mapping[str, Any]) -> list[PlannedRow]:
    """Return the rows of sweep.json or compare.json, and those of tuning.json, in the order of the table.

    A row under tuning has a run planned at each seed of the confirmation; a row whose trials all failed has none, and
    the reason in `why`.
    """
    rows = {str(label): PlannedRow(str(label)) for label in manifest.get("order") or ()}
    # A comparison lists its runs by row, and says under "runs" how many there are.
    by_row, in_a_list = (manifest["rows"], ()) if "rows" in manifest else ((), manifest.get("runs") or ())
    settings = manifest.get("settings") or {}
    for row in by_row:
        of_row = [(_planned_seed(settings.get(name)), str(name)) for name in dict.fromkeys(row["runs"])]
        _planned_row(rows, row).runs += of_row
    for run in in_a_list:
        if run.get("of_plan", True) and not str(run["name"]).startswith(f"{TRIALS}/"):
            _planned_row(rows, run).runs.append((run.get("seed"), str(run["name"])))
    seeds = (tuning.get("confirm") or {}).get("seeds") or ()
    for search in tuning.get("rows") or ():
        for label in search.get("rows") or ():
            told = _planned_row(rows, {**search, "label": label})
            if not told.runs:
                told.why = given_up(search)
                told.runs = [] if told.why else [(seed, None) for seed in seeds]
    return list(rows.values())


def _planned_seed(settings: Any) -> int | None:
    seed: int | None = (settings or {}).get("seed")
    return seed


def planned_trials(tuning: Mapping[str, Any]) -> list[PlannedRow]:
    """Return the searches of tuning.json as rows whose runs are the trials named there."""
    return [
        PlannedRow(
            str(search.get("label")),
            str(search.get("rule")),
            str(search.get("format")),
            [
                (int(seed), str(name))
                for trial in search.get("trials") or ()
                for seed, name in zip(trial.get("losses") or (), trial["runs"], strict=False)
            ],
        )
        for search in tuning.get("rows") or ()
    ]


def _planned_row(rows: dict[str, PlannedRow], told: Mapping[str, Any]) -> PlannedRow:
    """Get or make the row of a label, and update its rule and format."""
    row = rows.setdefault(str(told["label"]), PlannedRow(str(told["label"])))
    row.rule, row.format = str(told.get("rule") or row.rule), str(told.get("format") or row.format)
    return row


def given_up(search: Mapping[str, Any]) -> str:
    """Return the message of a search whose trials all failed, from its row of tuning.json; "" if one succeeded."""
    if not search.get("over") or search.get("best"):
        return ""
    trials = search.get("trials")
    runs = sum(len(trial.get("runs") or ()) for trial in trials) if isinstance(trials, Sequence) else 0
    return f"failed: none of {counted(runs, 'trial')} came to its end with a loss"


#: share of a run's steps at which monitored figures are exported, beside the end
TENTH = 0.1
#: figures that every record has, whether or not monitors ran
ALWAYS = (TRAIN_LOSS.name, SMOOTHED_LOSS.name, GRAD_NORM.name)
#: significant digits of an exported figure: enough for ranks
DIGITS = 4


def _is_watched(metric: Metric) -> bool:
    """True for a figure of the whole model: not of one bit, nor of the machine."""
    return bool(metric.monitor) and metric.monitor != "resources" and metric != OVERHEAD and metric.name[-2:] != "_I"


#: in the order of display
_WATCHED = (one.name for metric in METRICS if _is_watched(metric) for one in metric.each)
MONITORED = tuple(dict.fromkeys((*ALWAYS, *_WATCHED)))


def monitored_figures(run: Run) -> dict[int, Mapping[str, float]]:
    """Return monitored figures by step, at the last record within a tenth of the run's steps and at the last record.

    A run whose monitors ran too seldom has the last record only; a run read from a results file has those of the file.
    Values that are not finite are left out.
    """
    planned = run.number("steps_planned")
    if run.looks or not planned:
        return dict(run.looks)
    curves = {name: list(zip(*run.curve(name), strict=True)) for name in MONITORED}
    seen = sorted({step for name in MONITORED if name not in ALWAYS for step, _ in curves[name] if step > 0})
    ends = [max((step for step in seen if step <= limit), default=None) for limit in (TENTH * planned, planned)]
    return {int(end): _until(curves, end) for end in ends if end is not None}


def _until(curves: Mapping[str, Sequence[tuple[float, float | None]]], end: float) -> dict[str, float]:
    """Return the last value of every figure up to a step: each monitor has its own interval."""
    known = {name: [y for x, y in points if 0 < x <= end and y is not None] for name, points in curves.items()}
    return {name: float(f"{values[-1]:.{DIGITS}g}") for name, values in known.items() if values}


def merged_rows(runs: Sequence[Run], files: Sequence[Exported]) -> list[Row]:
    """Return the rows of run folders and results files together, each run once, from its longest record.

    A row without runs is kept if no file has runs under its label. A seed is missing if no file has it.
    """
    every = [*runs, *(run for file in files for row in file.rows for run in row.runs)]
    rows = group_rows(distinct(every))
    places = {identity(run): at for at, row in enumerate(rows) for run in (*row.runs, *row.aside)}
    labels = {row.label: at for at, row in enumerate(rows)}
    of_files = [row for file in files for row in file.rows]
    labels |= {row.label: places[identity(row.runs[0])] for row in of_files if row.runs}
    there = {(row.label, run.seed) for row in of_files for run in row.runs}
    for row in of_files:
        at = labels.get(row.label)
        known = set() if at is None else {run.seed for run in rows[at].runs}  # of run folders too
        missing = tuple(
            seed for seed in row.missing if (row.label, seed) not in there and (seed is None or seed not in known)
        )
        there |= {(row.label, seed) for seed in missing}  # counted once, though several files miss it
        if at is not None:
            rows[at] = replace(rows[at], missing=(*rows[at].missing, *missing))
        elif missing or row.why:
            labels[row.label] = len(rows)
            rows.append(replace(row, missing=missing))
    return rows


def with_given_up(
    rows: Sequence[Row], tunings: Iterable[Iterable[Mapping[str, Any]]], order: Sequence[str] = ()
) -> list[Row]:
    """Return the rows and those of tunings whose trials all failed, in the order of labels given."""
    found, labels = list(rows), {row.label for row in rows}
    for search in (search for tuning in tunings for search in tuning):
        named = search.get("rows")
        for label in map(str, named if isinstance(named, list) and (why := given_up(search)) else ()):
            if label not in labels:
                labels.add(label)
                rule, fmt = (str(search.get(key) or "none") for key in ("rule", "format"))
                found.append(Row(label, rule, fmt, (), why=why))
    places = {label: at for at, label in enumerate(order)}
    return sorted(found, key=lambda row: places.get(row.label, len(places)))
