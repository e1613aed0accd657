"""Rows of the table: runs of one setting, one per seed, their label and reference."""

import json
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from nanogpt_bench.config.endings import RunStatus
from nanogpt_bench.config.keys import FIELDS, keys_where, short_names
from nanogpt_bench.config.metrics import ELAPSED, VAL_LOSS
from nanogpt_bench.config.schema import NO_FORMAT
from nanogpt_bench.report.comparable import corpus_digests, differing_facts, loss_conditions
from nanogpt_bench.runs.environment import at
from nanogpt_bench.runs.load import Run, has_ended
from nanogpt_bench.runs.read import finite
from nanogpt_bench.system.errors import printable, shortened

REFERENCE_RULE = "bf16-mixed"
#: configuration keys in which the seeds of one row may differ
SEED_KEYS = frozenset({"seed", "data.seed", "model.seed"})
#: settings that a resumed run may have other values of, and in which rows differ anyway: how
#: far a run goes depends on them, or they say what it is
_OF_ROWS = ("rule", "data.dir", "train.parallel", "train.max_seconds", "train.stop_on")
#: characters of a setting's value in a label
LONGEST_SETTING = 60
#: settings that a label names
MOST_LABEL_SETTINGS = 3
#: runs that a label names
MOST_NAMES = 3


@dataclass(frozen=True)
class Row:
    """The runs of one setting, one per seed, under the label of tables and figures."""

    label: str
    rule: str
    format: str
    runs: tuple[Run, ...]
    #: seeds known to have no run yet
    missing: tuple[int | None, ...] = ()
    #: the reason why there will be no runs; "" otherwise
    reason: str = ""
    #: further runs of the same seeds
    uncounted: tuple[Run, ...] = ()


def row_runs(rows: Iterable[Row]) -> list[tuple[Row, Run]]:
    """Return every run of rows, with its row."""
    pairs = []
    for row in rows:
        pairs += [(row, run) for run in row.runs]
    return pairs


def shortfall(rows: Iterable[Row]) -> str:
    """Return the count of runs out of those planned, in words; "" where none is missing.

    >>> shortfall([Row("fp32", "fp32", "none", (), (1, 2))]), shortfall([])
    ('0 of 2 runs', '')
    """
    runs = 0
    missing = 0
    for row in rows:
        runs += len(row.runs)
        missing += len(row.missing)
    return f"{runs} of {runs + missing} runs" if missing else ""


def row_label(rule: str, fmt: str) -> str:
    """Return a setting's name: its format, unless its weights are floats, and its rule.

    >>> row_label("nearest", "E4M3"), row_label("fp32", "none")
    ('E4M3 nearest', 'fp32')
    """
    return rule if fmt == NO_FORMAT else f"{fmt} {rule}"


def group_rows(runs: Sequence[Run]) -> list[Row]:
    """Group runs that differ only in seeds into rows; each seed counts once.

    Rows are in order of first appearance.
    """
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(row_key(run), []).append(run)
    labels = _distinct_labels(list(groups.values()))
    rows = []
    for label, group in zip(labels, groups.values(), strict=True):
        row = Row(label, group[0].rule, group[0].format, tuple(group))
        rows.append(counted_once(row))
    return rows


def counted_once(row: Row) -> Row:
    """Return the row with one run per seed, the first of the longest.

    The other runs are added to `uncounted`.
    """
    by_seed: dict[Hashable, list[Run]] = {}
    for run in row.runs:
        seed = seed_of(run)
        # A run of unknown seed has no twin.
        key = ("unknown", id(run)) if seed is None else seed
        by_seed.setdefault(key, []).append(run)
    counted = []
    uncounted = list(row.uncounted)
    for group in by_seed.values():
        longest = max(group, key=_progress_key)
        counted.append(longest)
        uncounted += [run for run in group if run is not longest]
    return replace(row, runs=tuple(counted), uncounted=tuple(uncounted))


def _progress_key(run: Run) -> tuple[bool, bool, int]:
    """Return a key that is greater for a run that went further."""
    return run.status == RunStatus.FINISHED, has_ended(run.summary), run.last_step or 0


def row_key(run: Run) -> str:
    """Return a key that the runs of one row share: they differ only in seeds.

    A run without a config shares it with no other.
    """
    if not run.config:
        return f"path:{run.path}"
    # A corpus of the same name that was prepared again may be another one.
    conditions = sorted(loss_conditions([run]))
    parts = [run.rule, run.format, _settings_without(run, SEED_KEYS), conditions]
    return json.dumps(parts, sort_keys=True, default=str)


