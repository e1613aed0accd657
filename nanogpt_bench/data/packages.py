"""English text from fixed versions of packages: 60 million tokens and more.

    registry's client -> archive -> texts of every file -> new sentences -> corpus

Every archive is checked by its sha256 before anything in it is read, so the same
command gives the same corpus. The readers take docstrings, descriptions and comments.
A file of a package is a document. Sentences that came before are dropped: packages
repeat them thousands of times.
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
from typing import IO, Any, NamedTuple

from nanogpt_bench.data.text import docstrings
from nanogpt_bench.data.tokenizer_kind import TokenizerKind
from nanogpt_bench.data.tokenizers import check_tokenizer, make_tokenizer
from nanogpt_bench.data.write import (
    another_text,
    check_corpus_folder,
    check_replaced,
    source_in,
    split_limits,
    write_corpus,
)
from nanogpt_bench.system.errors import BenchError, one_line, refused, unknown
from nanogpt_bench.system.files import sha256


class SourceFile(NamedTuple):
    """A file of a package: its path in the archive, and the texts in it."""

    path: str
    texts: list[str]


#: a function that reads an archive
Reader = Callable[[Path], Iterator[SourceFile]]

#: the least characters of a text, and of a sentence that is dropped if it came before
SHORTEST_TEXT = 40
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
    r"SPDX|GNU (?:Lesser )?General Public|Permission is hereby granted|SOFTWARE IS PROVIDED|"
    r"WITHOUT WARRANTY|Redistribution and use|free software",
    re.IGNORECASE,
)
#: bytes above which a C source is skipped: such files are tables of registers
LARGEST_SOURCE = 3_000_000


class Sentences:
    """Drops sentences of at least `SHORTEST_TEXT` characters that came before.

    White space does not count.
    """

    def __init__(self) -> None:
        #: hashes of what came before
        self._texts: set[bytes] = set()
        self._sentences: set[bytes] = set()

    def new(self, text: str) -> str:
        """Return the new sentences of a text, "" if they are too short.

        A short sentence goes with the one before it.

        >>> known = Sentences()
        >>> known.new(
        ...     "The first of the sentences is long enough. "
        ...     "The second sentence is as long as that one."
        ... )[:18]
        'The first of the s'
        >>> known.new(
        ...     "A third sentence, of which no text had a word. "
        ...     "The second sentence is as long as that one. So."
        ... )
        'A third sentence, of which no text had a word.'
        """
        # A short sentence at the beginning is new if the whole text is.
        is_new = _add_new(" ".join(text.split()), self._texts)
        new_sentences = []
        for sentence in sentences(text):
            words = " ".join(sentence.split())
            if len(words) >= SHORTEST_TEXT:
                is_new = _add_new(words, self._sentences)
            if is_new:
                new_sentences.append(sentence)
        new_text = "".join(new_sentences).strip()
        return new_text if len(new_text) >= SHORTEST_TEXT else ""


def _add_new(text: str, hashes: set[bytes]) -> bool:
    """Add a text's hash; return whether it was not among them before."""
    count = len(hashes)
    hashes.add(hashlib.blake2b(text.encode(), digest_size=8).digest())
    return len(hashes) > count


