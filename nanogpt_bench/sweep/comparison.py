"""A comparison: the packaged sweep `compare.yaml`, changed by options.

It is a sweep whose rows are pairs of rule and format and whose axis is the seed.
Options of the command replace the rows, the number of steps and of seeds. Other
settings of the command go into each row whose rule takes them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from nanogpt_bench.config.keys import FIELDS, get
from nanogpt_bench.config.rules import RULES, available_rules, check_available
from nanogpt_bench.config.schema import FP8_FORMATS, NO_FORMAT, WITHOUT_FORMATS
from nanogpt_bench.config.settings import build_config, parse_overrides
from nanogpt_bench.report.rows import row_label
from nanogpt_bench.setup.formats import format_name
from nanogpt_bench.sweep.axes import FORMAT_KEY, Axis, Point
from nanogpt_bench.sweep.file import SWEEPS_FOLDER, SweepFile, read_sweep
from nanogpt_bench.sweep.plan import STEPS_KEY, applies, check_count
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
# Settings that change in proportion to the number of steps.
INTERVALS = ("eval.interval", "monitor.interval", "shadow.interval")
WARM_UP = "optimizer.warmup_steps"
MOST_WARM_UP = 100


@cache
def shipped() -> SweepFile:
    """Return the packaged comparison."""
    return read_sweep(SWEEPS_FOLDER / SHIPPED)


def comparison(
    *,
    formats: Sequence[str] | None = None,
    rules: Sequence[str] | None = None,
    max_steps: int | None = None,
    seeds: int = 1,
    data_dir: Path | None = None,
    reference: str | None = None,
    settings: Mapping[str, Any] | None = None,
) -> SweepFile:
    """Return the packaged comparison, or one of these formats and rules.

    The `settings` go into every row whose rule takes them; intervals change in
    proportion to the steps.
    """
    sweep = shipped()
    shared = dict(settings or {})
    steps = _take_steps(shared, max_steps) or sweep.base[STEPS_KEY]
    first_seed = shared.pop("seed", sweep.axes[0].grid()[0])
    base = of_length(sweep.base, steps)
    if data_dir is not None:
        base["data.dir"] = data_dir.as_posix()
    if shared.get("model.init_from") is not None:
        # The size is that of the checkpoint.
        base.pop("model.size")
    chosen_rows = choose_rows(formats, rules)
    rows_and_seeds = f"{counted(len(chosen_rows), 'row')} at --seeds {seeds:,}"
    check_count(len(chosen_rows) * seeds, rows_and_seeds)
    for key, value in shared.items():
        if not _rows_that_take(key, value, chosen_rows):
            labels = ", ".join(label(row) for row in chosen_rows)
            raise BenchError(f"--{key} {value} has no effect in any row ({labels}); leave it out")
    rows = []
    for row in chosen_rows:
        rows.append(of_length(row, steps, sweep.base[STEPS_KEY]) | applicable(shared, row))
    axes = (Axis("seed", tuple(range(first_seed, first_seed + seeds))),)
    return replace(
        sweep,
        base=base,
        rows=tuple(rows),
        axes=axes,
        reference=reference or sweep.reference,
    )


def choose_rows(formats: Sequence[str] | None, rules: Sequence[str] | None) -> tuple[Point, ...]:
    """Return the settings of every row.

    They are the packaged ones or, if formats or rules are given, those of the reference
    and of all formats x rules. Rules of float weights give one row each, without a
    format. `all` stands for every rule whose packages are installed, with the formats
    that its products take.
    """
    if formats is None and rules is None:
        return tuple(dict(row) for row in shipped().rows)
    rule_names = _choose_rules(rules)
    format_names = _choose_formats(formats)
    float_rules = [name for name in rule_names if RULES[name].storage in WITHOUT_FORMATS]
    quantised_rules = [name for name in rule_names if name not in float_rules]
    if formats and not quantised_rules:
        raise BenchError(
            f"--formats: all rules of --rules train floats ({', '.join(rule_names)}); leave "
            "--formats out"
        )
    rows = [row_of(REFERENCE, NO_FORMAT)]
    for name in float_rules:
        rows.append(row_of(name, NO_FORMAT))
    for fmt in format_names:
        for name in quantised_rules:
            # If its products don't take a format, `all` leaves a rule out. A rule that
            # is named is refused later.
            is_named = name in (rules or ())
            takes_format = RULES[name].products is None or fmt in FP8_FORMATS
            if is_named or takes_format:
                rows.append(row_of(name, fmt))
    distinct_rows = {label(row): row for row in rows}
    return tuple(distinct_rows.values())


def _choose_rules(rules: Sequence[str] | None) -> Sequence[str]:
    names = [name for name in rules or DEFAULT_RULES if name != "all"]
    for name in names:
        check_available(name)
    return available_rules() if "all" in (rules or ()) else names


def _choose_formats(formats: Sequence[str] | None) -> Sequence[str]:
    if formats is None:
        return DEFAULT_FORMATS
    names = [format_name(name, "--formats") for name in formats]
    if NO_FORMAT in names:
        raise BenchError(
            "--formats: 'none' can't be compared, since the reference row is float already; leave "
            "it out"
        )
    return names


def row_of(rule: str, fmt: str) -> Point:
    """Return the settings of a row.

    One with a format has those that packaged rows with a format have.
    """
    if fmt == NO_FORMAT:
        return {"rule": rule}
    packaged_row = next(row for row in shipped().rows if FORMAT_KEY in row)
    return {**packaged_row, "rule": rule, FORMAT_KEY: fmt}


def row_settings(
    rule: str, fmt: str, *, seed: int, max_steps: int, data_dir: str
) -> dict[str, Any]:
    """Return all settings of one row's run as {dotted key: value}.

    Learning rates are the rule's.
    """
    settings = of_length({**shipped().base, **row_of(rule, fmt)}, max_steps)
    return {**settings, "seed": seed, "data.dir": data_dir}


def label(row: Mapping[str, Any]) -> str:
    """Return the name of a row in the table."""
    return row_label(row["rule"], row.get(FORMAT_KEY, NO_FORMAT))


def of_length(settings: Mapping[str, Any], steps: int, old_steps: int | None = None) -> Point:
    """Return settings for another number of steps, intervals and warm-up in proportion.

    `old_steps` is the old number; if None, that of the settings.

    >>> of_length({"train.max_steps": 300, "eval.interval": 30, "optimizer.warmup_steps": 30}, 2000)
    {'train.max_steps': 2000, 'eval.interval': 200, 'optimizer.warmup_steps': 100}
    """
    old_steps = settings[STEPS_KEY] if old_steps is None else old_steps
    changed = dict(settings)
    for key in INTERVALS:
        if key in settings:
            changed[key] = max(1, settings[key] * steps // old_steps)
    if WARM_UP in settings:
        changed[WARM_UP] = min(MOST_WARM_UP, settings[WARM_UP] * steps // old_steps)
    if STEPS_KEY in settings:
        changed[STEPS_KEY] = steps
    return changed


def applicable(settings: Mapping[str, Any], row: Mapping[str, Any]) -> Point:
    """Return those of the settings that a row's rule takes."""
    rule = RULES[row["rule"]]
    return {key: value for key, value in settings.items() if applies(key, value, rule)}


