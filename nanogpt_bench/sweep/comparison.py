"""A comparison: the packaged sweep `compare.yaml`, with other formats, rules, lengths
and settings put into it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from nanogpt_bench.config.keys import FIELDS, get
from nanogpt_bench.config.rules import RULES, available_rules, check_available
from nanogpt_bench.config.schema import FP8_FORMATS, WITHOUT_FORMATS
from nanogpt_bench.config.settings import build_config, parse_overrides
from nanogpt_bench.report.rows import row_label
from nanogpt_bench.setup.formats import format_name
from nanogpt_bench.sweep.axes import Axis, Point
from nanogpt_bench.sweep.file import FOLDER, SweepFile, read_sweep
from nanogpt_bench.sweep.plan import applies, check_count
from nanogpt_bench.system.errors import BenchError, counted

SHIPPED = "compare.yaml"
REFERENCE = "bf16-mixed"
#: the rules if only formats are given, and the format if only rules are
DEFAULT_RULES = (
    "master",
    "nearest",
    "stochastic",
    "stiffness-anneal",
    "muon-stochastic",
    "muon-residual8",
)
DEFAULT_FORMATS = ("E4M3",)
STEPS, FORMAT = "train.max_steps", "model.format"
#: settings that change in proportion to the number of steps
INTERVALS, WARM_UP = (
    ("eval.interval", "monitor.interval", "shadow.interval"),
    "optimizer.warmup_steps",
)
MOST_WARM_UP = 100


@cache
def shipped() -> SweepFile:
    return read_sweep(FOLDER / SHIPPED)


def comparison(
    *,
    formats: Sequence[str] | None = None,
    rules: Sequence[str] | None = None,
    max_steps: int | None = None,
    seeds: int = 1,
    data_dir: Path | None = None,
    reference: str | None = None,
    given: Mapping[str, Any] | None = None,
) -> SweepFile:
    """Return the packaged comparison, or one of these formats and rules.

    The settings `given` go into every row whose rule takes them; intervals change in
    proportion to the steps.
    """
    sweep, given = shipped(), dict(given or {})
    steps = _steps(given, max_steps) or sweep.base[STEPS]
    first = given.pop("seed", sweep.axes[0].grid()[0])
    base = of_length(sweep.base, steps) | (
        {} if data_dir is None else {"data.dir": data_dir.as_posix()}
    )
    if given.get("model.init_from") is not None:  # the size is that of the checkpoint
        base.pop("model.size")
    chosen = choose_rows(formats, rules)
    check_count(len(chosen) * seeds, f"{counted(len(chosen), 'row')} at --seeds {seeds:,}")
    for key, value in given.items():
        if not any(applies(key, value, RULES[row["rule"]]) for row in chosen):
            raise BenchError(
                f"--{key} {value}: means nothing in any row ({', '.join(map(label, chosen))}); "
                f"leave it out"
            )
    rows = tuple(of_length(row, steps, sweep.base[STEPS]) | taken(given, row) for row in chosen)
    axes = (Axis("seed", tuple(range(first, first + seeds))),)
    return replace(sweep, base=base, rows=rows, axes=axes, reference=reference or sweep.reference)


def choose_rows(formats: Sequence[str] | None, rules: Sequence[str] | None) -> tuple[Point, ...]:
    """Return the settings of every row: the packaged ones, or the reference and all
    formats x rules.

    Rules of float weights give one row each, without a format. `all` stands for every
    rule whose packages are installed, with the formats that its products take.
    """
    if formats is None and rules is None:
        return tuple(dict(row) for row in shipped().rows)
    named = [name for name in rules or DEFAULT_RULES if name != "all"]
    for name in named:
        check_available(name)
    if "all" in (rules or ()):
        named = available_rules()
    grids = (
        DEFAULT_FORMATS if formats is None else [format_name(name, "--formats") for name in formats]
    )
    if "none" in grids:
        raise BenchError(
            "--formats: 'none' is no format to compare; the reference row is there already"
        )
    floats = [(name, "none") for name in named if RULES[name].storage in WITHOUT_FORMATS]
    quantised = [name for name in named if RULES[name].storage not in WITHOUT_FORMATS]
    if formats and not quantised:
        raise BenchError(
            f"--formats: every rule of --rules trains floats ({', '.join(named)}); leave --formats "
            f"out"
        )
    # If its products don't take a format, `all` leaves a rule out; a rule that is named
    # is refused later.
    takes = {name: name in (rules or ()) or RULES[name].products is None for name in quantised}
    crossed = [
        (name, fmt) for fmt in grids for name in quantised if takes[name] or fmt in FP8_FORMATS
    ]
    return tuple(row_of(*pair) for pair in dict.fromkeys([(REFERENCE, "none"), *floats, *crossed]))


def row_of(rule: str, fmt: str) -> Point:
    """Return the settings of a row; one with a format has those that packaged rows with
    a format have.
    """
    if fmt == "none":
        return {"rule": rule}
    return {**next(row for row in shipped().rows if FORMAT in row), "rule": rule, FORMAT: fmt}


def row_settings(
    rule: str, fmt: str, *, seed: int, max_steps: int, data_dir: str
) -> dict[str, Any]:
    """Return all settings of one row's run as {dotted key: value}; learning rates are
    the rule's.
    """
    own = of_length({**shipped().base, **row_of(rule, fmt)}, max_steps)
    return {**own, "seed": seed, "data.dir": data_dir}


def label(row: Mapping[str, Any]) -> str:
    """Return the name of a row in the table."""
    return row_label(row["rule"], row.get(FORMAT, "none"))


def of_length(settings: Mapping[str, Any], steps: int, before: int | None = None) -> Point:
    """Return settings for another number of steps (`before`: the old one), intervals
    and warm-up in proportion.

    >>> of_length({"train.max_steps": 300, "eval.interval": 30, "optimizer.warmup_steps": 30}, 2000)
    {'train.max_steps': 2000, 'eval.interval': 200, 'optimizer.warmup_steps': 100}
    """
    then = settings[STEPS] if before is None else before
    changed = {key: max(1, settings[key] * steps // then) for key in INTERVALS if key in settings}
    if WARM_UP in settings:
        changed[WARM_UP] = min(MOST_WARM_UP, settings[WARM_UP] * steps // then)
    return {**settings, **changed, **({STEPS: steps} if STEPS in settings else {})}


def taken(given: Mapping[str, Any], row: Mapping[str, Any]) -> Point:
    """Return those of the settings `given` that a row's rule takes."""
    return {key: value for key, value in given.items() if applies(key, value, RULES[row["rule"]])}


