"""Vega, which draws: JavaScript in threads of its own, so that it does not survive a fork of its process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import vl_convert

from nanogpt_bench.system.errors import BenchError, one_line

_process: list[int] = []
"""The process that has started it."""


def javascript(code: str) -> str:
    """Return Vega's own code, bundled with `code`; putting it together takes seconds."""
    _start()
    bundle: str = vl_convert.javascript_bundle(code)
    return bundle


def svg(spec: Mapping[str, Any]) -> str:
    """Draw a description as SVG.

    Raises:
        BenchError: this process was forked from one that had drawn, where nothing can be drawn; or Vega refuses.
    """
    _start()
    try:
        drawn: str = vl_convert.vegalite_to_svg(dict(spec))
    except ValueError as error:
        raise BenchError(f"a figure can't be drawn: {one_line(error)}") from None
    return drawn


def _start() -> None:
    if _process and _process[0] != os.getpid():
        raise BenchError("charts can't be drawn in a process that was forked from one that drew: start it anew (spawn)")
    _process[:] = [os.getpid()]
