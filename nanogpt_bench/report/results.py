"""Results: each row's measurements over its seeds, its gap and paired difference to the
reference, its verdict.
"""

from __future__ import annotations

import math
import re
import statistics
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from nanogpt_bench.config.metrics import BESIDE_LOSS, VAL_ALSO_LOSS
from nanogpt_bench.failures.table import VERDICT as BOUNDS
from nanogpt_bench.monitors.shadow import COSINE
from nanogpt_bench.report.holm import holm
from nanogpt_bench.report.rows import (
    REFERENCE_RULE,
    Row,
    differences,
    references_of,
    row_label,
    seed_of,
)
from nanogpt_bench.runs.environment import on_two_processors
from nanogpt_bench.runs.load import Run


@dataclass(frozen=True)
class Figure:
    """A number over seeds: mean, and sample standard deviation if there are several."""

    mean: float
    spread: float | None = None


@dataclass(frozen=True)
class Result:
    """One line of the table; losses and gaps in nats (`loss_unit`), `gap_share`
    relative to the reference's loss.
    """

    row: Row
    reference: bool
    final_val_loss: Figure | None
    best_val_loss: Figure | None
    gap: Figure | None
    gap_share: float | None
    bytes_per_parameter: float | None
    stall: Figure | None
    stall_metric: str | None
    tokens_per_s: Figure | None
    verdict: Verdict
    arrived: Figure | None = None
    cosine: Figure | None = None
    alerts: Mapping[str, int] = field(default_factory=dict)
    #: difference to the reference, over the seeds that both finished
    difference: Difference | None = None
    #: standard error of a validation over its batches, the mean over the row's runs
    val_loss_se: float | None = None
    #: other metrics of the validation, by `config.metrics.Metric.figure`
    beside: Mapping[str, Figure] = field(default_factory=dict)
    #: difference of the losses on the other text (`eval.also`)
    also_difference: Difference | None = None

    @property
    def alerts_fired(self) -> int:
        return sum(self.alerts.values())


def figure(values: Iterable[float | None]) -> Figure | None:
    """Return mean and sample standard deviation of the known values; None without any.

    >>> figure([1.0, None, 3.0])
    Figure(mean=2.0, spread=1.4142135623730951)
    """
    known = [value for value in values if value is not None]
    if not known:
        return None
    return Figure(statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else None)


def reference_name(results: Sequence[Result]) -> str:
    """Return the name of the reference: BF16, or the row's label, or the rule and
    format of several rows.
    """
    rows = [result.row for result in results if result.reference]
    if not rows:
        return "the reference"
    if rows[0].rule == REFERENCE_RULE:
        return "BF16"
    return rows[0].label if len(rows) == 1 else row_label(rows[0].rule, rows[0].format)


def measure(rows: Sequence[Row], reference: Row | None) -> list[Result]:
    """Return each row's result, in order."""
    against = references_of(rows, reference)
    results = [_measure_row(row, against.get(row.label)) for row in rows]
    family, also = (
        adjusted([getattr(result, name) for result in results])
        for name in ("difference", "also_difference")
    )
    each = zip(results, family, also, strict=True)
    return [
        replace(result, difference=found, also_difference=other) for result, found, other in each
    ]


#: measurements of a run that a column averages over the seeds of its row, by their name
#: in `Result`
FIGURES: dict[str, Callable[[Run], float | None]] = {
    "final_val_loss": lambda run: run.at_end("final_val_loss"),
    "bytes_per_parameter": lambda run: run.number("bytes_per_parameter"),
    "stall": lambda run: run.stall,
    "tokens_per_s": lambda run: run.number("tokens_per_s"),
    "arrived": lambda run: run.number("arrived"),
    "cosine": lambda run: getattr(
        figure(run.curve(COSINE.name)[1] or [run.number("cosine")]), "mean", None
    ),
}


