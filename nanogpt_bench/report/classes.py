"""The classes of failure found in runs, as a verdict names them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from nanogpt_bench.runs.load import Run

NAMES = {"nan": "NaN"}
#: those that say of the loss itself that it went wrong; the others say what may have made it so
OF_THE_LOSS = ("nan", "divergence")
MOST = 2  # classes that a verdict names


def class_name(kind: str) -> str:
    """A class of failure in words.

    >>> class_name("zero_gradients"), class_name("nan")
    ('zero gradients', 'NaN')
    """
    return NAMES.get(kind, kind.replace("_", " "))


def classes_found(runs: Sequence[Run], *, of_the_loss: bool = False) -> list[str]:
    """The classes found in the runs of one row: those of the loss first, then in the order in which they set in."""
    kinds = _counts(runs)
    ranked = sorted(kinds, key=lambda kind: kind not in OF_THE_LOSS)
    return [kind for kind in ranked if kind in OF_THE_LOSS] if of_the_loss else ranked


def in_words(kinds: Sequence[str], runs: Sequence[Run], figures: Mapping[str, str] | None = None) -> str:
    """The first classes by name, each with the seeds it was found in unless it is all; and how many more there are.

    `figures` has what stands for a class whose size is known, such as `stall 90%`.
    """
    counts, told = _counts(runs), figures or {}
    words = [told.get(kind, class_name(kind)) + _seeds(counts[kind], len(runs)) for kind in kinds[:MOST]]
    more = len(kinds) - MOST
    return ", ".join(words) + (f" and {more} more" if more > 0 else "")


def _counts(runs: Sequence[Run]) -> Counter[str]:
    """How many of the runs each class was found in."""
    return Counter(kind for run in runs for kind in dict.fromkeys(finding.kind for finding in run.findings))


def _seeds(found: int, of: int) -> str:
    return f" ({found} of {of} seeds)" if found < of else ""
