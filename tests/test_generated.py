"""The tables and figures on the pages are fresh.

They show all that the benchmarks wrote.
"""

import datetime
import json
import re
import sys
from importlib import import_module
from itertools import chain
from pathlib import Path

import ml_dtypes
import pytest

from nanogpt_bench.failures import KINDS

ROOT = Path(__file__).parent.parent
#: pages draw their figures with it, and are made to compare their tables
DRAWN = pytest.mark.extra("matplotlib")


@pytest.fixture(autouse=True)
def _on_path(monkeypatch):
    for folder in ("docs", "study", "benchmarks"):
        monkeypatch.syspath_prepend(ROOT / folder)


def pages_of(folder):
    return import_module("_generated").DOCS if folder == "docs" else import_module("make").STUDY


@DRAWN
@pytest.mark.parametrize("folder", ["docs", "study"])
def test_every_table_and_figure_is_fresh(folder):
    pages = pages_of(folder)
    assert pages.report(pages.stale()) == ""


@DRAWN
def test_what_is_stale_is_named_with_the_command(monkeypatch):
    """A table edited by hand, and results that changed after they were drawn."""
    docs = pages_of("docs")
    shown, record = docs.pieces_on_pages(), docs.read_record()
    monkeypatch.setattr(
        docs, "pieces_on_pages", lambda: shown | {"formats.md": f"{shown['formats.md']}\n| E9M9 |"}
    )
    assert set(docs.stale()) == {"formats.md"}
    line = docs.report(docs.stale())
    assert line.endswith("`python docs/_generated.py --write` makes them again")
    monkeypatch.setattr(docs, "pieces_on_pages", lambda: shown)
    monkeypatch.setattr(
        docs, "read_record", lambda: record | {"finetune": record["finetune"] | {"made_from": ""}}
    )
    assert set(docs.stale()) == record["finetune"]["pieces"].keys()


@DRAWN
@pytest.mark.slow
@pytest.mark.parametrize(
    ("folder", "name"),
    [("study", "results"), ("study", "study"), ("docs", "finetune"), ("docs", "geometry")],
)
def test_what_is_made_again_is_what_stands_there(folder, name):
    """Tables are compared whole, figures only by what is drawn.

    A figure's bytes are those of a release of matplotlib.
    """
    pages = pages_of(folder)
    again, shown = (
        import_module("_generated").make_pieces([pages.makers[name]]),
        pages.pieces_on_pages(),
    )
    of_maker = pages.read_record()[name]["pieces"]
    assert of_maker.keys() <= again.keys()
    for piece in of_maker:
        if piece.endswith(".md"):
            assert again[piece] == shown[piece], piece
        else:
            assert again[piece].startswith(("<?xml", "<svg")), piece


@pytest.mark.parametrize(
    "path", sorted((ROOT / "docs" / "measured").glob("*.json")), ids=lambda path: path.stem
)
def test_files_say_what_was_measured_where_when_and_against_what_and_stand_on_a_page(path):
    paths = chain((ROOT / "docs").glob("*.md"), (ROOT / "study").glob("*.md"))
    pages = [page.read_text(encoding="utf-8") for page in paths]
    facts = json.loads(path.read_text(encoding="utf-8"))
    assert facts.keys() == {"command", "date", "machine", "versions", "peer", "columns", "rows"}
    script = Path(facts["command"].split()[1])
    assert script.stem == path.stem or facts["command"].endswith(f"--part {path.stem}")
    assert (ROOT / script).exists()
    assert datetime.date.fromisoformat(facts["date"]) <= datetime.date.today()
    assert re.fullmatch(r"\d+-core (x86|Arm|\w+) CPU|NVIDIA [\w ]+", facts["machine"])
    assert {"Python", "torch"} <= facts["versions"].keys()
    assert {len(row) for row in facts["rows"]} == {len(facts["columns"])}
    for cell in chain.from_iterable(facts["rows"]):
        if isinstance(cell, list):
            median, *ends = cell
            assert not ends or ends[0] <= median <= ends[1]
    assert sum(page.count(f"<!-- table: measured-{path.stem} -->\n") for page in pages) == 1
    shown = import_module("_measured").recorded_table(facts)
    assert all(facts[name] in shown for name in ("command", "date", "machine"))


def test_what_a_benchmark_records_is_what_the_page_reads(monkeypatch, tmp_path):
    recorder = import_module("_record")
    monkeypatch.setattr(recorder, "MEASURED_FOLDER", tmp_path)
    script = ROOT / "benchmarks" / "round_to_grid.py"
    monkeypatch.setattr(sys, "argv", [str(script), "--record"])
    rows = [("E4M3", (1.23456, 1.0, 2.0), ""), ("E5M2", (1.5,), None), ("E3M4", 7, 2.5)]
    packages = ("ml_dtypes", "no-such-package")
    path = recorder.record("`torch.clone`", ("function", "ratio", "goal"), rows, packages=packages)
    facts = json.loads(path.read_text(encoding="utf-8"))
    assert (path.name, facts["command"]) == (
        "round_to_grid.json",
        "python benchmarks/round_to_grid.py --record",
    )
    assert list(facts["versions"]) == ["Python", "torch", "ml_dtypes"]
    assert facts["versions"]["ml_dtypes"] == ml_dtypes.__version__
    assert facts["rows"] == [
        ["E4M3", [1.23, 1.0, 2.0], ""],
        ["E5M2", [1.5], None],
        ["E3M4", 7, 2.5],
    ]
    lines = import_module("_measured").recorded_table(facts).splitlines()
    assert lines[:2] == ["| function | ratio | goal |", "| --- | ---: | --- |"]
    assert lines[2].split() == ["|", "E4M3", "|", "1.23x", "(1.00", "..", "2.00)", "|", "|"]
    assert lines[3:5] == ["| E5M2 | 1.50x |  |", "| E3M4 | 7 | 2.5 |"]
    assert facts["date"] in lines[6]


def test_every_class_of_failure_is_explained():
    page = (ROOT / "docs" / "bench-reference.md").read_text(encoding="utf-8")
    advice = page.partition("\n### Failures\n")[2].partition("\n### ")[0]
    assert re.findall(r"^\| `(\w+)` \|", advice, re.MULTILINE) == list(KINDS)
