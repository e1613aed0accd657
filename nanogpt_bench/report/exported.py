"""Results as one small JSON file: what tables and curves of losses are drawn from, without the run folders."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nanogpt_bench.config.metrics import BESIDE_LOSS, ELAPSED, TRAIN_LOSS, VAL_LOSS, VAL_LOSS_SE
from nanogpt_bench.report.planned import PlannedRow, planned_rows, planned_trials
from nanogpt_bench.report.results import Row
from nanogpt_bench.report.seeds import SEED_KEYS
from nanogpt_bench.runs.earlier import has_ended
from nanogpt_bench.runs.find import SWEEP
from nanogpt_bench.runs.load import Run, is_run_folder, load_run
from nanogpt_bench.runs.looks import FIGURES, looks_of
from nanogpt_bench.runs.read import Records, cleaned, finite
from nanogpt_bench.system.errors import BenchError, one_line
from nanogpt_bench.system.untrusted import read_json

KIND = "nanogpt-bench results"
VERSION = 1
COMPARISON = "compare.json"
#: of summary.json; all else in it follows from the settings or tells of files
OUTCOMES = (
    *("name", "seed", "status", "failure", "stop", "steps", "steps_planned", "tokens", "seconds", "tokens_per_s"),
    *("first_val_loss", "final_val_loss", "final_val_loss_se", "best_val_loss", "bits_per_byte", "lr", "arrived"),
    *("stall", "stall_metric", "alerts", "bytes_per_parameter", "bytes_per_quantized_parameter", "parameters"),
    *("quantized_parameters", *(metric.figure for metric in BESIDE_LOSS)),
)
#: of metrics.jsonl, at the steps of a validation
CURVES = ("step", "tokens", TRAIN_LOSS.name, VAL_LOSS.name, VAL_LOSS_SE.name, ELAPSED.name)
#: of environment.json: they tell of the start of one run, not of what its numbers depend on
PASSING = ("command", "started", "resumed")
#: of a run's settings: what its row does not share
OWN = {key.rpartition(".")[::2] for key in SEED_KEYS}


@dataclass(frozen=True)
class Exported:
    """A results file as read: its rows, with runs that have no folder, the row to measure against, what was tuned."""

    rows: tuple[Row, ...]
    baseline: str | None
    tuning: tuple[Mapping[str, Any], ...]
    #: the trials of every search, as a row of runs
    trials: tuple[Row, ...] = ()


def export(folder: Path) -> dict[str, Any]:
    """Return the content of a results file: what the rows of a sweep or a comparison have come to, run by run.

    Settings that all runs share stand once, those of a row once a row; so do environments that are alike. A run that
    has not come to its own end is left out, and its row says of which seeds there are none yet.

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
    looks = {id(run): looks_of(run) for run in runs}
    seen = {name for of_run in looks.values() for look in of_run.values() for name in look}
    columns = _Columns([name for name in FIGURES if name in seen])
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
    """A command, its absolute paths by their last part: where somebody's files lie is nobody else's business.

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
    """The trials of searches as rows: what a search begun elsewhere is gone on with (`nanogpt_bench.sweep.known`)."""
    shared = _shared([_settings(run) for runs in of_rows for run in runs.values()])
    plain = replace(columns, figures=[])
    told = [_row(row, runs, shared, plain) for row, runs in zip(rows, of_rows, strict=True) if runs]
    return {"settings": _nested(shared), "rows": told}


@dataclass
class _Columns:
    """What runs name by number: figures of the monitors, and environments as they are met."""

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
    """The runs of a row that have come to their own end, by their place in its plan."""
    paths = {at: folder / name for at, (_, name) in enumerate(row.runs) if name is not None}
    found = {at: load_run(path) for at, path in paths.items() if is_run_folder(path)}
    return {at: run for at, run in found.items() if has_ended(run.summary)}


Setting = tuple[str, str]


def _settings(run: Run) -> dict[Setting, Any]:
    """A run's settings by (section, key), those that follow from its seed left out."""
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
    seen = looks_of(run) if columns.figures else {}
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
    """Whether a path is a file that may hold exported results, by its name."""
    return path.suffix == ".json" and path.is_file()


def read_export(path: Path) -> Exported:
    """Read a results file.

    Raises:
        BenchError: it can't be read, or is none; in one line.
    """
    try:
        content = cleaned(read_json(path, times=8))
        if not isinstance(content, Mapping) or content.get("kind") != KIND:
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
    """Settings with those of a row or a run put in, section by section."""
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
    """Return a results file's text: a line a run, so that what changed between two files can be read."""
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
