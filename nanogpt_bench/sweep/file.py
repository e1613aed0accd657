"""The sweep file: the settings of all runs, rows, axes, and how they are searched.

`read_sweep` reads one in this order:

1. the section `smoke` is laid over the others, if it is asked for
2. axes and rows are read
3. the settings of all runs: those of the file named `config`, then `settings`, then the
   overrides of the command line
4. the sections with fixed keys (`Points`, `Tune`, `Confirm`, `SensitivityOptions`) are
   checked by pydantic, as the configuration is
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pydantic import ValidationError, field_validator

from nanogpt_bench.config.field import SettingsSection, setting
from nanogpt_bench.config.keys import refusal, section_settings
from nanogpt_bench.config.settings import (
    DuplicateSetting,
    content_of,
    find_config,
    find_shipped,
    parse_overrides,
    read_settings_file,
)
from nanogpt_bench.sweep.axes import Axis, assemble, read_axis, read_settings
from nanogpt_bench.system.errors import BenchError, unknown

SWEEPS_FOLDER = Path(__file__).parent.parent / "sweeps"
SectionKind = TypeVar("SectionKind", bound=SettingsSection)


class SensitivityOptions(SettingsSection):
    """The layers that `--sensitivity` quantises, one pattern at a time."""

    patterns: list[str] = setting(
        lambda: ["attn.qkv", "attn.proj", "mlp.fc", "mlp.proj", "lm_head", "*"],
        "layer patterns, one row each",
    )
    blocks: bool = setting(True, "add a row for every block")
    operand: str = setting(
        "weight", "which operand is quantised", choices=("weight", "activation", "gradient")
    )


class Confirm(SettingsSection):
    """The runs that count: every combination at its best values, on untouched seeds."""

    seeds: list[int] = setting(list, "seeds of the runs at every point")
    steps: int | None = setting(None, "steps of each run; null: train.max_steps", minimum=1)

    @field_validator("seeds", mode="before")
    @classmethod
    def _check_seeds(cls, seeds: Any) -> Any:
        if not _is_list_of_seeds(seeds):
            raise BenchError(
                f"{seeds!r} is not allowed; give a list of whole numbers >= 0, such as [1, 2]"
            )
        for seed in seeds:
            if seeds.count(seed) > 1:
                raise BenchError(f"{seed} is given twice; keep one")
        return seeds


def _is_list_of_seeds(seeds: Any) -> bool:
    if not isinstance(seeds, list) or not seeds:
        return False
    return all(type(seed) is int and seed >= 0 for seed in seeds)


# `seeds` and `steps` are declared as in the runs that count.
class Tune(Confirm):
    """The search for the best values of `keys`, before the runs that count.

    There is one at every combination of the axes.
    """

    keys: list[str] = setting(
        lambda: ["optimizer.lr"],
        "keys to search; a rule that lacks one of them is searched over the others",
    )
    start: dict[str, float] = setting(dict, "first value by key; where none is given, the rule's")
    factor: float = setting(
        2.0,
        "ratio of neighbouring values; around the best value its square root is tried too",
        minimum=1.05,
    )
    span: float = setting(
        256.0, "how far a search goes from the first value, as a factor", above=1.0
    )
    #: searched after `keys`, such as optimizer.weight_decay: [0.0, 0.1]; a value's
    #: neighbours are those in the list
    choices: dict[str, list[int | float]] = setting(
        dict,
        "values to try by key, the rule's own among them",
        maps="key to list of values",
    )
    #: points that differ only in these share one search
    settings: dict[str, Any] = setting(
        dict, "settings of the trials, which replace the points' own"
    )

    @field_validator("start", mode="before")
    @classmethod
    def _check_start(cls, start: Any) -> Any:
        numbers = _positive_numbers(start)
        if numbers is None:
            raise BenchError(
                f"{start!r} is not allowed; give keys and numbers above 0, such as "
                f"optimizer.lr: 0.001"
            )
        return numbers

    @field_validator("choices", mode="before")
    @classmethod
    def _check_choices(cls, choices: Any) -> Any:
        if not isinstance(choices, dict):
            # pydantic refuses it.
            return choices
        for key, values in choices.items():
            if not _is_rising(values):
                raise BenchError(
                    f"{key}: {values!r} is not allowed; give two or more rising numbers, such as "
                    f"[0.0, 0.1]"
                )
        return choices

    @field_validator("settings", mode="before")
    @classmethod
    def _check_settings(cls, settings: Any) -> Any:
        # The error gets the name of the section from `_read_section`.
        if not isinstance(settings, dict):
            raise BenchError(
                f"{settings!r} is not allowed; give settings, such as train.max_steps: 300"
            )
        return read_settings(settings)


def _positive_numbers(content: Any) -> dict[str, float] | None:
    """Return a mapping's values as floats; None if one is not finite and above 0."""
    if not isinstance(content, Mapping):
        return None
    numbers = {}
    for name, value in content.items():
        if isinstance(value, bool):
            return None
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            return None
        if not 0 < number < math.inf:
            return None
        numbers[str(name)] = number
    return numbers


