"""`prepare` replaces a corpus of the same text.

Another one it replaces only on request.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from damages import contents

from nanogpt_bench.cli import main
from nanogpt_bench.data.text import prepare_text
from nanogpt_bench.data.tokenizers import ByteTokenizer
from nanogpt_bench.data.write import write_corpus

LINES = "".join(f"{number} lazy dogs.\n" for number in range(200))


@pytest.fixture
def two(working_folder):
    """The current folder, with texts and data of nanoGPT that share their names."""
    for folder, word in (("a", "dogs"), ("b", "cats")):
        text = LINES.replace("dogs", word)
        (working_folder / folder / "book").mkdir(parents=True)
        (working_folder / folder / "book.txt").write_text(text)
        tokens = np.frombuffer(text.encode(), dtype=np.uint8).astype("<u2")
        for split in ("train", "val"):
            tokens.tofile(working_folder / folder / "book" / f"{split}.bin")
    return working_folder


#: words of `prepare` for one text, and for another one that goes to the same folder
PAIRS = {
    "text": ("text --input a/book.txt", "text --input b/book.txt"),
    "nanogpt": (
        "nanogpt --tokenizer byte --input a/book",
        "nanogpt --tokenizer byte --input b/book",
    ),
    "out": ("text --input a/book.txt --out x", "nanogpt --tokenizer byte --input a/book --out x"),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_a_corpus_of_another_text_stays(pair, two, refused):
    first, second = (["prepare", *words.split()] for words in PAIRS[pair])
    assert main(first) == 0
    old_contents = contents(two)
    message = refused(*second)
    assert "holds another text ('book" in message
    assert "give another --out, or --replace to replace it" in message
    assert contents(two) == old_contents
    assert main([*second, "--replace"]) == 0
    assert contents(two) != old_contents


@pytest.mark.parametrize(
    "options", ["", "--tokenizer char", "--limit-tokens 1000"], ids=["same", "tokenizer", "limit"]
)
def test_the_same_text_is_prepared_again(options, two):
    command = ["prepare", *PAIRS["text"][0].split()]
    assert main(command) == 0
    assert main([*command, *options.split()]) == 0
    assert main(command) == 0


def test_the_standard_librarys_folder_is_kept(two, refused):
    splits = {"train": ["a" * 99], "val": ["b" * 99]}
    source = {"kind": "stdlib", "sha256": "of another Python"}
    write_corpus(Path("data/stdlib"), splits, ByteTokenizer(), source, progress=False)
    old_contents = contents(two)
    refused("prepare", "text", "--input", "a/book.txt", "--out", "data/stdlib")
    assert contents(two) == old_contents


def test_a_file_called_stdlib_does_not_become_the_default_corpus(two, refused):
    Path("stdlib.txt").write_text(LINES)
    assert "the folder of prepare stdlib" in refused("prepare", "text", "--input", "stdlib.txt")
    assert not Path("data").exists()


def test_packages_are_not_downloaded_for_a_folder_of_another_text(two, refused, monkeypatch):
    prepare_text(Path("a/book.txt"), Path("data/packages"))
    monkeypatch.setattr(
        "nanogpt_bench.data.packages._download", lambda *_: pytest.fail("downloaded")
    )
    assert "holds another text ('book.txt', not 'packages')" in refused("prepare", "packages")


@pytest.mark.parametrize("source", [None, "a text", {}], ids=["none", "text", "empty"])
def test_a_corpus_of_an_unknown_source_stays(source, two, refused):
    prepare_text(Path("a/book.txt"), Path("x"))
    meta = json.loads(Path("x/meta.json").read_text())
    Path("x/meta.json").write_text(json.dumps({**meta, "source": source}))
    refused("prepare", "text", "--input", "a/book.txt", "--out", "x")
