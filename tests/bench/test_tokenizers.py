"""Byte and char tokenizers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanogpt_bench.errors import BenchError
from nanogpt_bench.tokenizers import ByteTokenizer, CharTokenizer, make_tokenizer, tokenizer_from_meta

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=200)


@given(texts)
def test_byte_round_trip(text: str) -> None:
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode(text)
    assert tokens.dtype == np.uint16
    assert tokens.tolist() == list(text.encode())
    assert tokenizer.decode(tokens) == text


@given(texts.filter(bool))
def test_char_round_trip_and_vocabulary(text: str) -> None:
    tokenizer = CharTokenizer.of(text)
    assert tokenizer.characters == "".join(sorted(set(text)))
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode(text).max() < tokenizer.vocab_size


def test_end_of_text_is_beyond_every_byte_and_decodes_to_nothing() -> None:
    tokenizer = ByteTokenizer()
    assert (tokenizer.end_of_text, tokenizer.vocab_size) == (256, 257)
    assert tokenizer.decode([104, 256, 105]) == "hi"


def test_an_unknown_character_is_refused() -> None:
    with pytest.raises(BenchError, match="'z'"):
        CharTokenizer.of("abc").encode("az")


@pytest.mark.parametrize("name", ["byte", "char"])
def test_meta_rebuilds_the_tokenizer(name: str) -> None:
    tokenizer = make_tokenizer(name, "hello")
    assert tokenizer_from_meta(tokenizer.meta()) == tokenizer


def test_an_unknown_tokenizer_is_named_with_what_there_is() -> None:
    with pytest.raises(BenchError, match=r"unknown tokenizer 'bite'; did you mean 'byte'\? allowed: byte, char"):
        make_tokenizer("bite", "")
