"""The tokenizer that a pretrained model came with, as transformers reads it from the model's folder or .gguf file."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nanogpt_bench.model.causal import find_model, reading
from nanogpt_bench.system.errors import BenchError

PREFIX = "model-"


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
        raise BenchError(
            f"{corpus!r} was written by the tokenizer {tokenizer!r}, which is not that of model {model!r}; prepare the "
            f"text with --tokenizer {model}"
        )
    if largest >= rows:
        raise BenchError(f"model {model!r} has {rows} token embeddings, its tokenizer makes {largest} of {corpus!r}")


@functools.lru_cache(maxsize=4)
def _made(model: str) -> Any:
    where = find_model(model)
    with reading(model) as transformers:
        made = transformers.AutoTokenizer.from_pretrained(**where, trust_remote_code=False)
    if not len(made.get_vocab()):
        raise BenchError(f"model {model!r} came without a tokenizer; save_pretrained writes one beside the weights")
    return made
