"""Formulas as MathML, which browsers lay out themselves: pages need neither a script nor a network for them."""

import re
from typing import Any, Protocol

from docutils import nodes
from latex2mathml.converter import convert


class Writer(Protocol):
    """What is needed of Sphinx's HTML writer."""

    body: list[str]

    def starttag(self, node: nodes.Element, tagname: str, suffix: str = "", **attributes: Any) -> str:
        """The opening tag of a node, with its classes and identifiers."""
        ...


#: after an opening bracket or a comma a minus is a sign, which has no space behind it
SIGN = re.compile(r"(<mo[^>]*>(?:\(|&#x00028;|,|&#x0002C;)</mo>)<mo>(?=&#x02212;)")


def mathml(formula: str, display: str) -> str:
    """A formula in LaTeX as MathML.

    >>> "<mo form=" in mathml("f(-x)", "inline"), "<mo form=" in mathml("1 - x", "inline")
    (True, False)
    """
    return SIGN.sub(r'\1<mo form="prefix">', convert(formula, display=display))


def inline(writer: Writer, node: nodes.math) -> None:
    """A formula within a line."""
    writer.body.append(mathml(node.astext(), "inline"))
    raise nodes.SkipNode


def block(writer: Writer, node: nodes.math_block) -> None:
    """A formula of its own, which scrolls where a screen is narrower."""
    formula = mathml(node.astext().strip(), "block")
    writer.body.append(f"{writer.starttag(node, 'div', CLASS='math')}{formula}</div>\n")
    raise nodes.SkipNode


def setup(app: Any) -> dict[str, bool]:
    """Register as one of the ways in which Sphinx writes formulas, under the name `mathml`."""
    app.add_html_math_renderer("mathml", (inline, None), (block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
