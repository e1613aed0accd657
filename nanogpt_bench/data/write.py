"""Writing a prepared corpus: train.bin, val.bin (uint16) and meta.json appear together or not at all.

Of labelled documents (`nanogpt_bench.data.labelled`), their ends and their labels appear with them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from nanogpt_bench.data.labelled import ENDS, LABELS, Given, LabelledText, write_labels
from nanogpt_bench.data.progress import Advance, progress_bar
from nanogpt_bench.data.tokenizers import Tokenizer, Tokens, stored_as
from nanogpt_bench.system.errors import BenchError, refused

CORPUS_FILES = ("meta.json", *(name.format(split) for split in ("train", "val") for name in ("{}.bin", ENDS, LABELS)))
#: a split must hold at least one block of the smallest named model and its shifted targets
MIN_TOKENS = 65
#: of a limited corpus the validation split holds one token for so many of training
VAL_SHARE = 10
#: characters encoded at a time
CHUNK = 1 << 20
#: characters searched for a place to cut
REACH = 4096
#: a blank between two words begins the second for GPT-2's tokenizer, so the tokens don't change if it is cut there
CUT = re.compile(r"(?<=\S) (?=\S)")


def write_corpus(
    out: Path,
    splits: Mapping[str, Iterable[str]],
    tokenizer: Tokenizer,
    source: dict[str, Any],
    progress: bool,
    limit: int | None = None,
    labels: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Write the documents of each split as tokens, an end of text after each, and return meta.json's content.

    `limit` is the most tokens of the training split; the validation split gets a tenth as many. Documents may come in a
    stream: no more of them are taken than are written. Those that are `LabelledText` have their labels written too,
    whose names are `labels`, or their numbers. Everything is written to a temporary sibling of `out` first, then
    renamed.
    """
    limits = split_limits(limit)
    check_folder(out)
    with _sibling(out) as folder, progress_bar(splits, limits, progress) as advance:
        written = {split: _Split(tokenizer, limits[split], advance) for split in splits}
        counts = {
            split: _write_split(folder / f"{split}.bin", documents, written[split])
            for split, documents in splits.items()
        }
        _check_counts(counts)
        meta = {**tokenizer.meta(), "source": source, "splits": counts}
        if any(None not in split.given.labels for split in written.values()):
            found = write_labels(folder, {name: split.given for name, split in written.items()}, labels)
            meta["labels"] = found["labels"]
            meta["splits"] = {name: {**counts[name], **found["splits"][name]} for name in splits}
        (folder / "meta.json").write_text(json.dumps(meta, indent=1, ensure_ascii=False), encoding="utf-8")
        _replace(folder, out)
    return meta


def split_limits(limit: int | None) -> dict[str, int | None]:
    """Return the most tokens of each split.

    >>> split_limits(5000)
    {'train': 5000, 'val': 500}

    Raises:
        BenchError: so few tokens that no block fits in.
    """
    if limit is None:
        return {"train": None, "val": None}
    if limit < VAL_SHARE * MIN_TOKENS:
        raise BenchError(f"--limit-tokens {limit} is too few; allowed: {VAL_SHARE * MIN_TOKENS} or more")
    return {"train": limit, "val": limit // VAL_SHARE}


@dataclass
class _Split:
    """What has been written of one split."""

    tokenizer: Tokenizer
    limit: int | None
    advance: Advance
    digest: Any = field(default_factory=hashlib.sha256)
    tokens: int = 0
    size: int = 0
    documents: int = 0
    given: Given = field(default_factory=lambda: Given([], []))

    def data(self, documents: Iterable[str]) -> Iterator[bytes]:
        """Yield what belongs into the file until the documents or the room end."""
        for text in documents:
            self.documents += 1
            yield from self._document(text)
            self.given.ends.append(self.tokens)
            self.given.labels.append(text.labels if isinstance(text, LabelledText) else None)
            if self.full:
                return

    def _document(self, text: str) -> Iterator[bytes]:
        for piece in pieces(text):
            yield self._take(self.tokenizer.encode(piece), piece)
            if self.full:
                return
        if self.tokenizer.end_of_text is not None:
            yield self._take(np.array([self.tokenizer.end_of_text], dtype=np.uint32), "")

    @property
    def full(self) -> bool:
        return self.limit is not None and self.tokens >= self.limit

    def _take(self, tokens: Tokens, text: str) -> bytes:
        room = len(tokens) if self.limit is None else self.limit - self.tokens
        kept = tokens[:room]
        self.size += len(text.encode("utf-8")) if len(kept) == len(tokens) else self.tokenizer.byte_count(kept)
        self.tokens += len(kept)
        self.advance(characters=len(text), tokens=len(kept))
        data = kept.astype(stored_as(self.tokenizer.vocab_size)).tobytes()
        self.digest.update(data)
        return data

    def counts(self) -> dict[str, Any]:
        return {
            "documents": self.documents,
            "tokens": self.tokens,
            "bytes": self.size,
            "sha256": self.digest.hexdigest(),
        }


def _write_split(path: Path, documents: Iterable[str], split: _Split) -> dict[str, Any]:
    with path.open("wb") as file:
        for data in split.data(documents):
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return split.counts()


def pieces(text: str, size: int = CHUNK) -> Iterator[str]:
    """Yield `text` in pieces of at most `size` characters, cut where no byte pairs are merged if there is such a place.

    >>> list(pieces("one two three", 9))
    ['one two', ' three']
    """
    start = 0
    while len(text) - start > size:
        places = [match.start() for match in CUT.finditer(text, max(start, start + size - REACH), start + size + 2)]
        end = places[-1] if places and places[-1] > start else start + size
        yield text[start:end]
        start = end
    yield text[start:]


def _check_counts(counts: dict[str, dict[str, Any]]) -> None:
    for split, count in counts.items():
        if count["tokens"] < MIN_TOKENS:
            raise BenchError(
                f"text is too short: its {split} split has {count['tokens']} tokens, at least {MIN_TOKENS} are "
                "needed; give a longer text (the last tenth is the validation split)"
            )


def check_folder(out: Path) -> None:
    """Refuse to write a corpus over anything else.

    Raises:
        BenchError: `out` is a file, or a folder with other files than a corpus's.
    """
    if out.exists() and not out.is_dir():
        raise BenchError(f"--out {str(out)!r} is a file; give a folder")
    foreign = sorted(item.name for item in out.iterdir() if item.name not in CORPUS_FILES) if out.exists() else []
    if foreign:
        raise BenchError(f"--out {str(out)!r} holds {foreign[0]!r}, not only a prepared corpus; give an empty folder")


@contextmanager
def _sibling(out: Path) -> Iterator[Path]:
    folder = out.parent / f".{out.name}.partial-{os.getpid()}"
    try:
        folder.mkdir(parents=True)
        yield folder
    except OSError as error:  # of this folder only: what reading a source raises has become a BenchError before
        raise refused(f"--out {str(out)!r} can't be written", error) from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _replace(folder: Path, out: Path) -> None:
    if out.exists():
        # os.replace can't overwrite a folder with content: the old corpus steps aside, then goes with `folder`.
        old = folder.with_name(f"{folder.name}-old")
        os.replace(out, old)
        os.replace(folder, out)
        shutil.rmtree(old)
    else:
        os.replace(folder, out)
