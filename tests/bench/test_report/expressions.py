"""The expressions of a chart: all that Vega evaluates, so that nothing a run says may be among it."""

from __future__ import annotations

from typing import Any

KEYS = ("filter", "calculate", "labelExpr", "expr", "test", "signal", "init", "update", "href", "url")


def expressions(node: Any) -> list[str]:
    """Every text in a description that stands where an expression or an address may stand; data have none."""
    if isinstance(node, list):
        return [found for part in node for found in expressions(part)]
    if not isinstance(node, dict):
        return []
    own = [str(part) for key, part in node.items() if key in KEYS]
    return own + [found for key, part in node.items() if key != "data" for found in expressions(part)]
