"""Writing a prepared corpus: train.bin, val.bin (uint16 or uint32) and meta.json appear
together or not at all.

For labelled documents, so do the files with their ends and labels.
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
from typing import Any, BinaryIO, Protocol

import numpy as np

from nanogpt_bench.data.batches import ENDS, ENDS_TYPE, LABELS, SPLITS
from nanogpt_bench.data.tokenizers import Tokenizer, Tokens, stored_as
from nanogpt_bench.system.errors import BenchError, counted, refused
from nanogpt_bench.system.files import sha256, write_text
from nanogpt_bench.system.untrusted import read_json

#: the least tokens of a split: one block of the smallest named model, and its shifted
#: targets
MIN_TOKENS = 65
#: training tokens per validation token in a limited corpus
VAL_SHARE = 10
#: characters encoded at a time
CHUNK = 1 << 20
#: characters searched for a place to cut
REACH = 4096
#: a space between two words belongs to the second word for GPT-2's tokenizer, so a cut
#: before it changes no token
CUT = re.compile(r"(?<=\S) (?=\S)")
#: files of each split, and what meta.json calls the SHA-256 of each
DIGESTS = {"{}.bin": "sha256", ENDS: "ends_sha256", LABELS: "labels_sha256"}
CORPUS_FILES = ("meta.json", *(name.format(split) for split in SPLITS for name in DIGESTS))


def write_corpus(
    out: Path,
    splits: Mapping[str, Iterable[str]],
    tokenizer: Tokenizer,
    source: dict[str, Any],
    progress: bool,
    limit: int | None = None,
    labels: Sequence[str] | None = None,
    replace: bool = False,
) -> dict[str, Any]:
    """Write the documents of each split as tokens, each with an end-of-text token, and
    return meta.json's content.

    `limit` is the most tokens of the training split; the validation split gets a tenth
    as many. Documents may come from a stream, of which no more are read than are
    written. If they are `LabelledText`, their labels are written too; the labels' names
    are `labels`, or else their numbers. All is written to a temporary sibling of `out`,
    then renamed. A corpus of another text than `source` is refused as `out`, unless
    `replace` is true.
    """
    limits = split_limits(limit)
    with (
        _replaced(out, source, replace=replace) as folder,
        progress_bar(splits, limits, progress) as advance,
    ):
        written = {split: _Split(tokenizer, limits[split], advance) for split in splits}
        counts = {
            split: written[split].write(folder / f"{split}.bin", splits[split]) for split in splits
        }
        _check_counts(counts, source)
        meta = {**tokenizer.meta(), "source": source, "splits": counts}
        if any(None not in split.labels for split in written.values()):
            meta["labels"] = _write_labels(folder, written, counts, labels)
        write_text(folder / "meta.json", json.dumps(meta, indent=1, ensure_ascii=False))
    return meta


def write_tokens(
    out: Path,
    splits: Mapping[str, Tokens],
    tokenizer: Tokenizer,
    source: dict[str, Any],
    limit: int | None = None,
    replace: bool = False,
) -> dict[str, Any]:
    """Write ready tokens of each split, as one document, and return meta.json's
    content.

    `replace` is that of `write_corpus`.
    """
    limits, counts = split_limits(limit), dict[str, dict[str, Any]]()
    with _replaced(out, source, replace=replace) as folder:
        for split, tokens in splits.items():
            path, written = folder / f"{split}.bin", tokens[: limits[split]]
            written.tofile(path)
            size = sum(
                tokenizer.byte_count(written[start : start + CHUNK])
                for start in range(0, len(written), CHUNK)
            )
            counts[split] = {
                "documents": 1,
                "tokens": len(written),
                "bytes": size,
                "sha256": sha256(path),
            }
        _check_counts(counts, source)
        meta = {**tokenizer.meta(), "source": source, "splits": counts}
        write_text(folder / "meta.json", json.dumps(meta, indent=1, ensure_ascii=False))
    return meta


def split_limits(limit: int | None) -> dict[str, int | None]:
    """Return the most tokens of each split; refuse a limit that is too low for a block."""
    if limit is None:
        return {"train": None, "val": None}
    if limit < VAL_SHARE * MIN_TOKENS:
        raise BenchError(
            f"--limit-tokens {limit} is too few; allowed: {VAL_SHARE * MIN_TOKENS} or more"
        )
    return {"train": limit, "val": limit // VAL_SHARE}


@dataclass
class _Split:
    """The writer of one split, with its counts so far, and the end (in tokens) and
    labels of each document.
    """

    tokenizer: Tokenizer
    limit: int | None
    advance: Advance
    digest: Any = field(default_factory=hashlib.sha256)
    tokens: int = 0
    size: int = 0
    ends: list[int] = field(default_factory=list)
    labels: list[tuple[int, ...] | None] = field(default_factory=list)

    def write(self, path: Path, documents: Iterable[str]) -> dict[str, Any]:
        """Write documents until they end or the limit is reached; return the split's
        entry in meta.json.
        """
        with path.open("wb") as file:
            for text in documents:
                self._document(text, file)
                self.ends.append(self.tokens)
                self.labels.append(text.labels if isinstance(text, LabelledText) else None)
                if self._full:
                    break
            file.flush()
            os.fsync(file.fileno())
        counts = {"documents": len(self.ends), "tokens": self.tokens, "bytes": self.size}
        return {**counts, "sha256": self.digest.hexdigest()}

    def _document(self, text: str, file: BinaryIO) -> None:
        for piece in pieces(text):
            self._take(self.tokenizer.encode(piece), piece, file)
            if self._full:
                return
        if self.tokenizer.end_of_text is not None:
            self._take(np.array([self.tokenizer.end_of_text], dtype=np.uint32), "", file)

    @property
    def _full(self) -> bool:
        return self.limit is not None and self.tokens >= self.limit

    def _take(self, tokens: Tokens, text: str, file: BinaryIO) -> None:
        written = tokens if self.limit is None else tokens[: self.limit - self.tokens]
        self.size += (
            len(text.encode("utf-8"))
            if len(written) == len(tokens)
            else self.tokenizer.byte_count(written)
        )
        self.tokens += len(written)
        self.advance(characters=len(text), tokens=len(written))
        data = written.astype(stored_as(self.tokenizer.vocab_size)).tobytes()
        self.digest.update(data)
        file.write(data)


def pieces(text: str, size: int = CHUNK) -> Iterator[str]:
    """Yield `text` in pieces of at most `size` characters, cut between words if
    possible, where no pairs are merged.
    """
    start = 0
    while len(text) - start > size:
        places = [
            match.start()
            for match in CUT.finditer(text, max(start, start + size - REACH), start + size + 2)
        ]
        end = places[-1] if places and places[-1] > start else start + size
        yield text[start:end]
        start = end
    yield text[start:]


def _called(source: Mapping[str, Any]) -> str:
    """The name of a text: its file, its data set, or what kind of text it is."""
    names = (source.get(key) for key in ("file", "dataset", "kind"))
    return str(next(filter(None, names), ""))


def _check_counts(counts: dict[str, dict[str, Any]], source: Mapping[str, Any]) -> None:
    called = _called(source)
    for split, count in counts.items():
        if count["tokens"] < MIN_TOKENS:
            raise BenchError(
                f"text {called!r} is too short: its {split} split has "
                f"{counted(count['tokens'], 'token')}, at least {MIN_TOKENS} are needed; give a "
                f"longer text (the last tenth is the validation split)"
            )


def check_folder(out: Path) -> None:
    """Refuse to overwrite a folder, unless it is empty or an unchanged prepared corpus
    (by SHA-256).
    """
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise BenchError(
            f"--out {str(out)!r} is a {'link' if out.is_symlink() else 'file'}; give a folder"
        )
    there = sorted(item.name for item in out.iterdir()) if out.exists() else []
    foreign = [name for name in there if name not in CORPUS_FILES]
    if foreign:
        raise BenchError(
            f"--out {str(out)!r} holds {foreign[0]!r}, not only a prepared corpus; give an empty "
            f"folder"
        )
    if there and (other := _not_prepared(out, there)):
        raise BenchError(
            f"--out {str(out)!r} holds {other}, which prepare did not write; give an empty folder"
        )


def check_replaced(out: Path, source: Mapping[str, Any], *, replace: bool) -> None:
    """Refuse a folder as `check_folder` does, and unless `replace` is true one that
    holds a corpus of another text.

    `source` is that of meta.json. The tokenizer and the limit of tokens may differ.
    """
    check_folder(out)
    before = source_in(out)
    if before is not None and not replace and _text_of(before) != _text_of(source):
        raise another_text(out, before, source)


def source_in(out: Path) -> Mapping[str, Any] | None:
    """Return the source of the corpus in a folder, empty if it is not known; None
    without a corpus.
    """
    path = out / "meta.json"
    if not path.exists():
        return None
    source = read_json(path, times=8).get("source")
    return source if isinstance(source, Mapping) else {}


def another_text(out: Path, before: Mapping[str, Any], source: Mapping[str, Any]) -> BenchError:
    """Return the error of a folder that holds the text of `before`, not of `source`."""
    return BenchError(
        f"--out {str(out)!r} holds another text ({_called(before)!r}) than this one "
        f"({_called(source)!r}); give another --out, or --replace to replace it"
    )


def _text_of(source: Mapping[str, Any]) -> Any:
    """What identifies the text of a source: its sha256, or all that is known of it."""
    digest = source.get("sha256")
    if digest is not None:
        return digest
    facts = {name: value for name, value in source.items() if name != "limit_tokens"}
    # as meta.json gives it back
    return json.loads(json.dumps(facts))


def _not_prepared(out: Path, names: Sequence[str]) -> str | None:
    """Return in words the first file of a folder that is not as `prepare` wrote it;
    None if all are.
    """
    try:
        splits = read_json(out / "meta.json", times=8)["splits"]
        known = {
            name.format(split): str(splits[split][key])
            for split in SPLITS
            for name, key in DIGESTS.items()
            if key in dict(splits[split])
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = (
            "without a meta.json"
            if isinstance(error, FileNotFoundError)
            else "with a meta.json that can't be read"
        )
        return f"{next(name for name in (*names, 'meta.json') if name != 'meta.json')!r} {why}"
    for name in names:
        if name == "meta.json":
            continue
        if name not in known:
            return f"{name!r}, which its meta.json does not list"
        if not (out / name).is_file():
            return f"{name!r}, no ordinary file"
        if sha256(out / name) != known[name]:
            return f"{name!r} with another sha256 than its meta.json gives"
    return None


@contextmanager
def _replaced(out: Path, source: Mapping[str, Any], *, replace: bool) -> Iterator[Path]:
    """Yield a new folder beside `out`, which replaces `out` when the block ends without
    an error.
    """
    check_replaced(out, source, replace=replace)
    folder = out.parent / f".{out.name}.partial-{os.getpid()}"
    try:
        folder.mkdir(parents=True)
        yield folder
        # again, since it may have changed meanwhile
        check_replaced(out, source, replace=replace)
        if out.exists():
            # os.replace can't overwrite a folder with content: the old corpus is
            # renamed, then removed.
            old = folder.with_name(f"{folder.name}-old")
            os.replace(out, old)
            os.replace(folder, out)
            shutil.rmtree(old)
        else:
            os.replace(folder, out)
    except OSError as error:  # about this folder: errors of reading a source are BenchErrors by now
        raise refused(f"--out {str(out)!r} can't be written", error) from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class LabelledText(str):
    """A document's text, and the numbers of its labels."""

    labels: tuple[int, ...]

    def __new__(cls, text: str, labels: Sequence[int]) -> LabelledText:
        made = super().__new__(cls, text)
        made.labels = tuple(labels)
        return made