def setting_key(run: Run, keys: Set[str]) -> str:
    """Return a key that runs share if their settings differ only in seeds and `keys`.

    Unlike `row_key` it ignores what is in no setting, such as the rule that the records
    of a run name.
    """
    if not run.config:
        return f"path:{run.path}"
    return json.dumps(_settings_without(run, SEED_KEYS | keys), sort_keys=True, default=str)


def _settings_without(run: Run, keys: Set[str]) -> dict[str, Any]:
    settings = {
        key: value
        for key, value in flat(run.config).items()
        if key not in keys and distinguishes_rows(key)
    }
    digests = corpus_digests(run)
    if digests is not None and "data.dir" in settings:
        # One folder has several names, and one name may have been given to two texts.
        settings["data.dir"] = digests
    return settings


def distinguishes_rows(key: str) -> bool:
    """Return whether runs with other values of a setting are of different rows.

    They are not where it is what a tracker calls the run, or when the run is saved.

    >>> distinguishes_rows("optimizer.lr"), distinguishes_rows("tracking.wandb_id")
    (True, False)
    """
    setting = FIELDS.get(key)
    return setting is None or key in _OF_ROWS or bool(setting.facts["changes_numbers"])


def _distinct_labels(groups: Sequence[Sequence[Run]]) -> list[str]:
    """Return labels of rule and format.

    Equal ones get the settings that differ, else names, else paths.
    """
    plain = [row_label(group[0].rule, group[0].format) for group in groups]
    differing = _differing_settings(groups, plain)
    names = [_in_brackets([run.name for run in group]) for group in groups]
    paths = [_in_brackets([printable(str(run.path)) for run in group]) for group in groups]
    labels = plain
    for endings in (differing, names, paths):
        counts = Counter(labels)
        labels = [
            base + ending if counts[label] > 1 else label
            for base, ending, label in zip(plain, endings, labels, strict=True)
        ]
    return labels


def _in_brackets(names: Sequence[str]) -> str:
    shown = ", ".join(names[:MOST_NAMES])
    hidden_count = len(names) - MOST_NAMES
    rest = f" and {hidden_count} more" if hidden_count > 0 else ""
    return f" ({shown}{rest})"


def _differing_settings(groups: Sequence[Sequence[Run]], labels: Sequence[str]) -> list[str]:
    """Return for each group the settings in which groups of its label differ.

    Such an ending is ` lr=0.001`; it is "" if there are many settings.
    """
    configs = [flat(group[0].config) for group in groups]
    by_label: dict[str, list[Mapping[str, Any]]] = {}
    for label, config in zip(labels, configs, strict=True):
        by_label.setdefault(label, []).append(config)
    return [
        _settings_ending(config, by_label[label])
        for label, config in zip(labels, configs, strict=True)
    ]


def _settings_ending(config: Mapping[str, Any], configs: Sequence[Mapping[str, Any]]) -> str:
    """Return the settings of `config` in which it differs from some of `configs`."""
    ending = ""
    keys = [
        key for key in config if key not in SEED_KEYS and _differs_from(key, config[key], configs)
    ]
    if len(keys) > MOST_LABEL_SETTINGS:
        return ""
    names = short_names(keys)
    for key in keys:
        value = config[key]
        text = f"{value:g}" if isinstance(value, float) else " ".join(str(value).split())
        ending += f" {names[key]}={shortened(text, LONGEST_SETTING)}"
    return ending


def _differs_from(key: str, value: Any, configs: Sequence[Mapping[str, Any]]) -> bool:
    return any(config.get(key) != value for config in configs)


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten settings to dotted keys.

    >>> flat({"a": 1, "b": {"c": 2}})
    {'a': 1, 'b.c': 2}
    """
    settings: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            settings |= flat(value, f"{prefix}{key}.")
        else:
            settings[f"{prefix}{key}"] = value
    return settings


def learning_rate(run: Run) -> float | None:
    """Return the peak learning rate in a run's records; None without one above 0."""
    rate = finite(run.summary.get("lr", at(run.config, "optimizer.lr")))
    return rate if rate is not None and rate > 0 else None


def find_reference(rows: Sequence[Row], label: str | None = None) -> Row | None:
    """Return the row of that label, by default the first BF16 autocast row.

    It is None where there is none.
    """
    if label is None:
        return next((row for row in rows if row.rule == REFERENCE_RULE), None)
    return next((row for row in rows if row.label == label), None)


