"""The sweep file: the settings of all runs, rows, axes, and how they are searched."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError, field_validator

from nanogpt_bench.config.field import Section, setting
from nanogpt_bench.config.keys import refusal, settings_of
from nanogpt_bench.config.settings import (
    GivenTwice,
    content_of,
    find_config,
    find_shipped,
    parse_overrides,
    read_yaml,
)
from nanogpt_bench.sweep.axes import Axis, assemble, read_axis, read_settings
from nanogpt_bench.system.errors import BenchError, unknown

FOLDER = Path(__file__).parent.parent / "sweeps"
Kind = TypeVar("Kind", bound=Section)


class SensitivityOptions(Section):
    """The layers that `--sensitivity` quantises, one pattern at a time."""

    patterns: list[str] = setting(
        lambda: ["attn.qkv", "attn.proj", "mlp.fc", "mlp.proj", "lm_head", "*"],
        "layer patterns, one row each",
    )
    blocks: bool = setting(True, "one more row for every block")
    operand: str = setting(
        "weight", "operand that is quantised", choices=("weight", "activation", "gradient")
    )


class Confirm(Section):
    """The runs that count: every combination at its best values, with seeds on which it
    was not tuned.
    """

    seeds: list[int] = setting(list, "seeds of the runs of every combination")
    steps: int | None = setting(None, "steps of each run; null: train.max_steps", minimum=1)

    @field_validator("seeds", mode="before")
    @classmethod
    def _once(cls, seeds: Any) -> Any:
        if (
            not isinstance(seeds, list)
            or not seeds
            or not all(type(seed) is int and seed >= 0 for seed in seeds)
        ):
            raise BenchError(
                f"{seeds!r} is not allowed; give a list of whole numbers >= 0, such as [1, 2]"
            )
        if twice := [seed for seed in seeds if seeds.count(seed) > 1]:
            raise BenchError(f"{twice[0]} is given twice; keep one")
        return seeds


class Tune(Confirm):
    """The search for the best values of `keys` at every combination of the axes, before
    the runs that count.
    """

    keys: list[str] = setting(
        lambda: ["optimizer.lr"],
        "keys to search; for a rule without one of them the others are searched",
    )
    start: dict[str, float] = setting(dict, "first value of a key; not given: the rule's")
    factor: float = setting(
        2.0, "ratio of neighbouring values; around the best its square root is tried", minimum=1.05
    )
    span: float = setting(
        256.0, "how far from its first value a key is searched, as a factor", above=1.0
    )
    #: searched after `keys`, such as optimizer.weight_decay: [0.0, 0.1]; a value's
    #: neighbours are those in the list
    choices: dict[str, list[int | float]] = setting(
        dict, "keys with a list of values to try, the rule's among them"
    )
    #: points that differ only in these share one search
    settings: dict[str, Any] = setting(dict, "settings of the trials in place of the points' own")

    @field_validator("start", mode="before")
    @classmethod
    def _numbers(cls, start: Any) -> Any:
        try:
            numbers = {
                str(name): float(number)
                for name, number in start.items()
                if not isinstance(number, bool)
            }
            if len(numbers) == len(start) and all(
                0 < number < math.inf for number in numbers.values()
            ):
                return numbers
        except (AttributeError, TypeError, ValueError, OverflowError):
            pass
        raise BenchError(
            f"{start!r} is not allowed; give keys and numbers above 0, such as optimizer.lr: 0.001"
        )

    @field_validator("choices", mode="before")
    @classmethod
    def _lists(cls, choices: Any) -> Any:
        for key, values in (
            choices.items() if isinstance(choices, dict) else [("tune.choices", choices)]
        ):
            numbers = (
                values
                if isinstance(values, list) and all(type(v) in (int, float) for v in values)
                else []
            )
            if len(numbers) < 2 or sorted({*numbers}) != numbers:
                raise BenchError(
                    f"{key}: {values!r} is not allowed; give two or more rising numbers, such as "
                    f"[0.0, 0.1]"
                )
        return choices

    @field_validator("settings", mode="before")
    @classmethod
    def _by_key(cls, settings: Any) -> Any:
        return _settings(settings, "tune.settings")


class Points(Section):
    """The choice of a sweep's points, and how many runs are trained at a time."""

    search: str = setting("grid", "every combination, or random points", choices=("grid", "random"))
    samples: int = setting(20, "random: how many points", minimum=1)
    sample_seed: int = setting(0, "random: the seed by which points are drawn", minimum=0)
    workers: int | None = setting(None, "runs at a time; null: one per core", minimum=1)


