"""The verdict on a row: the end of its runs, its loss against the reference's, and the classes of failure found."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from nanogpt_bench.failures.table import VERDICT
from nanogpt_bench.runs.load import Run

#: classes of the loss itself; the others are possible causes
OF_THE_LOSS = ("nan", "divergence")
MOST_CLASSES = 2  # classes that a verdict names
LONGEST_MESSAGE = 160
DIVERGED = "divergence"


def class_name(kind: str) -> str:
    """Return the display name of a failure class.

    >>> class_name("zero_gradients"), class_name("nan")
    ('zero gradients', 'NaN')
    """
    return "NaN" if kind == "nan" else kind.replace("_", " ")


def classes_found(runs: Sequence[Run], *, of_the_loss: bool = False) -> list[str]:
    """Return the failure classes of one row's runs: those of the loss first, then in order of onset."""
    kinds = _class_counts(runs)
    ranked = sorted(kinds, key=lambda kind: kind not in OF_THE_LOSS)
    return [kind for kind in ranked if kind in OF_THE_LOSS] if of_the_loss else ranked


def class_names(kinds: Sequence[str], runs: Sequence[Run], figures: Mapping[str, str] | None = None) -> str:
    """Return the first classes by name, each with its share of seeds where some lack it, and the number of the rest.

    `figures` replaces the name of a class whose size is known, such as `stall 90%`.
    """
    counts, told = _class_counts(runs), figures or {}
    words = [
        told.get(kind, class_name(kind)) + _share_of_seeds(counts[kind], len(runs)) for kind in kinds[:MOST_CLASSES]
    ]
    more = len(kinds) - MOST_CLASSES
    return ", ".join(words) + (f" and {more} more" if more > 0 else "")


def _class_counts(runs: Sequence[Run]) -> Counter[str]:
    return Counter(kind for run in runs for kind in dict.fromkeys(finding.kind for finding in run.failures))


def _share_of_seeds(found: int, of: int) -> str:
    return f" ({found} of {of} seeds)" if found < of else ""


class Judgement(StrEnum):
    """How a row compares with its reference, in a word; also the CSS class of its cell."""

    REFERENCE = "reference"
    WITHIN = "within"
    DOUBTFUL = "doubtful"
    BEHIND = "behind"
    OUTSIDE = "outside"
    UNFINISHED = "unfinished"
    FAILED = "failed"
    INCOMPARABLE = "incomparable"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Verdict:
    outcome: Judgement
    text: str


@dataclass(frozen=True)
class Evidence:
    """The measurements that a verdict is reached from; None where there is none.

    `gap_share` is (L - L_ref) / L_ref of the final validation losses in nats, `gap` is L - L_ref and `gap_error` its
    standard error. `stall` is a share of weights, `cosine` the mean cosine of the gradient and the float32 shadow's.
    `unlike` names further differences from the reference, such as the corpus, which make the gap meaningless.
    `unmeasured` rows have no reference.
    """

    gap_share: float | None = None
    stall: float | None = None
    cosine: float | None = None
    reference: bool = False
    unlike: tuple[str, ...] = ()
    unmeasured: bool = False
    gap: float | None = None
    gap_error: float | None = None


def judge(runs: Sequence[Run], evidence: Evidence) -> Verdict:
    """Return the verdict on the runs of one row (its seeds).

    A failure outranks an early end, which outranks the comparison of losses. A row within reach of the reference is
    doubtful if its gradient cosine is beyond its bound or its loss diverged. A row out of reach is named by
    its failure classes first, and by its stall at or above the limit; a row of unknown gap by those of the loss alone.
    """
    outcome, text = _ending(runs) or _comparison(evidence)
    if outcome in (Judgement.WITHIN, Judgement.REFERENCE):
        return _near(outcome, text, runs, evidence)
    if outcome in (Judgement.UNKNOWN, Judgement.INCOMPARABLE):
        doubts = _doubts(evidence) if outcome is Judgement.UNKNOWN else []
        return Verdict(outcome, "; ".join([*_classes(runs, of_the_loss=True), text, *doubts]))
    stalled = _stalled(evidence)
    first = _classes(runs, dict(zip(["stall"], stalled, strict=False)))
    rest = [said for said in stalled if not any(said in words for words in first)]
    return Verdict(outcome, "; ".join([*first, text, *_doubts(evidence), *rest]))


