"""The help on a run's settings: a topic for each section of them, for the rules and for the shipped configurations."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import get_type_hints

from nanogpt_bench.config.keys import FIELDS, type_name
from nanogpt_bench.config.rules import RULES
from nanogpt_bench.config.schema import Config
from nanogpt_bench.config.settings import FOLDER, shipped_configs
from nanogpt_bench.system.errors import BenchError, nearest

RULES_TOPIC, CONFIGS_TOPIC, GENERAL, ALL = "rules", "configs", "general", "all"
WIDTH = 100


def topic_of(words: Sequence[str]) -> str | None:
    """Return what a command line asks for help on: the word after `--help`, None where there is none.

    >>> topic_of(["run", "--help", "optimizer"]), topic_of(["run", "--help"]), topic_of(["run", "a.yaml"])
    ('optimizer', None, None)
    """
    place = next((place for place, word in enumerate(words) if word in ("--help", "-h")), len(words))
    following = words[place + 1 : place + 2]
    return next((word for word in following if not word.endswith((".yaml", ".yml"))), None)


def topics() -> dict[str, str]:
    """Return the topics and a line on each, the sections in the order of the settings."""
    hints = get_type_hints(Config)
    sections = [item.name for item in dataclasses.fields(Config) if dataclasses.is_dataclass(hints[item.name])]
    return {
        RULES_TOPIC: "The update rules.",
        CONFIGS_TOPIC: "The shipped configurations.",
        GENERAL: "Settings of no section.",
        **{name: (hints[name].__doc__ or "").splitlines()[0] for name in sections},
        ALL: "Every rule and every setting.",
    }


def text_on(topic: str) -> str:
    """Return the help on a topic, or on one setting.

    Raises:
        BenchError: neither; names the nearest one.
    """
    topic = topic.removeprefix("--")
    if topic in FIELDS:
        return describe([topic])
    known = topics()
    if topic not in known:
        guess = nearest(topic, [*known, *FIELDS])
        hint = f"; did you mean {guess!r}?" if guess else ";"
        raise BenchError(f"--help {topic!r} is not known{hint} allowed: {', '.join(known)}, or a setting")
    if topic == RULES_TOPIC:
        return rules()
    if topic == CONFIGS_TOPIC:
        return "\n".join(configs())
    if topic == ALL:
        return f"rules:\n{rules()}\n\nsettings:\n{describe(FIELDS)}"
    return f"{known[topic]}\n\n{describe(keys_of(topic))}"


def keys_of(section: str) -> list[str]:
    """Return the settings of a section, by dotted key."""
    return [key for key in FIELDS if (key.partition(".")[0] if "." in key else GENERAL) == section]


def overview() -> str:
    """Return a line for every topic."""
    lines = (f"  {name:<12}{text}" for name, text in topics().items())
    return "\n".join(["settings, by topic (nanogpt-bench run --help TOPIC, or --help optimizer.lr):", *lines])


def rules() -> str:
    """Return a line for every rule."""
    return "\n".join(f"  {name:<20} {entry.help} [lr {entry.lr:g}]" for name, entry in RULES.items())


def configs() -> Iterator[str]:
    """Yield a line for every shipped configuration: its name and how what it says of itself begins."""
    for name in shipped_configs():
        lines = (FOLDER / name).read_text(encoding="utf-8").splitlines()
        words = " ".join(line[1:].strip() for line in lines if line.startswith("#"))
        yield f"  {name:<30}{textwrap.shorten(words.partition('. ')[0], WIDTH, placeholder=' …')}"


def describe(keys: Iterable[str]) -> str:
    """Return one line for every setting: key, allowed values, default, help."""
    lines = []
    for key in keys:
        setting = FIELDS[key]
        choices = setting.facts["choices"]
        allowed = "{" + ",".join(choices) + "}" if choices else type_name(key)
        shown = "null" if setting.default is None else setting.default
        lines.append(f"  --{key:<26} {setting.facts['help']} [{allowed}; default {shown}]")
    return "\n".join(lines)