@dataclass(frozen=True)
class SweepFile:
    """The content of a sweep file: settings by dotted key, axes in the order of the
    file.
    """

    path: Path
    base: Mapping[str, Any]
    axes: tuple[Axis, ...]
    search: str
    samples: int
    sample_seed: int
    workers: int | None
    #: settings of each row of the table: a rule, a format, and others; every point of
    #: the axes is trained for each row
    rows: tuple[Mapping[str, Any], ...] = ()
    #: settings of reference runs, or the name of the row that is the reference
    reference: Mapping[str, Any] | str | None = None
    tune: Tune | None = None
    confirm: Confirm | None = None
    sensitivity: SensitivityOptions = field(default_factory=SensitivityOptions)

    def axis(self, key: str) -> Axis | None:
        """Return the axis of a setting; None without one."""
        return next((axis for axis in self.axes if axis.key == key), None)


#: the keys of a sweep file
KEYS = (
    *(
        "config",
        "settings",
        "rows",
        "axes",
        "search",
        "samples",
        "sample_seed",
        "workers",
        "reference",
    ),
    *("tune", "confirm", "smoke", "sensitivity"),
)
#: the sections that `smoke` may change
SMOKE = ("settings", "axes", "tune", "confirm")


def find_sweep(name: str) -> Path:
    """Return the path of a sweep file: `name` itself, or the packaged file of that
    name.
    """
    return find_shipped(name, FOLDER, "sweep file")


def read_sweep(path: Path, overrides: Sequence[str] = (), *, smoke: bool = False) -> SweepFile:
    """Read a sweep file; `overrides` win over its settings, also over those of `smoke`,
    which is used if `smoke`.
    """
    try:
        return _read(path, overrides, smoke)
    except GivenTwice as error:
        raise error.in_file(path) from None


def _read(path: Path, overrides: Sequence[str], smoke: bool) -> SweepFile:
    tree = content_of(path, "sweep file")
    if not isinstance(tree, dict):
        raise BenchError(
            f"sweep file {str(path)!r} must hold keys and values; allowed: {', '.join(KEYS)}"
        )
    for key in tree:
        if key not in KEYS:
            raise unknown(f"key in {path.name}", key, KEYS)
    shrunk = _smoke(tree, path)
    if smoke and not shrunk:
        raise BenchError(
            f"--smoke: {path.name} has no section smoke, which says what is small in its small "
            f"version"
        )
    tree = {**tree, **shrunk} if smoke else tree
    axes = _axes(tree.get("axes"), path)
    rows = _rows(tree.get("rows"), axes, path)
    base = {} if tree.get("config") is None else read_yaml(_beside(path, str(tree["config"])))
    base |= _settings(tree.get("settings") or {}, "settings")
    base = parse_overrides(overrides, assemble({}, base))
    for key in parse_overrides(overrides):
        if key in [axis.key for axis in axes]:
            raise BenchError(f"--{key}: {path.name} has it as an axis; leave one of them out")
        if any(key in row for row in rows):
            raise BenchError(f"--{key}: {path.name} has it in its rows; leave one of them out")
    reference = tree.get("reference")
    for key in ("samples", "sample_seed"):
        if tree.get(key) is not None and tree.get("search") in (None, "grid"):
            raise BenchError(
                f"{key} in {path.name} goes with search: random; give that, or leave {key} out"
            )
    return SweepFile(
        path,
        base,
        axes,
        **dict(_made(Points, {name: tree.get(name) for name in Points.model_fields}, "")),
        rows=rows,
        reference=reference
        if isinstance(reference, str | None)
        else _settings(reference, "reference"),
        **_tuning(tree, path),
        sensitivity=_section(SensitivityOptions, tree, "sensitivity"),
    )


