"""Verdicts: what a row's runs amount to, in a word and a text.

A failure outranks an early end, which outranks the comparison of the losses with those
of the reference. `VERDICT_BOUNDS`, the bounds of `nanogpt_bench.failures.table`, decide.
"""

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from nanogpt_bench.config.endings import LOSS_FAILURES, FailureClass, RunStatus
from nanogpt_bench.failures.table import VERDICT_BOUNDS
from nanogpt_bench.runs.load import Run

#: the most classes of failure that a verdict names
MOST_CLASSES = 2
#: characters
LONGEST_ENDING = 160


def class_name(kind: str) -> str:
    """Return the display name of a failure class.

    >>> class_name("zero_gradients"), class_name("nan")
    ('zero gradients', 'NaN')
    """
    return "NaN" if kind == FailureClass.NAN else kind.replace("_", " ")


class Judgement(StrEnum):
    """The comparison of a row with its reference, in a word.

    The word is also the CSS class of the verdict's cell.
    """

    REFERENCE = "reference"
    WITHIN = "within"
    AHEAD = "ahead"
    DOUBTFUL = "doubtful"
    BEHIND = "behind"
    OUTSIDE = "outside"
    UNFINISHED = "unfinished"
    FAILED = "failed"
    INCOMPARABLE = "incomparable"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Verdict:
    """A judgement, and the text of the table's cell."""

    outcome: Judgement
    text: str


@dataclass(frozen=True)
class RowComparison:
    """The measurements on which a verdict is based; None where there is none."""

    #: (L - L_ref) / L_ref of the final validation losses in nats
    gap_share: float | None = None
    #: a share of weights
    stall: float | None = None
    #: the mean cosine of the gradient and the float32 shadow's
    cosine: float | None = None
    #: True for the reference itself
    reference: bool = False
    #: further differences from the reference, such as the corpus, which make the gap
    #: meaningless
    differing_facts: tuple[str, ...] = ()
    #: True if there is no reference
    lacks_reference: bool = False
    #: L - L_ref in nats
    gap: float | None = None
    #: the standard error of `gap`
    gap_error: float | None = None
    #: how far the reference's validation loss fell, as a share of its final one
    reference_fall: float | None = None


def judge_row(runs: Sequence[Run], evidence: RowComparison) -> Verdict:
    """Return the verdict on the runs of one row (its seeds).

    A row ahead or within reach of the reference is doubtful if its gradient cosine is
    beyond the bound or its loss diverged. For a row out of reach the verdict names its
    failures first, and its stall if that is beyond the bound. With an unknown gap it
    names only failures of the loss.
    """
    verdict = _ending(runs) or _compare_losses(evidence)
    doubts = _cosine_doubts(verdict.outcome, evidence.cosine)
    if verdict.outcome is Judgement.REFERENCE:
        doubts += _failure_texts(runs, only=(FailureClass.DIVERGENCE,))
        return Verdict(verdict.outcome, "; ".join([verdict.text, *doubts]))
    if verdict.outcome in (Judgement.WITHIN, Judgement.AHEAD):
        doubts += _failure_texts(runs, only=(FailureClass.DIVERGENCE,))
        outcome = Judgement.DOUBTFUL if doubts else verdict.outcome
        return Verdict(outcome, "; ".join([verdict.text, *doubts]))
    if verdict.outcome in (Judgement.UNKNOWN, Judgement.INCOMPARABLE):
        failures = _failure_texts(runs, only=LOSS_FAILURES)
        return Verdict(verdict.outcome, "; ".join([*failures, verdict.text, *doubts]))
    stall = _stall_text(evidence.stall)
    failures = _failure_texts(runs, stall=stall)
    words = [*failures, verdict.text, *doubts]
    if stall and not any(stall in text for text in failures):
        words.append(stall)
    return Verdict(verdict.outcome, "; ".join(words))


def _cosine_doubts(outcome: Judgement, cosine: float | None) -> list[str]:
    if cosine is None or outcome in (Judgement.REFERENCE, Judgement.INCOMPARABLE):
        return []
    return [f"cosine {cosine:.2f}"] if VERDICT_BOUNDS.cosine.beyond(cosine) else []


def _stall_text(stall: float | None) -> str:
    """Return a stall that is beyond the bound in words; "" for any other."""
    if stall is None or not VERDICT_BOUNDS.stall.beyond(stall):
        return ""
    return f"stall {stall:.0%}"


