"""English text from fixed versions of packages, downloaded from their registries: 60
million tokens and more.

Every archive is checked by its sha256 before anything in it is read, so the same
command gives the same corpus.
"""

import gzip
import hashlib
import html
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from nanogpt_bench.data.text import docstrings
from nanogpt_bench.data.tokenizers import check_tokenizer, make_tokenizer
from nanogpt_bench.data.write import (
    another_text,
    check_folder,
    check_replaced,
    source_in,
    split_limits,
    write_corpus,
)
from nanogpt_bench.system.errors import BenchError, one_line, refused, unknown
from nanogpt_bench.system.files import sha256

#: a file's path in its archive, and the texts in it
File = tuple[str, list[str]]
Reader = Callable[[Path], Iterator[File]]

#: the least characters of a text, and of a sentence that is dropped if it came before
SHORTEST = 40
#: the end of a sentence: behind its mark, or at an empty line
_END = re.compile(r"[.!?]\s+|\n[ \t]*\n\s*")
_TAG = re.compile(r"</?[A-Za-z][^<>]*>")
_BLANKS = re.compile(r"[ \t]+")
#: a string of C or Java, which is skipped, or a comment: /* */, or consecutive lines
#: with //
_COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|/\*.*?\*/|//[^\n]*(?:\n[ \t]*//[^\n]*)*', re.DOTALL)
_MARKS = re.compile(r"^[ \t]*\*+/?[ \t]?|/\*+!?|\*+/|^[ \t]*//+!?[ \t]?", re.MULTILINE)
_INLINE = re.compile(r"\{@\w+\s*([^{}]*)\}")
_LICENCE = re.compile(
    r"SPDX|GNU (?:Lesser )?General Public|Permission is hereby granted|SOFTWARE IS PROVIDED|WITHOUT WARRANTY|"
    r"Redistribution and use|free software",
    re.IGNORECASE,
)
#: bytes above which a C source is skipped: such files are tables of registers
LARGEST_SOURCE = 3_000_000


class Sentences:
    """Drops sentences of at least `SHORTEST` characters that came before; white space
    does not count.
    """

    def __init__(self) -> None:
        self._texts, self._sentences = set[bytes](), set[bytes]()

    def new(self, text: str) -> str:
        """Return the new sentences of a text, "" if they are too short; a short
        sentence goes with the one before it.

        >>> known = Sentences()
        >>> known.new("The first of the sentences is long enough. The second sentence is as long as that one.")[:18]
        'The first of the s'
        >>> known.new("A third sentence, of which no text had a word. The second sentence is as long as that one. So.")
        'A third sentence, of which no text had a word.'
        """
        chosen, keep = [], _first(" ".join(text.split()), self._texts)
        for sentence in sentences(text):
            if len(words := " ".join(sentence.split())) >= SHORTEST:
                keep = _first(words, self._sentences)
            if keep:
                chosen.append(sentence)
        left = "".join(chosen).strip()
        return left if len(left) >= SHORTEST else ""


