"""Writing a prepared corpus, whose files appear together or not at all.

They are train.bin, val.bin and meta.json and, of labelled documents, the files with
their ends and labels (see `data.batches`). All are written to a new folder beside the
corpus, which replaces it by a rename at the end:

    documents -> pieces of about a million characters -> tokens -> SPLIT.bin and digests

A folder with anything that `prepare` did not write is never replaced.
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
from itertools import product
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
from numpy.typing import NDArray

from nanogpt_bench.data.batches import ENDS, ENDS_TYPE, LABELS, SPLITS
from nanogpt_bench.data.tokenizers import Tokenizer, Tokens, token_dtype
from nanogpt_bench.system.errors import BenchError, counted, refused
from nanogpt_bench.system.files import sha256, write_text
from nanogpt_bench.system.untrusted import read_json

#: the least tokens of a split: one block of the smallest named model, and its shifted
#: targets
MIN_TOKENS = 65
#: training tokens per validation token in a limited corpus
VAL_SHARE = 10
#: characters encoded at a time
ENCODED_AT_A_TIME = 1 << 20
#: characters searched for a place to cut
REACH = 4096
#: a space between two words belongs to the second word for GPT-2's tokenizer, so a cut
#: before it changes no token
CUT = re.compile(r"(?<=\S) (?=\S)")
#: files of each split, and what meta.json calls the SHA-256 of each
DIGESTS = {"{}.bin": "sha256", ENDS: "ends_sha256", LABELS: "labels_sha256"}
CORPUS_FILES = ("meta.json", *(name.format(split) for split, name in product(SPLITS, DIGESTS)))


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
    """Write the documents of each split as tokens; return the content of meta.json.

    An end-of-text token, if the tokenizer has one, follows every document. Documents
    may come from a stream, of which no more are read than are written. If they are
    `LabelledText`, their labels are written too.

    Args:
        out: folder of the corpus. One of another text than `source` is refused.
        splits: documents of each split.
        tokenizer: what makes tokens of them.
        source: facts that identify the text, for meta.json.
        progress: whether a bar is shown.
        limit: most tokens of the training split; the validation split gets a tenth as
            many.
        labels: names of the labels; None for their numbers.
        replace: whether a corpus of another text is replaced.
    """
    limits = split_limits(limit)
    with (
        _replacement(out, source, replace=replace) as folder,
        progress_bar(splits, limits, progress) as advance,
    ):
        writers = {}
        counts = {}
        for split, documents in splits.items():
            writers[split] = _SplitWriter(tokenizer, limits[split], advance)
            counts[split] = writers[split].write(folder / f"{split}.bin", documents)
        _check_token_counts(counts, source)
        meta = {**tokenizer.meta(), "source": source, "splits": counts}
        # A split has labels if every document in it has some.
        if any(None not in writer.labels for writer in writers.values()):
            meta["labels"] = _write_labels(folder, writers, counts, labels)
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
    """Write ready tokens of each split as a document; return meta.json's content.

    Arguments are those of `write_corpus`.
    """
    limits = split_limits(limit)
    counts = {}
    with _replacement(out, source, replace=replace) as folder:
        for split, all_tokens in splits.items():
            path = folder / f"{split}.bin"
            tokens = all_tokens[: limits[split]]
            tokens.tofile(path)
            size = 0
            for start in range(0, len(tokens), ENCODED_AT_A_TIME):
                size += tokenizer.byte_count(tokens[start : start + ENCODED_AT_A_TIME])
            counts[split] = {
                "documents": 1,
                "tokens": len(tokens),
                "bytes": size,
                "sha256": sha256(path),
            }
        _check_token_counts(counts, source)
        meta = {**tokenizer.meta(), "source": source, "splits": counts}
        write_text(folder / "meta.json", json.dumps(meta, indent=1, ensure_ascii=False))
    return meta


def split_limits(limit: int | None) -> dict[str, int | None]:
    """Return the most tokens of each split; refuse a limit too low for a block."""
    if limit is None:
        return {"train": None, "val": None}
    if limit < VAL_SHARE * MIN_TOKENS:
        raise BenchError(
            f"--limit-tokens {limit} is too few; allowed: {VAL_SHARE * MIN_TOKENS} or more"
        )
    return {"train": limit, "val": limit // VAL_SHARE}


@dataclass
class _SplitWriter:
    """Writes the tokens of one split, and counts what it writes."""

    tokenizer: Tokenizer
    #: most tokens
    limit: int | None
    advance: Advance
    digest: Any = field(default_factory=hashlib.sha256)
    #: counts so far
    tokens: int = 0
    byte_count: int = 0
    #: of each document: its end, in tokens, and its labels
    ends: list[int] = field(default_factory=list)
    labels: list[tuple[int, ...] | None] = field(default_factory=list)

    def write(self, path: Path, documents: Iterable[str]) -> dict[str, Any]:
        """Write documents until they end or the limit is reached.

        Returns the split's entry in meta.json.
        """
        with path.open("wb") as file:
            for text in documents:
                self._write_document(text, file)
                self.ends.append(self.tokens)
                self.labels.append(text.labels if isinstance(text, LabelledText) else None)
                if self._is_full:
                    break
            file.flush()
            os.fsync(file.fileno())
        return {
            "documents": len(self.ends),
            "tokens": self.tokens,
            "bytes": self.byte_count,
            "sha256": self.digest.hexdigest(),
        }

    def _write_document(self, text: str, file: BinaryIO) -> None:
        for piece in text_pieces(text):
            self._write_tokens(self.tokenizer.encode(piece), piece, file)
            if self._is_full:
                return
        if self.tokenizer.end_of_text is not None:
            end = np.array([self.tokenizer.end_of_text], dtype=np.uint32)
            self._write_tokens(end, "", file)

    @property
    def _is_full(self) -> bool:
        return self.limit is not None and self.tokens >= self.limit

    def _write_tokens(self, tokens: Tokens, text: str, file: BinaryIO) -> None:
        """Write the tokens of a text, as far as the limit allows."""
        if self.limit is None or len(tokens) <= self.limit - self.tokens:
            self.byte_count += len(text.encode("utf-8"))
        else:
            tokens = tokens[: self.limit - self.tokens]
            self.byte_count += self.tokenizer.byte_count(tokens)
        self.tokens += len(tokens)
        self.advance(characters=len(text), tokens=len(tokens))
        data = tokens.astype(token_dtype(self.tokenizer.vocab_size)).tobytes()
        self.digest.update(data)
        file.write(data)


def text_pieces(text: str, size: int = ENCODED_AT_A_TIME) -> Iterator[str]:
    """Yield `text` in pieces of at most `size` characters.

    They are cut between words if possible, where no pairs are merged.
    """
    start = 0
    while len(text) - start > size:
        # + 2: a space behind the piece, and the character that has to follow it
        near_end = CUT.finditer(text, max(start, start + size - REACH), start + size + 2)
        cuts = [match.start() for match in near_end]
        end = cuts[-1] if cuts and cuts[-1] > start else start + size
        yield text[start:end]
        start = end
    yield text[start:]


def _text_name(source: Mapping[str, Any]) -> str:
    """Return the name of a text: its file, its data set, or its kind."""
    for key in ("file", "dataset", "kind"):
        if source.get(key):
            return str(source[key])
    return ""


def _check_token_counts(counts: dict[str, dict[str, Any]], source: Mapping[str, Any]) -> None:
    for split, count in counts.items():
        if count["tokens"] < MIN_TOKENS:
            raise BenchError(
                f"text {_text_name(source)!r} is too short: its {split} split has "
                f"{counted(count['tokens'], 'token')}, and at least {MIN_TOKENS} are needed; give "
                "a longer text (the last tenth is the validation split)"
            )


def check_corpus_folder(out: Path) -> None:
    """Refuse to overwrite a folder, unless it is empty or an unchanged prepared corpus.

    Whether one is unchanged is decided by the SHA-256 of its files.
    """
    if out.is_symlink():
        raise BenchError(f"--out {str(out)!r} is a link; give a folder")
    if out.exists() and not out.is_dir():
        raise BenchError(f"--out {str(out)!r} is a file; give a folder")
    names = sorted(item.name for item in out.iterdir()) if out.exists() else []
    if not names:
        return
    for name in names:
        if name not in CORPUS_FILES:
            raise BenchError(
                f"--out {str(out)!r} holds {name!r}, which is not part of a prepared corpus; give "
                "an empty folder"
            )
    foreign_file = _foreign_file(out, names)
    if foreign_file:
        raise BenchError(
            f"--out {str(out)!r} holds {foreign_file}: prepare did not write it so; give an empty "
            "folder"
        )


def check_replaced(out: Path, source: Mapping[str, Any], *, replace: bool) -> None:
    """Refuse a folder as `check_corpus_folder` does, and one that holds another text.

    With `replace` another text is allowed. `source` is that of meta.json. The tokenizer
    and the limit of tokens may differ.
    """
    check_corpus_folder(out)
    present_source = source_in(out)
    if present_source is None or replace:
        return
    if _text_of(present_source) != _text_of(source):
        raise another_text(out, present_source, source)


def source_in(out: Path) -> Mapping[str, Any] | None:
    """Return the source of the corpus in a folder; None without a corpus.

    It is empty if meta.json does not say it.
    """
    path = out / "meta.json"
    if not path.exists():
        return None
    source = read_json(path, times=8).get("source")
    return source if isinstance(source, Mapping) else {}


def another_text(
    out: Path, present_source: Mapping[str, Any], source: Mapping[str, Any]
) -> BenchError:
    """Return the error of a folder that holds another text than that of `source`."""
    return BenchError(
        f"--out {str(out)!r} holds another text ({_text_name(present_source)!r}, not "
        f"{_text_name(source)!r}); give another --out, or --replace to replace it"
    )


def _text_of(source: Mapping[str, Any]) -> Any:
    """Return what identifies the text of a source.

    It is its sha256 or, without one, all that is known of it.
    """
    digest = source.get("sha256")
    if digest is not None:
        return digest
    facts = {name: value for name, value in source.items() if name != "limit_tokens"}
    # As meta.json gives it back.
    return json.loads(json.dumps(facts))


def _foreign_file(out: Path, names: Sequence[str]) -> str | None:
    """Return in words the first file of a folder that is not as `prepare` wrote it.

    It is None if all are.
    """
    token_files = [name for name in names if name != "meta.json"]
    try:
        digests = _digests_in_meta(out)
    except FileNotFoundError:
        return f"{token_files[0]!r} without a meta.json"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        if not token_files:
            return "a meta.json that can't be read"
        return f"{token_files[0]!r} with a meta.json that can't be read"
    for name in token_files:
        problem = _problem_of(out / name, digests.get(name))
        if problem:
            return f"{name!r}{problem}"
    return None


def _problem_of(path: Path, digest: str | None) -> str:
    """Return what is wrong with a file of that digest in meta.json; "" if nothing."""
    if digest is None:
        return ", which its meta.json does not list"
    if not path.is_file():
        return ", which is not an ordinary file"
    if sha256(path) != digest:
        return " with another sha256 than its meta.json gives"
    return ""


def _digests_in_meta(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file that meta.json lists."""
    facts_by_split = read_json(folder / "meta.json", times=8)["splits"]
    digests = {}
    for split in SPLITS:
        facts = dict(facts_by_split[split])
        for pattern, key in DIGESTS.items():
            if key in facts:
                digests[pattern.format(split)] = str(facts[key])
    return digests


