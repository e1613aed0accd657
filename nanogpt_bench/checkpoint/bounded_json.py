"""The bounds within which the JSON of a checkpoint and of a run folder is read, whoever has written it."""

from __future__ import annotations

from typing import Any

from nanogpt_bench.system.untrusted import parse_json

#: values in a document; each takes some 200 bytes once it is read
VALUES = 1 << 18
#: lists and mappings inside each other: an optimizer's state is an outline of outlines
DEPTH = 100


def parse(data: bytes, *, limit: int, unique: bool = False) -> Any:
    """Return the content of a JSON document of at most `limit` bytes; `unique` refuses a name given twice.

    Raises:
        ValueError: it is beyond the bounds, or no JSON (NaN is none).
    """
    return parse_json(data, VALUES, most_bytes=limit, deepest=DEPTH, nan=False, unique=unique)