def _first(text: str, seen: set[bytes]) -> bool:
    """Return whether a text is not in `seen`, and add it."""
    count = len(seen)
    seen.add(hashlib.blake2b(text.encode(), digest_size=8).digest())
    return len(seen) > count


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a text, each with the white space behind it.

    >>> list(sentences("It says so. Here is what\\nfollows.\\n\\nA title\\n\\nThe end"))
    ['It says so. ', 'Here is what\\nfollows.\\n\\n', 'A title\\n\\n', 'The end']
    """
    start = 0
    for end in _END.finditer(text):
        yield text[start : end.end()]
        start = end.end()
    yield text[start:]


def without_markup(text: str) -> str:
    """Return the text of HTML without its markup.

    >>> without_markup("<p>The  number of <code>x</code> &gt; 0</p>")
    'The number of x > 0'
    """
    return _BLANKS.sub(" ", html.unescape(_TAG.sub(" ", text))).strip()


def comments(source: str) -> list[str]:
    """Return the comments in C or Java, without their marks and markup; those about a
    licence are left out.

    >>> comments('int a = 1; /* The count of what is left to do,\\n * never below zero. */ char *b = "/* not */";')
    ['The count of what is left to do,\\nnever below zero.']
    """
    found = (match[0] for match in _COMMENT.finditer(source) if match[0][0] == "/")
    return [
        _INLINE.sub(r"\1", _TAG.sub("", _MARKS.sub("", comment))).strip()
        for comment in found
        if not _LICENCE.search(comment)
    ]


def described(pattern: str, key: str) -> Reader:
    """Return a reader of texts under `key` in a wheel's JSON files: those of the last
    file per group 1 of `pattern`.
    """

    def read(wheel: Path) -> Iterator[File]:
        with zipfile.ZipFile(wheel) as archive:
            names = sorted(archive.namelist())
            last = {found[1]: name for name in names if (found := re.fullmatch(pattern, name))}
            for name in last.values():
                data = archive.read(name)
                content = json.loads(gzip.decompress(data) if name.endswith(".gz") else data)
                yield name, list(map(without_markup, _under(key, content)))

    return read


def _under(key: str, content: Any) -> Iterator[str]:
    if isinstance(content, dict):
        for name, value in content.items():
            if name == key and isinstance(value, str):
                yield value
            else:
                yield from _under(key, value)
    elif isinstance(content, list):
        for value in content:
            yield from _under(key, value)


def python_wheel(wheel: Path) -> Iterator[File]:
    """Yield the docstrings of a wheel's modules."""
    with zipfile.ZipFile(wheel) as archive:
        for name in sorted(archive.namelist()):
            if name.endswith(".py"):
                yield name, list(map(without_markup, docstrings(archive.read(name))))


def java_package(package: Path) -> Iterator[File]:
    """Yield the comments in the sources of a Debian package with a src.zip."""
    with _member(package, "src.zip") as file, zipfile.ZipFile(io.BytesIO(file.read())) as archive:
        for name in sorted(archive.namelist()):
            if name.endswith(".java"):
                yield name, comments(_text(archive.read(name)))


def linux_package(package: Path) -> Iterator[File]:
    """Yield the documentation, and the comments in the sources, of a Debian package
    with the Linux kernel's archive.
    """
    with _member(package, ".tar.xz") as inner, tarfile.open(fileobj=inner, mode="r|xz") as archive:
        for member in archive:
            name = member.name.partition("/")[2]
            taken = _of_linux(name)
            if (
                taken
                and member.isfile()
                and member.size < LARGEST_SOURCE
                and (file := archive.extractfile(member))
            ):
                yield name, taken(_text(file.read()))


def _of_linux(name: str) -> Callable[[str], list[str]] | None:
    if name.startswith("Documentation/"):
        english = name.endswith((".rst", ".txt", ".yaml", ".md")) and "/translations/" not in name
        return (lambda text: [text.strip()]) if english else None
    return comments if name.endswith((".c", ".h", ".S", ".rs", ".dts", ".dtsi")) else None


def _text(data: bytes) -> str:
    return data.decode("utf-8", errors="replace").replace("\r\n", "\n")


@contextmanager
def _member(package: Path, suffix: str) -> Iterator[IO[bytes]]:
    """Open the first file in a Debian package whose name ends in `suffix`, as a stream."""
    with package.open("rb") as file:
        file.seek(8)  # the mark of an ar archive; each of its members has a header of 60 bytes
        while not (header := file.read(60)).startswith(b"data.tar"):
            size = int(header[48:58])
            file.seek(size + size % 2, 1)
        with tarfile.open(fileobj=file, mode="r|*") as data:
            found = next(
                member for member in data if member.isfile() and member.name.endswith(suffix)
            )
            stream = data.extractfile(found)
            assert stream is not None  # an ordinary file has one
            yield stream


#: one in so many files is for validation
VAL_EVERY = 50


