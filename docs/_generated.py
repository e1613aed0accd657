"""Check the tables and figures on the pages, or with --write make stale ones again.

A page has a table between `<!-- table: NAME -->` and `<!-- end -->`, and a figure as an
image of `figures/NAME.svg`. Both are committed, so that a reader of the repository sees
what a reader of the site does. The site is built from them. A table or a figure is
called a piece here, and has the name of its file: `NAME.md` or `NAME.svg`.

    maker   a function that writes pieces into a folder
    quick   its pieces are made in every check, and compared
    slow    `_generated.json` has digests of its inputs and of its pieces; a check
            compares those, and makes nothing
"""

import argparse
import ast
import hashlib
import json
import re
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TABLE = re.compile(
    r"(?P<start><!-- table: (?P<name>[\w-]+) -->\n)(?P<text>.*?)(?P<end><!-- end -->)", re.DOTALL
)
FIGURE = re.compile(r"!\[[^]]*\]\(figures/(?P<name>[\w-]+\.svg)\)")


@dataclass(frozen=True)
class Maker:
    """A function of a module that writes pieces into a folder."""

    module: str
    function: str
    #: patterns of the files that it reads, separated by blanks
    reads: str = ""
    quick: bool = False

    def make(self, folder: Path) -> None:
        """Write every piece."""
        getattr(import_module(self.module), self.function)(folder)

    def input_digest(self, folder: Path) -> str:
        """Return a digest of the files that it reads and of its modules."""
        files = sorted(imported_files(self.module, folder))
        inputs = chain.from_iterable(folder.glob(pattern) for pattern in self.reads.split())
        files += sorted(inputs)
        lines = [f"{path.name} {digest(path.read_text(encoding='utf-8'))}" for path in files]
        return digest("\n".join(lines))


def digest(text: str) -> str:
    """Return the first half of a text's SHA-256."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def imported_files(module: str, folder: Path = HERE) -> set[Path]:
    """Return the file of a module, and the files of all that it imports.

    Modules of the folder and of this one count, and no others.
    """
    files: set[Path] = set()
    queue = [module]
    while queue:
        name = queue.pop()
        for path in (folder / f"{name}.py", HERE / f"{name}.py"):
            if path.exists():
                if path not in files:
                    files.add(path)
                    queue += _imported_names(path)
                break
    return files


def _imported_names(path: Path) -> list[str]:
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    return names


def make_pieces(makers: Iterable[Maker]) -> dict[str, str]:
    """Return the pieces of makers as they would be committed, by name."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for maker in makers:
            maker.make(folder)
        paths = [path for path in sorted(folder.iterdir()) if path.suffix in (".md", ".svg")]
        return {path.name: as_committed(path) for path in paths}


def as_committed(path: Path) -> str:
    """Return the text of a piece as it is committed.

    A table has no blanks around it. A figure has coordinates in hundredths of a point
    and no trailing blanks.
    """
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return text.strip()
    text = re.sub(r' (?:d|x|y)="[^"]*"', _with_hundredths, text)
    return re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)


def _with_hundredths(match: re.Match[str]) -> str:
    return re.sub(r"(\d+\.\d\d)\d+", r"\1", match[0])