def references_by_label(rows: Sequence[Row], reference: Row | None) -> dict[str, Row]:
    """Return each row's reference by the row's label; {} without a reference.

    It is `reference` itself for the rows that can be compared with it. Rows of another
    corpus, length or size have a reference among themselves: the row of the same rule
    and format as `reference` that is most like it. Where that row would be compared
    with nothing but itself, it gets `reference`, to which it has no gap.
    """
    if reference is None:
        return {}
    references = {row.label: reference for row in rows}
    incomparable = [row for row in rows if differing_facts(row.runs, reference.runs)]
    nearest = _most_like(reference, incomparable)
    for row in incomparable:
        references[row.label] = nearest.get(loss_conditions(row.runs), reference)
    # rows that are the reference of another row, and not of themselves alone
    shared_labels = {
        row_reference.label
        for label, row_reference in references.items()
        if row_reference.label != label
    }
    for row in incomparable:
        if references[row.label].label not in shared_labels:
            references[row.label] = reference
    return references


def _most_like(reference: Row, rows: Sequence[Row]) -> dict[frozenset[str], Row]:
    """Return, by what losses depend on, the row that is most like the reference.

    Only rows of the reference's rule and format count.
    """
    groups: dict[frozenset[str], list[Row]] = {}
    for row in rows:
        if (row.rule, row.format) == (reference.rule, reference.format):
            groups.setdefault(loss_conditions(row.runs), []).append(row)
    reference_config = _first_config(reference)

    def distance(row: Row) -> tuple[int, int]:
        return _distance(_first_config(row), reference_config)

    return {conditions: min(group, key=distance) for conditions, group in groups.items()}


def _first_config(row: Row) -> dict[str, Any]:
    return flat(row.runs[0].config) if row.runs else {}


def _distance(config: Mapping[str, Any], reference_config: Mapping[str, Any]) -> tuple[int, int]:
    """Return a key that is smaller for settings that are more alike.

    Rates may be tuned for each row, so they count least; seeds and the task do not
    count.
    """
    keys = (config.keys() | reference_config.keys()) - SEED_KEYS - set(keys_where("of_task"))
    differing = {key for key in keys if config.get(key) != reference_config.get(key)}
    rates = set(keys_where("is_rate"))
    return len(differing - rates), len(differing)


def loss_unit(rows: Iterable[Row]) -> str:
    """Return the unit of the rows' losses.

    It is nats per token, or per label where documents are classified.

    >>> loss_unit([])
    'nats per token'
    """
    tasks = {run.config.get("task", "language") for _, run in row_runs(rows)}
    if tasks == {"classify"}:
        return "nats per label"
    return "nats" if "classify" in tasks else "nats per token"


def reference_beside(run: Run, references: Sequence[Row]) -> list[Row]:
    """Return the first run of a comparable reference as a row to draw beside the run.

    It is [] without one.
    """
    for reference in references:
        if not differing_facts([run], reference.runs[:1]):
            return [Row(reference.label, reference.rule, reference.format, reference.runs[:1])]
    return []


def identity(run: Run) -> Hashable:
    """Return a key that all records of one run share, and no other run's.

    It holds settings, name, seed and first validation.
    """
    times, losses = run.curve(VAL_LOSS.name, ELAPSED.name)
    if not times:
        return str(run.path)
    return (row_key(run), run.name, run.seed, times[0], losses[0])


def seed_of(run: Run) -> Hashable | None:
    """Return the seeds of run, data and model, in which the runs of one setting differ.

    It is None if the run's seed is unknown.

    >>> from pathlib import Path
    >>> run = Run(Path("a"), summary={"seed": 3})
    >>> seed_of(run) == seed_of(Run(Path("b"), {"seed": 3, "data": {"seed": 3}}))
    True
    """
    if run.seed is None:
        return None
    seeds: list[Hashable] = [run.seed]
    for key in ("data.seed", "model.seed"):
        seed = at(run.config, key)
        if seed is None:
            seeds.append(run.seed)
        else:
            seeds.append(seed if isinstance(seed, int) else repr(seed))
    return tuple(seeds)


def uncounted_lines(row: Row) -> list[str]:
    """Return a line for each run in `uncounted`: its seed, the run that counts, and why."""
    lines = []
    for run in row.uncounted:
        counted = next(
            counted_run for counted_run in row.runs if seed_of(counted_run) == seed_of(run)
        )
        further = _progress_key(counted) > _progress_key(run)
        reason = "has more steps" if further else "has as many steps and comes first"
        lines.append(
            f"{row.label}: {run.path} is not counted, since {counted.path} has seed {run.seed} too "
            f"and {reason}"
        )
    return lines
