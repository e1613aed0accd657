"""Tables of the pages, made from the library and the bench.

So no fact is stored twice. The bench is imported in the functions that need it, so that
the tables of formats can do without.
"""

import argparse
import math
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _markdown import markdown

import fp8manifold as fm

TABLED_FORMATS = tuple(name for name in fm.NAMED_FORMATS if not name.startswith("P3109"))
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
#: the page's words for the bench's names of storages
STORAGES = {
    "float32": "floats",
    "master": "a float32 copy",
    "grid": "the grid",
    "codes": "one byte",
    "continuous": "floats, unrounded",
    "peer": "one byte of its package",
}


def formats_table(names: Sequence[str] = TABLED_FORMATS) -> str:
    """Return the facts of formats, a line per format.

    The library derives each of them from the format's four stored fields.
    """
    header = (
        "format",
        "bits",
        "bias",
        "layout",
        "largest",
        "smallest normal",
        "smallest subnormal",
        "finite codes",
    )
    return markdown(header, [_format_row(fm.FloatFormat.from_string(name)) for name in names])


def _format_row(fmt: fm.FloatFormat) -> list[str]:
    return [
        fmt.name,
        str(fmt.bits),
        str(fmt.bias),
        fmt.layout,
        number(fmt.max),
        number(fmt.min_normal),
        "none" if fmt.min_subnormal is None else number(fmt.min_subnormal),
        str(fmt.finite_codes),
    ]


def number(x: float) -> str:
    """Return a format's number, exactly.

    It has decimals where these are short, and a power of two otherwise.

    >>> number(448.0), number(0.125), number(2.0**64), number(1.5 * 2.0**32)
    ('448', '2⁻³', '2⁶⁴', '1.5·2³²')
    """
    if 1 <= x < 2**17:
        return f"{x:g}" if x == float(f"{x:g}") else repr(x)
    fraction, exponent = math.frexp(x)
    # frexp's fraction is in [1/2, 1), a mantissa in [1, 2).
    mantissa = 2 * fraction
    power = "2" + str(exponent - 1).translate(SUPERSCRIPTS)
    return power if mantissa == 1 else f"{mantissa:g}·{power}"


def rules_table() -> str:
    """Return the update rules of the bench, a line per rule."""
    from nanogpt_bench.config.rules import RULES

    rows = []
    for name, rule in RULES.items():
        meaning = rule.help.replace(", no master copy", "")
        rows.append((f"`{name}`", meaning, STORAGES[rule.storage], f"{rule.lr:g}"))
    return markdown(("rule", "what it does", "weights live in", "default lr"), rows)


def metrics_tables() -> str:
    """Return a table of the metrics that are always recorded, and one per monitor."""
    from nanogpt_bench.monitors import METRICS

    header = ("metric", "what it is", "unit", "all layers", "bad")
    titles = {
        "": "Always:",
        "shadow": "With `shadow.enabled`:",
        "floor": "With `monitor.floor_formats`, `OPERAND` being a format:",
    }
    tables = []
    for monitor in dict.fromkeys(metric.monitor for metric in METRICS):
        title = titles.get(monitor, f"With `{monitor}`:")
        rows = [_metric_row(metric) for metric in METRICS if metric.monitor == monitor]
        tables.append(f"{title}\n\n{markdown(header, rows)}")
    return "\n".join(tables)


def _metric_row(metric: Any) -> tuple[str, ...]:
    name = f"{metric.name}/OPERAND" if metric.operands else metric.name
    bad = {"above": "high", "below": "low", "": ""}[metric.bad]
    row = (f"`{name}`", f"{metric.title}. {metric.meaning}", metric.unit, metric.over, bad)
    return tuple(map(_escape_bars, row))


def _escape_bars(text: str) -> str:
    """Escape the bars of a cell, which would end it."""
    return text.replace("|", "\\|")


def failures_table() -> str:
    """Return the bounds beyond which a run counts as failed, a line per bound."""
    from nanogpt_bench.failures import CLASSES
    from nanogpt_bench.monitors.ranges import CLAMPED, OVERFLOW

    header = ("class", "figure", "bound", "measurements in a row")
    sides = {"above": "at least", "below": "at most"}
    names = {}
    for metric in (OVERFLOW, CLAMPED):
        for operand_metric in metric.parts:
            names[operand_metric.name] = f"{metric.name}/OPERAND"
    rows = []
    for bound in CLASSES:
        rows.append(
            (
                f"`{bound.kind}`",
                f"`{names.get(bound.figure, bound.figure)}`",
                f"{sides[bound.side]} {bound.bound:g}",
                str(bound.patience),
            )
        )
    # The bounds of a metric's operands share a line.
    return markdown(header, dict.fromkeys(rows))


def settings_sections() -> str:
    """Return a heading and a table for every section of a configuration."""
    from nanogpt_bench.config.keys import FIELDS
    from nanogpt_bench.config.schema import Config

    run_settings = [setting for key, setting in FIELDS.items() if "." not in key]
    sections = [f"## Of the run\n\n{_settings_table(run_settings)}"]
    for name, field in Config.model_fields.items():
        settings = [setting for key, setting in FIELDS.items() if key.startswith(f"{name}.")]
        if settings:
            table = _settings_table(settings)
            sections.append(f"## `{name}`\n\n{field.description}\n\n{table}")
    return "\n".join(sections)


def _settings_table(settings: Iterable[Any]) -> str:
    rows = []
    for setting in settings:
        default = f"`{_yaml_text(setting.default)}`"
        rows.append(
            (f"`{setting.key}`", default, _escape_bars(setting.help), _allowed_values(setting))
        )
    return markdown(("setting", "default", "meaning", "allowed"), rows)


