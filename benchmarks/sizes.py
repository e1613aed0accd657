"""What a user downloads and installs, in MB of 10^6 bytes.

    python benchmarks/sizes.py [--no-builds] [--markdown | --json] [--record]

Packages are counted where this runs, by the files that pip lists for each, bytecode
included. A row of an extra has the packages that it brings beyond those of the library
itself. An extra of which a package is missing here has no figure. Then come the clones
of this repository and the files of a release, which are built without an index.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Final, NamedTuple

from _forms import add_form_options, print_titled, text_table
from _record import add_option, record
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT: Final = Path(__file__).resolve().parent.parent
LIBRARY: Final = "fp8manifold"
MB: Final = 1e6
COLUMNS: Final = ["what", "MB", "most of it"]
#: what a wheel of torch for GPUs brings and one for CPUs does not
OF_GPUS: Final = ("nvidia-", "cuda-", "triton")
#: packages of a row that it names
NAMED: Final = 3
#: extras for those who change the project
FOR_DEVELOPERS: Final = ("dev", "docs", "test", "test-all")


class Row(NamedTuple):
    """A line of the table. Without bytes something is missing here."""

    what: str
    size: int | None
    most: str


def closure(name: str, extras: Iterable[str] = ()) -> set[str]:
    """Return a package, with extras, and all that it needs, by their normalised names.

    Raises:
        PackageNotFoundError: if one of them is not installed.
    """
    found: set[tuple[str, frozenset[str]]] = set()
    queue = [(canonicalize_name(name), frozenset(extras))]
    while queue:
        package = queue.pop()
        if package in found:
            continue
        found.add(package)
        for requirement in _needs(*package):
            queue.append((canonicalize_name(requirement.name), frozenset(requirement.extras)))
    return {name for name, _ in found}


def _needs(name: str, extras: Iterable[str]) -> list[Requirement]:
    """Return what an installed package asks for here, with some of its extras."""
    needs = []
    for text in metadata.distribution(name).requires or []:
        requirement = Requirement(text)
        environments: list[dict[str, str]] = [{"extra": extra} for extra in ("", *extras)]
        if requirement.marker is None or any(map(requirement.marker.evaluate, environments)):
            needs.append(requirement)
    return needs


def installed_bytes(name: str) -> int:
    """Return the bytes of a package's files."""
    files = metadata.distribution(name).files or []
    return bytes_of(Path(str(file.locate())) for file in files)


def bytes_of(paths: Iterable[Path]) -> int:
    """Return the bytes of those paths that are files."""
    return sum(path.stat().st_size for path in paths if path.is_file())


def row_of(what: str, sizes: Mapping[str, int]) -> Row:
    """Return a row for packages, with the names and sizes of the largest.

    >>> row_of("`[x]`", {"a": 2_000_000, "b": 30_000_000, "c": 400_000})
    Row(what='`[x]`', size=32400000, most='b 30.0, a 2.0')
    """
    largest = sorted(sizes, key=lambda name: sizes[name], reverse=True)[:NAMED]
    parts = [f"{name} {sizes[name] / MB:.1f}" for name in largest if sizes[name] >= MB]
    return Row(what, sum(sizes.values()), ", ".join(parts) if len(sizes) > 1 else "")


def rows_of_packages() -> list[Row]:
    """Return the rows of `pip install fp8manifold`, and those of its extras."""
    every = closure(LIBRARY)
    sizes = {name: installed_bytes(name) for name in every - {LIBRARY}}
    of_geoopt = closure("geoopt") - closure("torch") - closure("numpy")
    of_gpus = {name for name in every if name.startswith(OF_GPUS)}
    parts = {
        "torch and numpy, with what they need": sizes.keys() - of_geoopt - of_gpus,
        "torch's libraries for GPUs": of_gpus,
        "geoopt, with scipy": of_geoopt,
    }
    rows = []
    for what, names in parts.items():
        rows.append(row_of(what, {name: sizes[name] for name in names}))
    extras = metadata.metadata(LIBRARY).get_all("Provides-Extra") or []
    return rows + [row_of_extra(extra, every) for extra in extras if extra not in FOR_DEVELOPERS]


def row_of_extra(extra: str, known: set[str]) -> Row:
    """Return what an extra adds to the packages that are there anyway."""
    what = f"`[{extra}]` adds"
    try:
        added = closure(LIBRARY, [extra]) - known
    except metadata.PackageNotFoundError as error:
        return Row(what, None, f"{error.name} is not installed here")
    return row_of(what, {name: installed_bytes(name) for name in added})


def rows_of_builds() -> list[Row]:
    """Return the rows of the repository and of the two files of a release."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shallow = clone(folder / "shallow", "--depth", "1")
        whole = clone(folder / "whole")
        git_bytes = bytes_of((folder / "shallow" / ".git").rglob("*"))
        tracked = bytes_of((folder / "shallow").rglob("*")) - git_bytes
        build = [sys.executable, "-m", "build", "-q", "--no-isolation", "--outdir", str(folder)]
        subprocess.run([*build, str(folder / "shallow")], check=True)
        (wheel,) = folder.glob("*.whl")
        (sdist,) = folder.glob("*.tar.gz")
        return [
            Row("the wheel", bytes_of([wheel]), f"unpacked {unpacked_bytes(wheel) / MB:.1f}"),
            Row("the sdist", bytes_of([sdist]), ""),
            Row("`git clone --depth 1`, received", shallow, ""),
            Row("`git clone`, received", whole, ""),
            Row("the files of a clone", tracked, largest_folders(folder / "shallow")),
        ]


def unpacked_bytes(wheel: Path) -> int:
    """Return the bytes of the files in a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return sum(entry.file_size for entry in archive.infolist())


def clone(folder: Path, *options: str) -> int:
    """Clone the branch that is checked out, and return the bytes that git received."""
    source = f"file://{ROOT}"
    command = ["git", "clone", "-q", "--single-branch", *options, source, str(folder)]
    subprocess.run(command, check=True)
    return bytes_of((folder / ".git" / "objects").rglob("*"))


def largest_folders(checkout: Path) -> str:
    """Return the largest folders of a checkout, git's own aside."""
    folders = [path for path in checkout.iterdir() if path.is_dir() and path.name != ".git"]
    return row_of("", {path.name: bytes_of(path.rglob("*")) for path in folders}).most


def main() -> None:
    """Count and print, and record if asked to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--no-builds", action="store_true", help="count packages alone")
    add_form_options(parser)
    add_option(parser)
    options = parser.parse_args()
    rows = rows_of_packages()
    if not options.no_builds:
        rows += rows_of_builds()
    cells = [
        [row.what, None if row.size is None else round(row.size / MB, 1), row.most] for row in rows
    ]
    if options.record:
        print(record("", COLUMNS, cells))
    if options.json:
        print(json.dumps([dict(zip(COLUMNS, row, strict=True)) for row in cells]))
        return
    texts = [[what, "" if size is None else f"{size:.1f}", most] for what, size, most in cells]
    table = text_table([COLUMNS, *texts], ["---", "---:", "---"], options.markdown)
    print_titled("Sizes", table, markdown=options.markdown)


if __name__ == "__main__":
    main()