def _smoke(tree: Mapping[str, Any], path: Path) -> dict[str, Any]:
    smoke = tree.get("smoke")
    if smoke is None:
        return {}
    if not isinstance(smoke, dict):
        raise BenchError(
            f"smoke in {path.name}: {smoke!r} is not allowed; give sections: {', '.join(SMOKE)}"
        )
    for name, content in smoke.items():
        if name not in SMOKE:
            raise unknown(f"key in smoke of {path.name}", name, SMOKE)
        for where, given in ((f"smoke.{name}", content), (name, tree.get(name) or {})):
            if not isinstance(given, dict):
                raise BenchError(
                    f"{where} in {path.name}: {given!r} is not allowed; give keys and values"
                )
    small = {name: {**(tree.get(name) or {}), **content} for name, content in smoke.items()}
    if "settings" in smoke:  # key by key, dotted or nested
        own = _settings(tree.get("settings") or {}, "settings")
        small["settings"] = own | _settings(smoke["settings"], "smoke.settings")
    return small


def _axes(content: Any, path: Path) -> tuple[Axis, ...]:
    if content is None:
        return ()
    if not isinstance(content, dict) or not content:
        raise BenchError(
            f"axes in {path.name}: {content!r} is not allowed; give settings and their values"
        )
    return tuple(read_axis(str(key), values) for key, values in content.items())


def _rows(content: Any, axes: Sequence[Axis], path: Path) -> tuple[dict[str, Any], ...]:
    if content is None:
        return ()
    if not isinstance(content, list) or not content:
        raise BenchError(
            f"rows in {path.name}: {content!r} is not allowed; give a list, such as "
            f"[{{rule: fp32}}]"
        )
    rows = tuple(_settings(row, "rows") for row in content)
    for row in rows:
        if "rule" not in row:
            raise BenchError(
                f"rows in {path.name}: {row!r} has no rule; give one, such as rule: fp32"
            )
        for axis in axes:
            if axis.key in row:
                raise BenchError(
                    f"axes.{axis.key} in {path.name}: rows says it; leave one of them out"
                )
    return rows


def _beside(path: Path, name: str) -> Path:
    """The configuration named in a sweep file: beside that file, or where `run` would
    find it.
    """
    beside = path.parent / name
    try:
        return beside if beside.is_file() else find_config(name)
    except OSError as error:
        raise BenchError(f"config {name!r} can't be read: {error.strerror or error}") from None


def _settings(content: Any, key: str) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise BenchError(
            f"{key}: {content!r} is not allowed; give settings, such as train.max_steps: 300"
        )
    try:
        return read_settings(content)
    except GivenTwice as error:
        raise GivenTwice(f"{key}.{error.key}") from None


def _tuning(tree: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The sections tune and confirm, which need each other and share no seed."""
    if tree.get("tune") is None and tree.get("confirm") is None:
        return {}
    for name, other in (("tune", "confirm"), ("confirm", "tune")):
        if tree.get(name) is None:
            raise BenchError(f"{other} in {path.name} needs {name}; give {name}: {{seeds: [1, 2]}}")
    tune, confirm = _section(Tune, tree, "tune"), _section(Confirm, tree, "confirm")
    for name, seeds in (("tune", tune.seeds), ("confirm", confirm.seeds)):
        if not seeds:
            raise BenchError(
                f"{name}.seeds: missing in {path.name}; give a list of seeds, such as [1, 2]"
            )
    if both := [seed for seed in tune.seeds if seed in confirm.seeds]:
        raise BenchError(
            f"confirm.seeds: {both[0]} is one of tune.seeds; confirm on seeds that nothing was "
            f"tuned on"
        )
    return {"tune": tune, "confirm": confirm}


def _section(kind: type[Kind], tree: Mapping[str, Any], name: str) -> Kind:
    content = {} if tree.get(name) is None else tree[name]
    if not isinstance(content, dict):
        raise BenchError(
            f"{name}: {content!r} is not a section; give its keys: {', '.join(kind.model_fields)}"
        )
    for key in content:
        if key not in kind.model_fields:
            raise unknown(f"key in {name}", key, kind.model_fields)
    return _made(kind, content, f"{name}.")


def _made(kind: type[Kind], content: Mapping[str, Any], prefix: str) -> Kind:
    """A section with a file's values; null means the default."""
    try:
        return kind.model_validate(
            {key: value for key, value in content.items() if value is not None}
        )
    except ValidationError as error:
        raise refusal(
            error, {each.key: each for each in settings_of(kind, prefix)}, prefix
        ) from None