@contextmanager
def _replacement(out: Path, source: Mapping[str, Any], *, replace: bool) -> Iterator[Path]:
    """Yield a new folder beside `out`, which replaces it at the end of the block.

    After an error it does not.
    """
    check_replaced(out, source, replace=replace)
    folder = out.parent / f".{out.name}.partial-{os.getpid()}"
    try:
        folder.mkdir(parents=True)
        yield folder
        # Again, since it may have changed meanwhile.
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
    # It is about this folder: errors of reading a source are BenchErrors by now.
    except OSError as error:
        raise refused(f"--out {str(out)!r} can't be written", error) from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class LabelledText(str):
    """A document's text, and the numbers of its labels."""

    labels: tuple[int, ...]

    def __new__(cls, text: str, labels: Sequence[int]) -> LabelledText:
        labelled = super().__new__(cls, text)
        labelled.labels = tuple(labels)
        return labelled


def _write_labels(
    folder: Path,
    writers: Mapping[str, _SplitWriter],
    counts: dict[str, dict[str, Any]],
    names: Sequence[str] | None,
) -> list[str]:
    """Write ends and labels of every split; return the names of the labels.

    Labels are uint8, (documents, labels). Digests of the files are put into `counts`.
    """
    numbers: set[int] = set()
    for writer in writers.values():
        for labels in writer.labels:
            numbers.update(labels or ())
    if not numbers:
        raise BenchError("no document has a label, so there is nothing to learn")
    largest = max(numbers)
    label_names = list(names) if names else [str(number) for number in range(largest + 1)]
    if largest >= len(label_names):
        raise BenchError(
            f"a document has label {largest}, but the data set names {len(label_names)} labels"
        )
    for split, writer in writers.items():
        rows = np.zeros((len(writer.labels), len(label_names)), dtype=np.uint8)
        for row, labels in zip(rows, writer.labels, strict=True):
            row[list(labels or ())] = 1
        arrays: dict[str, NDArray[Any]] = {
            ENDS: np.array(writer.ends, dtype=ENDS_TYPE),
            LABELS: rows,
        }
        for pattern, array in arrays.items():
            path = folder / pattern.format(split)
            path.write_bytes(array.tobytes())
            counts[split][DIGESTS[pattern]] = sha256(path)
    return label_names


