"""The sweep file: which settings are the same for all runs, which are the axes, and how they are searched."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from nanogpt_bench.config.field import allowed
from nanogpt_bench.config.keys import bounds, inside, is_finite
from nanogpt_bench.config.settings import GivenTwice, find_config, find_shipped, parse_overrides, read_yaml
from nanogpt_bench.sweep.axes import Axis, assemble, read_axis, read_settings
from nanogpt_bench.system import untrusted
from nanogpt_bench.system.errors import BenchError, one_line, unknown

FOLDER = Path(__file__).parent.parent / "sweeps"


def _key(default: Any, text: str, **limits: Any) -> Any:
    return field(default=default, metadata=allowed(text, **limits))


@dataclass(frozen=True)
class LrLimits:
    """The search of `--lr-limits`, and its criterion of a stable run."""

    resolution: float = _key(1.5, "stop when unstable over stable learning rate is at most this", above=1.0)
    span: float = _key(4096.0, "how far from the first learning rate to look, as a factor", above=1.0)
    tolerance: float = _key(0.1, "stable: the final val loss exceeds the best by at most this share", above=0.0)


@dataclass(frozen=True)
class Sensitivity:
    """The layers that `--sensitivity` quantises, one at a time."""

    patterns: tuple[str, ...] = _key(
        ("attn.qkv", "attn.proj", "mlp.fc", "mlp.proj", "lm_head", "*"), "layer patterns, one row each"
    )
    blocks: bool = _key(True, "one more row for every block")
    operand: str = _key("weight", "what is quantised there", choices=("weight", "activation", "gradient"))


@dataclass(frozen=True)
class Tune:
    """The search for the best values of `keys` at every combination of the axes, before the runs that count."""

    keys: tuple[str, ...] = _key(("optimizer.lr",), "what is searched; a rule that lacks a key is searched in the rest")
    start: Mapping[str, float] = field(default_factory=dict)
    factor: float = _key(2.0, "between neighbours of the grid; around its best half of it follows", minimum=1.05)
    span: float = _key(256.0, "how far from its start a key is searched, as a factor", above=1.0)
    seeds: tuple[int, ...] = _key((), "of the trials; the mean of their losses decides")
    steps: int | None = _key(None, "of a trial; null: train.max_steps", minimum=1)
    #: settings of the trials in place of the points' own: points that differ in nothing else share one search
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Confirm:
    """The runs that count: every combination at its best values, on seeds that it was not tuned on."""

    seeds: tuple[int, ...] = _key((), "of the runs of every combination")
    steps: int | None = _key(None, "of each; null: train.max_steps", minimum=1)


@dataclass(frozen=True)
class SweepFile:
    """A sweep file as read: settings by dotted key, axes in the order of the file."""

    path: Path
    base: Mapping[str, Any]
    axes: tuple[Axis, ...]
    search: str = _key("grid", "every combination, or random points", choices=("grid", "random"))
    samples: int = _key(20, "random: how many points", minimum=1)
    sample_seed: int = _key(0, "random: chooses the points", minimum=0)
    workers: int | None = _key(None, "runs at a time; null: one a core", minimum=1)
    #: settings of each row of the table: a rule and a format, and what else it has; every point is trained in each
    rows: tuple[Mapping[str, Any], ...] = ()
    #: settings of runs to measure against; or the name of a row to measure against
    reference: Mapping[str, Any] | str | None = None
    tune: Tune | None = None
    confirm: Confirm | None = None
    lr_limits: LrLimits = field(default_factory=LrLimits)
    sensitivity: Sensitivity = field(default_factory=Sensitivity)
    #: tokens of text that every point is trained on once, each in turn (`--data-sizes`)
    data_sizes: tuple[int, ...] = ()

    def axis(self, key: str) -> Axis | None:
        """The axis of a setting, None when it is none."""
        return next((axis for axis in self.axes if axis.key == key), None)


#: keys of a sweep file
KEYS = (
    *("config", "settings", "rows", "axes", "search", "samples", "sample_seed", "workers", "reference"),
    *("tune", "confirm", "smoke", "lr_limits", "sensitivity"),
)
#: sections that smoke may change
SMOKE = ("settings", "axes", "tune", "confirm")


def shipped_sweeps() -> list[str]:
    """Return the names of the sweep files that come with the package.

    >>> "lr_limits.yaml" in shipped_sweeps()
    True
    """
    return sorted(path.name for path in FOLDER.glob("*.yaml"))


def find_sweep(name: str) -> Path:
    """Return the path of a sweep file: `name` itself, or the shipped file of that name.

    Raises:
        BenchError: neither exists; names the nearest shipped file.
    """
    return find_shipped(name, FOLDER, "sweep file")


def read_sweep(path: Path, overrides: Sequence[str] = (), *, smoke: bool = False) -> SweepFile:
    """Read a sweep file; `--section.key VALUE` overrides take precedence over its settings, its section `smoke` too.

    Raises:
        BenchError: unreadable, an unknown key, a key twice, a value out of range, or an axis that is overridden, in
            one line.
    """
    try:
        return _read(path, overrides, smoke)
    except GivenTwice as error:
        raise error.in_file(path) from None


def _read(path: Path, overrides: Sequence[str], smoke: bool) -> SweepFile:
    tree = _load(path)
    for key in tree:
        if key not in KEYS:
            raise unknown(f"key in {path.name}", key, KEYS)
    shrunk = _smoke(tree, path)
    if smoke and not shrunk:
        raise BenchError(f"--smoke: {path.name} has no section smoke, which says what is small in its small version")
    tree = {**tree, **shrunk} if smoke else tree
    axes = _axes(tree.get("axes"), path)
    rows = _rows(tree.get("rows"), axes, path)
    base = parse_overrides(overrides, assemble({}, _base(tree, path)))
    for key in parse_overrides(overrides):
        if key in [axis.key for axis in axes]:
            raise BenchError(f"--{key}: {path.name} has it as an axis; leave one of them out")
        if any(key in row for row in rows):
            raise BenchError(f"--{key}: {path.name} has it in its rows; leave one of them out")
    reference = tree.get("reference")
    return SweepFile(
        path,
        base,
        axes,
        rows=rows,
        **_checked(SweepFile, tree, "", ("search", "samples", "sample_seed", "workers")),
        reference=reference if isinstance(reference, str | None) else _settings(reference, "reference"),
        **_tuning(tree, path),
        lr_limits=LrLimits(**_section(LrLimits, tree, "lr_limits")),
        sensitivity=Sensitivity(**_section(Sensitivity, tree, "sensitivity")),
    )


def _load(path: Path) -> dict[str, Any]:
    try:
        tree = untrusted.read_yaml(path)
    except OSError as error:
        raise BenchError(f"sweep file {str(path)!r} can't be read: {error.strerror or error}") from None
    except ValueError as error:
        raise BenchError(f"sweep file {str(path)!r} is not YAML: {one_line(error)}") from None
    if not isinstance(tree, dict):
        raise BenchError(f"sweep file {str(path)!r} must hold keys and values; allowed: {', '.join(KEYS)}")
    return tree


def _smoke(tree: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The sections of the file with what its section smoke says put in."""
    smoke = tree.get("smoke")
    if smoke is None:
        return {}
    if not isinstance(smoke, dict):
        raise BenchError(f"smoke in {path.name}: {smoke!r} is not allowed; give sections: {', '.join(SMOKE)}")
    for name, content in smoke.items():
        if name not in SMOKE:
            raise unknown(f"key in smoke of {path.name}", name, SMOKE)
        for where, given in ((f"smoke.{name}", content), (name, tree.get(name) or {})):
            if not isinstance(given, dict):
                raise BenchError(f"{where} in {path.name}: {given!r} is not allowed; give keys and values")
    return {name: _put_in(name, tree.get(name) or {}, content) for name, content in smoke.items()}


