"""Tables of the pages, made from the library and the bench so that no fact is stored
twice.
"""

import argparse
import math
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from _markdown import markdown

import fp8manifold as fm

TABLED_FORMATS = tuple(name for name in fm.NAMED_FORMATS if not name.startswith("P3109"))


#: the bench's names of storages, and the page's words for them
STORED = {
    "float32": "floats",
    "master": "a float32 copy",
    "grid": "the grid",
    "fp8": "one byte",
    "continuous": "floats, unrounded",
    "peer": "one byte of its package",
}


def formats_table(names: Sequence[str] = TABLED_FORMATS) -> str:
    """The facts of formats, each derived by the library from its four stored fields."""
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
    subnormal = "none" if fmt.min_subnormal is None else number(fmt.min_subnormal)
    facts = (
        fmt.name,
        fmt.bits,
        fmt.bias,
        fmt.layout,
        number(fmt.max),
        number(fmt.min_normal),
        subnormal,
    )
    return [*map(str, facts), str(fmt.finite_codes)]


def number(x: float) -> str:
    """A format's number, exactly: in decimals where they are short, otherwise with a
    power of two.

    >>> number(448.0), number(0.125), number(2.0**64), number(1.5 * 2.0**32)
    ('448', '2⁻³', '2⁶⁴', '1.5·2³²')
    """
    mantissa, exponent = math.frexp(x)
    mantissa, exponent = 2 * mantissa, exponent - 1
    if 1 <= x < 2**17:
        return f"{x:g}" if x == float(f"{x:g}") else repr(x)
    power = "2" + str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return power if mantissa == 1 else f"{mantissa:g}·{power}"


def rules_table() -> str:
    """The update rules of the bench."""
    from nanogpt_bench.config.rules import RULES

    rows = [
        (
            f"`{name}`",
            rule.help.replace(", no master copy", ""),
            STORED[rule.storage],
            f"{rule.lr:g}",
        )
        for name, rule in RULES.items()
    ]
    return markdown(("rule", "what it does", "weights live in", "default lr"), rows)


def metrics_tables() -> str:
    """A table of the metrics that are always recorded, and one for every monitor's,
    from the registry of metrics.
    """
    from nanogpt_bench.monitors import METRICS

    parts = []
    for monitor in dict.fromkeys(metric.monitor for metric in METRICS):
        title = {"": "Always:", "shadow": "With `shadow.enabled`:"}.get(
            monitor, f"With `{monitor}`:"
        )
        rows = [_metric_row(metric) for metric in METRICS if metric.monitor == monitor]
        parts.append(
            f"{title}\n\n" + markdown(("metric", "what it is", "unit", "all layers", "bad"), rows)
        )
    return "\n".join(parts)


def _metric_row(metric: Any) -> tuple[str, ...]:
    name = metric.name + "/OPERAND" * bool(metric.operands)
    bad = {"above": "high", "below": "low", "": ""}[metric.bad]
    row = f"`{name}`", f"{metric.title}. {metric.meaning}", metric.unit, metric.over, bad
    return tuple(cell.replace("|", "\\|") for cell in row)


def failures_table() -> str:
    """The bounds by which a run is found to fail, a row for each."""
    from nanogpt_bench.failures import CLASSES
    from nanogpt_bench.monitors.ranges import CLAMPED, OVERFLOW

    sides = {"above": "at least", "below": "at most"}
    names = {
        each.name: f"{metric.name}/OPERAND"
        for metric in (OVERFLOW, CLAMPED)
        for each in metric.each
    }
    rows = [
        (
            f"`{row.kind}`",
            f"`{names.get(row.figure, row.figure)}`",
            f"{sides[row.side]} {row.bound:g}",
            str(row.patience),
        )
        for row in CLASSES
    ]
    return markdown(
        ("class", "figure", "bound", "measurements in a row"), list(dict.fromkeys(rows))
    )


def settings_sections() -> str:
    """A heading and a table for every section of a configuration, from its model."""
    from nanogpt_bench.config.keys import FIELDS
    from nanogpt_bench.config.schema import Config

    of_run = [setting for key, setting in FIELDS.items() if "." not in key]
    parts = ["## Of the run\n\n" + _settings_rows(of_run)]
    for name, field in Config.model_fields.items():
        settings = [setting for key, setting in FIELDS.items() if key.startswith(f"{name}.")]
        if settings:
            heading = f"## `{name}`\n\n{field.description}\n\n"
            parts.append(heading + _settings_rows(settings))
    return "\n".join(parts)


def _settings_rows(settings: Iterable[Any]) -> str:
    """A table of some settings with their bounds."""
    rows = []
    for setting in settings:
        default = setting.default
        shown = (
            "null"
            if default is None
            else str(default).lower()
            if isinstance(default, bool)
            else str(default)
        )
        rows.append(
            (f"`{setting.key}`", f"`{shown}`", setting.help.replace("|", "\\|"), _bounds(setting))
        )
    return markdown(("setting", "default", "meaning", "allowed"), rows)