@dataclass(frozen=True)
class Package:
    """A version of a package: name and sha256 of its archive, licence, and reader."""

    version: str
    archive: str
    sha256: str
    licence: str
    read: Reader = field(repr=False)

    def command(self, name: str) -> list[str]:
        """Return the command of the registry's client that downloads the archive into
        the working directory.
        """
        if self.archive.endswith(".deb"):
            return ["apt-get", "download", f"{name}={self.version}"]
        pip = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--no-deps",
            "--only-binary",
            ":all:",
            "--retries",
            "1",
        ]
        return [*pip, f"{name}=={self.version}"]


#: packages in the order in which they are read, which matters: a sentence stays where
#: it comes first
PACKAGES = {
    "oci": Package(
        "2.189.0",
        "oci-2.189.0-py3-none-any.whl",
        "134e7cc634d4963ffc0c5411e9c2b2d8695d2f154fd5f8b873dd9fa8a4cb36a6",
        "UPL-1.0 OR Apache-2.0",
        python_wheel,
    ),
    "botocore": Package(
        "1.44.8",
        "botocore-1.44.8-py3-none-any.whl",
        "76342a76c338701db80dcb8afe1c9bd079283d6fffbb9d881442abb02a215043",
        "Apache-2.0",
        described(r"botocore/data/([^/]+)/[^/]+/service-2\.json(?:\.gz)?", "documentation"),
    ),
    "google-api-python-client": Package(
        "2.202.0",
        "google_api_python_client-2.202.0-py3-none-any.whl",
        "aaa90064c9bb642ff1d065b22ca8958a2cb6e345909cefe70d0e5452fc50e08b",
        "Apache-2.0",
        described(r"(googleapiclient/discovery_cache/documents/.+\.json)", "description"),
    ),
    "openjdk-17-source": Package(
        "17.0.19+10-1~deb12u2",
        "openjdk-17-source_17.0.19+10-1~deb12u2_all.deb",
        "2591b37131025f872f057be99467b45f7fa2aed928c8d779208db9c3239e1190",
        "GPL-2.0-only WITH Classpath-exception-2.0",
        java_package,
    ),
    "linux-source-6.1": Package(
        "6.1.176-1",
        "linux-source-6.1_6.1.176-1_all.deb",
        "9305d1a151b8e83dcb88aa11361e7b9513f0c252bdf7f5647e4542762d99c094",
        "GPL-2.0-only",
        linux_package,
    ),
}


def prepare_packages(
    out: Path,
    tokenizer: str = "byte",
    *,
    packages: Sequence[str] | None = None,
    data_dir: Path | None = None,
    limit: int | None = None,
    progress: bool = False,
    replace: bool = False,
) -> dict[str, Any]:
    """Prepare the English text of packages (default: all of `PACKAGES`) in `out`;
    return the content of meta.json.

    A document is a file of a package, without the sentences of earlier documents. The
    hash of its name decides on its split, one in `VAL_EVERY` for validation, and on its
    place there. With `data_dir` the archives are read from that folder; otherwise they
    are downloaded into a temporary one. A corpus of another text is replaced only with
    `replace`.
    """
    for name in packages or ():
        if name not in PACKAGES:
            raise unknown("package", name, PACKAGES)
    chosen = {
        name: package for name, package in PACKAGES.items() if packages is None or name in packages
    }
    check_folder(out)
    if not replace:
        _check_archives(out, chosen)
    split_limits(limit)
    check_tokenizer(tokenizer)
    with _archives(chosen, data_dir, out, progress) as archives:
        documents, facts = _documents(archives, progress)
    splits: dict[str, list[str]] = {"train": [], "val": []}
    digest = hashlib.sha256()
    for key in sorted(documents):
        splits["train" if int.from_bytes(key[:8]) % VAL_EVERY else "val"].append(documents[key])
        digest.update(documents[key].encode("utf-8"))
    source = {
        "kind": "packages",
        "packages": facts,
        "sha256": digest.hexdigest(),
        "documents": len(documents),
    }
    check_replaced(out, source, replace=replace)
    text = "".join(map("".join, splits.values())) if tokenizer == "char" else ""
    made = make_tokenizer(tokenizer, text, splits["train"])
    return write_corpus(out, splits, made, source, progress, limit, replace=replace)