def read_given(words: Sequence[str]) -> dict[str, Any]:
    """Return the settings of a command line by dotted key; refuse those in which the
    rows differ.
    """
    if not words:
        return {}
    given = parse_overrides(words)
    for key in given:
        if key in FIELDS and (option := FIELDS[key].facts["rows_by"]):
            raise BenchError(f"--{key}: the rows of a comparison differ in it; give {option}")
    config = build_config(given)
    return {key: get(config, key) for key in given}  # with their types: 1e-3 has become a number


def partly_used(given: Mapping[str, Any], sweep: SweepFile) -> Iterator[str]:
    """Yield a line about every given setting that not all rows take, and about a
    learning rate.
    """
    for key, value in given.items():
        takers = [label(row) for row in sweep.rows if applies(key, value, RULES[row["rule"]])]
        if key == "optimizer.lr":
            yield f"{key} {value} in every row, in the unit of its optimizer, in place of the rule's own"
        elif len(takers) < len(sweep.rows):
            yield f"{key} {value} in the rows that take it: {', '.join(takers)}"


def _steps(given: dict[str, Any], asked: int | None) -> int | None:
    """Remove the number of steps from `given`, and return it or that of --max-steps;
    None without either.
    """
    steps: int | None = given.pop(STEPS, None)
    if None not in (steps, asked) and steps != asked:
        raise BenchError(
            f"--{STEPS} {steps} and --max-steps {asked} are two numbers of steps; give one"
        )
    return asked if steps is None else steps
