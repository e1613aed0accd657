"""Data sets in the hub's layout, from a local copy.

Labelled documents written, opened again, and drawn.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from bench_runs import refusal
from hubs import write_parquet

from nanogpt_bench.cli import main
from nanogpt_bench.data.batches import documents_of, draw_documents, held_out_batches, load_corpus
from nanogpt_bench.data.dataset import prepare_eurlex, prepare_hub
from nanogpt_bench.data.text import prepare_text
from nanogpt_bench.data.tokenizers import ByteTokenizer, tokenizer_from_meta
from nanogpt_bench.loop.train import run
from nanogpt_bench.model.gpt import PADDING
from nanogpt_bench.system.files import sha256

pytestmark = pytest.mark.extra("datasets")

SAMPLE = Path(__file__).parents[3] / "../shared/data/eurlex_sample"
TRAIN = [
    f"Article {number}: the Member States shall notify measure {number * 37} to Brussels."
    for number in range(40)
]
VAL = [f"Annex {number}: done at Strasbourg, {number % 28 + 1} May." for number in range(12)]


@pytest.fixture
def copy(tmp_path):
    """A copy of a data set: two files for training, one for validation, one for tests."""
    folder = tmp_path / "copy"
    parts = {
        "train-00000-of-00002": TRAIN[:25],
        "train-00001-of-00002": TRAIN[25:],
        "validation-00000-of-00001": VAL,
    }
    for name, texts in {**parts, "test-00000-of-00001": ["never read"]}.items():
        write_parquet(folder / "eurlex" / f"{name}.parquet", texts)
    return folder


def damage_the_middle(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[4:200] = bytes(196)
    path.write_bytes(data)


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
        assert text_of(tmp_path / "out", split) == "".join(text + end for text in texts), split
    train = meta["splits"]["train"]
    assert (train["documents"], train["bytes"]) == (len(TRAIN), sum(map(len, TRAIN)))
    if tokenizer == "char":  # of both splits
        assert meta["characters"] == "".join(sorted({*"".join(TRAIN), *"".join(VAL)}))
    files = {
        path.name: sha256(path) for path in (copy / "eurlex").iterdir() if "test" not in path.name
    }
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
        (str, {"data_dir": Path("gone")}, ["--data-dir", "gone", "not a folder"]),
        (lambda path: path.rename(path.with_name("tests-0.parquet")), {}, ["has no split 'train'"]),
        (lambda path: path.write_bytes(b"not parquet"), {}, ["can't be read", "arquet"]),
        (lambda path: path.write_bytes(path.read_bytes()[:-100]), {}, ["can't be read"]),
        (damage_the_middle, {}, ["data set 'some/set' can't be read"]),
        (lambda path: write_parquet(path, ["short"]), {}, ["train split has 6 tokens"]),
        (str, {"limit": 649}, ["--limit-tokens 649", "650 or more"]),
    ],
)
def test_bad_copies_are_named_and_nothing_is_written(tmp_path, change, options, parts):
    write_parquet(tmp_path / "copy" / "train-0.parquet", [*TRAIN])
    write_parquet(tmp_path / "copy" / "validation-0.parquet", [*VAL])
    change(tmp_path / "copy" / "train-0.parquet")
    arguments = {"column": "text", "data_dir": tmp_path / "copy", **options}
    with refusal() as caught:
        prepare_hub(tmp_path / "out", "some/set", **arguments)
    assert [part for part in parts if part not in str(caught.value)] == []
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]


@pytest.mark.parametrize("tokenizer", ["byte", "gpt2"])
@pytest.mark.parametrize("place", ["sample", "own"])
def test_a_model_learns_from_eu_law(tmp_path, copy, tiny, tokenizer, place):
    """The command and a run on what it wrote, as a user takes them.

    The data set's real layout is one case.
    """
    if place == "sample" and not SAMPLE.is_dir():
        pytest.skip("the sample of EU legislation is not there")
    folder, out = SAMPLE if place == "sample" else copy, tmp_path / "corpus"
    assert (
        main(
            [
                "prepare",
                "eurlex",
                "--data-dir",
                str(folder),
                "--tokenizer",
                tokenizer,
                "--out",
                str(out),
            ]
        )
        == 0
    )
    corpus = load_corpus(out, 16)
    if place == "sample":
        assert (
            corpus.meta["splits"]["train"]["tokens"] == {"byte": 446_512, "gpt2": 83_201}[tokenizer]
        )
        assert "Regulation" in text_of(out, "train")[:10_000]
    config = tiny(data__dir=out, train__max_steps=12, eval__interval=12, optimizer__lr=1e-2)
    summary = run(config, tmp_path / "run")
    assert summary["status"] == "finished"
    assert summary["final_val_loss"] < np.log(corpus.vocab_size) - 0.3
    facts = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert facts["corpus"]["source"]["dataset"] == "coastalcph/lex_glue"


TEXTS = [f"Council decision {number} on fisheries and trade." for number in range(20)]
LABELS = [sorted({number % 3, number % 5}) for number in range(20)]


def write_copy(
    folder: Path, texts: list[str], labels: list[object], names: list[str] | None = None
) -> Path:
    """A data set in the hub's layout.

    Its labels are named as the hub keeps names where it has some.
    """
    import datasets

    (folder / "eurlex").mkdir(parents=True)
    label = datasets.ClassLabel(names=names) if names else datasets.Value("int64")
    features = datasets.Features(
        {"text": datasets.Value("string"), "labels": datasets.Sequence(label)}
    )
    for split, rows in (("train", slice(0, 15)), ("validation", slice(15, None))):
        content = {"text": texts[rows], "labels": labels[rows]}
        table = datasets.Dataset.from_dict(content, features)
        table.to_parquet(folder / "eurlex" / f"{split}-00000-of-00001.parquet")
    return folder


@pytest.fixture
def prepared(tmp_path):
    labelled = write_copy(tmp_path / "copy", TEXTS, [*LABELS])
    prepare_eurlex(tmp_path / "out", data_dir=labelled, task="labels")
    return tmp_path / "out"


def test_labels_have_the_names_of_the_data_set_and_an_empty_text_is_left_out(tmp_path):
    names = [f"concept {number}" for number in range(7)]
    folder = write_copy(tmp_path / "copy", ["", *TEXTS[1:]], [*LABELS], names)
    assert prepare_eurlex(tmp_path / "out", data_dir=folder, task="labels")["labels"] == names
    corpus = load_corpus(tmp_path / "out", 16)
    assert documents_of(corpus, "val").labels.shape == (5, 7)
    documents = documents_of(corpus, "train")
    ends = zip(documents.starts, documents.ends, strict=True)
    assert [ByteTokenizer().decode(documents.tokens[start:end]) for start, end in ends] == TEXTS[
        1:15
    ]
    assert [np.flatnonzero(row).tolist() for row in documents.labels] == LABELS[1:15]


@pytest.mark.parametrize(
    ("labels", "reason"),
    [
        (None, "unknown column of data set .* 'labels'; allowed: text"),
        ([3] * 20, "column 'labels' of .* holds int, not lists of whole numbers"),
        ([["a"]] * 20, "holds 'a'; whole numbers from 0 to 65535 are allowed"),
        ([[-1]] * 20, "holds -1; whole numbers"),
        ([[0], [70000]] * 10, "holds 70000; whole numbers"),
        ([[1.5]] * 20, "holds 1.5; whole numbers"),
        ([None] * 20, "holds NoneType, not lists"),
        ([[None]] * 20, "holds None; whole numbers"),
        ([[]] * 20, "no document has a label"),
    ],
)
def test_labels_that_are_none_are_named(tmp_path, labels, reason):
    import pyarrow
    import pyarrow.parquet

    (tmp_path / "copy" / "eurlex").mkdir(parents=True)
    columns = {"text": TEXTS} | ({} if labels is None else {"labels": labels})
    for split in ("train", "validation"):
        pyarrow.parquet.write_table(
            pyarrow.table(columns), tmp_path / "copy" / "eurlex" / f"{split}.parquet"
        )
    with refusal(reason):
        prepare_eurlex(tmp_path / "out", data_dir=tmp_path / "copy", task="labels")
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]


def test_the_command_says_how_many_labels_there_are(working_folder, capsys):
    write_copy(working_folder / "copy", TEXTS, [*LABELS])
    assert main(["prepare", "eurlex", "--task", "labels", "--data-dir", "copy"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("data/eurlex-labels: ")
    assert "; 5 labels, 15 documents for training, 5 for validation" in printed
    Path("a.txt").write_text("one two three\n" * 100)
    # a text over it leaves none of its files
    prepare_text(Path("a.txt"), working_folder / "data" / "eurlex-labels", replace=True)
    names = {path.name for path in (working_folder / "data" / "eurlex-labels").iterdir()}
    assert names == {"meta.json", "train.bin", "val.bin"}


@pytest.mark.parametrize("block", [16, None, 64], ids=["16", "a document's length", "64"])
def test_rows_are_first_tokens_with_padding_behind(prepared, block):
    documents = documents_of(load_corpus(prepared, 16), "train")
    block = block or int(documents.ends[0])
    tokens, labels = documents.rows(np.array([0, 3]), block)
    assert tokens.shape == (2, block)
    whole = documents.tokens[documents.starts[3] : documents.ends[3]].astype(np.int64)
    token_count = min(block, len(whole))
    assert tokens[1, :token_count].tolist() == whole[:token_count].tolist()
    assert (tokens[1, token_count:] == PADDING).all()
    assert documents.lengths(np.array([3]), block).tolist() == [token_count]
    assert torch.equal(labels[1], torch.from_numpy(documents.labels[3]).float())


@pytest.mark.parametrize("change", [{"seed": 2}, {"step": 6}, {"micro_step": 3}], ids=str)
def test_drawing_depends_on_seed_step_and_micro_step_only(prepared, change):
    documents = documents_of(load_corpus(prepared, 16), "train")
    draw = draw_documents(documents, 8, seed=1, step=5, micro_step=2)
    assert np.array_equal(draw, draw_documents(documents, 8, seed=1, step=5, micro_step=2))
    assert not np.array_equal(
        draw, draw_documents(documents, 8, **{"seed": 1, "step": 5, "micro_step": 2, **change})
    )


def test_held_out_batches_have_every_document_once(prepared):
    documents = documents_of(load_corpus(prepared, 16), "train")
    batches = held_out_batches(documents, 4, 4, seed=7)
    assert [len(part) for part in batches] == [4, 4, 4, 3]
    assert sorted(np.concatenate(batches)) == list(range(15))
    assert [len(part) for part in held_out_batches(documents, 2, 4, seed=7)] == [4, 4]