def _is_rising(values: Any) -> bool:
    """Return whether this is a list of two or more rising numbers."""
    if not isinstance(values, list) or len(values) < 2:
        return False
    if not all(type(value) in (int, float) for value in values):
        return False
    return sorted(set(values)) == values


class Points(SettingsSection):
    """The choice of a sweep's points, and how many runs are trained at a time."""

    search: str = setting(
        "grid", "grid: every combination; random: random points", choices=("grid", "random")
    )
    samples: int = setting(20, "random: number of points", minimum=1)
    sample_seed: int = setting(0, "random: seed by which points are drawn", minimum=0)
    workers: int | None = setting(None, "runs at a time; null: one per core", minimum=1)


@dataclass(frozen=True)
class SweepFile:
    """The content of a sweep file: settings by dotted key, axes in the file's order."""

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
    "config",
    "settings",
    "rows",
    "axes",
    "search",
    "samples",
    "sample_seed",
    "workers",
    "reference",
    "tune",
    "confirm",
    "smoke",
    "sensitivity",
)
#: the sections that `smoke` may change
SMOKE = ("settings", "axes", "tune", "confirm")


def find_sweep(name: str) -> Path:
    """Return the path of a sweep file: `name` itself, or a packaged file."""
    return find_shipped(name, SWEEPS_FOLDER, "sweep file")


def read_sweep(path: Path, overrides: Sequence[str] = (), *, smoke: bool = False) -> SweepFile:
    """Read a sweep file, its small version if `smoke`.

    `overrides` win over its settings, those of its section `smoke` included.
    """
    try:
        return _read_sweep(path, overrides, smoke)
    except DuplicateSetting as error:
        raise error.in_file(path) from None


def _read_sweep(path: Path, overrides: Sequence[str], smoke: bool) -> SweepFile:
    content = _read_content(path)
    small_sections = _small_sections(content, path)
    if smoke:
        if not small_sections:
            raise BenchError(
                f"--smoke: {path.name} has no section smoke, which describes its small version"
            )
        content = {**content, **small_sections}
    axes = _read_axes(content.get("axes"), path)
    rows = _read_rows(content.get("rows"), axes, path)
    base = parse_overrides(overrides, _read_base(content, path))
    _refuse_overridden(parse_overrides(overrides), axes, rows, path)
    _refuse_unused_samples(content, path)
    points = _build_section(Points, {name: content.get(name) for name in Points.model_fields}, "")
    reference = content.get("reference")
    if not isinstance(reference, str | None):
        reference = _read_section_settings(reference, "reference")
    tuning = _read_tuning_sections(content, path)
    return SweepFile(
        path=path,
        base=base,
        axes=axes,
        search=points.search,
        samples=points.samples,
        sample_seed=points.sample_seed,
        workers=points.workers,
        rows=rows,
        reference=reference,
        tune=tuning.tune,
        confirm=tuning.confirm,
        sensitivity=_read_section(SensitivityOptions, content, "sensitivity"),
    )


def _read_content(path: Path) -> dict[str, Any]:
    content = content_of(path, "sweep file")
    if not isinstance(content, dict):
        raise BenchError(
            f"sweep file {str(path)!r} must hold keys and values; allowed: {', '.join(KEYS)}"
        )
    for key in content:
        if key not in KEYS:
            raise unknown(f"key in {path.name}", key, KEYS)
    return content


