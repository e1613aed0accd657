"""The tables and figures on the pages are fresh."""

from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
#: pages draw their figures with it, and are made to compare their tables
pytestmark = pytest.mark.extra("matplotlib")
FOLDERS = (ROOT / "docs", ROOT / "study")


@pytest.fixture
def generated(monkeypatch):
    for folder in FOLDERS:
        monkeypatch.syspath_prepend(folder)
    return import_module("_generated")


@pytest.fixture
def docs(generated):
    return generated.DOCS


@pytest.fixture
def study(generated):
    return import_module("make").STUDY


@pytest.mark.parametrize("folder", ["docs", "study"])
def test_every_table_and_figure_is_fresh(folder, request):
    pages = request.getfixturevalue(folder)
    assert list(pages.report(pages.stale())) == []


def test_what_is_stale_is_named_with_the_command(docs, study, monkeypatch):
    """A table edited by hand, a figure that is gone, and results that changed after they were drawn."""
    there, record = docs.shown(), docs.recorded()
    monkeypatch.setattr(docs, "shown", lambda: there | {"formats.md": f"{there['formats.md']}\n| E9M9 |"})
    assert set(docs.stale()) == {"formats.md"}
    (line,) = docs.report(docs.stale())
    assert line.endswith("`python docs/_generated.py --write` makes them again")
    monkeypatch.setattr(docs, "shown", lambda: there)
    monkeypatch.setattr(docs, "recorded", lambda: record | {"finetune": record["finetune"] | {"made_from": ""}})
    assert set(docs.stale()) == record["finetune"]["pieces"].keys()
    of_study = study.shown() | {"study_q3.svg": None}
    monkeypatch.setattr(study, "shown", lambda: of_study)
    (line,) = study.report(study.stale())
    assert line.endswith("`python study/make.py` makes them again")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("folder", "name"), [("study", "results"), ("study", "study"), ("docs", "finetune"), ("docs", "geometry")]
)
def test_what_is_made_again_is_what_stands_there(generated, folder, name, request):
    """Tables whole; of figures, whose bytes are those of a release of matplotlib, that they are drawn."""
    pages = request.getfixturevalue(folder)
    again, there = generated.made([pages.makers[name]]), pages.shown()
    of_maker = pages.recorded()[name]["pieces"]
    assert of_maker.keys() <= again.keys()
    for piece in of_maker:
        if piece.endswith(".md"):
            assert again[piece] == there[piece], piece
        else:
            assert again[piece].startswith(("<?xml", "<svg")), piece
