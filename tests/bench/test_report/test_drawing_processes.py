"""What draws does not survive a fork: it is refused there, where it would wait for ever."""

import os

import pytest

from nanogpt_bench.report import figures
from nanogpt_bench.system.errors import BenchError


@pytest.mark.parametrize("call", [lambda: figures.svg({}), lambda: figures.javascript("")], ids=["svg", "javascript"])
def test_a_forked_process_is_refused(call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "_process", [os.getpid() + 1])
    with pytest.raises(BenchError, match="forked from one that drew"):
        call()


def test_a_description_that_can_not_be_drawn_is_one_line() -> None:
    with pytest.raises(BenchError, match="a figure can't be drawn: ") as caught:
        figures.svg({"mark": "none", "data": {"values": []}})
    assert "\n" not in str(caught.value)
