"""The plan of a sweep or a comparison: its runs with names and settings, checked before
any training.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nanogpt_bench.config.keys import FIELDS, get, keys_where
from nanogpt_bench.config.rules import RULES, Rule, has_moments, reference_settings
from nanogpt_bench.config.schema import (
    DEFAULT_DATA_DIR,
    OPTION_NAMES,
    OPTIONS,
    PEER_WEIGHTS,
    ROUNDED,
    WITHOUT_FORMATS,
    Config,
)
from nanogpt_bench.config.settings import build_config
from nanogpt_bench.report.rows import Row, row_label
from nanogpt_bench.setup.formats import format_summary, weight_format
from nanogpt_bench.setup.resolve import resolve, rule_name
from nanogpt_bench.setup.runtime import refuse_parallel
from nanogpt_bench.sweep.axes import Point, assemble, grid_points, random_points
from nanogpt_bench.sweep.file import SweepFile
from nanogpt_bench.system.errors import BenchError, printable, unknown

LONGEST_NAME = 120
FLOAT_LR = "optimizer.float_lr"
#: settings that a label does not repeat: rule and format are its first words, and the
#: seed is in the folder's name
_SAID = ("rule", "model.format", "seed")


#: the most runs of a comparison or a sweep: for so many checking takes a minute, and
#: the page has many megabytes
MOST_RUNS = 10_000


def check_count(runs: int, source: str) -> None:
    """Refuse more runs than `MOST_RUNS` before any is planned; the error names their
    `source`.
    """
    if runs > MOST_RUNS:
        count = f"{runs:,}" if runs < 10**15 else f"about 10^{math.log10(runs):.0f}"
        raise BenchError(f"{source} asks for {count} runs; at most {MOST_RUNS:,} are planned")


@dataclass(frozen=True)
class PlannedRun:
    """One training: a row of the table with one seed; the name of its folder, and its
    settings by dotted key.
    """

    label: str
    rule: str
    format: str
    seed: int
    name: str
    settings: dict[str, Any]
    #: its point of the sweep's axes
    axes: Mapping[str, Any] = field(default_factory=dict)
    #: True for a trial, which belongs to no row of the table
    aside: bool = field(default=False, kw_only=True)

    @property
    def cost(self) -> int:
        """The length of the run, in sequences."""
        train = (
            self.settings.get(f"train.{key}") or 1
            for key in ("max_steps", "batch_size", "accumulation")
        )
        return math.prod(train)


def plan_sweep(sweep: SweepFile) -> list[PlannedRun]:
    """Return all runs of a sweep file: the references at every seed, then the points,
    each once.
    """
    if not sweep.axes and not sweep.rows:
        raise BenchError(f"{sweep.path.name} has no axes; give settings and the values they take")
    check_count(count_points(sweep), f"{sweep.path.name} (search: {sweep.search})")
    points = points_of(sweep)
    planned = [plan_point(*each) for each in in_rows(sweep, points)]
    by_name = {run.name: run for run in planned}
    places = [{**row, **point} for row in sweep.rows or ({},) for point in points]
    references = [plan_point(*each) for each in references_of(sweep, places, "seed")]
    check_seeds(references, planned)
    return named_once(
        [*(_apart_from(by_name.get(run.name, run), run) for run in references), *planned]
    )


def check_seeds(references: Iterable[PlannedRun], planned: Iterable[PlannedRun]) -> None:
    """Refuse a reference with a seed that no other run has: there is nothing to measure
    against it.
    """
    seeds = sorted({run.seed for run in planned})
    for run in references:
        if run.seed not in seeds:
            raise BenchError(
                f"reference: {run.label} has seed {run.seed}, and the runs that are measured "
                f"against it have {', '.join(map(str, seeds))}; leave its seed out"
            )


def in_rows(sweep: SweepFile, points: Sequence[Point]) -> Iterator[tuple[Mapping[str, Any], Point]]:
    """Yield (base settings, point) for every point in every row of the file; for every
    point if there are no rows.

    A row's rule and format become part of its points, and so do settings in which rows
    of the same rule and format differ: labels show them. The row's other settings
    become part of its base settings.
    """
    for row in sweep.rows or ({},):
        alike = [
            other for other in sweep.rows if all(other.get(key) == row.get(key) for key in _SAID)
        ]
        said = {
            key: row[key]
            for key in row
            if key in _SAID or any(other.get(key) != row[key] for other in alike)
        }
        base = {**sweep.base, **{key: value for key, value in row.items() if key not in said}}
        yield from ((base, {**said, **point}) for point in points)


def _apart_from(point: PlannedRun, run: PlannedRun) -> PlannedRun:
    """The point, if the reference `run` is the same training; else the reference,
    labelled differently.
    """
    if resolve(build_config(point.settings)) == resolve(build_config(run.settings)):
        return point
    label = f"{run.label} (reference)"
    return replace(run, label=label, name=folder_name(f"{label} seed={run.seed}", run.axes))


def count_points(sweep: SweepFile) -> int:
    """Return the most points that the file can have, without making them."""
    rows = max(1, len(sweep.rows))
    if sweep.search == "random":
        return (
            rows * sweep.samples * math.prod(axis.size for axis in sweep.axes if axis.key == "seed")
        )
    return rows * math.prod(axis.size for axis in sweep.axes)


def points_of(sweep: SweepFile) -> list[Point]:
    """Return the points of the axes: every combination, or random ones."""
    if sweep.search == "random" and sweep.axes:
        return list(random_points(sweep.axes, sweep.samples, sweep.sample_seed))
    return list(grid_points(sweep.axes))


def references_of(
    sweep: SweepFile, points: Iterable[Point], *keys: str
) -> Iterator[tuple[Mapping[str, Any], Point]]:
    """Yield (settings, point) of the file's reference, if it has settings, for all
    values of `keys` in the points.

    There is also one for every combination of values of settings in which compared runs
    have to agree, such as train.max_steps: a reference trains on the same data, and as
    long, as the points that are compared with it.
    """
    if isinstance(sweep.reference, Mapping):
        base = reference_settings(sweep.base, sweep.reference)
        same = [key for key in (*keys_where("of_task"), *keys) if key not in sweep.reference]
        found = ({key: point[key] for key in same if key in point} for point in points)
        yield from ((base, point) for point in {repr(point): point for point in found}.values())


def left_out_of_reference(sweep: SweepFile) -> str:
    """Return a line that names the optimizer's options in `settings` that the reference
    does not get; "" for none.
    """
    if not isinstance(sweep.reference, Mapping):
        return ""
    own = reference_settings(sweep.base, sweep.reference)
    mine = (key for key in sweep.base if key.startswith("optimizer.") and key not in own)
    keys = [
        key for key in mine if key not in keys_where("of_formats") and sweep.base[key] is not None
    ]
    if not keys:
        return ""
    return (
        f"the reference is trained with its rule's own {', '.join(keys)}, not the file's: set them "
        f"under reference in "
        "the sweep file, or name a row as the reference"
    )


def plan_point(
    base: Mapping[str, Any], point: Mapping[str, Any], label: str | None = None
) -> PlannedRun:
    """Return the run at a point, its settings checked; `label` replaces the label made
    from the point.
    """
    idle = _idle(base, point)
    axes = {key: value for key, value in _without_formats(base, point).items() if key not in idle}
    settings = {key: value for key, value in assemble(base, axes).items() if key not in idle}
    try:
        built = build_config(settings)
        config = resolve(built)
        refuse_parallel(config.train.parallel, "each run of a sweep")
    except BenchError as error:
        where = ", ".join(f"{key} {value!r}" for key, value in axes.items())
        raise BenchError(f"{error}" + f" (at {where})" * bool(where)) from None
    settings |= {
        key: get(built, key) for key in settings
    }  # so that 1e-3 and 0.001 are the same learning rate
    axes |= {key: settings[key] for key in axes if key in settings}
    if built.rule is None and built.optimizer.lr is None and rule_name(config) in RULES:
        settings["optimizer.lr"] = (
            config.optimizer.lr
        )  # recorded, so that a changed default is noticed on resuming
    label = printable(label or describe(config, axes))
    name = folder_name(f"{label} seed={config.seed}", axes)
    return PlannedRun(
        label, rule_name(config), format_summary(config), config.seed, name, settings, axes
    )


def _idle(base: Mapping[str, Any], point: Mapping[str, Any]) -> frozenset[str]:
    """The settings that this point's rule does not take, although they are given for
    other rules of the axis.
    """
    rule = RULES.get(str(point.get("rule")))
    if rule is None:
        return frozenset()
    found = keys_where("of_formats") if _keeps_floats(base, point) else ()
    peer = point.get("model.peer")
    if peer is not None and (peer == rule.peer or not applies("model.peer", peer, rule)):
        found = (*found, "model.peer")
    return frozenset((*found, *((FLOAT_LR,) if rule.float_lr is None else ())))


def _without_formats(base: Mapping[str, Any], point: Mapping[str, Any]) -> Point:
    """The point; without formats if its rule keeps float weights, so that the grid has
    it once.
    """
    if not _keeps_floats(base, point):
        return dict(point)
    rest = {
        key: value
        for key, value in point.items()
        if not key.startswith(("model.format", "model.granularity"))
    }
    if "rule" not in point and (idle := [key for key in point if key not in rest]):
        raise BenchError(
            f"axes.{idle[0]}: rule {base['rule']!r} keeps float weights at every value; give "
            f"another rule, or axes.rule"
        )
    return rest


def applies(key: str, value: Any, rule: Rule) -> bool:
    """Return whether a rule takes a setting.

    >>> applies("optimizer.momentum", 0.9, RULES["sgd"]), applies("optimizer.momentum", 0.9, RULES["fp32"])
    (True, False)
    """
    section, _, option = key.partition(".")
    if section == "optimizer" and option in OPTION_NAMES:
        return option in OPTIONS[rule.optimizer]
    if key == "optimizer.moments":
        return has_moments(rule.storage, rule.optimizer)
    if key in FIELDS and (storages := FIELDS[key].facts["storages"]):
        return rule.storage in storages
    if key in FIELDS and (optimizers := FIELDS[key].facts["optimizers"]):
        return rule.optimizer in optimizers
    if key == "model.storage":
        return rule.storage == value or (rule.storage in ROUNDED and value in ROUNDED)
    if key == "model.peer":
        return rule.optimizer in PEER_WEIGHTS.get(value, ())
    if key == "train.precision":
        return rule.storage != "float32"
    return (
        rule.storage not in WITHOUT_FORMATS
        if key in FIELDS and FIELDS[key].facts["of_formats"]
        else True
    )


def _keeps_floats(base: Mapping[str, Any], point: Mapping[str, Any]) -> bool:
    rule = RULES.get(str(point.get("rule", base.get("rule"))))
    return rule is not None and rule.storage in WITHOUT_FORMATS


def describe(config: Config, axes: Mapping[str, Any]) -> str:
    """Return the label of a point: format and rule, then the other axes by the last
    words of their keys.
    """
    shorts = [key.rsplit(".", 1)[-1] for key in axes]
    fmt, everywhere = format_summary(config), config.model.formats.get("*")
    if (
        fmt == "mixed" and axes.get("model.format") and everywhere is not None
    ):  # some layers have other formats
        fmt = weight_format(everywhere)
    words = [row_label(rule_name(config), fmt)]
    for key, short in zip(axes, shorts, strict=True):
        if key not in _SAID:
            words.append(f"{short if shorts.count(short) == 1 else key}={_shown(axes[key])}")
    return " ".join(words)


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    return (
        json.dumps(value, separators=(",", ":"), default=str)
        if isinstance(value, Mapping | list | bool)
        else str(value)
    )


def folder_name(label: str, axes: Mapping[str, Any]) -> str:
    """Return a folder's name for a label; if it had to be changed or shortened, it ends
    with a hash of the point.

    >>> folder_name("E4M3 nearest lr=0.001 seed=42", {})
    'E4M3-nearest-lr=0.001-seed=42'
    """
    name = re.sub(r"[^A-Za-z0-9._=+-]+", "-", label)
    if name == label.replace(" ", "-") and len(name) <= LONGEST_NAME:
        return name
    digest = hashlib.sha256(json.dumps(axes, sort_keys=True, default=str).encode()).hexdigest()[:8]
    return f"{name[:LONGEST_NAME].rstrip('-')}-{digest}"


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
    """Return the runs without repetitions; refuse two with different settings that
    would share a folder.
    """
    by_name: dict[str, PlannedRun] = {}
    for run in planned:
        other = by_name.setdefault(run.name, run)
        if other.settings != run.settings:
            raise BenchError(
                f"two points would both be called {run.name!r}; give values that differ in the name"
            )
    return list(by_name.values())


def check_inputs(planned: Iterable[PlannedRun]) -> None:
    """Refuse a corpus that a run can't use, or that runs spell differently, before
    anything is written.
    """
    from nanogpt_bench.data.batches import open_also, open_corpus

    of_corpus = ("data.", "model.", "eval.also")
    seen: set[str] = set()
    spelt: dict[Path, str] = {}
    for run in planned:
        folder = str(run.settings.get("data.dir", DEFAULT_DATA_DIR))
        other = spelt.setdefault(Path(folder).resolve(), folder)
        if other != folder:
            raise BenchError(
                f"data.dir: {other!r} and {folder!r} are one folder, and would be two texts in "
                f"the report; give one of them"
            )
        corpus = repr([item for item in run.settings.items() if item[0].startswith(of_corpus)])
        if corpus not in seen:
            seen.add(corpus)
            config = resolve(build_config(run.settings))
            open_also(config, open_corpus(config))
