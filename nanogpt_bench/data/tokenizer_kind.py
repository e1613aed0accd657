"""The kinds of tokenizers, and the names by which a user or a meta.json calls one.

    kind                given as        in meta.json
    BYTE, CHAR, GPT2    its own word    the same
    BYTE_PAIRS          bpe-N           the same
    MODEL               a model         model-DIGEST

This module imports no NumPy, so that commands refuse a name at once.
"""

from enum import StrEnum
from pathlib import Path

#: beginning of the names of learned byte pairs
PAIRS = "bpe-"
#: beginning of the names of a model's tokens
MODEL = "model-"


class TokenizerKind(StrEnum):
    """A kind of tokenizer; the value is what a user gives for it."""

    #: UTF-8 bytes
    BYTE = "byte"
    #: the characters of the text
    CHAR = "char"
    #: GPT-2's byte pairs
    GPT2 = "gpt2"
    #: byte pairs learned from the text
    BYTE_PAIRS = "bpe-N"
    #: those of a model
    MODEL = "MODEL"


#: the choices of `prepare --tokenizer` beside a model
TOKENIZERS = tuple(kind.value for kind in TokenizerKind if kind != TokenizerKind.MODEL)
#: kinds whose name is a word of its own
_BY_WORD = (TokenizerKind.BYTE, TokenizerKind.CHAR, TokenizerKind.GPT2)
#: kinds that number the tokens of each text on its own
OF_ONE_TEXT = (TokenizerKind.CHAR, TokenizerKind.BYTE_PAIRS)


def chosen_kind(name: str) -> TokenizerKind | None:
    """Return the kind of tokenizer that a user gives by a name, or None if it is unknown.

    A name with a slash, or that of a folder or a .gguf file, means the tokenizer of the
    model of that name.

    >>> chosen_kind("bpe-4096"), chosen_kind("bite")
    (<TokenizerKind.BYTE_PAIRS: 'bpe-N'>, None)
    """
    if name in _BY_WORD:
        return TokenizerKind(name)
    if name.startswith(PAIRS):
        return TokenizerKind.BYTE_PAIRS
    if "/" in name or name.endswith(".gguf") or Path(name).is_dir():
        return TokenizerKind.MODEL
    return None


def stored_kind(name: str) -> TokenizerKind | None:
    """Return the kind of tokenizer that a meta.json names, or None if it is unknown.

    >>> stored_kind("model-1f0a2b3c4d5e"), stored_kind("models/smollm2")
    (<TokenizerKind.MODEL: 'MODEL'>, None)
    """
    if name in _BY_WORD:
        return TokenizerKind(name)
    if name.startswith(PAIRS):
        return TokenizerKind.BYTE_PAIRS
    return TokenizerKind.MODEL if name.startswith(MODEL) else None