def _bounds(setting: Any) -> str:
    """The values that a setting allows, as text."""
    if setting.facts["choices"]:
        return ", ".join(f"`{choice}`" for choice in setting.facts["choices"])
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    limits = [
        (sign, getattr(bound, name, None))
        for name, sign in signs.items()
        for bound in setting.bounds
    ]
    return ", ".join(f"{sign} {limit:g}" for sign, limit in limits if limit is not None)


def commands() -> str:
    """A heading for every command with its help and its options, from the parser
    itself.
    """
    from nanogpt_bench.cli import COMMANDS, build_parser

    _, parsers = build_parser(COMMANDS)
    return "\n".join(_command(name, COMMANDS[name], command) for name, command in parsers.items())


def _command(name: str, summary: str | None, parser: argparse.ArgumentParser) -> str:
    """The section of one command: its summary, its usage, its options."""
    rows = []
    for action in parser._actions:
        spelled = ", ".join(action.option_strings) or str(action.metavar or action.dest)
        value = f" {action.metavar}" if action.option_strings and action.metavar else ""
        text = _prose(
            (action.help or "").replace("|", "\\|").replace("%(default)s", str(action.default))
        )
        rows.append((f"`{(spelled + value).replace('|', chr(92) + '|')}`", text))
    usage = parser.format_usage().removeprefix("usage: ").strip()
    text = _prose((parser.description or "").replace("\n", " "))
    return f"## `{name}`\n\n{text}\n\n```text\n{usage}\n```\n\n" + markdown(
        ("argument", "meaning"), rows
    )


def _prose(text: str) -> str:
    """A help text as Markdown: options as code, stars escaped.

    >>> print(_prose("read DIR/*.parquet, see --data-dir"))
    read DIR/\\*.parquet, see `--data-dir`
    """
    return re.sub(r"(?<!\S)--[a-z][a-z-]*", r"`\g<0>`", text.replace("*", "\\*"))


#: for every row of the table of bytes: the call as the page shows it, and the function
#: that makes the optimizer
BYTES: dict[str, Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]] = {
    "torch.optim.AdamW(...)": lambda p: torch.optim.AdamW(p),
    "StiffnessAdamW(...)": lambda p: fm.optim.StiffnessAdamW(p),
    'StiffnessAdamW(..., moments="bfloat16")': lambda p: fm.optim.StiffnessAdamW(
        p, moments="bfloat16"
    ),
    'StiffnessAdamW(..., moments="8bit")': lambda p: fm.optim.StiffnessAdamW(p, moments="8bit"),
    'StiffnessAdamW(..., writeback="residual8", moments="8bit")': lambda p: fm.optim.StiffnessAdamW(
        p, writeback="residual8", moments="8bit"
    ),
    'StiffnessAdamW(..., writeback="momentum")': lambda p: fm.optim.StiffnessAdamW(
        p, writeback="momentum"
    ),
    "RiemannianAdam(...)": lambda p: fm.optim.RiemannianAdam(p),
    "StiffnessSGD(...)": lambda p: fm.optim.StiffnessSGD(p),
    "StiffnessSGD(..., momentum=0.9)": lambda p: fm.optim.StiffnessSGD(p, momentum=0.9),
    "StiffnessMuon(...)": lambda p: fm.optim.StiffnessMuon(p),
    'StiffnessMuon(..., moments="8bit")': lambda p: fm.optim.StiffnessMuon(p, moments="8bit"),
    'StiffnessMuon(..., writeback="residual8", moments="8bit")': lambda p: fm.optim.StiffnessMuon(
        p, writeback="residual8", moments="8bit"
    ),
    "StiffnessLion(...)": lambda p: fm.optim.StiffnessLion(p),
    'StiffnessLion(..., moments="8bit")': lambda p: fm.optim.StiffnessLion(p, moments="8bit"),
}


def bytes_table(rows: int = 64, columns: int = 512) -> str:
    """Bytes per weight after one step, measured on the live tensors: weight, scale and
    state.
    """
    return markdown(
        ("optimizer", "weight and scales", "state", "in all"),
        [(f"`{name}`", *_bytes(make, rows, columns)) for name, make in BYTES.items()],
    )


def _bytes(
    make: Callable[..., torch.optim.Optimizer], rows: int, columns: int
) -> tuple[str, str, str]:
    from nanogpt_bench.setup.memory import bytes_of, plain_tensors

    layer = torch.nn.Linear(columns, rows, bias=False)
    if make is not BYTES["torch.optim.AdamW(...)"]:
        layer = fm.quantize_model(layer, "E4M3", storage="fp8")
    optimizer = make([layer.weight])
    layer(torch.ones(1, columns)).sum().backward()
    optimizer.step()
    weight = sum(part.untyped_storage().nbytes() for part in plain_tensors(layer.weight))
    held = bytes_of([layer.weight], optimizer)
    count = rows * columns
    return f"{weight / count:.2f}", f"{(held - weight) / count:.2f}", f"**{held / count:.2f}**"


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