def _put_in(name: str, section: Mapping[str, Any], content: Mapping[str, Any]) -> dict[str, Any]:
    """A section with what smoke says in its place: settings one by one, however nested either is."""
    if name == "settings":
        return _settings(section, name) | _settings(content, f"smoke.{name}")
    return {**section, **content}


def _axes(content: Any, path: Path) -> tuple[Axis, ...]:
    if content is None:
        return ()
    if not isinstance(content, dict) or not content:
        raise BenchError(f"axes in {path.name}: {content!r} is not allowed; give settings and their values")
    axes = tuple(read_axis(str(key), values) for key, values in content.items())
    twice = [axis.key for axis in axes if [other.key for other in axes].count(axis.key) > 1]
    if twice:
        raise BenchError(f"axes in {path.name}: {twice[0]!r} is there twice")
    return axes


def _rows(content: Any, axes: Sequence[Axis], path: Path) -> tuple[dict[str, Any], ...]:
    """The settings of every row, each with a rule; none of them is an axis."""
    if content is None:
        return ()
    if not isinstance(content, list) or not content:
        raise BenchError(f"rows in {path.name}: {content!r} is not allowed; give a list, such as [{{rule: fp32}}]")
    rows = tuple(_settings(row, "rows") for row in content)
    for row in rows:
        if "rule" not in row:
            raise BenchError(f"rows in {path.name}: {row!r} has no rule; give one, such as rule: fp32")
        for axis in axes:
            if axis.key in row:
                raise BenchError(f"axes.{axis.key} in {path.name}: rows says it; leave one of them out")
    return rows


