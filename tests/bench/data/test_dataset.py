"""Data sets: a local copy in the hub's layout, read by the library that reads the hub."""

import json
from pathlib import Path

import numpy as np
import pytest
from bench_runs import refusal
from hubs import write_parquet

from nanogpt_bench.cli import main
from nanogpt_bench.data.batches import load_corpus
from nanogpt_bench.data.dataset import prepare_eurlex, prepare_hub
from nanogpt_bench.data.tokenizers import tokenizer_from_meta
from nanogpt_bench.loop.train import run
from nanogpt_bench.system.files import sha256

pytestmark = pytest.mark.extra("datasets")

SAMPLE = Path(__file__).parents[3] / "../shared/data/eurlex_sample"
TRAIN = [f"Article {number}: the Member States shall notify measure {number * 37} to Brussels." for number in range(40)]
VAL = [f"Annex {number}: done at Strasbourg, {number % 28 + 1} May." for number in range(12)]


@pytest.fixture
def copy(tmp_path):
    """A copy of a data set: two files for training, one for validation, one for tests."""
    folder = tmp_path / "copy"
    write_parquet(folder / "eurlex" / "train-00000-of-00002.parquet", [*TRAIN[:25]])
    write_parquet(folder / "eurlex" / "train-00001-of-00002.parquet", [*TRAIN[25:]])
    write_parquet(folder / "eurlex" / "validation-00000-of-00001.parquet", [*VAL])
    write_parquet(folder / "eurlex" / "test-00000-of-00001.parquet", ["never read"])
    return folder


def damage_the_middle(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[4:200] = bytes(196)
    path.write_bytes(data)


def too_little(path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"text": ["short"], "labels": [[0]]}), path)


def text_of(folder: Path, split: str) -> str:
    """The text of a prepared split, its ends of text shown as |."""
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    tokenizer = tokenizer_from_meta(meta)
    tokens = np.fromfile(folder / f"{split}.bin", dtype="<u2")
    ends = np.flatnonzero(tokens == tokenizer.end_of_text)
    parts = np.split(tokens, ends + 1)
    return "|".join(tokenizer.decode(part[part != tokenizer.end_of_text]) for part in parts)


@pytest.mark.parametrize("tokenizer", ["byte", "gpt2", "char"])
def test_every_document_is_written_once_and_its_source_named(tmp_path, copy, tokenizer):
    meta = prepare_eurlex(tmp_path / "out", tokenizer, data_dir=copy)
    end = "" if tokenizer == "char" else "|"  # which has no end of text
    for split, texts in (("train", TRAIN), ("val", VAL)):
        assert text_of(tmp_path / "out", split) == "".join(text + end for text in texts)
    train = meta["splits"]["train"]
    assert (train["documents"], train["bytes"]) == (len(TRAIN), sum(map(len, TRAIN)))
    if tokenizer == "char":  # of both splits
        assert meta["characters"] == "".join(sorted({*"".join(TRAIN), *"".join(VAL)}))
    files = {path.name: sha256(path) for path in (copy / "eurlex").iterdir() if "test" not in path.name}
    named = {"dataset": "coastalcph/lex_glue", "config": "eurlex", "column": "text"}
    assert meta["source"] == {"kind": "copy", **named, "files": files, "limit_tokens": None}


def test_without_a_validation_split_every_tenth_document_is_for_it(tmp_path):
    write_parquet(tmp_path / "copy" / "train.parquet", [*TRAIN])
    meta = prepare_hub(tmp_path / "out", "some/set", "text", data_dir=tmp_path / "copy")
    assert text_of(tmp_path / "out", "val") == "".join(f"{text}|" for text in TRAIN[9::10])
    assert [meta["splits"][split]["documents"] for split in ("train", "val")] == [36, 4]


def test_a_limit_ends_the_stream(tmp_path, copy):
    damage_the_middle(copy / "eurlex" / "train-00001-of-00002.parquet")  # never reached
    meta = prepare_eurlex(tmp_path / "out", data_dir=copy, limit=1000)
    assert [meta["splits"][split]["tokens"] for split in ("train", "val")] == [1000, 100]
    assert text_of(tmp_path / "out", "train") == "".join(f"{text}|" for text in TRAIN)[:1000]
    assert meta["splits"]["train"]["bytes"] == 1000 - text_of(tmp_path / "out", "train").count("|")


@pytest.mark.parametrize(
    ("change", "options", "parts"),
    [
        (str, {"column": "txt"}, ["unknown column", "'txt'", "did you mean 'text'", "labels"]),
        (str, {"column": "labels"}, ["'labels'", "list, not text"]),
        (str, {"data_dir": "gone"}, ["--data-dir", "gone", "not a folder"]),
        (lambda path: path.rename(path.with_name("tests-0.parquet")), {}, ["has no split 'train'"]),
        (lambda path: path.write_bytes(b"not parquet"), {}, ["can't be read", "arquet"]),
        (lambda path: path.write_bytes(path.read_bytes()[:-100]), {}, ["can't be read"]),
        (damage_the_middle, {}, ["data set 'some/set' can't be read"]),
        (too_little, {}, ["train split has 6 tokens"]),
        (str, {"limit": 649}, ["--limit-tokens 649", "650 or more"]),
    ],
)
def test_bad_copies_are_named_and_nothing_is_written(tmp_path, change, options, parts):
    write_parquet(tmp_path / "copy" / "train-0.parquet", [*TRAIN])
    write_parquet(tmp_path / "copy" / "validation-0.parquet", [*VAL])
    change(tmp_path / "copy" / "train-0.parquet")
    arguments = {"column": "text", "data_dir": tmp_path / "copy", **options}
    arguments["data_dir"] = Path(str(arguments["data_dir"]))
    with refusal() as caught:
        prepare_hub(tmp_path / "out", "some/set", **arguments)
    assert [part for part in parts if part not in str(caught.value)] == []
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]


@pytest.mark.parametrize("tokenizer", ["byte", "gpt2"])
@pytest.mark.parametrize("place", ["sample", "own"])
def test_a_model_learns_from_eu_law(tmp_path, copy, tiny, tokenizer, place):
    """The path a user takes: the command, then a run on what it wrote; of the data set's real layout too."""
    if place == "sample" and not SAMPLE.is_dir():
        pytest.skip("the sample of EU legislation is not there")
    folder, out = SAMPLE if place == "sample" else copy, tmp_path / "corpus"
    assert main(["prepare", "eurlex", "--data-dir", str(folder), "--tokenizer", tokenizer, "--out", str(out)]) == 0
    corpus = load_corpus(out, 16)
    if place == "sample":
        assert corpus.meta["splits"]["train"]["tokens"] == {"byte": 446_512, "gpt2": 83_201}[tokenizer]
        assert "Regulation" in text_of(out, "train")[:10_000]
    config = tiny(data__dir=out, train__max_steps=12, eval__interval=12, optimizer__lr=1e-2)
    summary = run(config, tmp_path / "run")
    assert summary["status"] == "finished"
    assert summary["final_val_loss"] < np.log(corpus.vocab_size) - 0.3
    facts = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert facts["corpus"]["source"]["dataset"] == "coastalcph/lex_glue"
