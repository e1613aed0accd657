"""Reading files that someone else may have made, within bounds on their size and depth.

A YAML alias counts as often as it is used, so that a few lines can't stand for a
billion values. The result is plain data: a tag that names a class is refused. So is
what readers understand differently: a name given twice, and numbers such as 010 and
1:30.
"""

import json
import math
import re
from pathlib import Path
from typing import Any, NoReturn

import yaml

from nanogpt_bench.system.errors import one_line, shortened

MOST_FILE_BYTES = 8 * 2**20
#: fewer for a YAML file, which is read character by character
MOST_YAML_BYTES = 2**20
#: levels of sections within sections, lists within lists
DEEPEST = 100
MOST_YAML_VALUES = 20_000
#: commas and brackets of a JSON document, about the number of its values, each of which
#: takes 64 bytes or more
MOST_JSON_MARKS = 2_000_000
#: characters of a number in a YAML file: the regular expressions that find numbers keep
#: up to a hundred bytes for each, and one of colons takes time with their square
LONGEST_NUMBER = 1000
#: characters of a name or a number that an error shows
LONGEST_QUOTE = 100

#: what numbers and dates of YAML begin with and are made of, infinity and NaN aside
_NUMBER_CHARACTERS = re.compile(r"[-+.0-9][-+.:_0-9a-fA-FxTtZz \t]*")
#: plain numbers of YAML 1.1 that YAML 1.2 reads as others: octal 010, sexagesimal 1:30
_AMBIGUOUS = re.compile(r"[-+]?(0[0-9_]+|[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?)")
#: what an error says of a number that is beyond floats
BEYOND_FLOATS = "as a float it would become 0 or infinity"
_FLOAT = "tag:yaml.org,2002:float"
_NUMBERS = ("tag:yaml.org,2002:int", _FLOAT, "tag:yaml.org,2002:timestamp")


class RefusedFile(ValueError):
    """The error of a file beyond the bounds, or not of its kind.

    `str(error)` does not have the file's name.
    """


class DuplicateName(RefusedFile):
    """The error of a name that a mapping has twice: a value would be dropped."""


def read_text(path: Path, limit: int = MOST_FILE_BYTES, *, links: bool = True) -> str:
    """Return the content of an ordinary UTF-8 file.

    With `links` False, a symbolic link is refused.

    Raises:
        OSError: the file can't be read.
        Refused: a folder, a device or a pipe, more than `limit` bytes, or not UTF-8.
    """
    with open_file(path, links=links) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise RefusedFile(f"it has more than {limit:,} bytes, the most that are read")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RefusedFile(f"it is not UTF-8: {one_line(error)}") from None


def open_file(path: Path, *, links: bool = True) -> Any:
    """Open an ordinary file to read its bytes; `links` and errors as in `read_text`."""
    if not links and path.is_symlink():
        raise RefusedFile("it is a symbolic link; links are not followed here")
    # Opening a pipe would wait for its other end.
    if path.exists() and not path.is_file():
        raise RefusedFile("it is not an ordinary file")
    return path.open("rb")


def read_json(path: Path, *, links: bool = True, times: int = 1) -> Any:
    """Return the content of a JSON file of at most `times` the usual size.

    Raises as `read_text` and `parse_json`.
    """
    return parse_json(read_text(path, times * MOST_FILE_BYTES, links=links))


def parse_json(data: bytes | str) -> Any:
    """Return the content of a JSON document.

    Raises:
        Refused: it is no JSON (which has no NaN and Inf), has a name twice, or is
            beyond the bounds.

    >>> parse_json('{"step": 3}')
    {'step': 3}
    """
    text = data if isinstance(data, str) else data.decode("utf-8", errors="replace")
    if sum(map(text.count, ",[{")) > MOST_JSON_MARKS:
        raise RefusedFile(
            f"it has more than {MOST_JSON_MARKS:,} commas and brackets, the most that are read"
        )
    try:
        content = json.loads(
            data, parse_constant=_refuse_constant, object_pairs_hook=_object_without_repetition
        )
    except json.JSONDecodeError as error:
        raise RefusedFile(f"it is not JSON: {error.msg} at character {error.pos}") from None
    except UnicodeDecodeError as error:
        raise RefusedFile(f"it is not UTF-8: {one_line(error)}") from None
    except RecursionError:
        raise _too_deep() from None
    _check_depth(content)
    return content


def _refuse_constant(name: str) -> NoReturn:
    raise RefusedFile(f"it has the value {name}, which JSON does not allow")


def _object_without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for name, value in pairs:
        if name in content:
            raise DuplicateName(f"the name {shortened(name, LONGEST_QUOTE)!r} is given twice")
        content[name] = value
    return content


def _too_deep() -> RefusedFile:
    return RefusedFile(f"it is nested more than {DEEPEST} levels deep")


def _check_depth(content: Any) -> None:
    level = [content]
    for _ in range(DEEPEST):
        next_level: list[Any] = []
        for node in level:
            if isinstance(node, dict):
                next_level.extend(node.values())
            elif isinstance(node, list):
                next_level.extend(node)
        if not next_level:
            return
        level = next_level
    raise _too_deep()


def read_yaml(path: Path, *, links: bool = True) -> Any:
    """Return the content of a YAML file; raises as `read_text` and `parse_yaml`."""
    return parse_yaml(read_text(path, MOST_YAML_BYTES, links=links))


