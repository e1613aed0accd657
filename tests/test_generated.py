"""What the library and the results files say stands on the pages, in the repository as on the site, and is fresh."""

import re
import subprocess
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "docs").rglob("*.rst"))]
#: folders that the site's build writes: never committed
BUILT = ("_build", "generated", "examples")
#: what shows a file in the place where it stands
SHOWS = (
    re.compile(r"\{(?:include|literalinclude|figure|image)\} (\S+)"),
    re.compile(r"^\.\. (?:include|literalinclude|figure|image):: (\S+)", re.MULTILINE),
    re.compile(r"!\[[^]]*\]\(([^)\s]+)\)"),
    re.compile(r"<(?:img|source)[^>]* (?:src|srcset)=\"([^\"]+)\""),
)

FINETUNED = {"finetune-card.md", "finetune-small.md", "finetune-small.svg"}


@pytest.fixture
def generated(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "docs")
    return import_module("_generated")


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


def test_a_reader_of_the_repository_sees_tables_and_generated_figures() -> None:
    """GitHub shows a directive that includes a file as its source."""
    for page in sources():
        text = page.read_text(encoding="utf-8")
        assert re.findall(r"\{include\}|\{(?:figure|image)\} (?:generated|figures)/", text) == [], page
        for match in re.finditer(r"<!-- table: ([\w-]+) -->\n(.*?)<!-- end -->", text, re.DOTALL):
            assert re.search(r"^\|[ :|-]+\|$", match[2], re.MULTILINE), match[1]
        assert text.count("<!-- table: ") == text.count("<!-- end -->")


def test_every_table_and_figure_is_fresh(generated: ModuleType) -> None:
    assert list(generated.report(generated.stale())) == []


def test_what_is_stale_is_named_with_the_command(generated: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table edited by hand, a figure that is gone, and results that changed after they were drawn."""
    there, record = generated.shown(), generated.recorded()
    edited = there | {"study_q3.md": str(there["study_q3.md"]).replace("1", "2", 1), "study_q3.svg": None}
    edited |= {"formats.md": f"{there['formats.md']}\n| E9M9 |"}
    monkeypatch.setattr(generated, "shown", lambda: edited)
    assert set(generated.stale()) == {"study_q3.md", "study_q3.svg", "formats.md"}
    (line,) = generated.report(generated.stale())
    assert line.endswith("`python docs/_generated.py --write` makes them again")
    monkeypatch.setattr(generated, "shown", lambda: there)
    monkeypatch.setattr(generated, "recorded", lambda: record | {"finetune": record["finetune"] | {"made_from": ""}})
    assert set(generated.stale()) == record["finetune"]["pieces"].keys() == FINETUNED


def test_what_a_piece_is_made_from_has_its_results_and_the_modules_it_needs(
    generated: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = {path.name for path in generated.needed("_finetune")}
    assert {"_finetune.py", "_study.py", "_looks.py", "_markdown.py"} <= needed
    assert "_tables.py" not in needed  # the rules of the bench change no result
    (tmp_path / "_own.py").write_text("def draw(folder):\n    (folder / 'own.md').write_text('| a |')\n")
    (tmp_path / "one.json").write_text("1")
    monkeypatch.setattr(generated, "HERE", tmp_path)
    maker = generated.Maker("_own", "draw", "*.json")
    before = maker.made_from()
    assert maker.made_from() == before
    (tmp_path / "one.json").write_text("2")
    assert maker.made_from() != before


@pytest.mark.slow
@pytest.mark.parametrize("name", ["results", "study", "finetune", "geometry", "number lines"])
def test_what_is_made_again_is_what_stands_there(generated: ModuleType, name: str) -> None:
    """Tables whole; of figures, whose bytes are those of a release of matplotlib, that they are drawn."""
    again, there = generated.made([generated.MAKERS[name]]), generated.shown()
    of_maker = generated.recorded()[name]["pieces"]
    assert of_maker.keys() <= again.keys()
    for piece in of_maker:
        if piece.endswith(".md"):
            assert again[piece] == there[piece], piece
        else:
            assert again[piece].startswith(("<?xml", "<svg")), piece
