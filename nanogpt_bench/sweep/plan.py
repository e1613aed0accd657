"""The plan of a sweep or a comparison: its runs with names and settings, all checked.

`plan_sweep` makes the runs of a file:

    axes -> points         `points_of`: every combination, or random ones
    rows x points          `in_rows`: the settings of each row under its points
    base + point -> run    `plan_point`: settings resolved and checked, a label and the
                           name of the folder made from the point
    references             `reference_points`: float runs for what the points vary and
                           compared runs have to share, such as seeds
    by name                `named_once`: the same training is planned once
"""

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nanogpt_bench.config.keys import FIELDS, get, keys_where, short_names
from nanogpt_bench.config.rules import RULES, Rule, has_moments, reference_settings
from nanogpt_bench.config.schema import (
    DEFAULT_DATA_DIR,
    OPTION_NAMES,
    OPTIONS,
    PEER_WEIGHTS,
    ROUNDED,
    WITHOUT_FORMATS,
    Config,
    Storage,
)
from nanogpt_bench.config.settings import Resolved, build_config
from nanogpt_bench.report.rows import Row, row_label
from nanogpt_bench.setup.formats import format_summary, weight_format
from nanogpt_bench.setup.resolve import resolve, rule_name
from nanogpt_bench.setup.runtime import refuse_parallel
from nanogpt_bench.sweep.axes import Point, assemble, grid_points, random_points
from nanogpt_bench.sweep.file import SweepFile
from nanogpt_bench.system.errors import BenchError, printable, unknown

LONGEST_FOLDER_NAME = 120
FLOAT_LR_KEY = "optimizer.float_lr"
STEPS_KEY = "train.max_steps"
#: settings that a label does not repeat: rule and format are its first words, and the
#: seed is in the folder's name
UNREPEATED = ("rule", "model.format", "seed")
#: the most runs of a comparison or a sweep: for so many checking takes a minute, and
#: the page has many megabytes
MOST_RUNS = 10_000


def check_count(runs: int, source: str) -> None:
    """Refuse more runs than `MOST_RUNS`; the error names what asks for them."""
    if runs > MOST_RUNS:
        count = f"{runs:,}" if runs < 10**15 else f"about 10^{math.log10(runs):.0f}"
        raise BenchError(f"{source} asks for {count} runs; at most {MOST_RUNS:,} are allowed")


@dataclass(frozen=True)
class PlannedRun:
    """One training: a row of the table with one seed."""

    label: str
    rule: str
    format: str
    seed: int
    #: of its folder
    name: str
    #: by dotted key
    settings: dict[str, Any]
    #: its point of the sweep's axes
    axes: Mapping[str, Any] = field(default_factory=dict)
    #: True for a trial of a search, which belongs to no row of the table
    is_trial: bool = field(default=False, kw_only=True)
    #: what the settings resolve to; the checks before the training take it from here
    config: Resolved = field(kw_only=True, compare=False, repr=False)

    @property
    def cost(self) -> int:
        """The length of the run, in sequences."""
        train = self.config.train
        return train.max_steps * train.batch_size * train.accumulation


def plan_sweep(sweep: SweepFile) -> list[PlannedRun]:
    """Return all runs of a sweep file, each once.

    The references at every seed come first, then the points.
    """
    if not sweep.axes and not sweep.rows:
        raise BenchError(
            f"{sweep.path.name} has no axes; give axes: settings, and the values they take"
        )
    check_count(count_points(sweep), f"{sweep.path.name} (search: {sweep.search})")
    points = points_of(sweep)
    planned = [plan_point(base, point) for base, point in in_rows(sweep, points)]
    full_points: list[Point] = []
    for row in sweep.rows or ({},):
        full_points += [{**row, **point} for point in points]
    references = [
        plan_point(base, point) for base, point in reference_points(sweep, full_points, "seed")
    ]
    check_seeds(references, planned)
    by_name = {run.name: run for run in planned}
    distinct = [_distinct_reference(run, by_name.get(run.name, run)) for run in references]
    return named_once([*distinct, *planned])