def parse_yaml(text: str) -> Any:
    """Return the content of a YAML text, as plain data.

    Raises:
        Refused: it is no YAML, has a tag that names a class, a key twice, an ambiguous
            number, or is too large.

    >>> parse_yaml("train: {max_steps: 3}")
    {'train': {'max_steps': 3}}
    """
    try:
        content = _Loader(text).get_single_data()
    except RefusedFile:
        raise
    except yaml.YAMLError as error:
        raise RefusedFile(one_line(error)) from None
    except RecursionError:
        raise _too_deep() from None
    except (ValueError, ArithmeticError, LookupError, AttributeError, TypeError) as error:
        # PyYAML lets these through where a tag does not fit its text, as in `!!int x`
        # or `!!timestamp x`.
        raise RefusedFile(
            f"a value can't be read ({type(error).__name__}: {one_line(error)[:200]})"
        ) from None
    _check_depth(content)
    return content


def is_ambiguous(number: str) -> bool:
    """Return whether a plain number is another one in YAML 1.1 than in YAML 1.2.

    YAML 1.1 reads it as octal or sexagesimal.

    >>> is_ambiguous("010"), is_ambiguous("1:30"), is_ambiguous("0.10")
    (True, True, False)
    """
    return _AMBIGUOUS.fullmatch(number) is not None


def is_beyond_floats(number: str) -> bool:
    """Return whether a text is a number that a float has only as 0 or as infinity.

    False for 0 and infinity themselves.

    >>> is_beyond_floats("1e-400"), is_beyond_floats("1e400"), is_beyond_floats("0e9")
    (True, True, False)
    """
    mantissa = number.strip().lower().lstrip("+-").partition("e")[0]
    if not any(character.isdigit() for character in mantissa):
        # such as inf, which means infinity
        return False
    try:
        value = float(number)
    except ValueError:
        return False
    is_zero = not any(character in "123456789" for character in mantissa)
    return math.isinf(value) or (value == 0 and not is_zero)


def _too_long_number(scalar: Any) -> RefusedFile:
    """Return the error of a number, given as PyYAML's event or node."""
    return RefusedFile(
        f"line {scalar.start_mark.line + 1}: {shortened(scalar.value, LONGEST_QUOTE)} is not "
        f"allowed: a number has at most {LONGEST_NUMBER:,} characters; if it is a text, put it in "
        "quotes"
    )


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with bounds, checked while the text is read."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        #: values so far, those of an alias counted again
        self._count = 0
        #: number of values in a node, by its id
        self._sizes: dict[int, int] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        is_alias = self.check_event(yaml.AliasEvent)
        count_before = self._count
        node = super().compose_node(parent, index)
        if is_alias:
            # A node's size is known once the node is complete.
            if id(node) not in self._sizes:
                raise RefusedFile("an alias stands for a value that contains it")
            self._count += self._sizes[id(node)]
        else:
            self._count += 1
            self._sizes[id(node)] = self._count - count_before
            self._check_number(node)
        if self._count > MOST_YAML_VALUES:
            raise RefusedFile(
                f"it has more than {MOST_YAML_VALUES:,} values, the most that are read"
            )
        return node

    def compose_scalar_node(self, anchor: Any) -> Any:
        event = self.peek_event()
        # A long plain text is taken as though it stood in quotes, unless it could be a
        # number.
        if event.implicit[0] and len(event.value) > LONGEST_NUMBER:
            if _NUMBER_CHARACTERS.fullmatch(event.value):
                raise _too_long_number(event)
            event.implicit = (False, True)
        return super().compose_scalar_node(anchor)

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        lines: dict[Any, int] = {}
        # Checked before `<<` merges names in, which the mapping may override.
        for name, _ in node.value:
            key, line = self._key_of(name), name.start_mark.line + 1
            if key in lines:
                places = f"line {line}" if lines[key] == line else f"lines {lines[key]} and {line}"
                raise DuplicateName(
                    f"{shortened(name.value, LONGEST_QUOTE)!r} is given twice, on {places}; "
                    f"keep one"
                )
            lines[key] = line
        return node

    def _key_of(self, name: Any) -> Any:
        """Return a key as a mapping has it: 1 and 0x1 are equal, 1 and "1" are not."""
        if not isinstance(name, yaml.ScalarNode):
            # Such a key is refused later.
            return id(name)
        try:
            return self.construct_object(name)
        except (
            yaml.YAMLError,
            ValueError,
            ArithmeticError,
            LookupError,
            AttributeError,
            TypeError,
        ):
            return name.tag, name.value

    def _check_number(self, node: Any) -> None:
        if not isinstance(node, yaml.ScalarNode) or node.tag not in _NUMBERS:
            return
        if len(node.value) > LONGEST_NUMBER:
            raise _too_long_number(node)
        number, line = shortened(node.value, LONGEST_QUOTE), node.start_mark.line + 1
        if is_ambiguous(node.value):
            feature = "a leading 0" if ":" not in node.value else "colons"
            raise RefusedFile(
                f"line {line}: {number} is not allowed: YAML readers disagree on numbers with "
                f"{feature}; write a plain number, or put a text in quotes"
            )
        if node.tag == _FLOAT and is_beyond_floats(node.value):
            raise RefusedFile(f"line {line}: {number} is not allowed: {BEYOND_FLOATS}")
