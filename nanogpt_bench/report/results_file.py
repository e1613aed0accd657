"""Results files: the runs of a sweep as a list of flat mappings in JSON.

A file has one entry per run, per missing seed, per row that was given up, and per search
of rates. The keys of an entry have a prefix (`config.`, `environment.`, `curve.`,
`look.`) for what they are; outcomes have none. `export` writes a file from the folder of
a sweep, `read_export` reads one back as rows whose runs have no folder.
"""

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

from nanogpt_bench.config.metrics import (
    BESIDE_LOSS,
    ELAPSED,
    TRAIN_LOSS,
    VAL_LOSS,
    VAL_LOSS_SE,
)
from nanogpt_bench.config.renamed import with_current_values
from nanogpt_bench.config.schema import NO_FORMAT
from nanogpt_bench.monitors.shadow import COSINE
from nanogpt_bench.report.monitored import MONITORED, monitored_figures
from nanogpt_bench.report.rows import Row
from nanogpt_bench.runs.environment import at, history_lines
from nanogpt_bench.runs.load import SWEEP, TRIALS, Run, has_ended, is_run_folder, load_run
from nanogpt_bench.runs.read import Records, cleaned, finite
from nanogpt_bench.system.errors import BenchError, counted, one_line, refusals
from nanogpt_bench.system.untrusted import read_json


class EntryKind(StrEnum):
    """The kinds of entries of a results file."""

    RUN = "run"
    #: a seed without a run that has ended
    MISSING = "missing"
    #: a row whose trials all failed
    GIVEN_UP = "given up"
    #: a search of rates
    SEARCH = "search"


#: keys of summary.json that are exported, where a run has them. Its other keys follow
#: from the settings, name files, or are of memory and of the shadow's time
SUMMARY_KEYS = (
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
    "first_val_loss",
    "final_val_loss",
    "final_val_loss_se",
    "best_val_loss",
    "bits_per_byte",
    "lr",
    "arrived",
    "stall",
    "stall_metric",
    "alerts",
    "bytes_per_parameter",
    "bytes_per_quantized_parameter",
    "parameters",
    "quantized_parameters",
    "cosine",
    "config_history",
    *(metric.figure for metric in BESIDE_LOSS),
)
#: series of metrics.jsonl, at the steps of a validation
CURVES = ("step", "tokens", TRAIN_LOSS.name, VAL_LOSS.name, VAL_LOSS_SE.name, ELAPSED.name)
#: keys of environment.json that are not exported: the numbers do not depend on them,
#: but for settings changed at a resumption, which are in the summary's `config_history`
NOT_EXPORTED = ("command", "started", "resumed")
#: prefix of an entry's keys: settings
CONFIG_PREFIX = "config."
#: prefix of an entry's keys: facts of the machine
ENVIRONMENT_PREFIX = "environment."
#: prefix of an entry's keys: series over the validations
CURVE_PREFIX = "curve."
#: prefix of an entry's keys: measurements of the monitors, each called a look
LOOK_PREFIX = "look."
#: prefix of an entry's keys: series over the trials of a search
TRIAL_PREFIX = "trial."
#: keys of a search that are exported as they are in tuning.json
SEARCH_FACTS = ("label", "rule", "format", "rows", "over")
#: mappings of a search, by key of the setting or of the cost; their names are prefixes
SEARCH_PARTS = ("start", "best", "inside", "cost")


@dataclass(frozen=True)
class Exported:
    """The content of a results file."""

    #: rows whose runs have no folder
    rows: tuple[Row, ...]
    #: the label of the reference
    baseline: str | None
    tuning: tuple[Mapping[str, Any], ...]


def export(folder: Path) -> list[dict[str, Any]]:
    """Return the entries of a results file for the folder of a sweep.

    There is one flat mapping per run and per search. A run that has not ended is an
    entry of kind `missing`; a row whose trials all failed is one of kind `given up`.
    """
    manifest = _read_json_or_refuse(folder / SWEEP) if (folder / SWEEP).is_file() else None
    if not isinstance(manifest, Mapping):
        raise BenchError(
            f"{str(folder)!r} holds no results; give the folder of a sweep, with {SWEEP} in it"
        )
    tuning_file = folder / "tuning.json"
    tuning = _read_json_or_refuse(tuning_file) if tuning_file.is_file() else {}
    try:
        entries: list[dict[str, Any]] = []
        for row in _planned_rows(manifest, tuning):
            entries += _row_entries(folder, row)
        searches = [_search_entry(row, tuning) for row in tuning.get("rows") or ()]
    except (KeyError, TypeError, AttributeError):
        # The file of that name is no sweep's.
        raise BenchError(f"{str(folder)!r}: the list of runs in {SWEEP} can't be read") from None
    if not searches and not any(entry["kind"] == EntryKind.RUN for entry in entries):
        raise BenchError(f"{str(folder)!r} has no run to export yet, since none has ended")
    for entry in entries:
        entry["reference"] = entry["label"] == manifest.get("baseline")
    return [*entries, *searches]