def _check_archives(out: Path, chosen: dict[str, Package]) -> None:
    """Refuse a folder that holds a text of other archives, before any is downloaded."""
    before = source_in(out)
    if before is None:
        return
    packages = before.get("packages")
    known = packages if isinstance(packages, dict) else {}
    archives = {}
    for name, facts in known.items():
        archives[name] = facts.get("sha256") if isinstance(facts, dict) else None
    if archives != {name: package.sha256 for name, package in chosen.items()}:
        raise another_text(out, before, {"kind": "packages"})


@contextmanager
def _archives(
    chosen: dict[str, Package], folder: Path | None, out: Path, progress: bool
) -> Iterator[dict[str, Path]]:
    """Yield the archive of each package, its sha256 checked; downloads are removed
    after the block.
    """
    if folder is not None:
        yield {name: _checked(name, chosen, folder) for name in chosen}
        return
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        made = tempfile.TemporaryDirectory(prefix=f".{out.name}.downloads-", dir=out.parent)
    except OSError as error:
        raise refused(f"--out {str(out)!r} can't be written", error) from None
    with made as downloads:
        found = {}
        for name, package in chosen.items():
            with _bar(f"downloading {name}", progress):
                failure = _download(package.command(name), downloads)
            found[name] = _checked(name, chosen, Path(downloads), failure)
        yield found


def _download(command: list[str], folder: str) -> str:
    """Run a registry's client; return its error message, or "" if it succeeded."""
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, "LC_ALL": "C"},
            capture_output=True,
            check=False,
            text=True,
        )
    except OSError as error:
        return f"{command[0]}: {error.strerror}"
    said = [line for line in done.stderr.splitlines() if line.lower().startswith(("e:", "error:"))]
    return (
        one_line((said or done.stderr.splitlines() or ["it failed"])[-1]) if done.returncode else ""
    )


def _checked(name: str, chosen: dict[str, Package], folder: Path, failure: str = "") -> Path:
    package = chosen[name]
    archive = folder / package.archive
    if archive.is_file():
        if (found := sha256(archive)) == package.sha256:
            return archive
        failure = f"{str(archive)!r} has the sha256 {found}, not {package.sha256}"
    where = f"; {failure}" if failure else f": it is not in {str(folder)!r}"
    rest = ",".join(other for other in chosen if other != name)
    command = " ".join(
        ["pip", *package.command(name)[3:]] if archive.suffix == ".whl" else package.command(name)
    )
    raise BenchError(
        f"prepare packages can't get {package.archive}{where}; get it with: {command}; then give "
        f"its folder with --data-dir{f'; or leave it out: --packages {rest}' if rest else ''}"
    )


@contextmanager
def _bar(what: str, show: bool) -> Iterator[Callable[[str], None]]:
    """Show the task, its progress and its time on standard error; yield a function that
    updates the progress.
    """
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn(f"{what} {{task.description}}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not show, transient=True) as bar:
        task = bar.add_task("")
        yield lambda said: bar.update(task, description=said)


def _documents(
    archives: dict[str, Path], progress: bool
) -> tuple[dict[bytes, str], dict[str, dict[str, Any]]]:
    """Return every document by the hash of its name, and each package's entry in
    meta.json.
    """
    known, documents = Sentences(), dict[bytes, str]()
    facts: dict[str, dict[str, Any]] = {}
    for name, archive in archives.items():
        count = size = 0
        with _bar(f"reading {name}", progress) as show:
            for path, texts in PACKAGES[name].read(archive):
                if text := "\n\n".join(filter(None, map(known.new, texts))):
                    documents[hashlib.sha256(f"{name}/{path}".encode()).digest()] = text
                    count, size = count + 1, size + len(text.encode("utf-8"))
                    show(f"{size:,} bytes")
        package = {key: value for key, value in vars(PACKAGES[name]).items() if key != "read"}
        facts[name] = {**package, "documents": count, "bytes": size}
    return documents, facts
