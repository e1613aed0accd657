"""Arguments that are no UTF-8: names of files are taken, other texts refused in a line."""

import os
from pathlib import Path

import pytest

from nanogpt_bench import cli
from nanogpt_bench.cli import main
from nanogpt_bench.data.batches import load_corpus

#: as Python has the argument of a shell in Latin-1
LATIN = os.fsdecode(b"caf\xe9")

WORDS = {
    "prompt": ["sample", "RUN", "--prompt", LATIN],
    "command": [LATIN],
    "option": ["run", "fp32", f"--{LATIN}", "3"],
    "setting": ["run", "fp32", "--optimizer.lr", LATIN],
    "pattern": ["run", "fp32", f"--model.formats.{LATIN}", "E4M3"],
    "config": ["run", LATIN],
    "folder": ["run", "fp32", "--data.dir", LATIN],
    "formats": ["compare", "--formats", LATIN],
    "tokenizer": ["prepare", "stdlib", "--tokenizer", LATIN],
}


@pytest.mark.parametrize("words", WORDS)
def test_a_text_that_is_no_utf_8_is_refused_in_one_line(words, working_folder, trained, refused):
    message = refused(*(str(trained["float"]) if word == "RUN" else word for word in WORDS[words]))
    assert r"caf\udce9" in message


@pytest.mark.parametrize("tokenizer", ["byte", "char"])
def test_a_file_of_such_a_name_is_prepared(tokenizer, working_folder):
    Path(f"{LATIN}.txt").write_text("a fox and a dog\n" * 200)
    assert main(["prepare", "text", "--input", f"{LATIN}.txt", "--tokenizer", tokenizer]) == 0
    corpus = load_corpus(Path("data") / LATIN, 16)
    assert corpus.meta["source"]["file"] == f"{LATIN}.txt"
    assert main(["prepare", "text", "--input", f"{LATIN}.txt", "--tokenizer", tokenizer]) == 0


def test_what_can_not_be_encoded_anywhere_is_one_line(refused, monkeypatch):
    monkeypatch.setattr(cli, "_dispatch", lambda _: LATIN.encode())
    assert r"'caf\udce9' is not UTF-8" in refused("verify", "x")