def _read_json_or_refuse(path: Path) -> Any:
    with refusals(f"{str(path)!r} can't be read", OSError, ValueError):
        return read_json(path, times=8)


@dataclass(frozen=True)
class _PlannedSeed:
    """A run that a row needs: its seed, and its folder's name if it was planned yet."""

    seed: Any
    folder: str | None = None


@dataclass
class _PlannedRow:
    """A row of the sweep's table as sweep.json and tuning.json plan it."""

    label: str
    rule: str = "unknown"
    format: str = NO_FORMAT
    seeds: list[_PlannedSeed] = field(default_factory=list)
    #: why there will be no runs; "" otherwise
    reason: str = ""

    def update(self, facts: Mapping[str, Any]) -> None:
        """Take the rule and the format that an entry names."""
        if facts.get("rule"):
            self.rule = str(facts["rule"])
        if facts.get("format"):
            self.format = str(facts["format"])

    def entry(self, kind: EntryKind) -> dict[str, Any]:
        return {"kind": kind, "label": self.label, "rule": self.rule, "format": self.format}


def _planned_rows(manifest: Mapping[str, Any], tuning: Mapping[str, Any]) -> list[_PlannedRow]:
    """Return the rows of sweep.json and tuning.json, in the order of the table."""
    rows: dict[str, _PlannedRow] = {}

    def row_of(label: Any, facts: Mapping[str, Any]) -> _PlannedRow:
        row = rows.setdefault(str(label), _PlannedRow(str(label)))
        row.update(facts)
        return row

    for label in manifest.get("order") or ():
        row_of(label, {})
    for run in manifest.get("runs") or ():
        # sweep.json keeps runs of earlier plans, and has trials beside the rows' runs
        if run.get("of_plan", True) and not str(run["name"]).startswith(f"{TRIALS}/"):
            row = row_of(run["label"], run)
            row.seeds.append(_PlannedSeed(run.get("seed"), str(run["name"])))
    for search in tuning.get("rows") or ():
        for label in search.get("rows") or ():
            row = row_of(label, search)
            if not row.seeds:
                row.reason = why_given_up(search)
                if not row.reason:
                    seeds = (tuning.get("confirm") or {}).get("seeds") or ()
                    row.seeds = [_PlannedSeed(seed) for seed in seeds]
    return list(rows.values())


def _row_entries(folder: Path, row: _PlannedRow) -> Iterator[dict[str, Any]]:
    """Yield the entries of a row: a run or a missing seed each, or that it was given up."""
    for planned in row.seeds:
        run = None
        if planned.folder is not None and is_run_folder(folder / planned.folder):
            run = load_run(folder / planned.folder)
        if run is not None and has_ended(run.summary):
            yield flat_run(row.label, run)
        else:
            yield {**row.entry(EntryKind.MISSING), "seed": planned.seed}
    if row.reason:
        yield {**row.entry(EntryKind.GIVEN_UP), "why": row.reason}


def why_given_up(search: Mapping[str, Any]) -> str:
    """Return the message of a search whose trials all failed; "" if one succeeded.

    `search` is a row of tuning.json.
    """
    if not search.get("over") or search.get("best"):
        return ""
    runs = int(finite(at(search, "cost.runs")) or 0)
    return f"failed: none of {counted(runs, 'trial')} ended with a loss"


def flat_run(label: str, run: Run) -> dict[str, Any]:
    """Return a run as a flat mapping.

    It has the outcome, settings, facts of the machine, series and monitors' measurements.
    """
    entry: dict[str, Any] = {
        "kind": EntryKind.RUN,
        "label": label,
        "rule": run.rule,
        "format": run.format,
    }
    for key in SUMMARY_KEYS:
        if run.summary.get(key) not in (None, {}, []):
            entry[key] = run.summary[key]
    cosines = [value for value in run.curve(COSINE.name)[1] if value is not None]
    if cosines:
        entry["cosine"] = fmean(cosines)
    entry["failures"] = [finding.kind for finding in run.failures]
    entry |= _prefixed_settings(run.config)
    for key, value in run.environment.items():
        if key not in NOT_EXPORTED:
            entry[ENVIRONMENT_PREFIX + key] = value
    entry |= _flat_curves(run)
    entry |= _flat_looks(run)
    return entry


