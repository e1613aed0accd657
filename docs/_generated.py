"""Tables and figures made from the library and the results files: checked, or with
--write made again.

A page has a table between `<!-- table: NAME -->` and `<!-- end -->`, and a figure as an
image of `figures/NAME.svg`. Both are committed, so that a reader of the repository sees
what a reader of the site does; the site builds from them. Quick pieces are made in
every check. For slow ones, `_generated.json` has digests of their inputs and of the
pieces.
"""

import argparse
import ast
import hashlib
import json
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TABLE = re.compile(
    r"(?P<start><!-- table: (?P<name>[\w-]+) -->\n)(?P<text>.*?)(?P<end><!-- end -->)", re.DOTALL
)
FIGURE = re.compile(r"!\[[^]]*\]\(figures/(?P<name>[\w-]+\.svg)\)")


@dataclass(frozen=True)
class Maker:
    """A function of a module that writes pieces into a folder, and patterns of the
    files it reads.
    """

    module: str
    function: str
    reads: str = ""
    quick: bool = False

    def make(self, folder: Path) -> None:
        """Write every piece."""
        getattr(import_module(self.module), self.function)(folder)

    def made_from(self, folder: Path) -> str:
        """A digest of the inputs: files in a folder by the maker's patterns, and
        modules of that folder or this one.
        """
        read = sorted(path for pattern in self.reads.split() for path in folder.glob(pattern))
        files = [*sorted(needed(self.module, folder)), *read]
        parts = [f"{path.name} {digest(path.read_text(encoding='utf-8'))}" for path in files]
        return digest("\n".join(parts))


def digest(text: str) -> str:
    """The first half of a text's SHA-256."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def needed(module: str, folder: Path = HERE, found: set[Path] | None = None) -> set[Path]:
    """The files of a module, in a folder or in this one, and of all such modules that
    it imports.
    """
    found = set() if found is None else found
    path = next(
        (path for path in (folder / f"{module}.py", HERE / f"{module}.py") if path.exists()), None
    )
    if path is not None and path not in found:
        found.add(path)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [node.module] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                needed(name or "", folder, found)
    return found


def made(makers: Iterable[Maker]) -> dict[str, str]:
    """The pieces of some makers, by file name, as they would be committed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for maker in makers:
            maker.make(folder)
        return {
            path.name: as_committed(path)
            for path in sorted(folder.iterdir())
            if path.suffix in (".md", ".svg")
        }


def as_committed(path: Path) -> str:
    """A table without blanks around it; a figure with coordinates in hundredths of a
    point and no trailing blanks.
    """
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return text.strip()
    text = re.sub(
        r' (?:d|x|y)="[^"]*"', lambda match: re.sub(r"(\d+\.\d\d)\d+", r"\1", match[0]), text
    )
    return re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)


