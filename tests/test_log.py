"""The log is in order, and its table of contents names its parts."""

import datetime
import re
from pathlib import Path

import pytest

LOG = (Path(__file__).parent.parent / "docs" / "log.md").read_text(encoding="utf-8")
CONTENTS, _, BODY = LOG.partition("<!-- contents -->\n")[2].partition("\n\n")
PARTS = {part.partition("\n")[0]: part for part in re.split(r"^## ", BODY, flags=re.MULTILINE)[1:]}


def test_the_contents_are_the_parts() -> None:
    listed = re.findall(r"\[([^]]+)\]\(#([^)]+)\)", CONTENTS)
    assert [title for title, _ in listed] == list(PARTS)
    assert [anchor for _, anchor in listed] == [title.lower().replace(" ", "-") for title in PARTS]


@pytest.mark.parametrize("title", PARTS)
def test_entries_are_dated_newest_first(title: str) -> None:
    headings = re.findall(r"^### (.+)$", PARTS[title], re.MULTILINE)
    dated = headings or re.findall(r"^- (.+)$", PARTS[title], re.MULTILINE)
    dates = [datetime.date.fromisoformat(text.partition(": ")[0]) for text in dated]
    assert dates == sorted(dates, reverse=True) != []
