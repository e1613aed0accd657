"""An axis of a sweep: a setting and the values it takes, listed or between two bounds."""

import inspect
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from nanogpt_bench.config.keys import FIELDS, mapping_above
from nanogpt_bench.config.settings import GivenTwice, entries_of, flatten, once, unknown_key
from nanogpt_bench.system.errors import BenchError, unknown
from nanogpt_bench.system.untrusted import is_beyond_floats

SCALES = ("log", "linear")
RANGE_KEYS = ("min", "max", "scale", "points")
#: significant digits of a number between two bounds, so that it is easily read
SIGNIFICANT_DIGITS = 4
FORMATS = "model.formats."

Point = dict[str, Any]


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, evenly spaced or drawn on a linear or a logarithmic
    scale.
    """

    low: float
    high: float
    scale: str = "log"
    points: int | None = None
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
    """A setting by dotted key (`model.formats.PATTERN` and
    `model.formats.PATTERN.OPTION` included) and its values.
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
        return tuple(dict.fromkeys(self.values.at(place / steps) for place in range(self.size)))

    @property
    def size(self) -> int:
        """The most values in a grid; values of a range may coincide when they are
        rounded to whole numbers.
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
                f"axes.{self.key}: points goes with search: grid, a random search takes samples "
                f"instead"
            )
        return self.values.at(source.random())


def grid_points(axes: tuple[Axis, ...]) -> Iterator[Point]:
    """Yield every combination, the last axis running fastest."""
    for values in product(*(axis.grid() for axis in axes)):
        yield dict(zip((axis.key for axis in axes), values, strict=True))


def random_points(axes: tuple[Axis, ...], samples: int, seed: int) -> Iterator[Point]:
    """Yield `samples` random points, each at every value of the axis `seed` if there is
    one.

    A point depends only on its number, `seed` and the keys: with more samples the
    earlier ones stay the same.
    """
    drawn = tuple(axis for axis in axes if axis.key != "seed")
    seeds = tuple(axis for axis in axes if axis.key == "seed")
    for number in range(samples):
        point = {
            axis.key: axis.draw(random.Random(f"{seed}/{number}/{axis.key}")) for axis in drawn
        }
        for same in grid_points(seeds):
            yield point | same


def read_axis(key: str, values: Any) -> Axis:
    """Return the axis that a sweep file gives as `key: values`, checked."""
    if key not in FIELDS and not mapping_above(key):
        raise unknown_key(key)
    if isinstance(values, Mapping):
        return Axis(key, _range(key, values))
    if not isinstance(values, list) or not values:
        raise BenchError(
            f"axes.{key}: {values!r} is not allowed; give a list of values, or min and max"
        )
    seen: set[Any] = set()
    for value in values:
        if (known := _hashable(value)) in seen:
            raise BenchError(f"axes.{key}: {value!r} is given twice; keep one")
        seen.add(known)
    return Axis(key, tuple(values))


def _hashable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return "mapping", frozenset((key, _hashable(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return "list", tuple(map(_hashable, value))
    return frozenset(value) if isinstance(value, set) else value


def _range(key: str, values: Mapping[Any, Any]) -> Range:
    for name in values:
        if name not in RANGE_KEYS:
            raise unknown(f"key in axes.{key}", name, RANGE_KEYS)
    low, high = (_number(key, name, values.get(name)) for name in ("min", "max"))
    scale, points = values.get("scale", "log"), values.get("points")
    if scale not in SCALES:
        raise unknown(f"axes.{key}.scale", scale, SCALES)
    if points is not None and (
        not isinstance(points, int) or isinstance(points, bool) or points < 2
    ):
        raise BenchError(f"axes.{key}.points: {points!r} is not allowed; give a whole number >= 2")
    if not low < high or (scale == "log" and low <= 0):
        raise BenchError(
            f"axes.{key}: min {low:g} and max {high:g} are not allowed; min < max, above 0 on a "
            f"log scale"
        )
    if not math.isfinite(high / low if scale == "log" else high - low):
        raise BenchError(f"axes.{key}: min {low:g} and max {high:g} are too far apart")
    return Range(low, high, scale, points, whole=key in FIELDS and FIELDS[key].kind is int)


def _number(key: str, name: str, value: Any) -> float:
    try:
        number = float(value) if not isinstance(value, bool) else math.nan
        if isinstance(value, str) and is_beyond_floats(value):
            number = math.nan
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise BenchError(f"axes.{key}.{name}: {value!r} is not allowed; give a number")
    return number


def read_settings(content: Mapping[Any, Any]) -> Point:
    """Return settings, nested or dotted, also single entries of model.formats, as
    {dotted key: value}.

    Raises `GivenTwice` for a setting, or an entry of a mapping, that is given both
    dotted and nested.

    >>> read_settings({"train": {"max_steps": 3}, "model.formats.attn": "E4M3"})
    {'train.max_steps': 3, 'model.formats.attn': 'E4M3'}
    """
    settings: Point = once(
        pair
        for key, value in content.items()
        for pair in ([(str(key), value)] if mapping_above(str(key)) else flatten({key: value}))
    )
    for key in settings:
        mapping = mapping_above(key)
        if (
            mapping
            and mapping in settings
            and key[len(mapping) + 1 :] in entries_of(settings, mapping)
        ):
            raise GivenTwice(key)
    return settings


def assemble(base: Mapping[str, Any], point: Mapping[str, Any]) -> Point:
    """Return `base` with the settings of a point, and single entries of `model.formats`
    merged into that mapping.

    An entry's format is that of the weights; `model.formats.PATTERN.OPTION` sets
    another option of the layers.

    >>> assemble({"model.format": "E4M3"}, {"model.formats.*.ste": "clipped", "model.format": "E5M2"})
    {'model.formats': {'*': {'weight': 'E5M2', 'ste': 'clipped'}}}
    """
    given = {**base, **point}
    formats = dict(entries_of(given, "model.formats"))
    given.pop("model.formats", None)
    entries = [
        (key, given.pop(key))
        for key in list(given)
        if key == "model.format" or key.startswith(FORMATS)
    ]
    for key, value in sorted(entries, key=lambda entry: _option(entry[0]) is not None):
        if value is not None or key != "model.format":
            _put(formats, key, value)
    for key in [key for key in given if mapping_above(key)]:
        mapping = mapping_above(key) or ""
        given[mapping] = {**entries_of(given, mapping), key[len(mapping) + 1 :]: given.pop(key)}
    return given | ({"model.formats": formats} if formats else {})


def _option(key: str) -> str | None:
    """The layer option at the end of a key of model.formats; None without one."""
    import fp8manifold as fm

    last = key.rsplit(".", 1)[-1]
    return (
        last if key.count(".") > 2 and last in inspect.signature(fm.LayerSpec).parameters else None
    )


def _put(formats: dict[str, Any], key: str, value: Any) -> None:
    option = _option(key)
    pattern = "*" if key == "model.format" else key.removeprefix(FORMATS).removesuffix(f".{option}")
    before = formats.get(pattern)
    if option is None:
        formats[pattern] = {**before, "weight": value} if isinstance(before, Mapping) else value
    else:
        spec = dict(before) if isinstance(before, Mapping) else {"weight": before}
        formats[pattern] = {**spec, option: value}