def sentences(text: str) -> Iterator[str]:
    r"""Yield the sentences of a text, each with the white space behind it.

    >>> list(sentences("It says so. Here is what\nfollows.\n\nA title\n\nThe end"))
    ['It says so. ', 'Here is what\nfollows.\n\n', 'A title\n\n', 'The end']
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
    r"""Return the comments in C or Java, without their marks and markup.

    Those about a licence are left out.

    >>> comments(
    ...     'int a = 1; /* The count of what is left to do,\n * never below zero. */ '
    ...     'char *b = "/* not */";'
    ... )
    ['The count of what is left to do,\nnever below zero.']
    """
    texts = []
    for match in _COMMENT.finditer(source):
        comment = match[0]
        is_string = comment[0] != "/"
        if not is_string and not _LICENCE.search(comment):
            text = _TAG.sub("", _MARKS.sub("", comment))
            texts.append(_INLINE.sub(r"\1", text).strip())
    return texts


def described(pattern: str, key: str) -> Reader:
    """Return a reader of the texts under `key` in a wheel's JSON files.

    It reads those whose path matches `pattern`; of the files with the same group 1 only
    the last by name, which is the newest version.
    """

    def read(wheel: Path) -> Iterator[SourceFile]:
        with zipfile.ZipFile(wheel) as archive:
            last_of_group = {}
            for name in sorted(archive.namelist()):
                match = re.fullmatch(pattern, name)
                if match:
                    last_of_group[match[1]] = name
            for name in last_of_group.values():
                data = archive.read(name)
                content = json.loads(gzip.decompress(data) if name.endswith(".gz") else data)
                texts = [without_markup(text) for text in _texts_under(key, content)]
                yield SourceFile(name, texts)

    return read


def _texts_under(key: str, content: Any) -> Iterator[str]:
    if isinstance(content, dict):
        for name, value in content.items():
            if name == key and isinstance(value, str):
                yield value
            else:
                yield from _texts_under(key, value)
    elif isinstance(content, list):
        for value in content:
            yield from _texts_under(key, value)


def python_wheel(wheel: Path) -> Iterator[SourceFile]:
    """Yield the docstrings of a wheel's modules."""
    with zipfile.ZipFile(wheel) as archive:
        for name in sorted(archive.namelist()):
            if name.endswith(".py"):
                texts = [without_markup(text) for text in docstrings(archive.read(name))]
                yield SourceFile(name, texts)


def java_package(package: Path) -> Iterator[SourceFile]:
    """Yield the comments in the sources of a Debian package with a src.zip."""
    with _open_member(package, "src.zip") as file:
        data = io.BytesIO(file.read())
        with zipfile.ZipFile(data) as archive:
            for name in sorted(archive.namelist()):
                if name.endswith(".java"):
                    yield SourceFile(name, comments(_decode(archive.read(name))))


def linux_package(package: Path) -> Iterator[SourceFile]:
    """Yield the texts of a Debian package with the Linux kernel's archive.

    They are its documentation, and the comments in its sources.
    """
    with (
        _open_member(package, ".tar.xz") as file,
        tarfile.open(fileobj=file, mode="r|xz") as archive,
    ):
        for member in archive:
            name = member.name.partition("/")[2]
            texts_in = _linux_reader(name)
            if texts_in is None or member.size >= LARGEST_SOURCE or not member.isfile():
                continue
            content = archive.extractfile(member)
            if content is not None:
                yield SourceFile(name, texts_in(_decode(content.read())))


def _linux_reader(name: str) -> Callable[[str], list[str]] | None:
    """Return the function that finds the texts of a file; None if it is not read."""
    if name.startswith("Documentation/"):
        is_text = name.endswith((".rst", ".txt", ".yaml", ".md"))
        return _whole_text if is_text and "/translations/" not in name else None
    is_source = name.endswith((".c", ".h", ".S", ".rs", ".dts", ".dtsi"))
    return comments if is_source else None


def _whole_text(text: str) -> list[str]:
    return [text.strip()]


def _decode(data: bytes) -> str:
    return data.decode("utf-8", errors="replace").replace("\r\n", "\n")


@contextmanager
def _open_member(package: Path, suffix: str) -> Iterator[IO[bytes]]:
    """Open the first file in a Debian package whose name ends in `suffix`, as a stream.

    A package is an ar archive: a mark of 8 bytes, then members of even length, each
    behind a header of 60 bytes. The member data.tar.* has the files.
    """
    with package.open("rb") as file:
        file.seek(8)
        header = file.read(60)
        while not header.startswith(b"data.tar"):
            size = int(header[48:58])
            file.seek(size + size % 2, 1)
            header = file.read(60)
        with tarfile.open(fileobj=file, mode="r|*") as data:
            member = next(
                member for member in data if member.isfile() and member.name.endswith(suffix)
            )
            stream = data.extractfile(member)
            # An ordinary file has one.
            assert stream is not None
            yield stream


#: one in so many files is for validation
VAL_FILE_INTERVAL = 50


