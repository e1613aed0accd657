"""Text to token numbers and back: bytes, the characters of the text, GPT-2's byte pairs, or a model's own tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from nanogpt_bench.data.gpt2_bpe import Gpt2Tokenizer, encoding
from nanogpt_bench.data.own_tokenizer import PREFIX, from_meta, own_tokenizer
from nanogpt_bench.system.errors import BenchError, unknown

#: tokens are stored as uint16, those of a larger vocabulary as uint32
MAX_VOCABULARY = 2**16
#: the choices of `prepare --tokenizer`
TOKENIZERS = ("byte", "char", "gpt2")

Tokens = NDArray[np.uint16] | NDArray[np.uint32]


def stored_as(vocab_size: int) -> np.dtype[Any]:
    """Return the type of a corpus's tokens on disk."""
    return np.dtype("<u2" if vocab_size <= MAX_VOCABULARY else "<u4")


class Tokenizer(Protocol):
    """What a corpus needs of a tokenizer."""

    @property
    def name(self) -> str:
        """What meta.json calls it."""

    @property
    def vocab_size(self) -> int:
        """How many tokens there are."""

    @property
    def end_of_text(self) -> int | None:
        """The token written after each document, None when there is none."""

    def encode(self, text: str) -> Tokens:
        """Return the tokens of `text`, without an end of text."""

    def decode(self, tokens: Sequence[int] | Tokens) -> str:
        """Return the text of `tokens`; an end of text gives an empty string."""

    def byte_count(self, tokens: Tokens) -> int:
        """Return how many UTF-8 bytes of text `tokens` stand for."""

    def meta(self) -> dict[str, Any]:
        """Return what meta.json must hold to rebuild the tokenizer."""


@dataclass(frozen=True)
class ByteTokenizer:
    """UTF-8 bytes 0..255 and an end of text, 256: a vocabulary of 257.

    >>> ByteTokenizer().encode("hé").tolist()
    [104, 195, 169]
    """

    name: str = "byte"
    vocab_size: int = 257
    end_of_text: int | None = 256

    def encode(self, text: str) -> Tokens:
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.uint16)

    def decode(self, tokens: Sequence[int] | Tokens) -> str:
        codes = np.asarray(tokens)
        return codes[codes < 256].astype(np.uint8).tobytes().decode("utf-8", errors="replace")

    def byte_count(self, tokens: Tokens) -> int:
        return int(np.count_nonzero(tokens < 256))

    def meta(self) -> dict[str, Any]:
        return {"tokenizer": self.name, "vocab_size": self.vocab_size, "end_of_text": self.end_of_text}


@dataclass(frozen=True)
class CharTokenizer:
    """Every character of the text, in code-point order, is a token (nanoGPT's shakespeare_char scheme).

    >>> CharTokenizer.of("hello").encode("hello").tolist()
    [1, 0, 2, 2, 3]
    """

    characters: str
    name: str = "char"
    end_of_text: int | None = None

    @classmethod
    def of(cls, text: str) -> CharTokenizer:
        """Return the tokenizer whose vocabulary is the set of characters of `text`.

        Raises:
            BenchError: more characters than a vocabulary can have.
        """
        codes = np.unique(_code_points(text))
        if len(codes) > MAX_VOCABULARY:
            raise BenchError(f"text has {len(codes)} different characters; --tokenizer char allows {MAX_VOCABULARY}")
        return cls("".join(map(chr, codes)))

    @property
    def vocab_size(self) -> int:
        return len(self.characters)

    def encode(self, text: str) -> Tokens:
        known, codes = _code_points(self.characters), _code_points(text)
        tokens = np.searchsorted(known, codes)
        wrong = known[np.minimum(tokens, len(known) - 1)] != codes
        if wrong.any():
            raise BenchError(f"character {chr(codes[wrong][0])!r} is not in the vocabulary of the char tokenizer")
        return tokens.astype(np.uint16)

    def decode(self, tokens: Sequence[int] | Tokens) -> str:
        return "".join(self.characters[token] for token in tokens)

    def byte_count(self, tokens: Tokens) -> int:
        return len(self.decode(tokens).encode("utf-8"))

    def meta(self) -> dict[str, Any]:
        return {
            "tokenizer": self.name,
            "vocab_size": self.vocab_size,
            "end_of_text": None,
            "characters": self.characters,
        }


def _code_points(text: str) -> NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)


def make_tokenizer(name: str, text: str) -> Tokenizer:
    """Return the tokenizer called `name`, its vocabulary taken from `text` where it has one.

    A name with a slash in it, or that of a .gguf file, is a model's, and means the model's own tokenizer.

    Raises:
        BenchError: no such tokenizer, or its package or files are missing.
    """
    if name == "byte":
        return ByteTokenizer()
    if name == "char":
        return CharTokenizer.of(text)
    if name == "gpt2":
        encoding()  # what is missing should be said before any text is fetched
        return Gpt2Tokenizer()
    if names_model(name):
        return own_tokenizer(name)
    raise unknown("tokenizer", name, TOKENIZERS)


def names_model(name: str) -> bool:
    """Whether a tokenizer is given by the model that it belongs to."""
    return "/" in name or name.endswith(".gguf")


def tokenizer_from_meta(meta: dict[str, Any]) -> Tokenizer:
    """Return the tokenizer that wrote a corpus; GPT-2's files are not read yet.

    Raises:
        TypeError: characters that are no text.
    """
    if meta["tokenizer"] == "char":
        if not isinstance(meta["characters"], str):
            raise TypeError(f"characters of {type(meta['characters']).__name__}; a text is needed")
        return CharTokenizer(meta["characters"])
    if meta["tokenizer"] == "gpt2":
        return Gpt2Tokenizer()
    if str(meta["tokenizer"]).startswith(PREFIX):
        return from_meta(meta)
    return make_tokenizer(meta["tokenizer"], "")
