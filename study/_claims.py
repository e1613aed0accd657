"""The verdicts of Q16: differences to the same optimizer in float32.

With d the mean difference over n seeds and sigma its standard deviation:

    claimed   |d| sqrt(n) / sigma is beyond Student's t at a p-value of 0.01, which is
              4.6 at five seeds
    equal     the 95% interval of d lies within 0.02 of 0

Both levels were announced before the runs.
"""

from collections.abc import Mapping, Sequence
from math import sqrt
from statistics import fmean, stdev
from typing import NamedTuple

from _compared import NAMES_OF_TEXTS, result_label, text_of_row
from _markdown import markdown
from _study import RESULTS_FOLDER, against_baseline, read_with_added_rows
from scipy.stats import t as student_t

from nanogpt_bench.report.paired import Difference
from nanogpt_bench.report.results import Result
from nanogpt_bench.report.rows import row_runs

CLAIMED_P = 0.01
EQUAL_WITHIN = 0.02
CLAIMS_HEADER = (
    "training",
    "text",
    "n",
    "sigma",
    "minus float32",
    "in steps",
    "d√n/sigma",
    "claimed beyond",
    "verdict",
)
#: the results file of the baselines' longer runs, and by how many steps they are longer
LONGER_RUNS = "study_q16_steps"
LONGER_BY = 200
#: the results file of each baseline
BASELINE_FILES = {"fp32": "study_q16_adamw", "muon": "study_q16_muon"}


class ComparedRow(NamedTuple):
    """A row of results files that is compared with its baseline."""

    #: results files, separated by blanks: one for all texts, or one per text
    files: str
    rule: str
    title: str
    #: the rule of the baseline
    baseline: str


def sigma_of(difference: Difference) -> float | None:
    """Return the standard deviation of paired differences over seeds.

    It follows from the half width of their 95% interval, which one seed does not have.

    >>> round(sigma_of(Difference(-0.2, 5, -0.23, -0.17)), 4), sigma_of(Difference(-0.2, 1))
    (0.0242, None)
    """
    if difference.low is None or difference.high is None:
        return None
    half = (difference.high - difference.low) / 2
    seeds = difference.seeds
    return float(half * sqrt(seeds) / student_t.ppf(0.975, seeds - 1))


def claim_level(seeds: int) -> float:
    """Return the size of `d sqrt(n) / sigma` beyond which a difference is claimed.

    >>> round(claim_level(5), 1)
    4.6
    """
    return float(student_t.ppf(1 - CLAIMED_P / 2, seeds - 1))


def claim_verdict(difference: Difference, sigma: float) -> str:
    """Return the claim that a difference allows: above, below, equal or not decided.

    >>> def verdict_on(mean, half):
    ...     difference = Difference(mean, 5, mean - half, mean + half)
    ...     return claim_verdict(difference, sigma_of(difference))
    >>> verdict_on(0.2, 0.03), verdict_on(0.01, 0.005), verdict_on(0.0, 0.03)
    ('above', 'above, by less than 0.02', 'not decided')
    """
    is_equal = (
        difference.low is not None
        and difference.high is not None
        and max(-difference.low, difference.high) < EQUAL_WITHIN
    )
    size = abs(difference.mean) * sqrt(difference.seeds) / sigma
    if size > claim_level(difference.seeds):
        side = "above" if difference.mean > 0 else "below"
        return f"{side}, by less than {EQUAL_WITHIN}" if is_equal else side
    return "equal" if is_equal else "not decided"


def gain_per_step(longer: Mapping[int, float], shorter: Mapping[int, float]) -> float | None:
    """Return the nats that a baseline gains per step at its end, from its losses by seed.

    Returns None where the 95% interval holds 0.

    >>> shorter = {1: 1.53, 2: 1.54, 3: 1.51}
    >>> round(gain_per_step({1: 1.5, 2: 1.52, 3: 1.49}, shorter), 6)
    0.000117
    >>> gain_per_step({1: 1.5}, shorter) is None
    True
    """
    gains = [shorter[seed] - longer[seed] for seed in shorter if seed in longer]
    count = len(gains)
    if count < 2:
        return None
    mean = fmean(gains)
    half = float(student_t.ppf(0.975, count - 1)) * stdev(gains) / sqrt(count)
    return mean / LONGER_BY if abs(mean) > half else None


def final_losses(name: str, rule: str, text: str) -> dict[int, float]:
    """Return the final losses of a rule of a results file by seed, on one text."""
    rows = []
    for row in read_with_added_rows(RESULTS_FOLDER / f"{name}.json").rows:
        if row.rule == rule and NAMES_OF_TEXTS[text_of_row(row)] == text:
            rows.append(row)
    return {run.seed: run.summary["final_val_loss"] for _, run in row_runs(rows)}


def claims_table(rows: Sequence[ComparedRow]) -> str:
    """Return a line for each text and row that is not a baseline, text by text."""
    lines_by_text: dict[str, list[list[str]]] = {}
    for row in rows:
        if row.rule == row.baseline:
            continue
        for text, results in against_baseline(row.files, row.baseline):
            result = next(result for result in results if result_label(result) == row.rule)
            lines = lines_by_text.setdefault(text, [])
            line = _claim_line(text, row, result)
            if line is not None:
                lines.append(line)
    lines = []
    for lines_of_text in lines_by_text.values():
        lines += lines_of_text
    return markdown(CLAIMS_HEADER, lines)


def _claim_line(text: str, row: ComparedRow, result: Result) -> list[str] | None:
    """Return the cells of a row on a text; None without an interval."""
    difference = result.difference
    sigma = sigma_of(difference) if difference else None
    if difference is None or sigma is None:
        return None
    longer = final_losses(LONGER_RUNS, row.baseline, text)
    shorter = final_losses(BASELINE_FILES[row.baseline], row.baseline, text)
    gain = gain_per_step(longer, shorter)
    return [
        row.title,
        text,
        str(difference.seeds),
        f"{sigma:.3f}",
        f"{difference.mean:+.3f}",
        f"{difference.mean / gain:+.0f}" if gain else "",
        f"{difference.mean * sqrt(difference.seeds) / sigma:+.1f}",
        f"{claim_level(difference.seeds):.1f}",
        claim_verdict(difference, sigma),
    ]