def _measure_row(row: Row, reference: Row | None) -> Result:
    is_reference = row is reference
    unlike = () if reference is None or is_reference else differences(row.runs, reference.runs)
    measured = None if unlike else reference
    found: dict[str, Any] = {
        name: figure(map(of_run, row.runs)) for name, of_run in FIGURES.items()
    }
    size = found.pop("bytes_per_parameter")
    gaps = (
        []
        if measured is None
        else [each for run in row.runs if (each := gap_to(run, measured.runs)) is not None]
    )
    gap = figure(gaps)
    base = figure(map(FIGURES["final_val_loss"], measured.runs)) if measured is not None else None
    gap_share = (
        gap.mean / base.mean if gap is not None and base is not None and base.mean > 0 else None
    )
    error = _error(row)
    evidence = Evidence(
        gap_share,
        getattr(found["stall"], "mean", None),
        getattr(found["cosine"], "mean", None),
        is_reference,
        unlike,
        unmeasured=reference is None,
        gap=gap.mean if gap else None,
        gap_error=error_of(gaps, [error, *([] if measured is None else [_error(measured)])]),
    )
    beside = {m.figure: figure(run.at_end(m.figure) for run in row.runs) for m in BESIDE_LOSS}
    return Result(
        row=row,
        reference=is_reference,
        **found,
        # from finished runs, or without any from those that ended early
        best_val_loss=figure(run.at_end("best_val_loss") for run in row.runs)
        or figure(run.number("best_val_loss") for run in row.runs),
        gap=gap,
        gap_share=gap_share,
        bytes_per_parameter=size.mean if size else None,
        stall_metric=next((run.stall_metric for run in row.runs if run.stall_metric), None),
        verdict=Verdict(Judgement.FAILED, row.why) if row.why else judge(row.runs, evidence),
        alerts=dict(
            sum((Counter(run.alert_counts) for run in row.runs), Counter[str]()).most_common()
        ),
        val_loss_se=error,
        beside={name: value for name, value in beside.items() if value is not None},
        also_difference=_difference(row, measured, VAL_ALSO_LOSS.figure),
        difference=_difference(row, measured, "final_val_loss"),
    )


def _error(row: Row) -> float | None:
    """The mean standard error of the runs' last validations."""
    return getattr(figure(run.at_end("final_val_loss_se") for run in row.runs), "mean", None)


def _difference(row: Row, reference: Row | None, name: str) -> Difference | None:
    """The paired difference, marked if records say that a seed's two runs were made on
    different processors.
    """
    if reference is None or row is reference:
        return None
    found = difference(_by_seed(row, name), _by_seed(reference, name))
    own, its = ({seed_of(run): run.environment for run in each.runs} for each in (row, reference))
    apart = any(on_two_processors(own[seed], its[seed]) for seed in own if seed in its)
    return None if found is None else replace(found, apart=apart)


def _by_seed(row: Row, name: str) -> dict[Hashable, float]:
    ended = ((seed_of(run), run.at_end(name)) for run in row.runs)
    return {seed: loss for seed, loss in ended if seed is not None and loss is not None}


def gap_to(run: Run, others: Sequence[Run]) -> float | None:
    """Return L - L_ref to the reference's run of the same seed, or else its mean; None
    for a run that ended early.
    """
    twins = [
        other for other in others if other.status == "finished" and seed_of(other) == seed_of(run)
    ]
    base = [
        loss for other in twins or others if (loss := other.at_end("final_val_loss")) is not None
    ]
    loss = run.at_end("final_val_loss")
    return loss - statistics.fmean(base) if loss is not None and base else None


def error_of(gaps: Sequence[float], errors: Sequence[float | None]) -> float | None:
    """Return the standard error of a row's gap: over its seeds, or for one seed from
    the two losses' errors.

    The two losses are over the same batches, so that for one seed it is an upper bound.

    >>> error_of([1.0, 3.0, 5.0, 3.0], []), error_of([0.1], [3.0, 4.0]), error_of([0.1], [0.03, None])
    (0.816496580927726, 5.0, None)
    """
    if len(gaps) > 1:
        return statistics.stdev(gaps) / math.sqrt(len(gaps))
    known = [error for error in errors if error is not None]
    return math.hypot(*known) if known and len(known) == len(errors) else None


#: the mark behind a difference of runs that were made on different processors
MARK = " †"
CONFIDENCE = 0.95
ALPHA = 1 - CONFIDENCE


@dataclass(frozen=True)
class Difference:
    """The mean of L - L_ref in nats over the seeds that both rows have; the rest is
    None for one seed.

    `low` and `high` are the ends of its 95% t-interval, `p` is the p-value of the
    two-sided paired t-test, and `holm` that value adjusted for the number of rows
    tested. `apart`: a pair's runs were made on different processors, whose kernels sum
    in different orders, so that pairing by seed removes little noise.
    """

    mean: float
    seeds: int
    low: float | None = None
    high: float | None = None
    p: float | None = None
    holm: float | None = None
    apart: bool = False

    @property
    def is_lead(self) -> bool:
        """True for a difference of one seed."""
        return self.low is None or self.high is None

    @property
    def is_found(self) -> bool:
        """True if the interval excludes 0."""
        return self.low is not None and self.high is not None and not self.low <= 0.0 <= self.high


