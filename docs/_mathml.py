"""Formulas as MathML, which browsers lay out themselves.

Pages need neither a script nor a network for them. Three things that latex2mathml makes
of LaTeX are corrected in its tree:

    stall            five letters that are multiplied      -> one name
    f(-x), |x|       blanks around a sign and around bars  -> none
    a line over ab   a sign that few fonts can stretch     -> a border
"""

from typing import Any, Protocol
from xml.etree.ElementTree import Element, tostring
from xml.sax.saxutils import unescape

from docutils import nodes
from latex2mathml.converter import convert_to_element

# latex2mathml writes an operator as a character or as an entity.
OPENING = {"(", "&#x00028;", ",", "&#x0002C;"}
MINUS = {"-", "&#x02212;"}
BARS = {"|", "&#x0007C;"}
LINES = {"&#x02015;", "&#x000AF;", "&#x00305;", "&#x0203E;", "¯"}


class Writer(Protocol):
    """The part of Sphinx's HTML writer that is used."""

    body: list[str]

    def starttag(
        self, node: nodes.Element, tagname: str, suffix: str = "", **attributes: Any
    ) -> str:
        """Return the opening tag of a node, with its classes and identifiers."""
        ...


def mathml(formula: str, display: str) -> str:
    r"""Return a formula in LaTeX as MathML.

    Rows that end with two backslashes are aligned at ampersands.

    >>> '<mo form="prefix">' in mathml("f(-x)", "inline")
    True
    >>> '<mo form="prefix">' in mathml("1 - x", "inline")
    False
    >>> ">stall<" in mathml("stall = 2 ab", "inline")
    True
    >>> "<mtable" in mathml(r"a &= b \\ c &= d", "block")
    True
    """
    if r"\\" in formula:
        formula = rf"\begin{{align*}}{formula}\end{{align*}}"
    root = convert_to_element(formula, display=display)
    for element in root.iter():
        _join_words(element)
        _remove_blanks(list(element))
        _draw_lines(element)
    return unescape(tostring(root, encoding="unicode"))


def _join_words(parent: Element) -> None:
    """Make three or more small letters in a row a name; its last letter may have an index."""
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


def _remove_blanks(children: list[Element]) -> None:
    """Remove the blanks around signs and bars.

    A minus after a bracket or a comma is a sign. A bar is no operator.
    """
    previous: Element | None = None
    for child in children:
        if child.tag == "mo" and not child.attrib.get("form"):
            if child.text in MINUS and _is_opening(previous):
                child.set("form", "prefix")
            if child.text in BARS:
                child.attrib |= {"lspace": "0", "rspace": "0"}
        previous = child


def _is_opening(element: Element | None) -> bool:
    return element is not None and element.tag == "mo" and element.text in OPENING


def _draw_lines(element: Element) -> None:
    """Draw a line over more than a letter as a border.

    Only mathematical fonts can stretch the sign.
    """
    if element.tag != "mover" or len(element) != 2:
        return
    base, accent = element
    if base.tag == "mrow" and accent.text in LINES:
        element.tag = "mrow"
        element.remove(accent)
        element.set("style", "border-top: 0.07em solid; padding-top: 0.15em")


def inline(writer: Writer, node: nodes.math) -> None:
    """Write a formula within a line."""
    writer.body.append(mathml(node.astext(), "inline"))
    raise nodes.SkipNode


def block(writer: Writer, node: nodes.math_block) -> None:
    """Write a formula in a block, which scrolls on screens narrower than it."""
    formula = mathml(node.astext().strip(), "block")
    writer.body.append(f"{writer.starttag(node, 'div', CLASS='math')}{formula}</div>\n")
    raise nodes.SkipNode


def setup(app: Any) -> dict[str, bool]:
    """Register `mathml` as one of Sphinx's ways to write formulas."""
    app.add_html_math_renderer("mathml", (inline, None), (block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
