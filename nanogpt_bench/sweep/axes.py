"""An axis of a sweep: a setting and the values it takes, listed or between two bounds.

A sweep file gives its axes as `key: values`, which `read_axis` checks. `grid_points`
and `random_points` make points of them, each a {dotted key: value} mapping. `assemble`
puts a point over the settings that all runs share.
"""

import inspect
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

from nanogpt_bench.config.keys import FIELDS, mapping_above
from nanogpt_bench.config.settings import DuplicateSetting, entries_of, flatten, once, unknown_key
from nanogpt_bench.system.errors import BenchError, unknown
from nanogpt_bench.system.untrusted import is_beyond_floats

AXIS_SCALES = ("log", "linear")
RANGE_KEYS = ("min", "max", "scale", "points")
#: significant digits of a number between two bounds, so that it is easily read
SIGNIFICANT_DIGITS = 4
#: stands for the format of all layers; its mapping has one for each pattern of layers
FORMAT_KEY = "model.format"
FORMATS_KEY = "model.formats"

Point = dict[str, Any]


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high` on a linear or a logarithmic scale.

    A grid takes `points` of them, evenly spaced; a random search draws them.
    """

    low: float
    high: float
    scale: str = "log"
    points: int | None = None
    #: numbers are rounded to whole ones
    whole: bool = False

    def at(self, share: float) -> float | int:
        """Return the number `share` (0 to 1) of the way from `low` to `high`."""
        if self.scale == "log":
            value = self.low * (self.high / self.low) ** share
        else:
            value = self.low + (self.high - self.low) * share
        return round(value) if self.whole else float(f"{value:.{SIGNIFICANT_DIGITS}g}")


@dataclass(frozen=True)
class Axis:
    """A setting and its values.

    The key is dotted. It may also name one entry of `model.formats`
    (`model.formats.PATTERN`), or an option of one (`model.formats.PATTERN.OPTION`).
    """

    key: str
    values: tuple[Any, ...] | Range

    def grid(self) -> tuple[Any, ...]:
        """Return all values, for a grid.

        >>> Axis("optimizer.lr", Range(1e-4, 1e-2, points=3)).grid()
        (0.0001, 0.001, 0.01)
        """
        if not isinstance(self.values, Range):
            return self.values
        steps = max(1, self.size - 1)
        numbers = [self.values.at(place / steps) for place in range(self.size)]
        return tuple(dict.fromkeys(numbers))

    @property
    def size(self) -> int:
        """The most values in a grid.

        A grid has fewer if values of a range are equal once rounded to whole numbers.
        """
        if not isinstance(self.values, Range):
            return len(self.values)
        if self.values.points is None:
            raise BenchError(
                f"axes.{self.key}: a grid needs points, the number of values from min to max"
            )
        return self.values.points

    def draw(self, source: random.Random) -> Any:
        """Return one value at random."""
        if not isinstance(self.values, Range):
            return source.choice(self.values)
        if self.values.points is not None:
            raise BenchError(
                f"axes.{self.key}: points is for search: grid; for a random search give samples "
                "instead"
            )
        return self.values.at(source.random())


def grid_points(axes: tuple[Axis, ...]) -> Iterator[Point]:
    """Yield every combination, the last axis running fastest."""
    keys = [axis.key for axis in axes]
    for values in product(*(axis.grid() for axis in axes)):
        yield dict(zip(keys, values, strict=True))


def random_points(axes: tuple[Axis, ...], samples: int, seed: int) -> Iterator[Point]:
    """Yield `samples` random points, each at every value of the axis `seed`, if any.

    A point depends only on its number, `seed` and the keys. With more samples the
    earlier ones stay the same.
    """
    drawn_axes = tuple(axis for axis in axes if axis.key != "seed")
    seed_axes = tuple(axis for axis in axes if axis.key == "seed")
    for number in range(samples):
        point = {}
        for axis in drawn_axes:
            point[axis.key] = axis.draw(random.Random(f"{seed}/{number}/{axis.key}"))
        for seed_point in grid_points(seed_axes):
            yield point | seed_point


def read_axis(key: str, values: Any) -> Axis:
    """Return the axis that a sweep file gives as `key: values`, checked."""
    if key not in FIELDS and not mapping_above(key):
        raise unknown_key(key)
    if isinstance(values, Mapping):
        return Axis(key, _read_range(key, values))
    if not isinstance(values, list) or not values:
        raise BenchError(
            f"axes.{key}: {values!r} is not allowed; give a list of values, or min and max"
        )
    known: set[Any] = set()
    for value in values:
        hashable = _hashable(value)
        if hashable in known:
            raise BenchError(f"axes.{key}: {value!r} is given twice; keep one")
        known.add(hashable)
    return Axis(key, tuple(values))


def _hashable(value: Any) -> Any:
    """Return an object that can be in a set, equal for equal values only."""
    if isinstance(value, Mapping):
        return "mapping", frozenset((key, _hashable(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return "list", tuple(map(_hashable, value))
    return frozenset(value) if isinstance(value, set) else value


def _read_range(key: str, content: Mapping[Any, Any]) -> Range:
    for name in content:
        if name not in RANGE_KEYS:
            raise unknown(f"key in axes.{key}", name, RANGE_KEYS)
    low = _read_number(key, "min", content.get("min"))
    high = _read_number(key, "max", content.get("max"))
    scale = content.get("scale", "log")
    points = content.get("points")
    if scale not in AXIS_SCALES:
        raise unknown(f"axes.{key}.scale", scale, AXIS_SCALES)
    if points is not None:
        is_whole = isinstance(points, int) and not isinstance(points, bool)
        if not is_whole or points < 2:
            raise BenchError(
                f"axes.{key}.points: {points!r} is not allowed; give a whole number >= 2"
            )
    if not low < high or (scale == "log" and low <= 0):
        raise BenchError(
            f"axes.{key}: min {low:g} and max {high:g} are not allowed; give min < max, above 0 on "
            "a log scale"
        )
    distance = high / low if scale == "log" else high - low
    if not math.isfinite(distance):
        raise BenchError(f"axes.{key}: min {low:g} and max {high:g} are too far apart")
    return Range(low, high, scale, points, whole=key in FIELDS and FIELDS[key].kind is int)


def _read_number(key: str, name: str, value: Any) -> float:
    number = _finite_number(value)
    if number is None:
        raise BenchError(f"axes.{key}.{name}: {value!r} is not allowed; give a number")
    return number


def _finite_number(value: Any) -> float | None:
    """Return a value, or the number a text spells, as a float; None if it is none."""
    if isinstance(value, bool):
        return None
    try:
        number = float(value)
        is_beyond = isinstance(value, str) and is_beyond_floats(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return None if is_beyond or not math.isfinite(number) else number


def read_settings(content: Mapping[Any, Any]) -> Point:
    """Return nested or dotted settings as {dotted key: value}.

    A dotted key may also name a single entry of `model.formats`. Raises `DuplicateSetting`
    for a setting, or an entry of a mapping, that is given both dotted and nested.

    >>> read_settings({"train": {"max_steps": 3}, "model.formats.attn": "E4M3"})
    {'train.max_steps': 3, 'model.formats.attn': 'E4M3'}
    """
    settings: Point = once(_flatten_settings(content))
    for key in settings:
        mapping = mapping_above(key)
        if mapping and mapping in settings:
            name = key.removeprefix(f"{mapping}.")
            if name in entries_of(settings, mapping):
                raise DuplicateSetting(key)
    return settings


def _flatten_settings(content: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        if mapping_above(str(key)):
            yield str(key), value
        else:
            yield from flatten({key: value})


def assemble(base: Mapping[str, Any], point: Mapping[str, Any]) -> Point:
    """Return `base` with the settings of a point.

    Single entries of a mapping, such as those of `model.formats`, are merged into it.
    An entry's format is that of the weights. `model.formats.PATTERN.OPTION` sets
    another option of the layers.

    >>> point = {"model.formats.*.ste": "clipped", "model.format": "E5M2"}
    >>> assemble({"model.format": "E4M3"}, point)
    {'model.formats': {'*': {'weight': 'E5M2', 'ste': 'clipped'}}}
    """
    settings = {**base, **point}
    formats = _take_formats(settings)
    for key in list(settings):
        mapping = mapping_above(key)
        if mapping is not None:
            entries = dict(entries_of(settings, mapping))
            entries[key.removeprefix(f"{mapping}.")] = settings.pop(key)
            settings[mapping] = entries
    if formats:
        settings[FORMATS_KEY] = formats
    return settings


def _take_formats(settings: dict[str, Any]) -> dict[str, Any]:
    """Remove `model.format` and all of `model.formats`; return them as one mapping."""
    formats = dict(entries_of(settings, FORMATS_KEY))
    settings.pop(FORMATS_KEY, None)
    weights: list[tuple[_LayersName, Any]] = []
    options: list[tuple[_LayersName, Any]] = []
    for key in list(settings):
        if key != FORMAT_KEY and not key.startswith(f"{FORMATS_KEY}."):
            continue
        value = settings.pop(key)
        if key == FORMAT_KEY and value is None:
            continue
        name = _layers_named(key)
        if name.option is None:
            weights.append((name, value))
        else:
            options.append((name, value))
    # Options come last, since they are put beside the format of the weights.
    for name, value in [*weights, *options]:
        _put_format(formats, name, value)
    return formats


class _LayersName(NamedTuple):
    """The part of the model that a key of `model.formats` names."""

    #: pattern of layers
    pattern: str
    #: an option of theirs; None for the format of their weights
    option: str | None = None


def _layers_named(key: str) -> _LayersName:
    import fp8manifold as fm

    if key == FORMAT_KEY:
        return _LayersName("*")
    name = key.removeprefix(f"{FORMATS_KEY}.")
    pattern, dot, last_word = name.rpartition(".")
    if dot and last_word in inspect.signature(fm.LayerSpec).parameters:
        return _LayersName(pattern, last_word)
    return _LayersName(name)


def _put_format(formats: dict[str, Any], name: _LayersName, value: Any) -> None:
    present = formats.get(name.pattern)
    if name.option is None and not isinstance(present, Mapping):
        formats[name.pattern] = value
        return
    spec = dict(present) if isinstance(present, Mapping) else {"weight": present}
    spec[name.option or "weight"] = value
    formats[name.pattern] = spec