def difference(losses: Mapping[Any, float], reference: Mapping[Any, float]) -> Difference | None:
    """Return the paired difference of two rows' losses by seed; None without a common
    seed.

    >>> found = difference({1: 2.0, 2: 2.2, 3: 2.1}, {1: 1.9, 2: 2.05, 4: 2.0})
    >>> found.seeds, round(found.mean, 3), round(found.low, 2), round(found.high, 2), round(found.p, 2)
    (2, 0.125, -0.19, 0.44, 0.13)
    """
    seeds = [seed for seed in losses if seed in reference]
    if not seeds:
        return None
    apart = [losses[seed] - reference[seed] for seed in seeds]
    mean = math.fsum(apart) / len(apart)
    if len(apart) == 1:
        return Difference(mean, 1)
    from scipy.stats import ttest_1samp  # of differences: the paired test

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scipy warns if all differences are equal
        test = ttest_1samp(apart, 0.0)
        low, high = map(float, test.confidence_interval(CONFIDENCE))
    if not (math.isfinite(low) and math.isfinite(high)):
        low = high = mean
    p = float(test.pvalue)
    if not any(apart):
        p = 1.0  # all differences are 0; the row still counts as tested
    return Difference(mean, len(apart), low, high, p if math.isfinite(p) else None)


def adjusted(found: Sequence[Difference | None]) -> list[Difference | None]:
    """Return differences with `holm`: their p-values adjusted by Holm's method."""
    tested = [each.p for each in found if each is not None and each.p is not None]
    if not tested:
        return list(found)
    left = iter(holm(tested))
    return [
        each if each is None or each.p is None else replace(each, holm=next(left)) for each in found
    ]


def difference_text(found: Difference | None) -> str:
    """Format a difference for tables; a dash without one.

    >>> difference_text(Difference(-0.02, 5, -0.03, -0.01, 0.001, 0.004))
    '-0.020 [-0.030, -0.010], p 0.004'
    >>> difference_text(Difference(-0.02, 5, -0.03, -0.01, 0.02, 0.06))
    '-0.020 [-0.030, -0.010], p 0.06 (not after Holm)'
    >>> difference_text(Difference(-0.02, 5, -0.05, 0.01, 0.2, 0.4))
    'no difference found [-0.050, +0.010]'
    >>> difference_text(Difference(-0.02, 1)), difference_text(None)
    ('-0.020, one seed: a lead', '-')
    >>> difference_text(Difference(-0.02, 1, apart=True))
    '-0.020, one seed: a lead †'
    """
    if found is None:
        return "-"
    mark = MARK * found.apart
    if found.low is None or found.high is None:
        return f"{found.mean:+z.3f}, one seed: a lead{mark}"
    interval = f"[{found.low:+z.3f}, {found.high:+z.3f}]"
    if not found.is_found:
        return f"no difference found {interval}{mark}"
    after = (
        ""
        if found.holm is None
        else f", p {found.holm:.2g}" + (" (not after Holm)" if found.holm >= ALPHA else "")
    )
    return f"{found.mean:+z.3f} {interval}{after}{mark}"


MOST_CLASSES = 2  # classes of failure that a verdict names
LONGEST_MESSAGE = 160
#: failures of the loss itself; the other classes are possible causes
OF_THE_LOSS = ("nan", "divergence")


def class_name(kind: str) -> str:
    """Return the display name of a failure class.

    >>> class_name("zero_gradients"), class_name("nan")
    ('zero gradients', 'NaN')
    """
    return "NaN" if kind == "nan" else kind.replace("_", " ")


