"""A Sphinx extension for pages in plain Markdown, as the repository shows them.

Pages have no roles and directives, so that they read well in the repository too. What
Sphinx needs is added while it reads them:

    the home page and the index of the API   each heading's links to pages become a
                                             table of contents under its name
    links to examples                        lead to their pages in the gallery
    names of the API in code                 the first of each on a page is a link
    blocks that name no language             are output or a drawing, and not coloured as
                                             the Python that Sphinx takes them for
"""

import re
from collections.abc import Iterator
from typing import Any

from docutils import nodes
from sphinx.util.nodes import make_refnode

PAGE = re.compile(r"\]\(((?!\.\.)[\w/-]+)\.(?:md|rst)\)")
EXAMPLE = re.compile(r"\]\(\.\./(examples)(/\w+)?(?:\.py)?\)")
NAME = re.compile(
    r"(?:fm\.|fp8manifold\.)?"
    r"(?P<module>(?:optim|ops|files|huggingface|distributed|reference)\.)?"
    r"(?P<name>[\w.]+)(?P<call>\(\))?"
)
MODULES = ("", "optim.", "ops.", "files.", "huggingface.", "distributed.", "reference.")
CONTENTS = """
```{{toctree}}
:hidden:
:maxdepth: 1
:caption: {title}

{pages}
```
"""


def contents(text: str) -> str:
    r"""Return a hidden table of contents for each heading with links to pages.

    A page that several headings link to is in the first of the tables only.

    >>> page = "# Home\n## Use\n[A](a.md), [B](b/c.rst), [A](a.md)\n## Other\n[S](../s.md)\n"
    >>> print(contents(page))
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
    known_pages: set[str] = set()
    tables = []
    for part in text.split("\n## ")[1:]:
        title, _, body = part.partition("\n")
        pages = [page for page in dict.fromkeys(PAGE.findall(body)) if page not in known_pages]
        known_pages.update(pages)
        if pages:
            tables.append(CONTENTS.format(title=title, pages="\n".join(pages)))
    return "".join(tables)


def candidates(text: str) -> Iterator[str]:
    """Yield the full names that a name on a page may stand for.

    A bare word in small letters stands for none.

    >>> list(candidates("fm.ulp")), list(candidates("step")), next(candidates("StiffnessAdamW"))
    (['fp8manifold.ulp'], [], 'fp8manifold.StiffnessAdamW')
    """
    match = NAME.fullmatch(text)
    if match is None or _is_bare_word(text):
        return
    is_unqualified = text == match["name"] + (match["call"] or "")
    modules = MODULES if is_unqualified else (match["module"] or "",)
    for module in modules:
        yield f"fp8manifold.{module}{match['name']}"


def _is_bare_word(text: str) -> bool:
    return text.islower() and not any(sign in text for sign in "_.(")


def _complete_page(_app: Any, page: str, source: list[str]) -> None:
    """Redirect links to examples, and add the contents of the two index pages."""
    text = EXAMPLE.sub(lambda link: f"]({link[1]}{link[2] or '/index'}.rst)", source[0])
    if page in ("index", "api/index"):
        text += contents(text)
    source[0] = text


def _name_languages(_app: Any, doctree: nodes.document) -> None:
    """Give the blocks that name no language the name of none."""
    for block in doctree.findall(nodes.literal_block):
        block.attributes.setdefault("language", "none")


def _link_names(app: Any, doctree: nodes.document, page: str) -> None:
    """Make the first mention of a name on a page a link to its entry in the API."""
    if page.startswith(("api/", "examples/")):
        return
    objects = app.env.domains["py"].objects
    linked: set[str] = set()
    for literal in list(doctree.findall(nodes.literal)):
        if isinstance(literal.parent, nodes.reference):
            continue
        name = next((name for name in candidates(literal.astext()) if name in objects), None)
        if name is None or name in linked or objects[name].docname == page:
            continue
        linked.add(name)
        entry = objects[name]
        link = make_refnode(
            app.builder, page, entry.docname, entry.node_id, literal.deepcopy(), name
        )
        literal.replace_self(link)


def setup(app: Any) -> dict[str, bool]:
    """Complete pages as they are read, and link names when all pages are known."""
    app.connect("source-read", _complete_page)
    app.connect("doctree-read", _name_languages)
    app.connect("doctree-resolved", _link_names)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