def _base(tree: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The settings of all runs: the configuration named, and what the file sets on top of it."""
    name = tree.get("config")
    base = read_yaml(_beside(path, str(name))) if name is not None else {}
    return base | _settings(tree.get("settings") or {}, "settings")


def _beside(path: Path, name: str) -> Path:
    """A configuration named in a sweep file: beside that file, or as `run` would find it."""
    beside = path.parent / name
    try:
        return beside if beside.is_file() else find_config(name)
    except OSError as error:
        raise BenchError(f"config {name!r} can't be read: {error.strerror or error}") from None


def _settings(content: Any, key: str) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise BenchError(f"{key}: {content!r} is not allowed; give settings, such as train.max_steps: 300")
    try:
        return read_settings(content)
    except GivenTwice as error:
        raise GivenTwice(f"{key}.{error.key}") from None


def _tuning(tree: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The sections tune and confirm, which go together and share no seed."""
    if tree.get("tune") is None and tree.get("confirm") is None:
        return {}
    for name, other in (("tune", "confirm"), ("confirm", "tune")):
        if tree.get(name) is None:
            raise BenchError(f"{other} in {path.name} needs {name}; give {name}: {{seeds: [1, 2]}}")
    tune, confirm = Tune(**_section(Tune, tree, "tune")), Confirm(**_section(Confirm, tree, "confirm"))
    for name, seeds in (("tune", tune.seeds), ("confirm", confirm.seeds)):
        if not seeds:
            raise BenchError(f"{name}.seeds: missing in {path.name}; give a list of seeds, such as [1, 2]")
    if both := [seed for seed in tune.seeds if seed in confirm.seeds]:
        raise BenchError(f"confirm.seeds: {both[0]} is one of tune.seeds; confirm on seeds that nothing was tuned on")
    return {"tune": tune, "confirm": confirm}


def _section(section: type, tree: Mapping[str, Any], name: str) -> dict[str, Any]:
    content = tree.get(name)
    if content is None:
        return {}
    known = [item.name for item in dataclasses.fields(section)]
    if not isinstance(content, dict):
        raise BenchError(f"{name}: {content!r} is not a section; give its keys: {', '.join(known)}")
    for key in content:
        if key not in known:
            raise unknown(f"key in {name}", key, known)
    return _checked(section, content, f"{name}.", known)


def _checked(section: type, content: Mapping[str, Any], prefix: str, keys: Sequence[str]) -> dict[str, Any]:
    """The values given for these keys, each of the type and in the range that its field declares."""
    items = {item.name: item for item in dataclasses.fields(section)}
    hints = get_type_hints(section)
    given = [key for key in keys if content.get(key) is not None]
    return {key: _value(prefix + key, content[key], hints[key], items[key].metadata) for key in given}


_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a word"}


def _value(key: str, value: Any, hint: Any, metadata: Mapping[str, Any]) -> Any:
    kinds = getattr(hint, "__args__", (hint,))
    if Ellipsis in kinds:
        return _words(key, value) if str in kinds else _seeds(key, value)
    if get_origin(hint) is Mapping:
        return _numbers(key, value) if float in get_args(hint) else _settings(value, key)
    kind = next(kind for kind in kinds if kind is not type(None))
    if kind is float and isinstance(value, int) and not isinstance(value, bool) and is_finite(value):
        value = float(value)
    if type(value) is not kind:
        raise BenchError(f"{key}: {value!r} is not allowed; give {_WORDS[kind]}{bounds(metadata)}")
    if metadata["choices"] and value not in metadata["choices"]:
        raise unknown(key, value, metadata["choices"])
    if kind in (int, float) and not (is_finite(value) and inside(value, metadata)):
        raise BenchError(f"{key}: {value!r} is out of range; give {_WORDS[kind]}{bounds(metadata)}")
    return value


def _seeds(key: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not value or not all(type(seed) is int and seed >= 0 for seed in value):
        raise BenchError(f"{key}: {value!r} is not allowed; give a list of whole numbers >= 0")
    if twice := [seed for seed in value if value.count(seed) > 1]:
        raise BenchError(f"{key}: {twice[0]} is there twice")
    return tuple(value)


def _numbers(key: str, value: Any) -> dict[str, float]:
    try:
        numbers = {str(name): float(number) for name, number in value.items() if not isinstance(number, bool)}
        if len(numbers) == len(value) and all(0 < number < math.inf for number in numbers.values()):
            return numbers
    except (AttributeError, TypeError, ValueError, OverflowError):
        pass
    raise BenchError(f"{key}: {value!r} is not allowed; give keys and numbers above 0, such as optimizer.lr: 0.001")


def _words(key: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not value or not all(isinstance(word, str) for word in value):
        raise BenchError(f"{key}: {value!r} is not allowed; give a list of words")
    return tuple(dict.fromkeys(value))