class Judgement(StrEnum):
    """The comparison of a row with its reference, in a word; also the CSS class of its
    cell.
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
    outcome: Judgement
    text: str


@dataclass(frozen=True)
class Evidence:
    """The measurements on which a verdict is based; None where there is none.

    `gap_share` is (L - L_ref) / L_ref of the final validation losses in nats, `gap` is
    L - L_ref and `gap_error` its standard error. `stall` is a share of weights,
    `cosine` the mean cosine of the gradient and the float32 shadow's. `unlike` names
    further differences from the reference, such as the corpus, which make the gap
    meaningless. `unmeasured` rows have no reference.
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

    A failure outranks an early end, which outranks the comparison of losses. A row
    ahead or within reach of the reference is doubtful if its gradient cosine is beyond
    the bound or its loss diverged. For a row out of reach the verdict names its
    failures first, and its stall if that is beyond the bound; with an unknown gap only
    its loss'.
    """
    outcome, text = _ending(runs) or _comparison(evidence)
    compared = outcome not in (Judgement.REFERENCE, Judgement.INCOMPARABLE)
    far = compared and evidence.cosine is not None and BOUNDS["cosine"].beyond(evidence.cosine)
    doubts = [f"cosine {evidence.cosine:.2f}"] if far else []
    if outcome in (Judgement.WITHIN, Judgement.AHEAD, Judgement.REFERENCE):
        doubts += _classes(runs, ("divergence",))
        doubtful = doubts and outcome is not Judgement.REFERENCE
        return Verdict(Judgement.DOUBTFUL if doubtful else outcome, "; ".join([text, *doubts]))
    if outcome in (Judgement.UNKNOWN, Judgement.INCOMPARABLE):
        return Verdict(outcome, "; ".join([*_classes(runs, OF_THE_LOSS), text, *doubts]))
    stalled = evidence.stall is not None and BOUNDS["stall"].beyond(evidence.stall)
    stall = f"stall {evidence.stall:.0%}" if stalled else ""
    first = _classes(runs, stall=stall)
    rest = [stall] if stall and not any(stall in words for words in first) else []
    return Verdict(outcome, "; ".join([*first, text, *doubts, *rest]))


def _classes(runs: Sequence[Run], only: Sequence[str] = (), *, stall: str = "") -> list[str]:
    """The first failures as one text, those of the loss first, without the one that
    ended a run.
    """
    counts = Counter(
        kind for run in runs for kind in dict.fromkeys(found.kind for found in run.failures)
    )
    ended_by = {(run.failure or {}).get("kind") for run in runs if run.status == "failed"}
    kinds = [kind for kind in counts if kind not in ended_by and (not only or kind in only)]
    kinds.sort(key=lambda kind: kind not in OF_THE_LOSS)
    words = []
    for kind in kinds[:MOST_CLASSES]:
        share = f" ({counts[kind]} of {len(runs)} seeds)" if counts[kind] < len(runs) else ""
        words.append((stall if stall and kind == "stall" else class_name(kind)) + share)
    more = f" and {len(kinds) - MOST_CLASSES} more" if len(kinds) > MOST_CLASSES else ""
    return [", ".join(words) + more] if words else []


def _ending(runs: Sequence[Run]) -> tuple[Judgement, str] | None:
    """The judgement on runs that did not reach their planned end, and its text; None if
    all did.
    """
    for status in ("failed", "stopped", "incomplete"):
        affected = [run for run in runs if run.status == status]
        if affected:
            share = f" ({len(affected)} of {len(runs)} seeds)" if len(runs) > 1 else ""
            outcome = Judgement.FAILED if status == "failed" else Judgement.UNFINISHED
            return outcome, describe_ending(affected[0]) + share
    return None if runs else (Judgement.UNFINISHED, "not run")


def describe_ending(run: Run) -> str:
    """Return the failure or the last step of an unfinished run in words."""
    failure = run.failure or {}
    step = failure.get("step", run.last_step)
    message = " ".join(str(failure.get("message") or failure.get("kind") or "").split())
    where = "" if step is None or re.search(rf"\bstep {step}\b", message) else f" at step {step}"
    verb = run.status if run.status in ("failed", "stopped") else "unfinished"
    message = message if len(message) <= LONGEST_MESSAGE else message[: LONGEST_MESSAGE - 1] + "…"
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
    bound, gap = BOUNDS["outside"].bound, evidence.gap or 0.0
    if evidence.gap_share > bound:
        return Judgement.OUTSIDE, f"outside {bound:.0%}"
    # A gap without a standard error decides only beyond the bound.
    margin = max(
        BOUNDS["behind"].bound,
        2.0 * (math.inf if evidence.gap_error is None else evidence.gap_error),
    )
    if gap > margin:
        return Judgement.BEHIND, "behind"
    if gap < -margin or evidence.gap_share < -bound:
        return Judgement.AHEAD, "ahead"
    return Judgement.WITHIN, f"within {bound:.0%}"
