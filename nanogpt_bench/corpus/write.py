"""Writing a prepared corpus: train.bin, val.bin (uint16) and meta.json appear together or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from nanogpt_bench.errors import BenchError
from nanogpt_bench.tokenizers import Tokenizer, Tokens

CORPUS_FILES = ("train.bin", "val.bin", "meta.json")
#: a split must hold at least one block of the smallest named model and its shifted targets
MIN_TOKENS = 65
#: characters encoded between two updates of the progress bar
CHUNK = 1 << 20


def write_corpus(
    out: Path, splits: dict[str, Sequence[str]], tokenizer: Tokenizer, source: dict[str, Any], progress: bool
) -> dict[str, Any]:
    """Write the documents of each split as tokens, an end of text after each, and return meta.json's content.

    Everything is written to a temporary sibling of `out` first, then renamed.
    """
    _refuse_foreign(out)
    with _sibling(out) as folder, _bar(splits, progress) as advance:
        counts = {
            split: _write_split(folder / f"{split}.bin", documents, tokenizer, advance)
            for split, documents in splits.items()
        }
        _check_counts(counts)
        meta = {**tokenizer.meta(), "source": source, "splits": counts}
        (folder / "meta.json").write_text(json.dumps(meta, indent=1, ensure_ascii=False), encoding="utf-8")
        _replace(folder, out)
    return meta


def _write_split(path: Path, documents: Iterable[str], tokenizer: Tokenizer, advance: Any) -> dict[str, Any]:
    digest, tokens, size = hashlib.sha256(), 0, 0
    with path.open("wb") as file:
        for text in documents:
            for piece in _pieces(text):
                size += len(piece.encode("utf-8"))
                tokens += _append(file, tokenizer.encode(piece), digest)
                advance(len(piece))
            if tokenizer.end_of_text is not None:
                tokens += _append(file, np.array([tokenizer.end_of_text], dtype=np.uint16), digest)
        file.flush()
        os.fsync(file.fileno())
    return {"tokens": tokens, "bytes": size, "sha256": digest.hexdigest()}


def _pieces(text: str) -> Iterator[str]:
    return (text[start : start + CHUNK] for start in range(0, len(text), CHUNK))


def _append(file: Any, tokens: Tokens, digest: Any) -> int:
    data = tokens.astype("<u2").tobytes()
    file.write(data)
    digest.update(data)
    return len(tokens)


def _check_counts(counts: dict[str, dict[str, Any]]) -> None:
    for split, count in counts.items():
        if count["tokens"] < MIN_TOKENS:
            raise BenchError(
                f"text is too short: its {split} split has {count['tokens']} tokens, at least {MIN_TOKENS} are "
                "needed; give a longer text (the last tenth is the validation split)"
            )


def _refuse_foreign(out: Path) -> None:
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
    except OSError as error:
        raise BenchError(f"--out {str(out)!r} can't be written: {error.strerror}") from None
    try:
        yield folder
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


@contextmanager
def _bar(splits: dict[str, Sequence[str]], show: bool) -> Iterator[Any]:
    from rich.console import Console
    from rich.progress import Progress

    total = sum(len(text) for documents in splits.values() for text in documents)
    with Progress(console=Console(stderr=True), disable=not show, transient=True) as progress:
        task = progress.add_task("tokenizing", total=total)
        yield lambda characters: progress.advance(task, characters)