def _small_sections(content: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the sections that `smoke` changes, as it changes them; {} without one."""
    smoke = content.get("smoke")
    if smoke is None:
        return {}
    if not isinstance(smoke, dict):
        raise BenchError(
            f"smoke in {path.name}: {smoke!r} is not allowed; give sections: {', '.join(SMOKE)}"
        )
    small_sections = {}
    for name, changes in smoke.items():
        if name not in SMOKE:
            raise unknown(f"key in smoke of {path.name}", name, SMOKE)
        section = content.get(name) or {}
        _refuse_unless_mapping(changes, f"smoke.{name}", path)
        _refuse_unless_mapping(section, name, path)
        small_sections[name] = {**section, **changes}
    if "settings" in smoke:
        # A setting replaces itself, whether they are dotted or nested.
        settings = _read_section_settings(content.get("settings") or {}, "settings")
        settings |= _read_section_settings(smoke["settings"], "smoke.settings")
        small_sections["settings"] = settings
    return small_sections


def _refuse_unless_mapping(content: Any, name: str, path: Path) -> None:
    if not isinstance(content, dict):
        raise BenchError(f"{name} in {path.name}: {content!r} is not allowed; give keys and values")


def _read_axes(content: Any, path: Path) -> tuple[Axis, ...]:
    if content is None:
        return ()
    if not isinstance(content, dict) or not content:
        raise BenchError(
            f"axes in {path.name}: {content!r} is not allowed; give settings and their values"
        )
    return tuple(read_axis(str(key), values) for key, values in content.items())


def _read_rows(content: Any, axes: Sequence[Axis], path: Path) -> tuple[dict[str, Any], ...]:
    if content is None:
        return ()
    if not isinstance(content, list) or not content:
        raise BenchError(
            f"rows in {path.name}: {content!r} is not allowed; give a list, such as "
            f"[{{rule: fp32}}]"
        )
    rows = tuple(_read_section_settings(row, "rows") for row in content)
    for row in rows:
        if "rule" not in row:
            raise BenchError(
                f"rows in {path.name}: {row!r} has no rule; give one, such as rule: fp32"
            )
        for axis in axes:
            if axis.key in row:
                raise BenchError(
                    f"axes.{axis.key} in {path.name}: its rows set it already; leave one of them "
                    "out"
                )
    return rows


def _read_base(content: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the settings of all runs, those of the file before the command line's."""
    settings = {}
    if content.get("config") is not None:
        settings = read_settings_file(_find_config(str(content["config"]), path))
    settings |= _read_section_settings(content.get("settings") or {}, "settings")
    return assemble({}, settings)


def _find_config(name: str, sweep_path: Path) -> Path:
    """Return the path of a configuration that a sweep file names.

    It is looked for in the folder of that file, then where `run` would find it.
    """
    sibling = sweep_path.parent / name
    try:
        return sibling if sibling.is_file() else find_config(name)
    except OSError as error:
        raise BenchError(f"config {name!r} can't be read: {error.strerror or error}") from None


def _refuse_overridden(
    overrides: Mapping[str, Any],
    axes: Sequence[Axis],
    rows: Sequence[Mapping[str, Any]],
    path: Path,
) -> None:
    """Refuse an override of a setting that the file varies."""
    axis_keys = [axis.key for axis in axes]
    for key in overrides:
        if key in axis_keys:
            raise BenchError(f"--{key}: {path.name} has an axis of it; leave one of them out")
        if any(key in row for row in rows):
            raise BenchError(f"--{key}: {path.name} sets it in its rows; leave one of them out")


def _refuse_unused_samples(content: Mapping[str, Any], path: Path) -> None:
    """Refuse options of a random search in the file of a grid."""
    if content.get("search") not in (None, "grid"):
        return
    for key in ("samples", "sample_seed"):
        if content.get(key) is not None:
            raise BenchError(
                f"{key} in {path.name} is for search: random; give that, or leave {key} out"
            )


def _read_section_settings(content: Any, section: str) -> dict[str, Any]:
    """Return settings of a section by dotted key; errors name the section."""
    if not isinstance(content, dict):
        raise BenchError(
            f"{section}: {content!r} is not allowed; give settings, such as train.max_steps: 300"
        )
    try:
        return read_settings(content)
    except DuplicateSetting as error:
        raise DuplicateSetting(f"{section}.{error.key}") from None


class _TuningSections(NamedTuple):
    tune: Tune | None = None
    confirm: Confirm | None = None


def _read_tuning_sections(content: Mapping[str, Any], path: Path) -> _TuningSections:
    """Return the sections tune and confirm, which need each other and share no seed."""
    has_tune = content.get("tune") is not None
    has_confirm = content.get("confirm") is not None
    if not has_tune and not has_confirm:
        return _TuningSections()
    if not has_tune:
        raise BenchError(f"confirm in {path.name} needs tune; give tune: {{seeds: [1, 2]}}")
    if not has_confirm:
        raise BenchError(f"tune in {path.name} needs confirm; give confirm: {{seeds: [1, 2]}}")
    tune = _read_section(Tune, content, "tune")
    confirm = _read_section(Confirm, content, "confirm")
    for name, section in (("tune", tune), ("confirm", confirm)):
        if not section.seeds:
            raise BenchError(
                f"{name}.seeds: missing in {path.name}; give a list of seeds, such as [1, 2]"
            )
    for seed in tune.seeds:
        if seed in confirm.seeds:
            raise BenchError(
                f"confirm.seeds: {seed} is one of tune.seeds; confirm on seeds on which nothing "
                "was tuned"
            )
    return _TuningSections(tune, confirm)


def _read_section(kind: type[SectionKind], content: Mapping[str, Any], name: str) -> SectionKind:
    section = {} if content.get(name) is None else content[name]
    if not isinstance(section, dict):
        raise BenchError(
            f"{name}: {section!r} is not a section; give its keys: {', '.join(kind.model_fields)}"
        )
    for key in section:
        if key not in kind.model_fields:
            raise unknown(f"key in {name}", key, kind.model_fields)
    return _build_section(kind, section, f"{name}.")


def _build_section(kind: type[SectionKind], values: Mapping[str, Any], prefix: str) -> SectionKind:
    """Return a section with these values; null stands for the default."""
    try:
        return kind.model_validate(
            {key: value for key, value in values.items() if value is not None}
        )
    except ValidationError as error:
        fields = {declared.key: declared for declared in section_settings(kind, prefix)}
        raise refusal(error, fields, prefix) from None
