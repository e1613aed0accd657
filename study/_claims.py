"""The verdicts of Q16: differences to the same optimizer in float32.

With d the mean difference over n seeds and sigma its standard deviation:

    claimed   |d| sqrt(n) / sigma is beyond Student's t at a p-value of 0.01, which is
              4.6 at five seeds
    equal     the 95% interval of d lies within 0.02 of 0

Both levels were announced before the runs. Beside them stands what was not announced:
the p-value after Holm's method over all lines, and half of the 95% interval by the
sigma that is pooled over all lines. A sigma of five seeds can be small by luck.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from math import sqrt
from statistics import fmean, stdev
from typing import NamedTuple

from _compared import NAMES_OF_TEXTS, result_label, text_of_row
from _markdown import markdown
from _study import RESULTS_FOLDER, against_baseline, read_with_added_rows
from scipy.stats import t as student_t

from nanogpt_bench.report.holm import holm
from nanogpt_bench.report.paired import Difference
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
    "p after Holm",
    "± with pooled sigma",
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


class Claim(NamedTuple):
    """A line of the table: a row on a text, with its difference and sigma."""

    row: ComparedRow
    text: str
    difference: Difference
    sigma: float

    @property
    def statistic(self) -> float:
        """Return `d sqrt(n) / sigma`, which has Student's t distribution at d = 0."""
        return self.difference.mean * sqrt(self.difference.seeds) / self.sigma

    @property
    def p_value(self) -> float:
        """Return the two-sided p-value, not adjusted."""
        return 2 * float(student_t.sf(abs(self.statistic), self.difference.seeds - 1))


def claims_table(rows: Sequence[ComparedRow]) -> str:
    """Return a line for each text and row that is not a baseline, text by text."""
    claims = _claims_of(rows)
    adjusted = holm([claim.p_value for claim in claims])
    pooled = pooled_sigma(claims)
    lines = []
    for claim, p_value in zip(claims, adjusted, strict=True):
        lines.append(_claim_line(claim, p_value, pooled))
    return markdown(CLAIMS_HEADER, lines)


def _claims_of(rows: Sequence[ComparedRow]) -> list[Claim]:
    """Return the claims of all rows with an interval, text by text."""
    claims_by_text: dict[str, list[Claim]] = {}
    for row in rows:
        if row.rule == row.baseline:
            continue
        for text, results in against_baseline(row.files, row.baseline):
            result = next(result for result in results if result_label(result) == row.rule)
            sigma = sigma_of(result.difference) if result.difference else None
            if result.difference is not None and sigma is not None:
                claim = Claim(row, text, result.difference, sigma)
                claims_by_text.setdefault(text, []).append(claim)
    return list(chain.from_iterable(claims_by_text.values()))


class PooledSigma(NamedTuple):
    """The standard deviation over all lines, and its degrees of freedom."""

    sigma: float
    freedom: int

    def half_interval(self, seeds: int) -> float:
        """Return half of the 95% interval of a mean over seeds.

        >>> round(PooledSigma(0.01, 48).half_interval(4), 5)
        0.01005
        """
        return float(student_t.ppf(0.975, self.freedom)) * self.sigma / sqrt(seeds)


def pooled_sigma(claims: Sequence[Claim]) -> PooledSigma:
    """Return the root of the mean variance, weighted by degrees of freedom."""
    freedom = sum(claim.difference.seeds - 1 for claim in claims)
    squares = sum((claim.difference.seeds - 1) * claim.sigma**2 for claim in claims)
    return PooledSigma(sqrt(squares / freedom), freedom)


def _claim_line(claim: Claim, adjusted_p: float, pooled: PooledSigma) -> list[str]:
    """Return the cells of a claim."""
    row, difference = claim.row, claim.difference
    longer = final_losses(LONGER_RUNS, row.baseline, claim.text)
    shorter = final_losses(BASELINE_FILES[row.baseline], row.baseline, claim.text)
    gain = gain_per_step(longer, shorter)
    return [
        row.title,
        claim.text,
        str(difference.seeds),
        f"{claim.sigma:.3f}",
        f"{difference.mean:+.3f}",
        f"{difference.mean / gain:+.0f}" if gain else "",
        f"{claim.statistic:+.1f}",
        f"{claim_level(difference.seeds):.1f}",
        claim_verdict(difference, claim.sigma),
        f"{adjusted_p:.2g}",
        f"{pooled.half_interval(difference.seeds):.3f}",
    ]
