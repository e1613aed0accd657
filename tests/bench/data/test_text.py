"""Any UTF-8 file."""

from pathlib import Path

import numpy as np

from nanogpt_bench.data.text import prepare_text
from nanogpt_bench.data.tokenizers import tokenizer_from_meta


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