@dataclass
class Pages:
    """The pages of a folder, the makers of their pieces, and the command to run these."""

    folder: Path
    makers: Mapping[str, Maker]
    command: str

    @property
    def record_path(self) -> Path:
        """The file with the digests of slow makers' inputs and pieces."""
        return self.folder / "_generated.json"

    def page_texts(self) -> dict[Path, str]:
        """Return the text of every page."""
        return {path: path.read_text(encoding="utf-8") for path in sorted(self.folder.glob("*.md"))}

    def pieces_on_pages(self) -> dict[str, str | None]:
        """Return the pieces on pages by name, None for a figure without a file."""
        pieces: dict[str, str | None] = {}
        for text in self.page_texts().values():
            for match in TABLE.finditer(text):
                pieces[f"{match['name']}.md"] = match["text"].strip()
            for match in FIGURE.finditer(text):
                path = self.folder / "figures" / match["name"]
                text_of_figure = path.read_text(encoding="utf-8") if path.exists() else None
                pieces[match["name"]] = text_of_figure
        return pieces

    def read_record(self) -> dict[str, Any]:
        """Read `_generated.json`: of every slow maker, a digest of its inputs and pieces."""
        if not self.record_path.exists():
            return {}
        record: dict[str, Any] = json.loads(self.record_path.read_text(encoding="utf-8"))
        return record

    def stale(self) -> list[str]:
        """Return the pieces on pages that are missing, edited, or older than their inputs."""
        record = self.read_record()
        quick = make_pieces(maker for maker in self.makers.values() if maker.quick)
        fresh_digests = {name: digest(text) for name, text in quick.items()}
        for name in self.makers:
            if self._has_same_inputs(name, record):
                fresh_digests |= record[name]["pieces"]
        stale = []
        for name, text in self.pieces_on_pages().items():
            if text is None or digest(text) != fresh_digests.get(name):
                stale.append(name)
        return stale

    def _has_same_inputs(self, name: str, record: Mapping[str, Any]) -> bool:
        """Return whether a slow maker's pieces were made from its present inputs."""
        maker = self.makers[name]
        if maker.quick or name not in record:
            return False
        return bool(record[name]["made_from"] == maker.input_digest(self.folder))

    def write(self, everything: bool = False) -> None:
        """Make the stale pieces, or all, and put them where the pages show them."""
        record = self.read_record()
        stale = set(self.stale())
        pieces_by_maker = {}
        for name, maker in self.makers.items():
            is_fresh = self._has_same_inputs(name, record) and stale.isdisjoint(
                record[name]["pieces"]
            )
            if everything or not is_fresh:
                pieces_by_maker[name] = make_pieces([maker])
        self.put(pieces_by_maker)

    def put(self, pieces_by_maker: dict[str, dict[str, str]]) -> None:
        """Write pieces into pages and `figures`, and their digests into the record."""
        record = self.read_record()
        for name, pieces in pieces_by_maker.items():
            # Asked again for every maker: a table that was just written may show figures.
            on_pages = self.pieces_on_pages().keys()
            used = {piece: text for piece, text in pieces.items() if piece in on_pages}
            self.write_figures(used)
            self.write_tables(used)
            if not self.makers[name].quick:
                record[name] = {
                    "made_from": self.makers[name].input_digest(self.folder),
                    "pieces": {piece: digest(text) for piece, text in sorted(used.items())},
                }
        self.remove_unused_figures()
        text = json.dumps(record, indent=2, sort_keys=True)
        self.record_path.write_text(f"{text}\n", encoding="utf-8")

    def remove_unused_figures(self) -> None:
        """Remove the figures that no page shows."""
        on_pages = self.pieces_on_pages()
        for path in (self.folder / "figures").glob("*.svg"):
            if path.name not in on_pages:
                path.unlink()

    def write_figures(self, pieces: Mapping[str, str]) -> None:
        """Write figures into their folder."""
        (self.folder / "figures").mkdir(exist_ok=True)
        for name, text in pieces.items():
            if name.endswith(".svg"):
                (self.folder / "figures" / name).write_text(text, encoding="utf-8")

    def write_tables(self, pieces: Mapping[str, str]) -> None:
        """Put tables between their markers, on whatever page has these."""

        def with_table(match: re.Match[str]) -> str:
            table = pieces.get(f"{match['name']}.md")
            return match[0] if table is None else f"{match['start']}\n{table}\n\n{match['end']}"

        for path, text in self.page_texts().items():
            new_text = TABLE.sub(with_table, text)
            if new_text != text:
                path.write_text(new_text, encoding="utf-8")

    def report(self, stale: list[str]) -> str:
        """Return a line that names the stale pieces and the command, or "" for none."""
        return f"stale: {', '.join(stale)}; `{self.command}` makes them again" if stale else ""


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
    """Check for stale pieces, or with --write make them, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="make what is stale and write it")
    parser.add_argument("--all", action="store_true", help="with --write: make everything, minutes")
    arguments = parser.parse_args()
    if arguments.write:
        DOCS.write(arguments.all)
    stale = DOCS.stale()
    print(DOCS.report(stale) or "every table and figure is fresh")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    sys.exit(main())
