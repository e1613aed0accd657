"""What the library and the results files say stands on the pages, in the repository as on the site, and is fresh."""

import re
import subprocess
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = (ROOT / "docs", ROOT / "study")
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *(page for end in ("md", "rst") for of in FOLDERS for page in sorted(of.rglob(f"*.{end}"))),
]
#: folders that the site's build writes: never committed
BUILT = ("_build", "generated", "examples")
#: what shows a file in the place where it stands
SHOWS = (
    re.compile(r"\{(?:include|literalinclude|figure|image)\} (\S+)"),
    re.compile(r"^\.\. (?:include|literalinclude|figure|image):: (\S+)", re.MULTILINE),
    re.compile(r"!\[[^]]*\]\(([^)\s]+)\)"),
    re.compile(r"<(?:img|source)[^>]* (?:src|srcset)=\"([^\"]+)\""),
)

FINETUNED = {
    "finetune-card.md",
    "finetune-published.md",
    "finetune-small.md",
    "finetune-small.svg",
    "study_embeddings.md",
}


@pytest.fixture
def generated(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    for folder in FOLDERS:
        monkeypatch.syspath_prepend(folder)
    return import_module("_generated")


@pytest.fixture
def docs(generated: ModuleType) -> Any:
    """The site's pages."""
    return generated.DOCS


@pytest.fixture
def study(generated: ModuleType) -> Any:
    """The study's pages."""
    return import_module("make").STUDY


def committed() -> set[Path] | None:
    """The files that git knows, None where there is no git (an sdist)."""
    if not (ROOT / ".git").exists():
        return None
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    return {ROOT / line for line in listed.stdout.splitlines()} if listed.returncode == 0 else None


def sources() -> list[Path]:
    return [page for page in PAGES if not {*BUILT} & {*page.relative_to(ROOT).parts}]


def test_no_page_shows_a_file_that_the_repository_lacks() -> None:
    there = committed()
    missing = []
    for page in sources():
        text = page.read_text(encoding="utf-8")
        for name in (match[1] for pattern in SHOWS for match in pattern.finditer(text)):
            path = (page.parent / name).resolve()
            if "://" not in name and (not path.is_file() or (there is not None and path not in there)):
                missing.append(f"{page.relative_to(ROOT)}: {name}")
    assert missing == []


@pytest.mark.parametrize("folder", ["docs", "study"])
def test_every_table_and_figure_is_fresh(folder: str, request: pytest.FixtureRequest) -> None:
    pages = request.getfixturevalue(folder)
    assert list(pages.report(pages.stale())) == []


def test_what_is_stale_is_named_with_the_command(docs: Any, study: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table edited by hand, a figure that is gone, and results that changed after they were drawn."""
    there, record = docs.shown(), docs.recorded()
    edited = there | {"formats.md": f"{there['formats.md']}\n| E9M9 |"}
    monkeypatch.setattr(docs, "shown", lambda: edited)
    assert set(docs.stale()) == {"formats.md"}
    (line,) = docs.report(docs.stale())
    assert line.endswith("`python docs/_generated.py --write` makes them again")
    monkeypatch.setattr(docs, "shown", lambda: there)
    monkeypatch.setattr(docs, "recorded", lambda: record | {"finetune": record["finetune"] | {"made_from": ""}})
    assert set(docs.stale()) == record["finetune"]["pieces"].keys() == FINETUNED
    of_study = study.shown()
    of_study |= {"study_q3.md": str(of_study["study_q3.md"]).replace("1", "2", 1), "study_q3.svg": None}
    monkeypatch.setattr(study, "shown", lambda: of_study)
    assert set(study.stale()) == {"study_q3.md", "study_q3.svg"}
    (line,) = study.report(study.stale())
    assert line.endswith("`python study/make.py` makes them again")


def test_what_a_piece_is_made_from_has_its_results_and_the_modules_it_needs(
    generated: ModuleType, tmp_path: Path
) -> None:
    needed = {path.name for path in generated.needed("_finetune")}
    assert {"_finetune.py", "_compared.py", "_looks.py", "_markdown.py"} <= needed
    assert "_tables.py" not in needed  # the rules of the bench change no result
    needed = {path.relative_to(ROOT).as_posix() for path in generated.needed("_study", ROOT / "study")}
    assert {"study/_study.py", "study/_along.py", "docs/_compared.py", "docs/_looks.py"} <= needed
    (tmp_path / "_own.py").write_text("def draw(folder):\n    (folder / 'own.md').write_text('| a |')\n")
    (tmp_path / "one.json").write_text("1")
    maker = generated.Maker("_own", "draw", "*.json")
    before = maker.made_from(tmp_path)
    assert maker.made_from(tmp_path) == before
    (tmp_path / "one.json").write_text("2")
    assert maker.made_from(tmp_path) != before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("folder", "name"),
    [("study", "results"), ("study", "study"), ("docs", "finetune"), ("docs", "geometry"), ("docs", "number lines")],
)
def test_what_is_made_again_is_what_stands_there(
    generated: ModuleType, folder: str, name: str, request: pytest.FixtureRequest
) -> None:
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