@dataclass
class Pages:
    """The pages of a folder with their tables and figures, their makers, and the
    command that runs these.
    """

    folder: Path
    makers: Mapping[str, Maker]
    command: str

    @property
    def record(self) -> Path:
        """The file with the digests of slow pieces and of their inputs."""
        return self.folder / "_generated.json"

    def pages(self) -> dict[Path, str]:
        """The text of every page."""
        return {path: path.read_text(encoding="utf-8") for path in sorted(self.folder.glob("*.md"))}

    def shown(self) -> dict[str, str | None]:
        """The pieces on pages, as committed: tables by `NAME.md`, figures by
        `NAME.svg`, None where one is missing.
        """
        found: dict[str, str | None] = {}
        for text in self.pages().values():
            found |= {
                f"{match['name']}.md": match["text"].strip() for match in TABLE.finditer(text)
            }
            for match in FIGURE.finditer(text):
                path = self.folder / "figures" / match["name"]
                found[match["name"]] = path.read_text(encoding="utf-8") if path.exists() else None
        return found

    def recorded(self) -> dict[str, Any]:
        """Read `_generated.json`: of every slow maker its inputs, and the digests of
        its pieces.
        """
        held: dict[str, Any] = (
            json.loads(self.record.read_text(encoding="utf-8")) if self.record.exists() else {}
        )
        return held

    def stale(self) -> list[str]:
        """The pieces on pages that are missing, edited by hand, or older than their
        inputs.
        """
        record, there = self.recorded(), self.shown()
        quick = made(maker for maker in self.makers.values() if maker.quick)
        fresh = {name: digest(text) for name, text in quick.items()}
        for name, maker in self.makers.items():
            if not maker.quick and record.get(name, {}).get("made_from") == maker.made_from(
                self.folder
            ):
                fresh |= record[name]["pieces"]
        return [
            name for name, text in there.items() if text is None or digest(text) != fresh.get(name)
        ]

    def write(self, everything: bool = False) -> None:
        """Make the stale pieces, or all, and put them where the pages show them."""
        record, of_makers = self.recorded(), {}
        wrong = set(self.stale())
        for name, maker in self.makers.items():
            known = record.get(name, {})
            unchanged = (
                known.get("made_from") == maker.made_from(self.folder)
                and not wrong & known.get("pieces", {}).keys()
            )
            if maker.quick or everything or not unchanged:
                of_makers[name] = made([maker])
        self.put(of_makers)

    def put(self, of_makers: dict[str, dict[str, str]]) -> None:
        """Write what makers made into pages, `figures` and the record."""
        record = self.recorded()
        for name, pieces in of_makers.items():
            wanted = self.shown().keys()  # a table that was just written may show figures
            used = {piece: text for piece, text in pieces.items() if piece in wanted}
            self.write_figures(used)
            self.write_tables(used)
            if not self.makers[name].quick:
                digests = {piece: digest(text) for piece, text in sorted(used.items())}
                record[name] = {
                    "made_from": self.makers[name].made_from(self.folder),
                    "pieces": digests,
                }
        kept = {piece for piece in self.shown() if piece.endswith(".svg")}
        for path in (self.folder / "figures").glob("*.svg"):
            if path.name not in kept:
                path.unlink()
        self.record.write_text(
            json.dumps(record, indent=2, sort_keys=True) + "\n", encoding="utf-8"
        )

    def write_figures(self, pieces: dict[str, str]) -> None:
        """Write figures into their folder."""
        (self.folder / "figures").mkdir(exist_ok=True)
        for name, text in pieces.items():
            if name.endswith(".svg"):
                (self.folder / "figures" / name).write_text(text, encoding="utf-8")

    def write_tables(self, pieces: dict[str, str]) -> None:
        """Put tables between their markers, on whatever page has these."""

        def with_text(match: re.Match[str]) -> str:
            text = pieces.get(f"{match['name']}.md")
            return match[0] if text is None else f"{match['start']}\n{text}\n\n{match['end']}"

        for path, text in self.pages().items():
            if (new := TABLE.sub(with_text, text)) != text:
                path.write_text(new, encoding="utf-8")

    def report(self, names: list[str]) -> Iterator[str]:
        """Yield a line that names the stale pieces, if there are any."""
        if names:
            yield f"stale: {', '.join(names)}; `{self.command}` makes them again"


DOCS = Pages(
    HERE,
    {
        "tables": Maker("_tables", "write_all", quick=True),
        "formats": Maker("_format_pages", "write_formats", quick=True),
        "performance": Maker("_measured", "write_measured", "measured/*.json", quick=True),
        "finetune": Maker(
            "_finetune", "write_finetune", "measured/finetune/*.json measured/published/*.json"
        ),
        "geometry": Maker("_figures", "draw_all"),
    },
    "python docs/_generated.py --write",
)


def main() -> int:
    """Check for stale pieces, or with --write make them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="make what is stale and write it")
    parser.add_argument("--all", action="store_true", help="with --write: make everything, minutes")
    arguments = parser.parse_args()
    if arguments.write:
        DOCS.write(arguments.all)
    lines = list(DOCS.report(DOCS.stale()))
    print("\n".join(lines) or "every table and figure is fresh")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    sys.exit(main())