@dataclass(frozen=True)
class PackageArchive:
    """A version of a package: name and sha256 of its archive, licence, and reader."""

    version: str
    archive: str
    sha256: str
    licence: str
    read: Reader = field(repr=False)

    def command(self, name: str) -> list[str]:
        """Return the command of the registry's client that downloads the archive.

        It downloads into the working directory.
        """
        if self.archive.endswith(".deb"):
            return ["apt-get", "download", f"{name}={self.version}"]
        return [sys.executable, "-m", *self._pip_command(name)]

    def command_to_type(self, name: str) -> str:
        """Return the command as a user types it."""
        is_wheel = self.archive.endswith(".whl")
        return " ".join(self._pip_command(name) if is_wheel else self.command(name))

    def _pip_command(self, name: str) -> list[str]:
        return [
            "pip",
            "download",
            "--no-deps",
            "--only-binary",
            ":all:",
            "--retries",
            "1",
            f"{name}=={self.version}",
        ]


#: packages in the order in which they are read, which matters: a sentence stays where
#: it comes first
PACKAGES = {
    "oci": PackageArchive(
        "2.189.0",
        "oci-2.189.0-py3-none-any.whl",
        "134e7cc634d4963ffc0c5411e9c2b2d8695d2f154fd5f8b873dd9fa8a4cb36a6",
        "UPL-1.0 OR Apache-2.0",
        python_wheel,
    ),
    "botocore": PackageArchive(
        "1.44.8",
        "botocore-1.44.8-py3-none-any.whl",
        "76342a76c338701db80dcb8afe1c9bd079283d6fffbb9d881442abb02a215043",
        "Apache-2.0",
        described(r"botocore/data/([^/]+)/[^/]+/service-2\.json(?:\.gz)?", "documentation"),
    ),
    "google-api-python-client": PackageArchive(
        "2.202.0",
        "google_api_python_client-2.202.0-py3-none-any.whl",
        "aaa90064c9bb642ff1d065b22ca8958a2cb6e345909cefe70d0e5452fc50e08b",
        "Apache-2.0",
        described(r"(googleapiclient/discovery_cache/documents/.+\.json)", "description"),
    ),
    "openjdk-17-source": PackageArchive(
        "17.0.19+10-1~deb12u2",
        "openjdk-17-source_17.0.19+10-1~deb12u2_all.deb",
        "2591b37131025f872f057be99467b45f7fa2aed928c8d779208db9c3239e1190",
        "GPL-2.0-only WITH Classpath-exception-2.0",
        java_package,
    ),
    "linux-source-6.1": PackageArchive(
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
    """Prepare the English text of packages in `out`; return the content of meta.json.

    By default it is that of all of `PACKAGES`. A document is a file of a package,
    without the sentences of earlier documents. The hash of its name decides on its
    split, one in `VAL_FILE_INTERVAL` for validation, and on its place there. With `data_dir`
    the archives are read from that folder; otherwise they are downloaded into a
    temporary one. A corpus of another text is replaced only with `replace`.
    """
    for name in packages or ():
        if name not in PACKAGES:
            raise unknown("package", name, PACKAGES)
    chosen = dict(PACKAGES)
    if packages is not None:
        chosen = {name: package for name, package in PACKAGES.items() if name in packages}
    check_corpus_folder(out)
    if not replace:
        _check_archives(out, chosen)
    split_limits(limit)
    check_tokenizer(tokenizer)
    with _archives(chosen, data_dir, out, progress) as archives:
        prose = _read_prose(archives, progress)
    splits: dict[str, list[str]] = {"train": [], "val": []}
    digest = hashlib.sha256()
    for name_hash in sorted(prose.documents):
        text = prose.documents[name_hash]
        is_validation = int.from_bytes(name_hash[:8]) % VAL_FILE_INTERVAL == 0
        splits["val" if is_validation else "train"].append(text)
        digest.update(text.encode("utf-8"))
    source = {
        "kind": "packages",
        "packages": prose.facts,
        "sha256": digest.hexdigest(),
        "documents": len(prose.documents),
    }
    check_replaced(out, source, replace=replace)
    vocabulary = ""
    if tokenizer == TokenizerKind.CHAR:
        vocabulary = "".join(splits["train"]) + "".join(splits["val"])
    made_tokenizer = make_tokenizer(tokenizer, vocabulary, splits["train"])
    return write_corpus(out, splits, made_tokenizer, source, progress, limit, replace=replace)


def _check_archives(out: Path, chosen: dict[str, PackageArchive]) -> None:
    """Refuse a folder that holds a text of other archives, before any is downloaded."""
    present_source = source_in(out)
    if present_source is None:
        return
    packages = present_source.get("packages")
    present_digests = {}
    for name, facts in (packages if isinstance(packages, dict) else {}).items():
        present_digests[name] = facts.get("sha256") if isinstance(facts, dict) else None
    if present_digests != {name: package.sha256 for name, package in chosen.items()}:
        raise another_text(out, present_source, {"kind": "packages"})


@contextmanager
def _archives(
    chosen: dict[str, PackageArchive], folder: Path | None, out: Path, progress: bool
) -> Iterator[dict[str, Path]]:
    """Yield the archive of each package, its sha256 checked.

    Downloads are removed after the block.
    """
    if folder is not None:
        yield {name: _checked_archive(name, chosen, folder) for name in chosen}
        return
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary = tempfile.TemporaryDirectory(prefix=f".{out.name}.downloads-", dir=out.parent)
    except OSError as error:
        raise refused(f"--out {str(out)!r} can't be written", error) from None
    with temporary as downloads:
        archives = {}
        for name, package in chosen.items():
            with _bar(f"downloading {name}", progress):
                failure = _download(package.command(name), downloads)
            archives[name] = _checked_archive(name, chosen, Path(downloads), failure)
        yield archives


def _download(command: list[str], folder: str) -> str:
    """Run a registry's client; return its error message, or "" if it succeeded."""
    try:
        client = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, "LC_ALL": "C"},
            capture_output=True,
            check=False,
            text=True,
        )
    except OSError as error:
        return f"{command[0]}: {error.strerror}"
    if not client.returncode:
        return ""
    lines = client.stderr.splitlines()
    errors = [line for line in lines if line.lower().startswith(("e:", "error:"))]
    return one_line((errors or lines or ["it failed"])[-1])


