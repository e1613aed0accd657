"""JSON from a file that anyone may have written: its size and values are bounded before it is read, then its depth."""

from __future__ import annotations

import json
from typing import Any, NoReturn

#: values in a document; each takes some 200 bytes once it is read
VALUES = 1 << 18
#: lists and mappings inside each other
DEPTH = 100


def parse(data: bytes, *, limit: int, unique: bool = False) -> Any:
    """Return the content of a JSON document; `unique` refuses a name given twice.

    Raises:
        ValueError: it is longer than `limit` bytes, has too many values, is too deep, or is no JSON (NaN is none).
    """
    if len(data) > limit:
        raise ValueError(f"{len(data):,} bytes are more than the {limit:,} allowed")
    if sum(map(data.count, (b",", b":", b"[", b"{"))) > VALUES:
        raise ValueError(f"more than the {VALUES:,} values allowed")
    try:
        content = json.loads(data, parse_constant=_no_number, object_pairs_hook=_once if unique else None)
    except json.JSONDecodeError as error:
        raise ValueError(f"no JSON: {error.msg} at byte {error.pos}") from None
    except RecursionError:
        raise ValueError(_too_deep()) from None
    _check_depth(content)
    return content


def _check_depth(content: Any) -> None:
    level = [content]
    for _ in range(DEPTH + 1):
        level = [child for item in level for child in _children(item)]
        if not level:
            return
    raise ValueError(_too_deep())


def _children(item: Any) -> list[Any]:
    return list(item.values()) if isinstance(item, dict) else item if isinstance(item, list) else []


def _too_deep() -> str:
    return f"more than the {DEPTH} lists inside each other allowed"


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        raise ValueError("a name is given twice")
    return content
