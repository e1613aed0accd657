"""Formulas as MathML, which browsers lay out themselves: pages need neither a script
nor a network for them.
"""

from typing import Any, Protocol
from xml.etree.ElementTree import Element, tostring
from xml.sax.saxutils import unescape

from docutils import nodes
from latex2mathml.converter import convert_to_element

OPENING = {"(", "&#x00028;", ",", "&#x0002C;"}
MINUS, BARS, LINES = (
    {"-", "&#x02212;"},
    {"|", "&#x0007C;"},
    {"&#x02015;", "&#x000AF;", "&#x00305;", "&#x0203E;", "¯"},
)


class Writer(Protocol):
    """The part of Sphinx's HTML writer that is used."""

    body: list[str]

    def starttag(
        self, node: nodes.Element, tagname: str, suffix: str = "", **attributes: Any
    ) -> str:
        """The opening tag of a node, with its classes and identifiers."""
        ...


def mathml(formula: str, display: str) -> str:
    r"""A formula in LaTeX as MathML; rows that end with two backslashes are aligned at
    ampersands.

    >>> '<mo form="prefix">' in mathml("f(-x)", "inline"), '<mo form="prefix">' in mathml("1 - x", "inline")
    (True, False)
    >>> ">stall<" in mathml("stall = 2 ab", "inline"), "<mtable" in mathml(r"a &= b \\ c &= d", "block")
    (True, True)
    """
    rows = rf"\begin{{align*}}{formula}\end{{align*}}" if r"\\" in formula else formula
    root = convert_to_element(rows, display=display)
    for element in root.iter():
        _join_words(element)
        _space(list(element))
        _draw_lines(element)
    return unescape(tostring(root, encoding="unicode"))


def _join_words(parent: Element) -> None:
    """Three or more small letters in a row are a name, not a product; its last letter
    may carry an index.
    """
    run: list[Element] = []
    for child in [*parent, Element("end")]:
        if _is_letter(child):
            run.append(child)
            continue
        if len(run) > 1 and child.tag == "msub" and _is_letter(child[0]):
            _join(parent, run, child[0])
        elif len(run) > 2:
            _join(parent, run[:-1], run[-1])
        run = []


def _is_letter(element: Element) -> bool:
    text = element.text or ""
    return element.tag == "mi" and len(text) == 1 and text.isascii() and text.islower()


def _join(parent: Element, letters: list[Element], last: Element) -> None:
    last.text = "".join(letter.text or "" for letter in [*letters, last])
    for letter in letters:
        parent.remove(letter)


def _space(children: list[Element]) -> None:
    """A minus after a bracket or a comma is a sign, and a bar no operator: neither has
    space around it.
    """
    for before, child in zip([None, *children], children, strict=False):
        if child.tag != "mo" or child.attrib.get("form"):
            continue
        if (
            child.text in MINUS
            and before is not None
            and before.tag == "mo"
            and before.text in OPENING
        ):
            child.set("form", "prefix")
        if child.text in BARS:
            child.attrib |= {"lspace": "0", "rspace": "0"}


def _draw_lines(element: Element) -> None:
    """A line over more than a letter is drawn as a border, because only mathematical
    fonts can stretch the sign.
    """
    if (
        element.tag == "mover"
        and len(element) == 2
        and element[0].tag == "mrow"
        and element[1].text in LINES
    ):
        element.tag = "mrow"
        element.remove(element[1])
        element.set("style", "border-top: 0.07em solid; padding-top: 0.15em")


def inline(writer: Writer, node: nodes.math) -> None:
    """A formula within a line."""
    writer.body.append(mathml(node.astext(), "inline"))
    raise nodes.SkipNode


def block(writer: Writer, node: nodes.math_block) -> None:
    """A formula in a block, which scrolls on screens narrower than it."""
    formula = mathml(node.astext().strip(), "block")
    writer.body.append(f"{writer.starttag(node, 'div', CLASS='math')}{formula}</div>\n")
    raise nodes.SkipNode


def setup(app: Any) -> dict[str, bool]:
    """Register `mathml` as one of Sphinx's ways to write formulas."""
    app.add_html_math_renderer("mathml", (inline, None), (block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