def _rows_that_take(
    key: str, value: Any, rows: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    return [row for row in rows if applies(key, value, RULES[row["rule"]])]


def read_overrides(words: Sequence[str]) -> dict[str, Any]:
    """Return the settings of a command line by dotted key.

    Those in which the rows differ are refused.
    """
    if not words:
        return {}
    settings = parse_overrides(words)
    for key in settings:
        option = FIELDS[key].facts["rows_by"] if key in FIELDS else None
        if option:
            raise BenchError(
                f"--{key}: the rows of a comparison have different values of it; give {option} "
                "instead"
            )
    # With their types: 1e-3 has become a number.
    config = build_config(settings)
    return {key: get(config, key) for key in settings}


def partly_used(settings: Mapping[str, Any], sweep: SweepFile) -> Iterator[str]:
    """Yield a line about every setting that not all rows take.

    There is one about a learning rate, too.
    """
    for key, value in settings.items():
        rows = _rows_that_take(key, value, sweep.rows)
        if key == "optimizer.lr":
            yield (
                f"{key} {value} in every row, in the unit of the row's optimizer, instead of its "
                "rule's own"
            )
        elif len(rows) < len(sweep.rows):
            labels = ", ".join(label(row) for row in rows)
            yield f"{key} {value} in the rows that take it: {labels}"


def _take_steps(settings: dict[str, Any], max_steps: int | None) -> int | None:
    """Remove the number of steps from `settings`; return it or --max-steps, if any."""
    steps: int | None = settings.pop(STEPS_KEY, None)
    if None not in (steps, max_steps) and steps != max_steps:
        raise BenchError(
            f"--{STEPS_KEY} {steps} and --max-steps {max_steps} both set the number of steps; "
            "leave one of them out"
        )
    return max_steps if steps is None else steps
