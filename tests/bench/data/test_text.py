"""Texts as corpora.

Any UTF-8 file, nanoGPT's data by the name of its tokenizer, the library's prose.
"""

import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
from bench_runs import refusal

from nanogpt_bench.cli import main
from nanogpt_bench.data.batches import load_corpus
from nanogpt_bench.data.text import prepare_nanogpt, prepare_stdlib, prepare_text, stdlib_documents
from nanogpt_bench.data.tokenizers import make_tokenizer, tokenizer_from_meta
from nanogpt_bench.system.files import sha256


def test_char_scheme_splits_nine_to_one_and_keeps_line_ends(tmp_path, text_file):
    text = text_file.read_text().replace("\n", "\r\n")
    (tmp_path / "dos.txt").write_bytes(text.encode())
    meta = prepare_text(tmp_path / "dos.txt", tmp_path / "out", "char")
    train, val = (
        np.fromfile(tmp_path / "out" / f"{split}.bin", dtype=np.uint16)
        for split in ("train", "val")
    )
    assert meta["vocab_size"] == len(set(text))
    assert len(train) == int(0.9 * len(text))
    tokenizer = tokenizer_from_meta(meta)
    assert tokenizer.decode(train) + tokenizer.decode(val) == text


TEXT = "To be, or not to be: that is the question. Grüße.\n" * 90


class Trap:
    """A class that runs code where it is unpickled."""

    def __reduce__(self):
        return pytest.fail, ("meta.pkl was read",)


def folder_of(folder: Path, tokenizer: str) -> Path:
    """Files as nanoGPT's own scripts write them, and a meta.pkl that nobody may read."""
    folder.mkdir()
    tokens_of = make_tokenizer(tokenizer, TEXT)
    cut = int(len(TEXT) * 0.9)
    for name, text in (("train", TEXT[:cut]), ("val", TEXT[cut:])):
        tokens_of.encode(text).astype(np.uint16).tofile(folder / f"{name}.bin")
    (folder / "input.txt").write_text(TEXT)
    (folder / "meta.pkl").write_bytes(pickle.dumps(Trap()))
    return folder


@pytest.mark.parametrize("tokenizer", ["byte", "char", "gpt2"])
def test_the_tokens_are_taken_as_they_are(tmp_path, tokenizer, capsys):
    prepared, out = folder_of(tmp_path / "shakespeare", tokenizer), tmp_path / "out"
    assert (
        main(
            [
                "prepare",
                "nanogpt",
                "--input",
                str(prepared),
                "--tokenizer",
                tokenizer,
                "--out",
                str(out),
            ]
        )
        == 0
    )
    assert f"{tokenizer} tokenizer, vocabulary" in capsys.readouterr().out
    corpus = load_corpus(out, 16)
    tokenizer_again = tokenizer_from_meta(corpus.meta)
    for split, text in (("train", corpus.train), ("val", corpus.val)):
        assert (out / f"{split}.bin").read_bytes() == (prepared / f"{split}.bin").read_bytes(), (
            split
        )
        assert corpus.meta["splits"][split]["bytes"] == len(
            tokenizer_again.decode(text).encode()
        ), split
    assert tokenizer_again.decode(np.concatenate([corpus.train, corpus.val])) == TEXT
    digests = {split: sha256(prepared / f"{split}.bin") for split in ("train", "val")}
    source = {"kind": "nanogpt", "file": "shakespeare", "sha256": digests}
    assert corpus.meta["source"] == source


@pytest.mark.parametrize(
    ("damage", "tokenizer", "message"),
    [
        (
            lambda f: np.full(99, 257, np.uint16).tofile(f / "val.bin"),
            "byte",
            "token 257, but byte has 0 to 256",
        ),
        (
            lambda f: np.full(99, 50257, np.uint16).tofile(f / "val.bin"),
            "gpt2",
            "token 50257, but gpt2 has 0 to 50256",
        ),
        (
            lambda f: (f / "input.txt").unlink(),
            "char",
            r"meta.pkl is never unpickled\); put the text there",
        ),
        (
            lambda f: (f / "input.txt").write_text(TEXT[:-2] + "!\n"),
            "char",
            "do not hold the characters of its input.txt",
        ),
        (
            lambda f: (f / "train.bin").write_bytes(b"abc"),
            "byte",
            "has 3 bytes, but uint16 tokens take two each",
        ),
        (
            lambda f: (f / "train.bin").write_bytes(b""),
            "byte",
            "has 0 bytes, but uint16 tokens take two each",
        ),
        (lambda f: (f / "val.bin").unlink(), "byte", "val.bin' can't be read: No such file"),
        (lambda f: (f / "val.bin").write_bytes(b"a\0"), "byte", "its val split has 1 token"),
        (lambda f: None, "bpe-512", "byte, char, gpt2"),
    ],
)
def test_what_is_no_such_data_is_refused(tmp_path, damage, tokenizer, message):
    source = folder_of(tmp_path / "in", "char" if tokenizer == "char" else "byte")
    damage(source)
    with refusal(message):
        prepare_nanogpt(source, tmp_path / "out", tokenizer)
    assert not (tmp_path / "out").exists()


def test_the_tokenizer_is_named_and_where_to_name_it_is_said(tmp_path, capsys):
    source = folder_of(tmp_path / "in", "byte")
    assert main(["prepare", "nanogpt", "--input", str(source)]) == 2
    assert (
        "prepare nanogpt needs --tokenizer {byte,char,gpt2}, since its meta.pkl is never unpickled"
        in capsys.readouterr().err
    )
    line = r"gpt2, byte or char\): nanogpt-bench prepare nanogpt --input \S+/in --tokenizer gpt2 --out DIR$"
    with refusal(line):
        load_corpus(source, 16)


def fake_library(root: Path) -> Path:
    files = {
        "pydoc_data/topics.py": "topics = {'zip': 'last\\n', 'and': 'first'}\n",
        "json/__init__.py": '"""JSON, with an \\d escape."""\nimport nowhere\ndef f():\n    '
        '"""F.\n\n    More."""\n',
        "json/tests/__init__.py": '"""excluded"""\n',
        "site-packages/json.py": '"""excluded"""\n',
        "mine.py": '"""not of the standard library"""\n',
        "abc.py": "class A:\n    'a class'\n    async def g(self):\n        'a coroutine'\n",
        "copy.py": "x = 1\n",
        "ast.py": "def broken(:\n",
        "_sysconfigdata_linux.py": '"""differs"""\n',
    }
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_topics_then_docstrings_in_order_and_nothing_is_imported(tmp_path):
    with refusal("no sources of the standard library"):
        stdlib_documents(tmp_path)
    files = [
        "first\n",
        "last\n",
        "a class\n\na coroutine\n",
        "JSON, with an \\d escape.\n\nF.\n\nMore.\n",
    ]
    assert stdlib_documents(fake_library(tmp_path)) == files
    assert "nowhere" not in sys.modules


def test_the_real_library_gives_over_a_million_bytes_of_prose(tmp_path):
    meta = prepare_stdlib(tmp_path / "a")
    assert meta["splits"]["train"]["bytes"] > 1_000_000
    assert meta["splits"]["val"]["bytes"] > 50_000
    assert meta["source"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert len(meta["source"]["sha256"]) == 64
