"""Tables and figures made from the library and the results files: checked, or with --write made again.

A page has a table between `<!-- table: NAME -->` and `<!-- end -->`, and a figure as an image of `figures/NAME.svg`.
Both are committed, so that a reader of the repository sees what a reader of the site does; the site builds from them.
What takes seconds is made for every check; of the rest, `_generated.json` says what it was made from and what it was.
"""

import argparse
import ast
import hashlib
import json
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RECORD = HERE / "_generated.json"
COMMAND = "python docs/_generated.py --write"
TABLE = re.compile(r"(?P<start><!-- table: (?P<name>[\w-]+) -->\n)(?P<text>.*?)(?P<end><!-- end -->)", re.DOTALL)
FIGURE = re.compile(r"!\[[^]]*\]\(figures/(?P<name>[\w-]+\.svg)\)")


@dataclass(frozen=True)
class Maker:
    """A function of a module here that writes pieces into a folder, and patterns of the files it reads."""

    module: str
    function: str
    reads: str = ""
    quick: bool = False

    def make(self, folder: Path) -> None:
        """Write every piece."""
        getattr(import_module(self.module), self.function)(folder)

    def made_from(self) -> str:
        """A digest of the files it reads and of the modules here that it needs."""
        read = sorted(path for pattern in self.reads.split() for path in HERE.glob(pattern))
        files = [*sorted(needed(self.module)), *read]
        parts = [f"{path.name} {digest(path.read_text(encoding='utf-8'))}" for path in files]
        return digest("\n".join(parts))


MAKERS = {
    "tables": Maker("_tables", "write_all", quick=True),
    "formats": Maker("_format_pages", "write_formats", quick=True),
    "performance": Maker("_measured", "write_measured", "measured/*.json", quick=True),
    "results": Maker("_front", "write_front", "measured/study/study_q[12]*.json"),
    "study": Maker("_study", "write_study", "measured/study/*.json measured/study_steps.json"),
    "finetune": Maker("_finetune", "write_finetune", "measured/finetune/*.json"),
    "geometry": Maker("_figures", "draw_all"),
    "number lines": Maker("_format_pages", "draw_formats"),
}


def digest(text: str) -> str:
    """The first half of a text's SHA-256."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def needed(module: str, found: set[Path] | None = None) -> set[Path]:
    """The files of a module here and of all modules here that it imports."""
    found = set() if found is None else found
    path = HERE / f"{module}.py"
    if path.exists() and path not in found:
        found.add(path)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [node.module] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                needed(name or "", found)
    return found


def pages() -> dict[Path, str]:
    """The text of every page."""
    return {path: path.read_text(encoding="utf-8") for path in sorted(HERE.glob("*.md"))}


def shown() -> dict[str, str | None]:
    """The pieces on pages, as they stand: tables by `NAME.md`, figures by `NAME.svg`, None where one is missing."""
    found: dict[str, str | None] = {}
    for text in pages().values():
        found |= {f"{match['name']}.md": match["text"].strip() for match in TABLE.finditer(text)}
        for match in FIGURE.finditer(text):
            path = HERE / "figures" / match["name"]
            found[match["name"]] = path.read_text(encoding="utf-8") if path.exists() else None
    return found


def made(makers: Iterable[Maker]) -> dict[str, str]:
    """The pieces of some makers, as they would stand."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for maker in makers:
            maker.make(folder)
        return {path.name: as_committed(path) for path in sorted(folder.iterdir()) if path.suffix in (".md", ".svg")}


def as_committed(path: Path) -> str:
    """A table without blank ends; a figure with coordinates in hundredths of a point and no blanks at line ends."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return text.strip()
    text = re.sub(r' (?:d|x|y)="[^"]*"', lambda match: re.sub(r"(\d+\.\d\d)\d+", r"\1", match[0]), text)
    return re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)


def recorded() -> dict[str, Any]:
    """What `_generated.json` holds: of every slow maker what it was made from, and the digests of its pieces."""
    held: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    return held


def stale() -> list[str]:
    """The pieces on pages that are missing, edited by hand, or older than what they are made from."""
    record, there = recorded(), shown()
    quick = made(maker for maker in MAKERS.values() if maker.quick)
    fresh = {name: digest(text) for name, text in quick.items()}
    for name, maker in MAKERS.items():
        if not maker.quick and record.get(name, {}).get("made_from") == maker.made_from():
            fresh |= record[name]["pieces"]
    return [name for name, text in there.items() if text is None or digest(text) != fresh.get(name)]


def write(everything: bool = False) -> None:
    """Make what is stale, or everything, and put it where the pages show it."""
    record, of_makers = recorded(), {}
    wrong = set(stale())
    for name, maker in MAKERS.items():
        known = record.get(name, {})
        unchanged = known.get("made_from") == maker.made_from() and not wrong & known.get("pieces", {}).keys()
        if maker.quick or everything or not unchanged:
            of_makers[name] = made([maker])
    put(of_makers)


def put(of_makers: dict[str, dict[str, str]]) -> None:
    """Write what makers made into pages, `figures` and the record."""
    record = recorded()
    for name, pieces in of_makers.items():
        wanted = shown().keys()  # a table that was just written may show figures
        used = {piece: text for piece, text in pieces.items() if piece in wanted}
        write_figures(used)
        write_tables(used)
        if not MAKERS[name].quick:
            digests = {piece: digest(text) for piece, text in sorted(used.items())}
            record[name] = {"made_from": MAKERS[name].made_from(), "pieces": digests}
    kept = {piece for piece in shown() if piece.endswith(".svg")}
    for path in (HERE / "figures").glob("*.svg"):
        if path.name not in kept:
            path.unlink()
    RECORD.write_text(json.dumps(record, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def write_figures(pieces: dict[str, str]) -> None:
    """Write figures into their folder."""
    (HERE / "figures").mkdir(exist_ok=True)
    for name, text in pieces.items():
        if name.endswith(".svg"):
            (HERE / "figures" / name).write_text(text, encoding="utf-8")


def write_tables(pieces: dict[str, str]) -> None:
    """Put tables between their markers, on whatever page has these."""

    def with_text(match: re.Match[str]) -> str:
        text = pieces.get(f"{match['name']}.md")
        return match[0] if text is None else f"{match['start']}\n{text}\n\n{match['end']}"

    for path, text in pages().items():
        if (new := TABLE.sub(with_text, text)) != text:
            path.write_text(new, encoding="utf-8")


def report(names: list[str]) -> Iterator[str]:
    """What to say of stale pieces."""
    if names:
        yield f"stale: {', '.join(names)}; `{COMMAND}` makes them again"


def main() -> int:
    """Check, or with --write make what is stale."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="make what is stale and write it")
    parser.add_argument("--all", action="store_true", help="with --write: make everything, minutes")
    arguments = parser.parse_args()
    if arguments.write:
        write(arguments.all)
    lines = list(report(stale()))
    print("\n".join(lines) or "every table and figure is fresh")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    sys.exit(main())
