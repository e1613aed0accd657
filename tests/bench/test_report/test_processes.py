"""The page's table of runs in several processes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from nanogpt_bench.report.page import PROCESS_HEADINGS, processes_section
from nanogpt_bench.report.rows import Row
from nanogpt_bench.runs.load import Run

FACTS = {"parallel": "fsdp", "count": 2, "held_bytes": [1000, 2000], "peak_bytes": [1, 3], "sent_bytes": 4567}


def cells(facts: Any) -> list[str] | None:
    summary = {"name": "a", "tokens_per_s": 1234.5, "processes": facts}
    rows = [
        Row("one", "fp32", "none", (Run(Path("b")),)),
        Row("two", "fp32", "none", (Run(Path("a"), summary=summary),)),
    ]
    section = processes_section(rows)
    return None if section is None else re.findall(r"<td>(.*?)</td>", section.body)


def test_the_process_with_most_of_it_counts() -> None:
    found = cells(FACTS)
    assert found == ["two · a", "fsdp", "2", "2,000 bytes", "3 bytes", "4,567 bytes", "1,234"]
    assert len(found) == len(PROCESS_HEADINGS)


@pytest.mark.parametrize("facts", [None, {}, [], "x", 3])
def test_without_processes_there_is_no_table(facts: Any) -> None:
    assert cells(facts) is None


def test_what_a_file_lacks_is_a_dash_and_its_words_are_no_markup() -> None:
    assert cells({"parallel": "<b>", "held_bytes": ["x", None]}) == [
        *("two · a", "&lt;b&gt;"),
        *["-"] * 4,
        "1,234",
    ]