def _near(outcome: Judgement, text: str, runs: Sequence[Run], evidence: Evidence) -> Verdict:
    doubts = _doubts(evidence) if outcome is Judgement.WITHIN else []
    doubts += [class_names([DIVERGED], runs)] if DIVERGED in classes_found(runs) else []
    doubtful = doubts and outcome is Judgement.WITHIN
    return Verdict(Judgement.DOUBTFUL if doubtful else outcome, "; ".join([text, *doubts]))


def _classes(runs: Sequence[Run], figures: Mapping[str, str] | None = None, *, of_the_loss: bool = False) -> list[str]:
    """Return the failure classes that a verdict begins with, without the one that ended the run."""
    ended_by = {(run.failure or {}).get("kind") for run in runs if run.status == "failed"}
    kinds = [kind for kind in classes_found(runs, of_the_loss=of_the_loss) if kind not in ended_by]
    return [class_names(kinds, runs, figures)] if kinds else []


def _doubts(evidence: Evidence) -> list[str]:
    doubtful = evidence.cosine is not None and VERDICT["cosine"].beyond(evidence.cosine)
    return [f"cosine {evidence.cosine:.2f}"] if doubtful else []


def _stalled(evidence: Evidence) -> list[str]:
    stalled = evidence.stall is not None and VERDICT["stall"].beyond(evidence.stall)
    return [f"stall {evidence.stall:.0%}"] if stalled else []


def _ending(runs: Sequence[Run]) -> tuple[Judgement, str] | None:
    """Return outcome and text of runs that did not reach their planned end; None if all did."""
    for status, outcome in (
        ("failed", Judgement.FAILED),
        ("stopped", Judgement.UNFINISHED),
        ("incomplete", Judgement.UNFINISHED),
    ):
        affected = [run for run in runs if run.status == status]
        if affected:
            share = f" ({len(affected)} of {len(runs)} seeds)" if len(runs) > 1 else ""
            return outcome, describe_ending(affected[0]) + share
    return None if runs else (Judgement.UNFINISHED, "not run")


def describe_ending(run: Run) -> str:
    """Return the failure or the last step of an unfinished run in words."""
    failure = run.failure or {}
    step = failure.get("step", run.last_step)
    message = " ".join(str(failure.get("message") or failure.get("kind") or "").split())
    said = re.search(rf"\bstep {step}\b", message)
    where = "" if step is None or said else f" at step {step}"
    message = message if len(message) <= LONGEST_MESSAGE else message[: LONGEST_MESSAGE - 1] + "…"
    verb = {"failed": "failed", "stopped": "stopped"}.get(run.status, "unfinished")
    return f"{verb}{where}" + (f": {message}" if message else "")


def _comparison(evidence: Evidence) -> tuple[Judgement, str]:
    if evidence.reference:
        return Judgement.REFERENCE, "reference"
    if evidence.unlike:
        return Judgement.INCOMPARABLE, f"not comparable: {', '.join(evidence.unlike)}"
    if evidence.unmeasured:
        return Judgement.UNKNOWN, "finished"
    if evidence.gap_share is None:
        return Judgement.UNKNOWN, "no finished reference"
    limit = f"{VERDICT['outside'].bound:.0%}"
    if evidence.gap_share > VERDICT["outside"].bound:
        return Judgement.OUTSIDE, f"outside {limit}"
    if _is_behind(evidence):
        return Judgement.BEHIND, "behind"
    return Judgement.WITHIN, f"within {limit}"


def _is_behind(evidence: Evidence) -> bool:
    """Test a gap against twice its standard error and the bound; a gap without a standard error never passes."""
    if evidence.gap is None or evidence.gap_error is None:
        return False
    return evidence.gap > max(VERDICT["behind"].bound, 2.0 * evidence.gap_error)
