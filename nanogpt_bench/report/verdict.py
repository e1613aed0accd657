"""What became of a row, said against the reference: thresholds in, one short sentence of facts out."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from nanogpt_bench.config.metrics import LIMITS
from nanogpt_bench.report.classes import classes_found, in_words
from nanogpt_bench.runs.load import Run
from nanogpt_bench.system.errors import BenchError

LONGEST_MESSAGE = 160
DIVERGED = "divergence"


@dataclass(frozen=True)
class Thresholds:
    """When a row counts as within reach of the reference, and what beside the loss is worth a word."""

    within: float = 0.10  # final val loss may exceed the reference's by this share
    stall: float = LIMITS["stall"]  # share of weights whose requested update did not change them
    cosine: float = 0.90  # mean gradient cosine against the float32 shadow, below which a row is doubtful
    alerts: int | None = None  # most alerts of a row that is not doubtful; None: they are counted, not judged
    behind: float = 0.05  # nats by which a final loss exceeds the reference's, twice its standard error at the least
    gap: float = 0.10  # nats per token by which the training loss leaves the reference's (tokens to gap)

    def __post_init__(self) -> None:
        if not 0 < self.within < float("inf"):
            raise BenchError(f"within = {self.within!r}: expected a positive share, 0.10 for 10%")
        if not 0 < self.stall <= 1:
            raise BenchError(f"stall = {self.stall!r}: expected a share above 0 and at most 1")
        if not -1 <= self.cosine <= 1:
            raise BenchError(f"cosine = {self.cosine!r}: expected a cosine, from -1 to 1")
        if self.alerts is not None and self.alerts < 0:
            raise BenchError(f"alerts = {self.alerts!r}: expected a number of alerts, 0 or more")
        if not 0 < self.behind < float("inf"):
            raise BenchError(f"behind = {self.behind!r}: expected a positive number of nats")
        if not 0 < self.gap < float("inf"):
            raise BenchError(f"gap = {self.gap!r}: expected a positive number of nats")


DEFAULTS = Thresholds()


class Outcome(StrEnum):
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
    outcome: Outcome
    text: str


@dataclass(frozen=True)
class Evidence:
    """What a row is judged by; None where it was not measured.

    `gap_share` is (L - L_ref) / L_ref of the final validation losses in nats, `gap` L - L_ref and `gap_error` its
    standard error, `stall` a share of weights,
    `cosine` the mean over the run of its gradient's cosine against the float32 shadow's. `unlike` names what else
    differs from the reference than what is compared, such as the corpus: there no gap says anything. `unmeasured` rows
    have no reference at all, and none is spoken of.
    """

    gap_share: float | None = None
    stall: float | None = None
    cosine: float | None = None
    alerts: int = 0
    reference: bool = False
    unlike: tuple[str, ...] = ()
    unmeasured: bool = False
    gap: float | None = None
    gap_error: float | None = None


def judge(
    runs: Sequence[Run], evidence: Evidence, *, thresholds: Thresholds = DEFAULTS, running: bool = False
) -> Verdict:
    """The verdict over the runs of one row (its seeds).

    A failure outranks an early end, which outranks the comparison of losses; a row within reach whose
    gradients or alerts speak against it, or whose loss diverged on its way, is doubtful. The classes of failure found
    in a row that is short of the reference come first, for they say what happened; where it is not known how far off a
    row is, only those of the loss itself do. A stall at or above the threshold is named where the row is short.
    """
    if running and (not runs or any(run.status == "incomplete" for run in runs)):
        return Verdict(Outcome.UNKNOWN, f"running, step {runs[-1].last_step or 0}" if runs else "waiting")
    outcome, text = _ending(runs) or _comparison(evidence, thresholds)
    if outcome in (Outcome.WITHIN, Outcome.REFERENCE):
        return _near(outcome, text, runs, evidence, thresholds)
    if outcome in (Outcome.UNKNOWN, Outcome.INCOMPARABLE):
        doubts = _doubts(evidence, thresholds) if outcome is Outcome.UNKNOWN else []
        return Verdict(outcome, "; ".join([*_classes(runs, of_the_loss=True), text, *doubts]))
    stalled = _stalled(evidence, thresholds)
    first = _classes(runs, dict(zip(["stall"], stalled, strict=False)))
    rest = [said for said in stalled if not any(said in words for words in first)]
    return Verdict(outcome, "; ".join([*first, text, *_doubts(evidence, thresholds), *rest]))


def _near(outcome: Outcome, text: str, runs: Sequence[Run], evidence: Evidence, thresholds: Thresholds) -> Verdict:
    """The verdict over the reference, or a row within reach of it."""
    doubts = _doubts(evidence, thresholds) if outcome is Outcome.WITHIN else []
    doubts += [in_words([DIVERGED], runs)] if DIVERGED in classes_found(runs) else []
    doubtful = doubts and outcome is Outcome.WITHIN
    return Verdict(Outcome.DOUBTFUL if doubtful else outcome, "; ".join([text, *doubts]))


def _classes(runs: Sequence[Run], figures: Mapping[str, str] | None = None, *, of_the_loss: bool = False) -> list[str]:
    """The classes of failure that a verdict begins with, without what the end of the run says itself."""
    ended_by = {(run.failure or {}).get("kind") for run in runs if run.status == "failed"}
    kinds = [kind for kind in classes_found(runs, of_the_loss=of_the_loss) if kind not in ended_by]
    return [in_words(kinds, runs, figures)] if kinds else []


def _doubts(evidence: Evidence, thresholds: Thresholds) -> list[str]:
    found = []
    if evidence.cosine is not None and evidence.cosine <= thresholds.cosine:
        found.append(f"cosine {evidence.cosine:.2f}")
    if thresholds.alerts is not None and evidence.alerts > thresholds.alerts:
        found.append(f"{evidence.alerts} alert{'s' if evidence.alerts > 1 else ''}")
    return found


def _stalled(evidence: Evidence, thresholds: Thresholds) -> list[str]:
    stalled = evidence.stall is not None and evidence.stall >= thresholds.stall
    return [f"stall {evidence.stall:.0%}"] if stalled else []


def _ending(runs: Sequence[Run]) -> tuple[Outcome, str] | None:
    """What is to say about runs that did not run to their planned end."""
    for status, outcome in (
        ("failed", Outcome.FAILED),
        ("stopped", Outcome.UNFINISHED),
        ("incomplete", Outcome.UNFINISHED),
    ):
        affected = [run for run in runs if run.status == status]
        if affected:
            share = f" ({len(affected)} of {len(runs)} seeds)" if len(runs) > 1 else ""
            return outcome, describe_ending(affected[0]) + share
    return None if runs else (Outcome.UNFINISHED, "not run")


def describe_ending(run: Run) -> str:
    """How a run that did not finish ended: its failure or its last step, in words."""
    failure = run.failure or {}
    step = failure.get("step", run.last_step)
    message = " ".join(str(failure.get("message") or failure.get("kind") or "").split())
    said = re.search(rf"\bstep {step}\b", message)
    where = "" if step is None or said else f" at step {step}"
    message = message if len(message) <= LONGEST_MESSAGE else message[: LONGEST_MESSAGE - 1] + "…"
    verb = {"failed": "failed", "stopped": "stopped"}.get(run.status, "unfinished")
    return f"{verb}{where}" + (f": {message}" if message else "")


def _comparison(evidence: Evidence, thresholds: Thresholds) -> tuple[Outcome, str]:
    if evidence.reference:
        return Outcome.REFERENCE, "reference"
    if evidence.unlike:
        return Outcome.INCOMPARABLE, f"not comparable: {', '.join(evidence.unlike)}"
    if evidence.unmeasured:
        return Outcome.UNKNOWN, "finished"
    if evidence.gap_share is None:
        return Outcome.UNKNOWN, "no finished reference"
    limit = f"{100 * thresholds.within:.4g}%"
    if evidence.gap_share > thresholds.within:
        return Outcome.OUTSIDE, f"outside {limit}"
    if _is_behind(evidence, thresholds):
        return Outcome.BEHIND, "behind"
    return Outcome.WITHIN, f"within {limit}"


def _is_behind(evidence: Evidence, thresholds: Thresholds) -> bool:
    """Whether a gap is more than its noise, and large enough to matter; of one without a standard error, none is."""
    if evidence.gap is None or evidence.gap_error is None:
        return False
    return evidence.gap > max(thresholds.behind, 2.0 * evidence.gap_error)
