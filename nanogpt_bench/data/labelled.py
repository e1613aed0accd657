"""Labels of documents: texts that carry theirs, and how they are written beside the tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nanogpt_bench.system.digest import sha256
from nanogpt_bench.system.errors import BenchError

#: beside NAME.bin of each split: where its documents end, and their labels
ENDS, LABELS = "{}.ends.bin", "{}.labels.bin"
ENDS_TYPE = np.dtype("<u8")


class LabelledText(str):
    """A document's text, and the numbers of its labels.

    >>> LabelledText("Article 1", [3, 5]).labels
    (3, 5)
    """

    labels: tuple[int, ...]

    def __new__(cls, text: str, labels: Sequence[int]) -> LabelledText:
        made = super().__new__(cls, text)
        made.labels = tuple(labels)
        return made


@dataclass
class Given:
    """What the documents of one split have: where each ends, in tokens, and its labels; None without labels."""

    ends: list[int]
    labels: list[tuple[int, ...] | None]


def write_labels(folder: Path, splits: Mapping[str, Given], names: Sequence[str] | None) -> dict[str, Any]:
    """Write ends and labels of every split, and return what meta.json says of them: the labels' names, and digests.

    Labels are one byte each, 0 or 1, a row a document: shape (documents, labels). Without `names` the labels' numbers
    are their names, as many as the largest one asks for.

    Raises:
        BenchError: no document has a label, or one has a number that has no name.
    """
    numbers = [number for split in splits.values() for labels in split.labels for number in labels or ()]
    if not numbers:
        raise BenchError("no document has a label; there is nothing to learn")
    named = list(names) if names else list(map(str, range(max(numbers) + 1)))
    if max(numbers) >= len(named):
        raise BenchError(f"a document has label {max(numbers)}, the data set names {len(named)} labels")
    return {
        "labels": named,
        "splits": {name: _write(folder, name, split, len(named)) for name, split in splits.items()},
    }


def _write(folder: Path, name: str, split: Given, width: int) -> dict[str, str]:
    rows = np.zeros((len(split.labels), width), dtype=np.uint8)
    for row, labels in zip(rows, split.labels, strict=True):
        row[list(labels or ())] = 1
    ends, labels_file = (folder / pattern.format(name) for pattern in (ENDS, LABELS))
    ends.write_bytes(np.array(split.ends, dtype=ENDS_TYPE).tobytes())
    labels_file.write_bytes(rows.tobytes())
    return {"ends_sha256": sha256(ends), "labels_sha256": sha256(labels_file)}
