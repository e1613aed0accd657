"""Files that someone else may have made, read within bounds: their size, how deep they nest, how much they hold.

A YAML alias counts as often as it is used, so that a few lines can't stand for a billion values. Nothing but plain
data comes out: a tag that names a class is refused by the loader. So is what two readers would take for two things: a
name given twice, and numbers such as 010 and 1:30.
"""

from __future__ import annotations

import json
import os
import re
import stat
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import yaml

from nanogpt_bench.system.errors import one_line, shortened

MOST_BYTES = 8 * 2**20
#: of a YAML file, which is read character by character
MOST_YAML_BYTES = 2**20
#: sections within sections, lists within lists
DEEPEST = 100
MOST_YAML_VALUES = 20_000
MOST_JSON_VALUES = 400_000
#: digits of a number; Python converts longer ones in quadratic time or not at all
LONGEST_NUMBER = 400
#: of a name that is given twice, as an error shows it
LONGEST_NAME = 100
#: of a safetensors file: a tensor takes about a hundred bytes of it
MOST_HEADER_BYTES = 8 * 2**20

#: plain numbers of YAML 1.1 that YAML 1.2 reads as others: octal 010, sexagesimal 1:30
_AMBIGUOUS = re.compile(r"[-+]?(0[0-9_]+|[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?)")
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float", "tag:yaml.org,2002:timestamp")


class Refused(ValueError):
    """A file beyond the bounds, or not of its kind; `str(error)` says what is wrong, without the file's name."""


class GivenTwice(Refused):
    """A name that one mapping gives twice, so that one of its values would be dropped."""


def read_text(path: Path, most: int = MOST_BYTES, *, links: bool = True) -> str:
    """Return the content of an ordinary UTF-8 file; without `links`, one that is a symbolic link is refused.

    Raises:
        OSError: it can't be read.
        Refused: a folder, a device or a pipe, more than `most` bytes, or not UTF-8.
    """
    with open_file(path, links=links) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise Refused(f"it has more than {most:,} bytes, the most that is read")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Refused(f"it is not UTF-8: {one_line(error)}") from None


def open_file(path: Path, *, links: bool = True) -> Any:
    """Open an ordinary file to read its bytes.

    Raises:
        OSError: it can't be read.
        Refused: a folder, a device, a pipe, or a symbolic link where `links` are not followed.
    """
    if not links and path.is_symlink():
        raise Refused("it is a symbolic link, which is not followed here")
    handle = os.open(path, os.O_RDONLY | _flags(links))
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise Refused("it is not an ordinary file")
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def _flags(links: bool) -> int:
    """A pipe must not be waited for, nor a link followed that has come since it was looked for."""
    names = ("O_NONBLOCK", "O_CLOEXEC", "O_BINARY") + (() if links else ("O_NOFOLLOW",))
    return sum(getattr(os, name, 0) for name in names)


def read_json(path: Path, *, links: bool = True, times: int = 1) -> Any:
    """Return the content of a JSON file; one that grows with the number of runs may be some `times` as large.

    Raises:
        OSError: it can't be read.
        ValueError: not JSON, a name given twice, or beyond the bounds.
    """
    return parse_json(read_text(path, times * MOST_BYTES, links=links), times * MOST_JSON_VALUES)


def parse_json(data: bytes | str, most: int = MOST_JSON_VALUES) -> Any:
    """Return what a JSON document says; the number of values is bounded before it is read, then how deep they nest.

    >>> parse_json('{"step": 3}')
    {'step': 3}

    Raises:
        ValueError: not JSON, which has neither NaN nor infinities, a name given twice, or beyond the bounds.
    """
    if _marks(data) > most:
        raise Refused(f"it holds more than {most:,} values, the most that is read")
    try:
        content = json.loads(data, parse_constant=_no_number, object_pairs_hook=_once)
    except json.JSONDecodeError as error:
        raise Refused(f"it is no JSON: {error.msg} at character {error.pos}") from None
    except UnicodeDecodeError as error:
        raise Refused(f"it is no text: {one_line(error)}") from None
    except RecursionError:
        raise _too_deep() from None
    _check_depth(content)
    return content


def _marks(data: bytes | str) -> int:
    """Signs that begin a value or a name, those inside of strings included."""
    if isinstance(data, bytes):
        return sum(map(data.count, (b",", b":", b"[", b"{")))
    return sum(map(data.count, ",:[{"))


def _no_number(name: str) -> NoReturn:
    raise Refused(f"it holds {name}, which JSON has not")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        name = next(name for place, name in enumerate(names) if name in names[:place])
        raise GivenTwice(f"it gives the name {shortened(name, LONGEST_NAME)!r} twice")
    return content


def _too_deep() -> Refused:
    return Refused(f"it nests more than {DEEPEST} deep")


def _check_depth(content: Any) -> None:
    level = [content]
    for _ in range(DEEPEST):
        nodes = (node.values() if isinstance(node, dict) else node for node in level if isinstance(node, dict | list))
        level = [item for items in nodes for item in items]
        if not level:
            return
    raise _too_deep()


