"""The C sources: the header that the build writes, and the digest of all of them.

::

    _interface.py  --header_text-->  generated.h     enums, structs, constants
    *.c, *.h, generated.h  --digest-->  compiled into the library, and compared when it
                                        is loaded

The header asserts where fields are, so that a compiler whose structs are not those of
Python's tables stops.

Nothing is imported here but the standard library: the build loads this file where torch
is not installed, and passes the modules of the tables.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any, Final

HEADER: Final = "generated.h"
"""The file that the build writes into the folder of the sources."""


def header_text(interface: ModuleType, formats: ModuleType) -> str:
    """Return the header.

    Args:
        interface: the module ``fp8manifold/_interface.py``.
        formats: the module ``fp8manifold/formats.py``.
    """
    moments, momentum = (
        interface.format_facts(formats.as_format(name))
        for name in (interface.MOMENT_FORMAT, interface.MOMENTUM_FORMAT)
    )
    terms = interface.FLOAT32_TERMS
    lines = [
        "/* Written by hatch_build.py.  fp8manifold/_interface.py has the tables of it, and",
        " * says what each entry means. */",
        "#ifndef FP8MANIFOLD_GENERATED_H",
        "#define FP8MANIFOLD_GENERATED_H",
        "",
        "#include <stddef.h>",
        "#include <stdint.h>",
        "",
    ]
    for choice, prefix in interface.ENUMERATIONS:
        lines += _enumeration(choice.__name__, [prefix + member.name for member in choice])
    report = interface.NativeReport
    lines += _enumeration(report.__name__, [name.upper() for name in report._fields])
    lines.append("")
    for record in interface.RECORDS:
        lines += _struct(record)
    lines += [
        *_format("MOMENT_FORMAT", moments),
        *_format("MOMENTUM_FORMAT", momentum),
        "",
        f"#define FLOAT32_TERMS {terms}",
        *_series("EXP2_SERIES", interface.EXP2_SERIES[:terms]),
        *_series("LOG2_SERIES", interface.LOG2_SERIES[:terms]),
        "",
    ]
    rounds = zip(interface.HASH_SHIFTS, interface.HASH_MULTIPLIERS, strict=True)
    for number, (shift, multiplier) in enumerate(rounds, 1):
        lines.append(f"#define HASH_SHIFT_{number} {shift}")
        lines.append(f"#define HASH_MULTIPLIER_{number} 0x{multiplier:08X}u")
    return "\n".join([*lines, "", "#endif", ""])


def _enumeration(name: str, members: Sequence[str]) -> Iterator[str]:
    """Yield the lines of an enum: its members, and how many there are."""
    words = re.findall("[A-Z][a-z]+", name)
    count = "_".join([*words, "count"]).upper()
    yield f"enum {{ {', '.join([*members, count])} }};"


def _struct(record: Any) -> Iterator[str]:
    """Yield the lines of a struct and of what holds it to the table."""
    name = record.name
    yield "typedef struct {"
    for field in record.fields:
        kind = field.kind if isinstance(field.kind, str) else field.kind.name
        space = "" if kind.endswith("*") else " "
        yield f"    {kind}{space}{field.name};"
    yield f"}} {name};"
    for field, offset in record.offsets.items():
        assertion = f'offsetof({name}, {field}) == {offset}, "{name}.{field}"'
        yield f"_Static_assert({assertion});"
    yield f'_Static_assert(sizeof({name}) == {record.size}, "{name}");'
    yield ""


def _format(name: str, facts: Any) -> Iterator[str]:
    yield f"static const Format {name} = {{"
    for fact, value in asdict(facts).items():
        yield f"    .{fact} = {value!r},"
    yield "};"


def _series(name: str, terms: Iterable[float]) -> Iterator[str]:
    """Yield the lines of an array, each term rounded from float64 as torch rounds it."""
    yield f"static const float {name}[FLOAT32_TERMS] = {{"
    for term in terms:
        yield f"    (float){term!r},"
    yield "};"


def digest(folder: Path, header: str) -> str:
    """Return the digest of the sources of a folder with a header.

    The header that the folder may have is not read: it may be another build's.
    """
    sources = hashlib.sha256(header.encode())
    for path in sorted(folder.glob("*.[ch]")):
        if path.name == HEADER:
            continue
        sources.update(path.name.encode() + b"\0" + path.read_bytes().replace(b"\r\n", b"\n"))
    return sources.hexdigest()[:16]