def _checked_archive(
    name: str, chosen: dict[str, PackageArchive], folder: Path, failure: str = ""
) -> Path:
    """Return a package's archive in a folder; `failure` is that of its download."""
    package = chosen[name]
    archive = folder / package.archive
    if archive.is_file():
        digest = sha256(archive)
        if digest == package.sha256:
            return archive
        failure = f"{str(archive)!r} has sha256 {digest}, but {package.sha256} is expected"
    reason = f"; {failure}" if failure else f": it is not in {str(folder)!r}"
    other_packages = ",".join(chosen_name for chosen_name in chosen if chosen_name != name)
    alternative = (
        f"; or leave the package out: --packages {other_packages}" if other_packages else ""
    )
    raise BenchError(
        f"prepare packages can't get {package.archive}{reason}; get it with: "
        f"{package.command_to_type(name)}; then give its folder as --data-dir{alternative}"
    )


@contextmanager
def _bar(task_name: str, show: bool) -> Iterator[Callable[[str], None]]:
    """Show the task, its progress and its time on standard error.

    Yields a function that updates the progress.
    """
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    bar = Progress(
        SpinnerColumn(),
        TextColumn(f"{task_name} {{task.description}}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        disable=not show,
        transient=True,
    )
    with bar:
        task = bar.add_task("")
        yield lambda progress: bar.update(task, description=progress)


class _Prose(NamedTuple):
    """The documents of packages, by the hash of their names, and facts about these."""

    documents: dict[bytes, str]
    #: each package's entry in meta.json
    facts: dict[str, dict[str, Any]]


def _read_prose(archives: dict[str, Path], progress: bool) -> _Prose:
    known = Sentences()
    documents: dict[bytes, str] = {}
    facts: dict[str, dict[str, Any]] = {}
    for name, archive in archives.items():
        package = PACKAGES[name]
        count = 0
        size = 0
        with _bar(f"reading {name}", progress) as show:
            for file in package.read(archive):
                new_texts = [known.new(text) for text in file.texts]
                document = "\n\n".join(text for text in new_texts if text)
                if document:
                    name_hash = hashlib.sha256(f"{name}/{file.path}".encode()).digest()
                    documents[name_hash] = document
                    count += 1
                    size += len(document.encode("utf-8"))
                    show(f"{size:,} bytes")
        facts[name] = {
            "version": package.version,
            "archive": package.archive,
            "sha256": package.sha256,
            "licence": package.licence,
            "documents": count,
            "bytes": size,
        }
    return _Prose(documents, facts)