def read_yaml(path: Path, *, links: bool = True) -> Any:
    """Return the content of a YAML file, as `parse_yaml` does.

    Raises:
        OSError: it can't be read.
        ValueError: not YAML, or beyond the bounds.
    """
    return parse_yaml(read_text(path, MOST_YAML_BYTES, links=links))


def parse_yaml(text: str) -> Any:
    """Return what a YAML text says, plain data only.

    >>> parse_yaml("train: {max_steps: 3}")
    {'train': {'max_steps': 3}}

    Raises:
        ValueError: not YAML, a tag that names a class, a key given twice, a number that is read in two ways, or beyond
            the bounds.
    """
    try:
        return _Loader(text).get_single_data()
    except Refused:
        raise
    except yaml.YAMLError as error:
        raise Refused(one_line(error)) from None
    except (ValueError, ArithmeticError, LookupError, AttributeError, TypeError, RecursionError) as error:
        # PyYAML lets these through where a tag does not fit its text, as in `!!int x` or `!!timestamp x`.
        raise Refused(f"a value can't be read ({type(error).__name__}: {one_line(error)[:200]})") from None


def is_ambiguous(number: str) -> bool:
    """Whether readers differ in what a plain number is: octal or sexagesimal in YAML 1.1, something else in YAML 1.2.

    >>> is_ambiguous("010"), is_ambiguous("1:30"), is_ambiguous("10"), is_ambiguous("0.10")
    (True, True, False, False)
    """
    return _AMBIGUOUS.fullmatch(number) is not None


def lines_of(text: str, key: str) -> tuple[int, ...]:
    """Return the lines on which a YAML text gives a key, nested or dotted; () where it is none.

    >>> lines_of("train.max_steps: 3\\ntrain:\\n  max_steps: 4", "train.max_steps")
    (1, 3)
    """
    try:
        root = _Loader(text).get_single_node()
    except (ValueError, yaml.YAMLError):
        return ()
    return tuple(sorted(_lines_below(root, key)))


def _lines_below(node: Any, key: str) -> Iterator[int]:
    for name, value in node.value if isinstance(node, yaml.MappingNode) else ():
        if not isinstance(name, yaml.ScalarNode):
            continue
        if name.value == key:
            yield name.start_mark.line + 1
        elif key.startswith(f"{name.value}."):
            yield from _lines_below(value, key[len(name.value) + 1 :])


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with bounds, checked while the text is read."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = self._count = 0
        self._sizes: dict[int, int] = {}
        self._open: set[int] = set()

    def compose_node(self, parent: Any, index: Any) -> Any:
        alias = self.check_event(yaml.AliasEvent)
        self._depth += 1
        if self._depth > DEEPEST:
            raise _too_deep()
        before = self._count
        node = super().compose_node(parent, index)
        self._depth -= 1
        if alias:
            if id(node) not in self._sizes:
                raise Refused("an alias stands for a value that contains it")
            self._count += self._sizes[id(node)]
        else:
            self._count += 1
            self._sizes[id(node)] = self._count - before
            self._check_number(node)
        if self._count > MOST_YAML_VALUES:
            raise Refused(f"it holds more than {MOST_YAML_VALUES:,} values, the most that is read")
        return node

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        lines: dict[Any, int] = {}
        for name, _ in node.value:  # before `<<` puts in what a mapping may well give otherwise
            said, line = self._said_by(name), name.start_mark.line + 1
            if said in lines:
                where = f"line {line}" if lines[said] == line else f"lines {lines[said]} and {line}"
                raise GivenTwice(f"{shortened(name.value, LONGEST_NAME)!r} is given twice, on {where}; keep one")
            lines[said] = line
        return node

    def _said_by(self, name: Any) -> Any:
        """A key as a mapping holds it: 1 and 0x1 are one, 1 and "1" are two."""
        if not isinstance(name, yaml.ScalarNode):
            return id(name)  # no key of plain data, which its mapping is refused for
        try:
            return self.construct_object(name)
        except (yaml.YAMLError, ValueError, ArithmeticError, LookupError, AttributeError, TypeError):
            return name.tag, name.value

    def _check_number(self, node: Any) -> None:
        if not isinstance(node, yaml.ScalarNode) or node.tag not in _NUMBERS:
            return
        if len(node.value) > LONGEST_NUMBER:
            raise Refused(f"it holds a number of {len(node.value):,} characters")
        if is_ambiguous(node.value):
            sign = "a leading 0" if ":" not in node.value else "colons"
            raise Refused(
                f"line {node.start_mark.line + 1}: {node.value} is not allowed, since readers differ in what a number "
                f"with {sign} is; write a plain number, or a text in quotes"
            )


def check_header(path: Path) -> None:
    """Refuse a safetensors file whose header is longer than the file, or than any that is honest.

    Raises:
        OSError: it can't be read.
        Refused: not an ordinary file, or such a header.
    """
    with open_file(path) as file:
        start, size = file.read(8), os.fstat(file.fileno()).st_size
    if len(start) < 8:
        raise Refused("it is too short for a safetensors file")
    (claimed,) = struct.unpack("<Q", start)
    if claimed > min(size - 8, MOST_HEADER_BYTES):
        raise Refused(f"its header claims {claimed:,} bytes, the file has {size:,}, and {MOST_HEADER_BYTES:,} are read")
