"""Links to files that the site leaves out: into the repository where its address is
known, else to copies.
"""

import re
from importlib.metadata import metadata
from typing import Any

LINK = re.compile(r"\]\(((?:\.\./)+)((?:study|fp8manifold)/[\w/-]+\.(?:md|py))(#[\w-]*)?\)")


def repository() -> str | None:
    """Address of the repository's files, from the package's metadata."""
    urls = dict(
        line.split(", ", 1) for line in metadata("fp8manifold").get_all("Project-URL") or []
    )
    return urls["Documentation"].removesuffix("docs") if "Documentation" in urls else None


def redirected(text: str, address: str | None) -> str:
    """A page's text with its links to `study/` redirected; a link to a copy downloads
    the file.

    >>> redirected("[Q1](../study/study-q1.md#a), [Q2](../study/study-q2.md)", "https://github.com/o/p/tree/main/")
    '[Q1](https://github.com/o/p/tree/main/study/study-q1.md#a), [Q2](https://github.com/o/p/tree/main/study/study-q2.md)'
    >>> redirected("[Q1](../study/study-q1.md#a), [Q2](start.md)", None)
    '[Q1](path:../study/study-q1.md), [Q2](start.md)'
    """
    return LINK.sub(r"](path:\1\2)" if address is None else rf"]({address}\2\3)", text)


def setup(app: Any) -> dict[str, bool]:
    """Make Sphinx redirect the links in every page that it reads."""
    address = repository()

    def read(_app: Any, _page: str, source: list[str]) -> None:
        source[0] = redirected(source[0], address)

    app.connect("source-read", read)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
