"""Results as one small JSON file: what tables and curves of losses are drawn from, without the run folders."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanogpt_bench.config.metrics import ELAPSED, TRAIN_LOSS, VAL_LOSS, VAL_LOSS_SE
from nanogpt_bench.report.results import SEED_KEYS, Row
from nanogpt_bench.runs.find import SWEEP, TRIALS
from nanogpt_bench.runs.load import Run, is_run_folder, load_run
from nanogpt_bench.runs.read import cleaned
from nanogpt_bench.runs.records import Records
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
    *("quantized_parameters",),
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


def export(folder: Path) -> dict[str, Any]:
    """Return the content of a results file: what the rows of a sweep or a comparison have come to, run by run.

    Settings that all runs share stand once, those of a row once a row; so do environments that are alike.

    Raises:
        BenchError: the folder holds neither a sweep nor a comparison, or none of its runs has begun.
    """
    manifest = _manifest(folder)
    try:
        named = list(_rows(folder, manifest))
    except (KeyError, TypeError, AttributeError):  # of something else of that name
        raise BenchError(f"{str(folder)!r} holds no results: what its list of runs says can't be read") from None
    rows = [(label, [load_run(path) for path in paths if is_run_folder(path)]) for label, paths in named]
    runs = [run for _, loaded in rows for run in loaded]
    if not runs:
        raise BenchError(f"{str(folder)!r} has no run to export yet")
    shared = _shared([_settings(run) for run in runs])
    environments: list[dict[str, Any]] = []
    tuned = folder / "tuning.json"
    return {
        "kind": KIND,
        "version": VERSION,
        "command": manifest.get("command"),
        "mode": manifest.get("mode", "compare"),
        "baseline": manifest.get("baseline"),
        "settings": _nested(shared),
        "rows": [_row(label, loaded, shared, environments) for label, loaded in rows if loaded],
        "environments": environments,
        "tuning": _read(tuned) if tuned.is_file() else None,
    }


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


def _rows(folder: Path, manifest: Mapping[str, Any]) -> Iterator[tuple[str, list[Path]]]:
    """Yield the label of every row of the table, and the folders of its runs."""
    found: dict[str, list[Path]] = {str(label): [] for label in manifest.get("order") or ()}
    for row in manifest.get("rows") or ():  # a comparison's
        found.setdefault(str(row["label"]), []).extend(folder / str(name) for name in row["runs"])
    for run in manifest.get("runs") or ():  # a sweep's
        if run.get("of_plan", True) and not str(run["name"]).startswith(f"{TRIALS}/"):
            found.setdefault(str(run["label"]), []).append(folder / str(run["name"]))
    yield from found.items()


Setting = tuple[str, str]


def _settings(run: Run) -> dict[Setting, Any]:
    """A run's settings by (section, key), those that belong to its seed left out."""
    found = {("", key): value for key, value in run.config.items() if not isinstance(value, Mapping)}
    for section, content in run.config.items():
        if isinstance(content, Mapping):
            found |= {(section, key): value for key, value in content.items()}
    return {key: value for key, value in found.items() if key not in OWN}


def _shared(each: Sequence[Mapping[Setting, Any]]) -> dict[Setting, Any]:
    first, *others = each
    return {key: value for key, value in first.items() if all(key in one and one[key] == value for one in others)}


def _nested(settings: Mapping[Setting, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for (section, key), value in settings.items():
        (tree.setdefault(section, {}) if section else tree)[key] = value
    return tree


def _row(label: str, runs: Sequence[Run], shared: Mapping[Setting, Any], environments: list[dict[str, Any]]) -> Any:
    own = _shared([_settings(run) for run in runs])
    settings = {key: value for key, value in own.items() if key not in shared}
    told = {"label": label, "rule": runs[0].rule, "format": runs[0].format, "settings": _nested(settings)}
    return {**told, "runs": [_run(run, environments) for run in runs]}


def _run(run: Run, environments: list[dict[str, Any]]) -> dict[str, Any]:
    environment = {key: value for key, value in run.environment.items() if key not in PASSING}
    if environment not in environments:
        environments.append(environment)
    losses = [[record.get(name) for name in CURVES] for record in run.metrics if record.get(VAL_LOSS.name) is not None]
    return {
        **{key: run.summary[key] for key in OUTCOMES if run.summary.get(key) not in (None, {}, [])},
        "failures": [finding.kind for finding in run.findings],
        "environment": environments.index(environment),
        "curve": losses,
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
        rows = tuple(_read_row(path, row, content) for row in content["rows"])
        tuning = content.get("tuning") or {}
        tuned = tuple(row for row in tuning.get("rows") or () if isinstance(row, Mapping))
        return Exported(rows, content.get("baseline"), tuned)
    except BenchError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise BenchError(f"{str(path)!r} can't be read: {one_line(error)}") from None


def _read_row(path: Path, row: Mapping[str, Any], content: Mapping[str, Any]) -> Row:
    config = {**content["settings"]}
    for section, own in row["settings"].items():
        config[section] = {**config.get(section, {}), **own} if isinstance(own, Mapping) else own
    runs = tuple(_read_run(path, row, config, entry, content["environments"]) for entry in row["runs"])
    return Row(str(row["label"]), str(row["rule"]), str(row["format"]), runs)


def _read_run(
    path: Path, row: Mapping[str, Any], config: Mapping[str, Any], entry: Mapping[str, Any], environments: Sequence[Any]
) -> Run:
    summary = {key: entry[key] for key in OUTCOMES if key in entry} | {"rule": row["rule"], "format": row["format"]}
    summary["failures"] = [{"kind": kind} for kind in entry["failures"]]
    curve = Records([dict(zip(CURVES, values, strict=True)) for values in entry["curve"] if int(values[0]) >= 0])
    environment = environments[entry["environment"]]
    if not isinstance(environment, Mapping):
        raise TypeError(f"an environment is {environment!r}")
    place = path / str(entry.get("name") or entry.get("seed"))
    return Run(place, {**config, "seed": entry.get("seed")}, environment, curve, summary)


def to_json(content: Mapping[str, Any]) -> str:
    """Return a results file's text: a line a run, so that what changed between two files can be read."""
    parts = {key: json.dumps(value, ensure_ascii=False) for key, value in content.items() if key != "rows"}
    rows = [
        json.dumps({key: value for key, value in row.items() if key != "runs"}, ensure_ascii=False)[:-1]
        + ', "runs": [\n  '
        + ",\n  ".join(json.dumps(run, ensure_ascii=False, separators=(",", ":")) for run in row["runs"])
        + "]}"
        for row in content["rows"]
    ]
    parts["rows"] = "[\n " + ",\n ".join(rows) + "\n]"
    return "{\n" + ",\n".join(f'"{key}": {parts[key]}' for key in content) + "\n}\n"
