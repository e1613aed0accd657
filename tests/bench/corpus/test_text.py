"""Any UTF-8 file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from nanogpt_bench.data import prepare_text
from nanogpt_bench.data.tokenizers import tokenizer_from_meta
from nanogpt_bench.system.errors import BenchError


def test_char_scheme_splits_nine_to_one(tmp_path: Path, text_file: Path) -> None:
    text = text_file.read_text()
    meta = prepare_text(text_file, tmp_path / "out", "char")
    tokenizer = tokenizer_from_meta(meta)
    train = np.fromfile(tmp_path / "out" / "train.bin", dtype=np.uint16)
    val = np.fromfile(tmp_path / "out" / "val.bin", dtype=np.uint16)
    assert meta["vocab_size"] == len(set(text))
    assert len(train) == int(0.9 * len(text))
    assert tokenizer.decode(train) + tokenizer.decode(val) == text


def test_line_ends_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "dos.txt"
    path.write_bytes(b"one line\r\n" * 100)
    meta = prepare_text(path, tmp_path / "out", "char")
    assert "\r" in meta["characters"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "does not exist"),
        (b"", "is empty"),
        (b" \n\n", "is empty"),
        (b"hello", "too short"),
        (b"fine so far \xff and on" * 100, "not UTF-8: byte 0xff at position 12"),
        ("naïve".encode("utf-16") * 100, "not UTF-8"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, content: bytes | None, reason: str) -> None:
    path = tmp_path / "in.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(BenchError, match=reason):
        prepare_text(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_is_not_a_text(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="can't be read"):
        prepare_text(tmp_path, tmp_path / "out")
