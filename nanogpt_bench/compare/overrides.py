"""Settings given to `compare`: what `run` takes, put into every row for which it means something."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from nanogpt_bench.compare.plan import PlannedRun
from nanogpt_bench.config.keys import FIELDS, get
from nanogpt_bench.config.rules import RULES, Rule, has_moments
from nanogpt_bench.config.schema import OPTION_NAMES, OPTIONS, PEER_WEIGHTS, ROUNDED, WITHOUT_FORMATS
from nanogpt_bench.system.errors import BenchError

LR = "optimizer.lr"


def read_given(words: Sequence[str]) -> dict[str, Any]:
    """Return the settings of a command line by dotted key.

    Raises:
        BenchError: no such setting, or one that the rows differ in.
    """
    if not words:
        return {}
    from nanogpt_bench.config.settings import build_config, parse_overrides

    given = parse_overrides(words)
    for key in given:
        if key in FIELDS and (option := FIELDS[key].facts["rows_by"]):
            raise BenchError(f"--{key}: the rows of a comparison differ in it; give {option}")
    config = build_config(given)
    return {key: get(config, key) for key in given}  # 1e-3 is a number


def steps_of(given: dict[str, Any], asked: int | None) -> int | None:
    """Return the steps of every run, taken out of what was given, since other settings follow from them.

    Raises:
        BenchError: two numbers of them.
    """
    steps: int | None = given.pop("train.max_steps", None)
    if None not in (steps, asked) and steps != asked:
        raise BenchError(f"--train.max_steps {steps} and --max-steps {asked} are two numbers of steps; give one")
    return asked if steps is None else steps


def as_typed(words: Sequence[str]) -> dict[str, str]:
    """Return the options of a command line and their texts.

    >>> as_typed(["--optimizer.lr", "1e-3", "--seed=3"])
    {'--optimizer.lr': '1e-3', '--seed': '3'}
    """
    typed, queue = {}, list(words)
    while queue:
        option, equals, text = queue.pop(0).partition("=")
        typed[option] = text if equals else queue.pop(0)
    return typed


def put_into(settings: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row's settings with those given that mean something for its rule."""
    rule = RULES[settings["rule"]]
    taken = {key: value for key, value in given.items() if applies(key, value, rule)}
    if taken.get("model.init_from") is not None:  # which has a size of its own
        settings = {key: value for key, value in settings.items() if key != "model.size"}
    return settings | taken


def applies(key: str, value: Any, rule: Rule) -> bool:
    """Whether a setting means something under a rule.

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
    if key == "shadow.of":
        return value != "master" or rule.storage not in ROUNDED
    if key == "model.peer":
        return rule.optimizer in PEER_WEIGHTS.get(value, ())
    if key == "train.precision":
        return rule.storage != "float32"
    return rule.storage not in WITHOUT_FORMATS if key in FIELDS and FIELDS[key].facts["of_formats"] else True


def check_given(given: Mapping[str, Any], planned: Sequence[PlannedRun], say: Callable[[str], None]) -> int:
    """Check every row's settings, say which rows a setting is for, and return the length of a block.

    Raises:
        BenchError: a setting that no row takes, or one that a row can't have; names the row.
    """
    from nanogpt_bench.config.settings import build_config
    from nanogpt_bench.setup.parallel import refuse_parallel
    from nanogpt_bench.setup.resolve import resolve  # brings torch along

    rows = {run.label: run for run in planned}
    lines = list(_lines(given, rows))
    length = 0
    for label, run in rows.items():
        try:
            config = resolve(build_config(dict(run.settings)))
            refuse_parallel(config.train.parallel, "each row of a comparison")
            length = config.model.block_size or 0
        except BenchError as error:
            raise BenchError(f"{error} (in the row {label!r})") from None
    for line in lines:
        say(line)
    return length


def _lines(given: Mapping[str, Any], rows: Mapping[str, PlannedRun]) -> Iterator[str]:
    for key, value in given.items():
        takers = [label for label, run in rows.items() if applies(key, value, RULES[run.rule])]
        if not takers:
            raise BenchError(f"--{key} {value}: means nothing in any row ({', '.join(rows)}); leave it out")
        if key == LR:
            yield f"{key} {value} in every row, in the unit of its optimizer, in place of the rule's own"
        elif len(takers) < len(rows):
            yield f"{key} {value} in the rows that take it: {', '.join(takers)}"