class Advance(Protocol):
    """The function that moves the bar by the characters and tokens written."""

    def __call__(self, *, characters: int, tokens: int) -> None: ...


@contextmanager
def progress_bar(
    splits: Mapping[str, Iterable[str]], limits: Mapping[str, int | None], show: bool
) -> Iterator[Advance]:
    """Show a bar on standard error while its block runs.

    Yields the function that moves it.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    counts_tokens = None not in limits.values()
    if counts_tokens:
        total: int | None = sum(limit or 0 for limit in limits.values())
    else:
        total = _characters(splits)
    bar = Progress(
        TextColumn("tokenizing"),
        BarColumn(),
        TextColumn("{task.fields[tokens]:,} tokens"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        disable=not show,
        transient=True,
    )
    with bar:
        task = bar.add_task("", total=total, tokens=0)
        all_tokens = 0

        def advance(*, characters: int, tokens: int) -> None:
            nonlocal all_tokens
            all_tokens += tokens
            distance = tokens if counts_tokens else characters
            bar.update(task, advance=distance, tokens=all_tokens)

        yield advance


def _characters(splits: Mapping[str, Iterable[str]]) -> int | None:
    """Return the characters of all documents; None if some come from a stream."""
    count = 0
    for documents in splits.values():
        if not isinstance(documents, Sequence):
            return None
        count += sum(len(text) for text in documents)
    return count
