"""The parsers of what people write and of what a checkpoint holds, each as a function of one input.

What is wrong with the input is said by a `ValueError` of one line, of the bench's own kind where the command line
turns it into exit code 2; anything else, and more than some seconds of a core, is a failure.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import fp8manifold as fm
from nanogpt_bench.checkpoint.format import restore_tree
from nanogpt_bench.config.settings import load_config
from nanogpt_bench.setup.resolve import resolve
from nanogpt_bench.sweep.file import read_sweep
from nanogpt_bench.sweep.plan import count_points, plan_sweep
from nanogpt_bench.system.errors import BenchError

#: of a core; the slowest input that is refused takes a tenth of it
MOST_SECONDS = 20.0
#: of a sweep that is planned to its end, which takes a tenth of a second a run
MOST_PLANNED = 2
LONGEST_MESSAGE = 5000

CLASSES = (fm.FP8Tensor,)


class TooSlow(Exception):
    """A parser took longer than any input may take."""


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """End the block by `TooSlow` after so many seconds of a core."""

    def stop(*_: object) -> None:
        raise TooSlow(f"more than {seconds:g} s of a core")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def is_taken(parse: Callable[[], object], kind: type[ValueError] = BenchError) -> bool:
    """Whether an input is taken; False where it is refused as it should be, an exception where it is not."""
    try:
        with at_most(MOST_SECONDS):
            parse()
    except kind as error:
        said = str(error)
        assert said, "an error without a word"
        assert said.isprintable(), f"an error of more than one line, or of what a terminal obeys: {said!r}"
        assert len(said) <= LONGEST_MESSAGE, f"an error of {len(said):,} characters: {said[:200]!r}"
        return False
    return True


def config(path: Path, arguments: list[str]) -> None:
    """Read a configuration and fill in what it leaves open; one that starts from a checkpoint's weights without it."""
    found = load_config(path, arguments)
    found.model.init_from = None
    resolve(found)


def sweep(path: Path, arguments: list[str]) -> None:
    """Read a sweep file and plan what is planned quickly."""
    found = read_sweep(path, [*arguments, "--model.init_from=null"])
    if count_points(found) <= MOST_PLANNED:
        plan_sweep(found)


def format_name(name: str) -> None:
    """Read a format's name; the name that it has then is read back as the same format."""
    found = fm.FloatFormat.from_string(name)
    assert fm.FloatFormat.from_string(found.name) == found
    assert math.isfinite(found.max)


def tree(tensors: dict[str, torch.Tensor], outline: Any) -> None:
    """Put a tree together."""
    restore_tree(tensors, outline, CLASSES)
