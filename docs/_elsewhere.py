"""A Sphinx extension that redirects links to files that the site leaves out.

Where the repository's address is known, such a link leads into the repository.
Otherwise it downloads a copy of the file.
"""

import re
from importlib.metadata import metadata
from typing import Any

LINK = re.compile(r"\]\(((?:\.\./)+)((?:study|fp8manifold)/[\w/-]+\.(?:md|py))(#[\w-]*)?\)")


def repository() -> str | None:
    """Return the address of the repository's files, from the package's metadata."""
    for line in metadata("fp8manifold").get_all("Project-URL") or []:
        name, _, url = line.partition(", ")
        if name == "Documentation":
            return str(url).removesuffix("docs")
    return None


def redirected(text: str, address: str | None) -> str:
    """Return a page's text with its links to left-out files redirected.

    >>> address = "https://github.com/o/p/tree/main/"
    >>> redirected("[Q1](../study/study-q1.md#a), [Q2](start.md)", address)
    '[Q1](https://github.com/o/p/tree/main/study/study-q1.md#a), [Q2](start.md)'
    >>> redirected("[Q1](../study/study-q1.md#a), [Q2](start.md)", None)
    '[Q1](path:../study/study-q1.md), [Q2](start.md)'
    """
    if address is None:
        return LINK.sub(r"](path:\1\2)", text)
    return LINK.sub(rf"]({address}\2\3)", text)


def setup(app: Any) -> dict[str, bool]:
    """Make Sphinx redirect the links in every page that it reads."""
    address = repository()

    def redirect_links(_app: Any, _page: str, source: list[str]) -> None:
        source[0] = redirected(source[0], address)

    app.connect("source-read", redirect_links)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
