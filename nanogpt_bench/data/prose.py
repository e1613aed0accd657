"""English in the archives of packages: documentation and comments, file by file, without sentences that came before."""

import gzip
import hashlib
import html
import io
import json
import re
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from nanogpt_bench.data.text import docstrings

#: a file's path in its archive, and the texts in it
File = tuple[str, list[str]]
Reader = Callable[[Path], Iterator[File]]

#: characters of the shortest text, and of the shortest sentence that is looked for in other texts
SHORTEST = 40
#: where a sentence ends: behind its mark, or before an empty line
_END = re.compile(r"[.!?]\s+|\n[ \t]*\n\s*")
_TAG = re.compile(r"</?[A-Za-z][^<>]*>")
_BLANKS = re.compile(r"[ \t]+")
#: a text of C or Java in quotes, which is passed over, or a comment: of one form, or lines of the other
_COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|/\*.*?\*/|//[^\n]*(?:\n[ \t]*//[^\n]*)*', re.DOTALL)
_MARKS = re.compile(r"^[ \t]*\*+/?[ \t]?|/\*+!?|\*+/|^[ \t]*//+!?[ \t]?", re.MULTILINE)
_INLINE = re.compile(r"\{@\w+\s*([^{}]*)\}")
_LICENCE = re.compile(
    r"SPDX|GNU (?:Lesser )?General Public|Permission is hereby granted|SOFTWARE IS PROVIDED|WITHOUT WARRANTY|"
    r"Redistribution and use|free software",
    re.IGNORECASE,
)
#: in C sources larger than this one finds tables of registers
LARGEST_SOURCE = 3_000_000


class Sentences:
    """Texts without the sentences of at least `SHORTEST` characters that came before, whatever blanks are in them."""

    def __init__(self) -> None:
        self._texts, self._sentences = set[bytes](), set[bytes]()

    def new(self, text: str) -> str:
        """Return what is new in a text, "" where that is too short; a short sentence goes with the one before it.

        >>> known = Sentences()
        >>> known.new("The first of the sentences is long enough. The second sentence is as long as that one.")[:18]
        'The first of the s'
        >>> known.new("A third sentence, of which no text had a word. The second sentence is as long as that one. So.")
        'A third sentence, of which no text had a word.'
        """
        kept, keep = [], _first(" ".join(text.split()), self._texts)
        for sentence in sentences(text):
            if len(words := " ".join(sentence.split())) >= SHORTEST:
                keep = _first(words, self._sentences)
            if keep:
                kept.append(sentence)
        left = "".join(kept).strip()
        return left if len(left) >= SHORTEST else ""


def _first(text: str, seen: set[bytes]) -> bool:
    """Whether a text was not seen before, but is from now on."""
    count = len(seen)
    seen.add(hashlib.blake2b(text.encode(), digest_size=8).digest())
    return len(seen) > count


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a text, each with the blanks behind it.

    >>> list(sentences("It says so. Here is what\\nfollows.\\n\\nA title\\n\\nThe end"))
    ['It says so. ', 'Here is what\\nfollows.\\n\\n', 'A title\\n\\n', 'The end']
    """
    start = 0
    for end in _END.finditer(text):
        yield text[start : end.end()]
        start = end.end()
    yield text[start:]


def without_markup(text: str) -> str:
    """Return a text of HTML as it reads.

    >>> without_markup("<p>The  number of <code>x</code> &gt; 0</p>")
    'The number of x > 0'
    """
    return _BLANKS.sub(" ", html.unescape(_TAG.sub(" ", text))).strip()


def comments(source: str) -> list[str]:
    """Return the comments of C or Java, without marks and markup, and without those that are about a licence.

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
    """Return what reads the texts under a key of JSON files in a wheel, of each path's first group the last file."""

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
    """Yield the documentation, and the comments in the sources, of a Debian package with the kernel's archive."""
    with _member(package, ".tar.xz") as inner, tarfile.open(fileobj=inner, mode="r|xz") as archive:
        for member in archive:
            name = member.name.partition("/")[2]
            taken = _of_linux(name)
            if taken and member.isfile() and member.size < LARGEST_SOURCE and (file := archive.extractfile(member)):
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
    """Open the first file of a Debian package whose name ends so, as a stream."""
    with package.open("rb") as file:
        file.seek(8)  # behind the mark of an ar archive, whose members have a header of 60 bytes each
        while not (header := file.read(60)).startswith(b"data.tar"):
            size = int(header[48:58])
            file.seek(size + size % 2, 1)
        with tarfile.open(fileobj=file, mode="r|*") as data:
            found = next(member for member in data if member.isfile() and member.name.endswith(suffix))
            stream = data.extractfile(found)
            assert stream is not None  # an ordinary file has one
            yield stream