def _prefixed_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings under keys such as `config.optimizer.lr`."""
    settings = {}
    for section, content in config.items():
        if isinstance(content, Mapping):
            for key, value in content.items():
                settings[f"{CONFIG_PREFIX}{section}.{key}"] = value
        elif section != "seed":
            # The seed is among the keys of the summary.
            settings[CONFIG_PREFIX + section] = content
    return settings


def _flat_curves(run: Run) -> dict[str, list[Any]]:
    """Return each series at the steps of a validation; None where it has no value."""
    validations = [row for row, loss in run.metrics.rows(VAL_LOSS.name) if loss is not None]
    curves = {}
    for name in CURVES:
        values = dict(run.metrics.rows(name))
        curves[CURVE_PREFIX + name] = [values.get(row) for row in validations]
    return curves


def _flat_looks(run: Run) -> dict[str, list[Any]]:
    """Return monitors' measurements by metric, a value per step; {} without any."""
    figures = monitored_figures(run)
    if not figures:
        return {}
    looks: dict[str, list[Any]] = {f"{LOOK_PREFIX}step": list(figures)}
    for name in dict.fromkeys((*MONITORED, *chain.from_iterable(figures.values()))):
        if any(name in measured for measured in figures.values()):
            looks[LOOK_PREFIX + name] = [measured.get(name) for measured in figures.values()]
    return looks


def _search_entry(row: Mapping[str, Any], tuning: Mapping[str, Any]) -> dict[str, Any]:
    """Return a search as a flat mapping, from its row of tuning.json."""
    trials = row.get("trials") or ()
    entry: dict[str, Any] = {"kind": EntryKind.SEARCH}
    for key in SEARCH_FACTS:
        entry[key] = row.get(key)
    for part in SEARCH_PARTS:
        for key, value in (row.get(part) or {}).items():
            entry[f"{part}.{key}"] = value
    for key in row.get("start") or {}:
        entry[TRIAL_PREFIX + key] = [trial["values"].get(key) for trial in trials]
    entry[f"{TRIAL_PREFIX}loss"] = [trial.get("loss") for trial in trials]
    for seed in tuning.get("seeds") or ():
        losses = [(trial.get("losses") or {}).get(str(seed)) for trial in trials]
        entry[f"{TRIAL_PREFIX}loss.{seed}"] = losses
    for key in ("factor", "span", "seeds", "steps"):
        entry[f"tune.{key}"] = tuning.get(key)
    confirm = tuning.get("confirm") or {}
    for key in ("seeds", "steps"):
        entry[f"confirm.{key}"] = confirm.get(key)
    return entry


def is_export(path: Path) -> bool:
    """Return whether a path is a JSON file, and so may be a results file."""
    return path.suffix == ".json" and path.is_file()


def has_known_kinds(content: Any) -> bool:
    """Return whether a content is that of a results file: entries of known kinds.

    An empty list is not.
    """
    if not isinstance(content, list) or not content:
        return False
    kinds = tuple(EntryKind)
    return all(_kind(entry) in kinds for entry in content)


def _kind(entry: Any) -> Any:
    return entry.get("kind") if isinstance(entry, Mapping) else None


def read_export(path: Path) -> Exported:
    """Return the content of a results file."""
    if not path.exists():
        raise BenchError(f"results file {str(path)!r} does not exist")
    if path.is_dir():
        advice = f"nanogpt-bench results export {shlex.quote(str(path))} --out FILE.json"
        raise BenchError(
            f"{str(path)!r} is a folder, not a results file; to make a file of a sweep's folder: "
            f"{advice}"
        )
    unreadable = (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError)
    with refusals(f"{str(path)!r} can't be read", *unreadable):
        content = cleaned(read_json(path, times=8))
        if _kind(content) == "nanogpt-bench results":
            raise BenchError(
                f"{str(path)!r} has an earlier layout, which is no longer read; export the sweep's "
                "folder again"
            )
        if not has_known_kinds(content):
            raise BenchError(
                f"{str(path)!r} holds no results; to write a results file: nanogpt-bench results "
                "export SWEEP --out FILE.json"
            )
        return _read_entries(content, path)