def _failure_texts(runs: Sequence[Run], *, only: Sequence[str] = (), stall: str = "") -> list[str]:
    """Return the first failures as one text, those of the loss first; [] without any.

    The class that ended a run is left out, since the verdict names it already. `only`
    are the classes to look for, by default all. `stall` replaces the name of that class.
    """
    # How many runs have each class. A counter keeps the order in which they are counted.
    counts: Counter[str] = Counter()
    for run in runs:
        # a class once, in the order of its first failure
        counts.update(list(dict.fromkeys(failure.kind for failure in run.failures)))
    ended_by = {(run.failure or {}).get("kind") for run in runs if run.status == RunStatus.FAILED}
    kinds = [kind for kind in counts if kind not in ended_by and (not only or kind in only)]
    # failures of the loss first
    kinds.sort(key=lambda kind: kind not in LOSS_FAILURES)
    if not kinds:
        return []
    words = []
    for kind in kinds[:MOST_CLASSES]:
        name = stall if stall and kind == FailureClass.STALL else class_name(kind)
        share = f" ({counts[kind]} of {len(runs)} seeds)" if counts[kind] < len(runs) else ""
        words.append(name + share)
    hidden_count = len(kinds) - MOST_CLASSES
    rest = f" and {hidden_count} more" if hidden_count > 0 else ""
    return [", ".join(words) + rest]


def _ending(runs: Sequence[Run]) -> Verdict | None:
    """Return the verdict on runs that did not reach their planned end; None if all did."""
    for status in (RunStatus.FAILED, RunStatus.STOPPED, RunStatus.INCOMPLETE):
        affected = [run for run in runs if run.status == status]
        if affected:
            share = f" ({len(affected)} of {len(runs)} seeds)" if len(runs) > 1 else ""
            outcome = Judgement.FAILED if status == RunStatus.FAILED else Judgement.UNFINISHED
            return Verdict(outcome, describe_ending(affected[0]) + share)
    return None if runs else Verdict(Judgement.UNFINISHED, "not run")


def describe_ending(run: Run) -> str:
    """Return in words why and at which step an unfinished run ended."""
    failure = run.failure or run.stop or {}
    has_ended = run.status in (RunStatus.FAILED, RunStatus.STOPPED)
    text = run.status if has_ended else "unfinished"
    message = " ".join(str(failure.get("message") or failure.get("kind") or "").split())
    step = failure.get("step", run.last_step)
    if step is not None and not re.search(rf"\bstep {step}\b", message):
        text += f" at step {step}"
    if len(message) > LONGEST_ENDING:
        message = message[: LONGEST_ENDING - 1] + "…"
    return f"{text}: {message}" if message else text


def _compare_losses(evidence: RowComparison) -> Verdict:
    """Return the verdict on finished runs, by their loss alone."""
    if evidence.reference:
        return Verdict(Judgement.REFERENCE, "reference")
    if evidence.differing_facts:
        text = f"not comparable: {', '.join(evidence.differing_facts)}"
        return Verdict(Judgement.INCOMPARABLE, text)
    if evidence.lacks_reference:
        return Verdict(Judgement.UNKNOWN, "finished")
    if evidence.gap_share is None:
        return Verdict(Judgement.UNKNOWN, "no finished reference")
    return _compare_gap(evidence, evidence.gap_share)


def _compare_gap(evidence: RowComparison, gap_share: float) -> Verdict:
    """Return the verdict on a gap, given as a share of the reference's loss too."""
    bound = VERDICT_BOUNDS.outside.bound
    if gap_share > bound:
        return Verdict(Judgement.OUTSIDE, f"outside {bound:.0%}")
    gap = evidence.gap or 0.0
    # A gap without a standard error decides only beyond the bound.
    error = math.inf if evidence.gap_error is None else evidence.gap_error
    margin = max(VERDICT_BOUNDS.behind.bound, 2.0 * error)
    if gap > margin:
        return Verdict(Judgement.BEHIND, "behind")
    if gap < -margin or gap_share < -bound:
        return Verdict(Judgement.AHEAD, "ahead")
    fall = evidence.reference_fall
    if fall is not None and fall <= bound:
        # A row that had not trained at all would be within the bound, too.
        return Verdict(Judgement.UNKNOWN, "too early")
    return Verdict(Judgement.WITHIN, f"within {bound:.0%}")