def _yaml_text(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def _allowed_values(setting: Any) -> str:
    if setting.facts["choices"]:
        return ", ".join(f"`{choice}`" for choice in setting.facts["choices"])
    limits = []
    for name, sign in {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}.items():
        for bound in setting.bounds:
            limit = getattr(bound, name, None)
            if limit is not None:
                limits.append(f"{sign} {limit:g}")
    return ", ".join(limits)


def commands() -> str:
    """Return a heading, the help and the options of every command, from its parser."""
    from nanogpt_bench.cli import COMMANDS, build_parser

    _, parsers = build_parser(COMMANDS)
    return "\n".join(_command_section(name, command) for name, command in parsers.items())


def _command_section(name: str, parser: argparse.ArgumentParser) -> str:
    """Return the description, the usage and the options of one command."""
    rows = []
    for action in parser._actions:
        if action.option_strings:
            spelling = ", ".join(action.option_strings)
            spelling += f" {action.metavar}" if action.metavar else ""
        else:
            spelling = str(action.metavar or action.dest)
        meaning = _escape_bars(action.help or "").replace("%(default)s", str(action.default))
        rows.append((f"`{_escape_bars(spelling)}`", _help_markdown(meaning)))
    description = _help_markdown((parser.description or "").replace("\n", " "))
    usage = parser.format_usage().removeprefix("usage: ").strip()
    table = markdown(("argument", "meaning"), rows)
    return f"## `{name}`\n\n{description}\n\n```text\n{usage}\n```\n\n{table}"


def _help_markdown(text: str) -> str:
    r"""Return a help text as Markdown, with options as code and stars escaped.

    >>> print(_help_markdown("read DIR/*.parquet, see --data-dir"))
    read DIR/\*.parquet, see `--data-dir`
    """
    return re.sub(r"(?<!\S)--[a-z][a-z-]*", r"`\g<0>`", text.replace("*", "\\*"))


FLOAT_ADAMW = "torch.optim.AdamW(...)"
#: of each row of the table of bytes: the call as the page shows it, and the function
#: that makes the optimizer
BYTES: dict[str, Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]] = {
    FLOAT_ADAMW: torch.optim.AdamW,
    "StiffnessAdamW(...)": fm.optim.StiffnessAdamW,
    'StiffnessAdamW(..., moments="bfloat16")': partial(fm.optim.StiffnessAdamW, moments="bfloat16"),
    'StiffnessAdamW(..., moments="8bit")': partial(fm.optim.StiffnessAdamW, moments="8bit"),
    'StiffnessAdamW(..., writeback="residual8", moments="8bit")': partial(
        fm.optim.StiffnessAdamW, writeback="residual8", moments="8bit"
    ),
    'StiffnessAdamW(..., writeback="momentum")': partial(
        fm.optim.StiffnessAdamW, writeback="momentum"
    ),
    "RiemannianAdam(...)": fm.optim.RiemannianAdam,
    "StiffnessSGD(...)": fm.optim.StiffnessSGD,
    "StiffnessSGD(..., momentum=0.9)": partial(fm.optim.StiffnessSGD, momentum=0.9),
    "StiffnessMuon(...)": fm.optim.StiffnessMuon,
    'StiffnessMuon(..., moments="8bit")': partial(fm.optim.StiffnessMuon, moments="8bit"),
    'StiffnessMuon(..., writeback="residual8", moments="8bit")': partial(
        fm.optim.StiffnessMuon, writeback="residual8", moments="8bit"
    ),
    "StiffnessLion(...)": fm.optim.StiffnessLion,
    'StiffnessLion(..., moments="8bit")': partial(fm.optim.StiffnessLion, moments="8bit"),
    "StiffnessAdafactor(...)": fm.optim.StiffnessAdafactor,
    'StiffnessAdafactor(..., momentum=0.9, moments="8bit")': partial(
        fm.optim.StiffnessAdafactor, momentum=0.9, moments="8bit"
    ),
}


def bytes_table(rows: int = 64, columns: int = 512) -> str:
    """Return the bytes per weight of weight, scale and state, a line per optimizer.

    They are measured on the live tensors of one layer, after one step.
    """
    lines = [_bytes_row(call, rows, columns) for call in BYTES]
    return markdown(("optimizer", "weight and scales", "state", "in all"), lines)


def _bytes_row(call: str, rows: int, columns: int) -> tuple[str, ...]:
    from nanogpt_bench.setup.memory import bytes_with_state, plain_tensors

    layer = torch.nn.Linear(columns, rows, bias=False)
    if call != FLOAT_ADAMW:
        layer = fm.quantize_model(layer, "E4M3", storage="codes")
    optimizer = BYTES[call]([layer.weight])
    layer(torch.ones(1, columns)).sum().backward()
    optimizer.step()
    weight = sum(part.untyped_storage().nbytes() for part in plain_tensors(layer.weight))
    total = bytes_with_state([layer.weight], optimizer)
    count = rows * columns
    return (
        f"`{call}`",
        f"{weight / count:.2f}",
        f"{(total - weight) / count:.2f}",
        f"**{total / count:.2f}**",
    )


def write_all(folder: Path) -> None:
    """Write every table into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tables = {
        "formats": formats_table(),
        "rules": rules_table(),
        "metrics": metrics_tables(),
        "failures": failures_table(),
        "settings": settings_sections(),
        "commands": commands(),
        "bytes": bytes_table(),
    }
    for name, text in tables.items():
        (folder / f"{name}.md").write_text(text, encoding="utf-8")