def check_seeds(references: Iterable[PlannedRun], planned: Iterable[PlannedRun]) -> None:
    """Refuse a reference with a seed that no other run has.

    There is nothing to measure against it.
    """
    seeds = sorted({run.seed for run in planned})
    for run in references:
        if run.seed not in seeds:
            raise BenchError(
                f"reference: {run.label} has seed {run.seed}, but the runs that are compared with "
                f"it have {', '.join(map(str, seeds))}; leave its seed out"
            )


def in_rows(sweep: SweepFile, points: Sequence[Point]) -> Iterator[tuple[Mapping[str, Any], Point]]:
    """Yield (base settings, point) for every point in every row of the file.

    A row's rule and format become part of its points, and so do settings in which rows
    of the same rule and format differ: labels show them. The row's other settings
    become part of its base settings. A file without rows has one without settings.
    """
    for row in sweep.rows or ({},):
        labelled = _labelled_keys(row, sweep.rows)
        base = dict(sweep.base)
        shown = {}
        for key, value in row.items():
            if key in labelled:
                shown[key] = value
            else:
                base[key] = value
        for point in points:
            yield base, {**shown, **point}


def _labelled_keys(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> set[str]:
    """Return the settings of a row that tell it from the others.

    They are rule, format and seed, and what differs among rows that share these three.
    """
    kind = [row.get(key) for key in UNREPEATED]
    similar = [sibling for sibling in rows if [sibling.get(key) for key in UNREPEATED] == kind]
    keys = set()
    for key, value in row.items():
        if key in UNREPEATED or any(sibling.get(key) != value for sibling in similar):
            keys.add(key)
    return keys


def _distinct_reference(run: PlannedRun, point: PlannedRun) -> PlannedRun:
    """Return the point of the reference's name if it is the same training.

    Otherwise return the reference `run`, labelled differently.
    """
    if point.config == run.config:
        return point
    label = f"{run.label} (reference)"
    return replace(run, label=label, name=folder_name(f"{label} seed={run.seed}", run.axes))


def count_points(sweep: SweepFile) -> int:
    """Return the most points that the file can have, without making them."""
    rows = max(1, len(sweep.rows))
    if sweep.search == "random":
        seeds = math.prod(axis.size for axis in sweep.axes if axis.key == "seed")
        return rows * sweep.samples * seeds
    return rows * math.prod(axis.size for axis in sweep.axes)


def points_of(sweep: SweepFile) -> list[Point]:
    """Return the points of the axes: every combination, or random ones."""
    if sweep.search == "random" and sweep.axes:
        return list(random_points(sweep.axes, sweep.samples, sweep.sample_seed))
    return list(grid_points(sweep.axes))


def reference_points(
    sweep: SweepFile, points: Iterable[Point], *keys: str
) -> Iterator[tuple[Mapping[str, Any], Point]]:
    """Yield (settings, point) of the file's reference.

    There is one for every combination of values of `keys` in the points, and of
    settings in which compared runs have to agree, such as train.max_steps: a reference
    trains on the same data, and as long, as the points that are compared with it. There
    is none if the file has no reference, or one that is the name of a row.
    """
    if not isinstance(sweep.reference, Mapping):
        return
    base = reference_settings(sweep.base, sweep.reference)
    shared = [key for key in (*keys_where("of_task"), *keys) if key not in sweep.reference]
    distinct: dict[str, Point] = {}
    for point in points:
        reference_point = {key: point[key] for key in shared if key in point}
        distinct[repr(reference_point)] = reference_point
    for reference_point in distinct.values():
        yield base, reference_point


def left_out_of_reference(sweep: SweepFile) -> str:
    """Return a line that names options in `settings` that the reference does not get.

    They are options of the optimizer. It is "" if there are none.
    """
    if not isinstance(sweep.reference, Mapping):
        return ""
    settings = reference_settings(sweep.base, sweep.reference)
    of_formats = keys_where("of_formats")
    keys = []
    for key, value in sweep.base.items():
        is_option = key.startswith("optimizer.") and key not in of_formats
        if is_option and value is not None and key not in settings:
            keys.append(key)
    if not keys:
        return ""
    return (
        f"the reference is trained with its own rule's {', '.join(keys)}, not with the file's; to "
        "change that, set them under reference in the sweep file, or name a row as the reference"
    )


def plan_point(
    base: Mapping[str, Any], point: Mapping[str, Any], label: str | None = None
) -> PlannedRun:
    """Return the run at a point, its settings checked.

    `label` replaces the label made from the point.
    """
    idle = _idle_keys(base, point)
    used = _without_formats(base, point)
    axes = {key: value for key, value in used.items() if key not in idle}
    assembled = assemble(base, axes)
    settings = {key: value for key, value in assembled.items() if key not in idle}
    try:
        built = build_config(settings)
        config = resolve(built)
        refuse_parallel(config.train.parallel, "each run of a sweep")
    except BenchError as error:
        place = ", ".join(f"{key} {value!r}" for key, value in axes.items())
        raise BenchError(f"{error} (at {place})" if place else str(error)) from None
    # As the config has them, so that 1e-3 and 0.001 are the same learning rate.
    for key in settings:
        settings[key] = get(built, key)
    for key in axes:
        if key in settings:
            axes[key] = settings[key]
    rule = rule_name(config)
    if built.rule is None and built.optimizer.lr is None and rule in RULES:
        # Recorded, so that a changed default is noticed on resuming.
        settings["optimizer.lr"] = config.optimizer.lr
    label = printable(label or describe(config, axes))
    name = folder_name(f"{label} seed={config.seed}", axes)
    fmt = format_summary(config)
    return PlannedRun(label, rule, fmt, config.seed, name, settings, axes, config=config)


def _idle_keys(base: Mapping[str, Any], point: Mapping[str, Any]) -> set[str]:
    """Return the settings that this point's rule does not take.

    They are given for other rules of the axis.
    """
    rule = RULES.get(str(point.get("rule")))
    if rule is None:
        return set()
    keys = set(keys_where("of_formats")) if _keeps_floats(base, point) else set()
    peer = point.get("model.peer")
    if peer is not None and (peer == rule.peer or not applies("model.peer", peer, rule)):
        keys.add("model.peer")
    if rule.float_lr is None:
        keys.add(FLOAT_LR_KEY)
    return keys


def _without_formats(base: Mapping[str, Any], point: Mapping[str, Any]) -> Point:
    """Return the point, without formats if its rule keeps float weights.

    The grid then has the rule once.
    """
    if not _keeps_floats(base, point):
        return dict(point)
    of_formats = ("model.format", "model.granularity")
    rest = {key: value for key, value in point.items() if not key.startswith(of_formats)}
    idle = [key for key in point if key not in rest]
    if idle and "rule" not in point:
        raise BenchError(
            f"axes.{idle[0]}: rule {base['rule']!r} trains float weights, so the axis has no "
            "effect; give another rule, or axes.rule"
        )
    return rest


def applies(key: str, value: Any, rule: Rule) -> bool:
    """Return whether a rule takes a setting.

    >>> applies("optimizer.momentum", 0.9, RULES["sgd"])
    True
    >>> applies("optimizer.momentum", 0.9, RULES["fp32"])
    False
    """
    section, _, option = key.partition(".")
    if section == "optimizer" and option in OPTION_NAMES:
        return option in OPTIONS[rule.optimizer]
    facts = FIELDS[key].facts if key in FIELDS else {}
    if facts.get("storages"):
        return rule.storage in facts["storages"]
    if facts.get("optimizers"):
        return rule.optimizer in facts["optimizers"]
    if key in _TAKEN_BY:
        return _TAKEN_BY[key](value, rule)
    return not facts.get("of_formats") or rule.storage not in WITHOUT_FORMATS


def _takes_storage(storage: str, rule: Rule) -> bool:
    is_rounded = rule.storage in ROUNDED and storage in ROUNDED
    return rule.storage == storage or is_rounded


def _takes_peer(peer: str, rule: Rule) -> bool:
    return rule.optimizer in PEER_WEIGHTS.get(peer, ())


def _takes_moments(_: str, rule: Rule) -> bool:
    return has_moments(rule.storage, rule.optimizer)


def _takes_precision(_: str, rule: Rule) -> bool:
    return rule.storage != Storage.FLOAT32


#: settings with a condition that no fact of theirs says
_TAKEN_BY: dict[str, Callable[[Any, Rule], bool]] = {
    "model.storage": _takes_storage,
    "model.peer": _takes_peer,
    "optimizer.moments": _takes_moments,
    "train.precision": _takes_precision,
}


def _keeps_floats(base: Mapping[str, Any], point: Mapping[str, Any]) -> bool:
    rule = RULES.get(str(point.get("rule", base.get("rule"))))
    return rule is not None and rule.storage in WITHOUT_FORMATS


def describe(config: Config, axes: Mapping[str, Any]) -> str:
    """Return the label of a point.

    It has format and rule, then the other axes by the last words of their keys.
    """
    fmt = format_summary(config)
    everywhere = config.model.formats.get("*")
    if fmt == "mixed" and axes.get("model.format") and everywhere is not None:
        # Some layers have other formats.
        fmt = weight_format(everywhere)
    words = [row_label(rule_name(config), fmt)]
    names = short_names(axes)
    for key, value in axes.items():
        if key not in UNREPEATED:
            words.append(f"{names[key]}={_value_text(value)}")
    return " ".join(words)


def _value_text(value: Any) -> str:
    if isinstance(value, float):
        short = f"{value:g}"
        return short if float(short) == value else repr(value)
    if isinstance(value, Mapping | list | bool):
        return json.dumps(value, separators=(",", ":"), default=str)
    return str(value)


def folder_name(label: str, axes: Mapping[str, Any]) -> str:
    """Return a folder's name for a label.

    If it had to be changed or shortened, it ends with a hash of the point.

    >>> folder_name("E4M3 nearest lr=0.001 seed=42", {})
    'E4M3-nearest-lr=0.001-seed=42'
    """
    name = re.sub(r"[^A-Za-z0-9._=+-]+", "-", label)
    if name == label.replace(" ", "-") and len(name) <= LONGEST_FOLDER_NAME:
        return name
    digest = hashlib.sha256(json.dumps(axes, sort_keys=True, default=str).encode()).hexdigest()[:8]
    return f"{name[:LONGEST_FOLDER_NAME].rstrip('-')}-{digest}"


def baseline_of(
    reference: Mapping[str, Any] | str | None, planned: Sequence[PlannedRun | Row]
) -> str | None:
    """Return the label of the reference row; None for the first BF16 row.

    If `reference` has settings, its runs are the first of `planned`. A name is a row's
    label, or stands for the first row of that rule and format; any other is refused.
    """
    if not isinstance(reference, str):
        return None if reference is None else planned[0].label
    labels = [run.label for run in planned]
    if reference in labels:
        return reference
    short = [row_label(run.rule, run.format) for run in planned]
    if reference not in short:
        raise unknown("reference", reference, list(dict.fromkeys(labels)))
    return labels[short.index(reference)]


def named_once(planned: Iterable[PlannedRun]) -> list[PlannedRun]:
    """Return the runs without repetitions.

    Two with different settings that would share a folder are refused.
    """
    by_name: dict[str, PlannedRun] = {}
    for run in planned:
        same_named = by_name.setdefault(run.name, run)
        if same_named.settings != run.settings:
            raise BenchError(
                f"two points would both be called {run.name!r}; give values that make names differ"
            )
    return list(by_name.values())


def check_inputs(planned: Iterable[PlannedRun]) -> None:
    """Refuse a corpus that a run can't use, or that runs spell differently.

    Nothing is written before.
    """
    from nanogpt_bench.data.batches import open_also, open_corpus

    of_corpus = ("data.", "model.", "eval.also")
    checked: set[str] = set()
    spelt: dict[Path, str] = {}
    for run in planned:
        folder = str(run.settings.get("data.dir", DEFAULT_DATA_DIR))
        first_spelling = spelt.setdefault(Path(folder).resolve(), folder)
        if first_spelling != folder:
            raise BenchError(
                f"data.dir: {first_spelling!r} and {folder!r} are the same folder, but would be "
                "two texts in the report; give one of them"
            )
        corpus = repr([item for item in run.settings.items() if item[0].startswith(of_corpus)])
        if corpus not in checked:
            checked.add(corpus)
            open_also(run.config, open_corpus(run.config))