def _write_labels(
    folder: Path,
    splits: Mapping[str, _Split],
    counts: dict[str, dict[str, Any]],
    names: Sequence[str] | None,
) -> list[str]:
    """Write ends and labels (uint8, documents x labels) of every split, put digests
    into `counts`, return the names.
    """
    numbers = [
        number for split in splits.values() for labels in split.labels for number in labels or ()
    ]
    if not numbers:
        raise BenchError("no document has a label; there is nothing to learn")
    named = list(names) if names else list(map(str, range(max(numbers) + 1)))
    if max(numbers) >= len(named):
        raise BenchError(
            f"a document has label {max(numbers)}, the data set names {len(named)} labels"
        )
    for name, split in splits.items():
        rows = np.zeros((len(split.labels), len(named)), dtype=np.uint8)
        for row, labels in zip(rows, split.labels, strict=True):
            row[list(labels or ())] = 1
        for pattern, content in ((ENDS, np.array(split.ends, dtype=ENDS_TYPE)), (LABELS, rows)):
            path = folder / pattern.format(name)
            path.write_bytes(content.tobytes())
            counts[name][DIGESTS[pattern]] = sha256(path)
    return named


class Advance(Protocol):
    """The function that moves the bar by the characters and tokens written."""

    def __call__(self, *, characters: int, tokens: int) -> None: ...


@contextmanager
def progress_bar(
    splits: Mapping[str, Iterable[str]], limits: Mapping[str, int | None], show: bool
) -> Iterator[Advance]:
    """Show a bar on standard error while its block runs, and yield the function that
    moves it.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    by_tokens = None not in limits.values()
    total: int | None = sum(limit or 0 for limit in limits.values())
    if not by_tokens:
        listed = [documents for documents in splits.values() if isinstance(documents, Sequence)]
        characters = sum(len(text) for documents in listed for text in documents)
        total = (
            characters if len(listed) == len(splits) else None
        )  # unknown for documents from a stream
    columns = (
        TextColumn("tokenizing"),
        BarColumn(),
        TextColumn("{task.fields[tokens]:,} tokens"),
        TimeElapsedColumn(),
    )
    with Progress(
        *columns, console=Console(stderr=True), disable=not show, transient=True
    ) as progress:
        task, written = progress.add_task("", total=total, tokens=0), 0

        def advance(*, characters: int, tokens: int) -> None:
            nonlocal written
            written += tokens
            progress.update(task, advance=tokens if by_tokens else characters, tokens=written)

        yield advance
