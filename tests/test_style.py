"""README and the pages it leads to are written in short sentences, with few figures, in words that a reader has."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
#: what is dated keeps its words: a notebook, and what was announced before runs
FROZEN = {"log", "study-amendments"}
PAGES = [ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY")]
PAGES += [*sorted(DOCS.rglob("*.md")), *sorted((ROOT / "study").glob("*.md"))]
PAGES = [page for page in PAGES if page.stem not in FROZEN and not {"_build", "generated"} & {*page.parts}]
#: words a sentence on the average and the longest, figures in a hundred words, lines of a page but for generated tables
MEAN, LONGEST, FIGURES, LINES = 18, 35, 4, 300
GENERATED = re.compile(r"<!-- table: [\w-]+ -->.*?<!-- end -->", re.DOTALL)
#: ordinary words that have been used with a meaning of our own
HOUSE = (
    *("kept", "asked for", "arrived", "goes on", "stands", "lies", "of its own", "bears", "anew", "is said"),
    *("look", "looks", "lead", "leads", "twin", "twins", "course", "courses", "row", "rows"),
)
WORD = re.compile(r"\S*\w\S*")
FIGURE = re.compile(r"(?<![\w.])\d[\d,.]*")
END = re.compile(r"[.!?][)\"'”]?\s+(?=[A-Z0-9`(“\"])")


def prose(text: str) -> list[str]:
    """The paragraphs and entries of lists of a page, without code, tables, formulas, headings and directives."""
    text = GENERATED.sub("\n", text)
    text = re.sub(r"^([ ]*)(```+|:::+).*?^\1\2[ ]*$", "\n", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"<!--.*?-->|<[^>]+>|!\[[^\]]*\]\([^)]*\)", "", text, flags=re.DOTALL)
    text = re.sub(r"\$\$?[^$]+\$\$?", "x", text)
    text = re.sub(r"\{\w+\}`~?([^`<]*?)(?:\s*<[^>]*>)?`", r"`\1`", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", lambda link: link[1] or "page", text)
    text = re.sub(r"^\s*(\||#).*$|^\s*$", "\0", text, flags=re.MULTILINE)
    text = re.sub(r"^\s*([-*+]|\d+[.)]|:)\s+", "\0", text, flags=re.MULTILINE)
    blocks = (" ".join(block.split()).replace("*", "") for block in text.split("\0"))
    return [block for block in blocks if block]


def sentences(text: str) -> list[str]:
    """The sentences of a page's prose that have three words at least."""
    found = [
        sentence for block in prose(text) for sentence in re.split(r"\0", END.sub(lambda end: end[0] + "\0", block))
    ]
    return [sentence for sentence in found if len(WORD.findall(sentence)) >= 3]


def explained() -> set[str]:
    """The words that the glossary has; several may share an entry."""
    heads = re.findall(r"^(\S.*)\n: ", (DOCS / "glossary.md").read_text(encoding="utf-8"), re.MULTILINE)
    return {word.strip() for head in heads for word in head.split(",")}


def house_words(text: str, known: set[str]) -> list[str]:
    """House words of a text that are not explained, in the singular or the plural."""
    words = [word for word in HOUSE if not {word, word.removesuffix("s")} & known]
    plain = re.sub(r"`[^`]*`", " ", " ".join(prose(text))).lower()
    return [word for word in words if re.search(rf"\b{word}\b", plain)]


def test_pages_read_easily() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        each = sentences(text)
        lengths = [len(WORD.findall(sentence)) for sentence in each]
        figures = sum(len(FIGURE.findall(re.sub(r"`[^`]*`", "x", sentence))) for sentence in each)
        assert sum(lengths) / len(lengths) <= MEAN, page
        assert [each for each, length in zip(each, lengths, strict=True) if length > LONGEST] == [], page
        assert 100 * figures / sum(lengths) <= FIGURES, page
        assert house_words(text, explained()) == [], page
        assert len(GENERATED.sub("", text).splitlines()) <= LINES, page


def linked(page: Path) -> set[Path]:
    """The pages that a page leads to: by links, and by the lists of pages of the site."""
    text = page.read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)#\s]+\.(?:md|rst))(?:#[^)]*)?\)", text)
    for entries in re.findall(r"```\{toctree\}\n(.*?)```", text, re.DOTALL):
        names = [line.strip() for line in entries.splitlines() if line.strip() and not line.startswith(":")]
        targets += [f"{name}{end}" for name in names for end in (".md", ".rst")]
    return {there for target in targets if (there := (page.parent / target).resolve()).is_file()}


def test_every_page_is_two_clicks_from_readme() -> None:
    first = linked(ROOT / "README.md")
    second = first | {there for page in first if page.suffix == ".md" for there in linked(page)}
    pages = {page for folder in (DOCS, ROOT / "study") for page in folder.rglob("*") if page.suffix in (".md", ".rst")}
    built = [DOCS / name for name in ("_build", "generated", "examples")]
    assert [page.name for page in sorted(pages - second) if not any(page.is_relative_to(each) for each in built)] == []


def test_readme_is_short_and_soon_at_code() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 90
    assert lines.index("```python") < 45


def test_only_what_is_dated_is_exempt() -> None:
    there = {page.stem for folder in (DOCS, ROOT / "study") for page in folder.glob("*.md")}
    assert there - {page.stem for page in PAGES} == FROZEN


def test_the_check_sees_what_is_hard_to_read() -> None:
    text = "# A lead\n\nOne of its own. Two `lead` here, twins.\n\n| lead |\n\n```sh\nlead\n```\n"
    text += "\n- A *look* [here](x.md)\n"
    assert prose(text) == ["One of its own. Two `lead` here, twins.", "A look here"]
    assert sentences(text) == ["One of its own. ", "Two `lead` here, twins.", "A look here"]
    assert house_words(text, {"look"}) == ["of its own", "twins"]
    assert FIGURE.findall("0.86M and E4M3, 2,000 steps ± 0.1") == ["0.86", "2,000", "0.1"]
