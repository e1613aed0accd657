"""Any UTF-8 file as a corpus: the first nine tenths of its tokens train, the last tenth validates."""

from __future__ import annotations

import codecs
import hashlib
from pathlib import Path
from typing import Any

from nanogpt_bench.data.tokenizers import make_tokenizer
from nanogpt_bench.data.write import write_corpus
from nanogpt_bench.system.errors import BenchError

#: share of the characters that train, as nanoGPT's shakespeare_char splits them
TRAIN_SHARE = 0.9


def prepare_text(
    path: Path, out: Path, tokenizer: str = "byte", *, limit: int | None = None, progress: bool = False
) -> dict[str, Any]:
    """Prepare a UTF-8 text file in folder `out` and return what was written to meta.json.

    Raises:
        BenchError: missing, empty, too short or not UTF-8; unknown tokenizer; unwritable folder.
    """
    text = read_text(path)
    cut = int(len(text) * TRAIN_SHARE)
    source = {
        "kind": "text",
        "file": path.name,
        "sha256": hashlib.sha256(text.encode("utf-8")).hexdigest(),
        "documents": 1,
    }
    splits = {"train": [text[:cut]], "val": [text[cut:]]}
    return write_corpus(out, splits, make_tokenizer(tokenizer, text, splits["train"]), source, progress, limit)


def read_text(path: Path) -> str:
    """Return the content of a UTF-8 file, line ends as they are, without a byte order mark.

    Raises:
        BenchError: missing, a folder, unreadable, empty, or not UTF-8 (with the position of the first wrong byte).
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise BenchError(f"--input {str(path)!r} does not exist") from None
    except OSError as error:
        raise BenchError(f"--input {str(path)!r} can't be read: {error.strerror}") from None
    if not data.removeprefix(codecs.BOM_UTF8).strip():
        raise BenchError(f"--input {str(path)!r} is empty; give a UTF-8 text file")
    try:
        return data.decode("utf-8-sig")  # without the mark that some editors begin a file with
    except UnicodeDecodeError as error:
        raise BenchError(
            f"--input {str(path)!r} is not UTF-8: byte 0x{data[error.start]:02x} at position {error.start}; "
            "convert it to UTF-8 first"
        ) from None