def _read_entries(content: Sequence[Mapping[str, Any]], path: Path) -> Exported:
    rows: dict[str, Row] = {}
    baseline: str | None = None
    tuning = []
    for entry in content:
        if baseline is None and entry.get("reference"):
            baseline = str(entry["label"])
        if entry["kind"] == EntryKind.SEARCH:
            tuning.append(_read_search(entry))
        else:
            label = str(entry["label"])
            row = rows.get(label) or Row(label, str(entry["rule"]), str(entry["format"]), ())
            rows[label] = _with_entry(row, entry, path)
    return Exported(tuple(rows.values()), baseline, tuple(tuning))


def _with_entry(row: Row, entry: Mapping[str, Any], path: Path) -> Row:
    if entry["kind"] == EntryKind.RUN:
        rule = str(entry["rule"])
        fmt = str(entry["format"])
        return replace(row, rule=rule, format=fmt, runs=(*row.runs, _read_run(entry, path)))
    if entry["kind"] == EntryKind.GIVEN_UP:
        return replace(row, reason=one_line(str(entry.get("why", ""))))
    # of kind `missing`
    seed = entry.get("seed")
    return replace(row, missing=(*row.missing, seed if isinstance(seed, int) else None))


def _read_run(entry: Mapping[str, Any], path: Path) -> Run:
    summary = {key: entry[key] for key in SUMMARY_KEYS if key in entry}
    summary["rule"] = entry["rule"]
    summary["format"] = entry["format"]
    summary["failures"] = [{"kind": kind} for kind in entry["failures"]]
    return Run(
        path / str(entry.get("name") or entry.get("seed")),
        _read_entry_settings(entry),
        _with_prefix(entry, ENVIRONMENT_PREFIX),
        Records(_read_curves(entry)),
        summary,
        looks=_read_looks(entry),
        notes=tuple(history_lines({"resumed": summary.get("config_history")})),
    )


def _read_entry_settings(entry: Mapping[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = {}
    for key, value in with_current_values(_with_prefix(entry, CONFIG_PREFIX)).items():
        section, dot, name = key.partition(".")
        if dot:
            config.setdefault(section, {})[name] = value
        else:
            config[key] = value
    config["seed"] = entry.get("seed")
    return config


def _read_curves(entry: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a record per validation, with the values that are known there."""
    curves = _with_prefix(entry, CURVE_PREFIX)
    records = []
    for values in zip(*curves.values(), strict=True):
        pairs = zip(curves, values, strict=True)
        records.append({name: value for name, value in pairs if value is not None})
    return records


def _read_looks(entry: Mapping[str, Any]) -> dict[int, dict[str, float]]:
    """Return monitors' measurements by step, those that are finite."""
    series = _with_prefix(entry, LOOK_PREFIX)
    steps = [int(step) for step in series.pop("step", ())]
    looks = {}
    for place, step in enumerate(steps):
        measured = {}
        for name, values in series.items():
            value = finite(values[place])
            if value is not None:
                measured[name] = value
        looks[step] = measured
    return looks


def _with_prefix(entry: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return the part of an entry whose keys begin with a prefix, without the prefix."""
    return {
        key.removeprefix(prefix): value for key, value in entry.items() if key.startswith(prefix)
    }


def _read_search(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return a search as tuning.json has it."""
    search: dict[str, Any] = {key: entry.get(key) for key in SEARCH_FACTS}
    for part in SEARCH_PARTS:
        search[part] = _with_prefix(entry, f"{part}.")
    tried = _with_prefix(entry, TRIAL_PREFIX)
    keys = [key for key in search["start"] if isinstance(tried.get(key), list)]
    losses = tried.get("loss")
    trials = []
    for place, loss in enumerate(losses if isinstance(losses, list) else ()):
        values = {key: tried[key][place] for key in keys}
        trials.append({"values": values, "loss": loss})
    search["trials"] = trials
    return search


def to_json(content: Sequence[Mapping[str, Any]]) -> str:
    """Return a results file's text, one line per entry, so that two files can be diffed."""
    lines = [json.dumps(entry, ensure_ascii=False, separators=(",", ":")) for entry in content]
    return "[\n" + ",\n".join(lines) + "\n]\n"
