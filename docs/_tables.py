"""Tables of the pages, written from the library and the bench so that no fact is stored twice."""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import fp8manifold as fm

TABLED_FORMATS = tuple(name for name in fm.NAMED_FORMATS if not name.startswith("P3109"))


#: how the bench names a storage, and how the page does
STORED = {
    "float32": "floats",
    "master": "a float32 copy",
    "grid": "the grid",
    "fp8": "one byte",
    "continuous": "floats, unrounded",
}


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def formats_table(names: Sequence[str] = TABLED_FORMATS) -> str:
    """The facts of formats, each derived by the library from its four stored fields."""
    header = ("format", "bits", "bias", "layout", "largest", "smallest normal", "smallest subnormal", "finite codes")
    return markdown(header, [_format_row(fm.FloatFormat.from_string(name)) for name in names])


def _format_row(fmt: fm.FloatFormat) -> list[str]:
    subnormal = "none" if fmt.min_subnormal is None else number(fmt.min_subnormal)
    facts = (fmt.name, fmt.bits, fmt.bias, fmt.layout, number(fmt.max), number(fmt.min_normal), subnormal)
    return [*map(str, facts), str(fmt.finite_codes)]


def number(x: float) -> str:
    """A float of a format, exactly: in decimals where they are short, otherwise with a power of two.

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
    from nanogpt_bench.rules import RULES

    rows = [(f"`{name}`", rule.help, STORED[rule.storage], f"{rule.lr:g}") for name, rule in RULES.items()]
    return markdown(("rule", "what it does", "weights live in", "default lr"), rows)


def settings_table() -> str:
    """Every setting of a run: its key, default and meaning."""
    from nanogpt_bench.config import Config

    rows = []
    for key, field in _settings(Config):
        default = _default_of(field)
        shown = "null" if default is None else str(default).lower() if isinstance(default, bool) else str(default)
        choices = field.metadata.get("choices")
        allowed = f" ({', '.join(f'`{choice}`' for choice in choices)})" if choices else ""
        rows.append((f"`{key}`", f"`{shown}`", field.metadata["help"].replace("|", "\\|") + allowed))
    return markdown(("setting", "default", "meaning"), rows)


def _default_of(field: "dataclasses.Field[object]") -> object:
    made = field.default_factory
    return field.default if made is dataclasses.MISSING else made()


def _settings(section: type, prefix: str = "") -> Iterable[tuple[str, "dataclasses.Field[object]"]]:
    """Dotted keys of a configuration, and the fields they are declared by."""
    for field in dataclasses.fields(section):
        nested = field.default_factory
        if isinstance(nested, type) and dataclasses.is_dataclass(nested):
            yield from _settings(nested, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, field


def write_all(folder: Path) -> None:
    """Write every table into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tables = {"formats": formats_table(), "rules": rules_table(), "settings": settings_table()}
    for name, text in tables.items():
        (folder / f"{name}.md").write_text(text, encoding="utf-8")
