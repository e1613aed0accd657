"""A Sphinx extension for pages in plain Markdown, as the repository shows them: names
of the API become links.

On the home page and in the index of the API, each heading's links to pages become a
table of contents under its name.
"""

import re
from collections.abc import Iterator
from typing import Any

from docutils import nodes
from sphinx.util.nodes import make_refnode

PAGE = re.compile(r"\]\(((?!\.\.)[\w/-]+)\.(?:md|rst)\)")
EXAMPLE = re.compile(r"\]\(\.\./(examples)(/\w+)?(?:\.py)?\)")
NAME = re.compile(
    r"(?:fm\.|fp8manifold\.)?((?:optim|ops|huggingface|distributed|reference)\.)?([\w.]+)(\(\))?"
)
PLACES = ("", "optim.", "ops.", "huggingface.", "distributed.", "reference.")


def contents(text: str) -> str:
    """A hidden table of contents for each heading with links to pages, each page in the
    first of them only.

    >>> print(contents("# Home\\n## Use\\n[A](a.md), [B](b/c.rst), [A](a.md)\\n## Other\\n[S](../s.md)\\n"))
    <BLANKLINE>
    ```{toctree}
    :hidden:
    :maxdepth: 1
    :caption: Use
    <BLANKLINE>
    a
    b/c
    ```
    <BLANKLINE>
    """
    seen: set[str] = set()
    made = []
    for part in text.split("\n## ")[1:]:
        title, _, body = part.partition("\n")
        pages = [page for page in dict.fromkeys(PAGE.findall(body)) if page not in seen]
        seen.update(pages)
        if pages:
            listed = "\n".join(pages)
            made.append(
                f"\n```{{toctree}}\n:hidden:\n:maxdepth: 1\n:caption: {title}\n\n{listed}\n```\n"
            )
    return "".join(made)


def candidates(text: str) -> Iterator[str]:
    """Full names that a name on a page may stand for; none for a bare word in small
    letters.

    >>> list(candidates("fm.ulp")), list(candidates("step")), next(candidates("StiffnessAdamW"))
    (['fp8manifold.ulp'], [], 'fp8manifold.StiffnessAdamW')
    """
    found = NAME.fullmatch(text)
    if not found or (text.islower() and "_" not in text and "." not in text and "(" not in text):
        return
    places = PLACES if text == found[2] + (found[3] or "") else (found[1] or "",)
    yield from (f"fp8manifold.{place}{found[2]}" for place in places)


def _read(_app: Any, page: str, source: list[str]) -> None:
    text = EXAMPLE.sub(lambda link: f"]({link[1]}{link[2] or '/index'}.rst)", source[0])
    source[0] = text + contents(text) if page in ("index", "api/index") else text


def _link_names(app: Any, doctree: nodes.document, page: str) -> None:
    """Make the first mention of a name on a page a link to its entry in the API."""
    objects = app.env.domains["py"].objects
    linked: set[str] = set()
    for literal in (
        [*doctree.findall(nodes.literal)] if not page.startswith(("api/", "examples/")) else []
    ):
        if isinstance(literal.parent, nodes.reference):
            continue
        full = next((name for name in candidates(literal.astext()) if name in objects), None)
        if full is None or full in linked or objects[full].docname == page:
            continue
        linked.add(full)
        entry = objects[full]
        target = make_refnode(
            app.builder, page, entry.docname, entry.node_id, literal.deepcopy(), full
        )
        literal.replace_self(target)


def setup(app: Any) -> dict[str, bool]:
    """Register both: contents are added as the home page is read, names are linked when
    all pages are known.
    """
    app.connect("source-read", _read)
    app.connect("doctree-resolved", _link_names)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
