"""Differences of Q16, each with its n, its standard deviation over seeds, and what may be said of it.

A difference is claimed where `|d| sqrt(n) / sigma` is beyond Student's t at a p-value of 0.01 (4.6 at five seeds), and
two rows are equal where the 95% interval lies within 0.02. Both levels were announced before the runs.
"""

from math import sqrt
from pathlib import Path

from _compared import by_text, measured_against, short
from _markdown import markdown
from scipy.stats import t

from nanogpt_bench.report.results import Difference, Result
from nanogpt_bench.report.results_file import read_export

CLAIMED_P, EQUAL_WITHIN = 0.01, 0.02
HEADER = ("training", "text", "n", "sigma", "minus float32", "d√n/sigma", "claimed beyond", "verdict")


def sigma_of(found: Difference) -> float | None:
    """Standard deviation of paired differences over seeds, from the half width of their 95% interval.

    >>> round(sigma_of(Difference(-0.2, 5, -0.23, -0.17)), 4), sigma_of(Difference(-0.2, 1))
    (0.0242, None)
    """
    if found.low is None or found.high is None:
        return None
    return float((found.high - found.low) / 2 * sqrt(found.seeds) / t.ppf(0.975, found.seeds - 1))


def level(seeds: int) -> float:
    """The size of `d sqrt(n) / sigma` beyond which a difference is claimed.

    >>> round(level(5), 1)
    4.6
    """
    return float(t.ppf(1 - CLAIMED_P / 2, seeds - 1))


def verdict(found: Difference, sigma: float) -> str:
    """The claim that a difference allows: above, below, equal or not decided.

    >>> [verdict(Difference(d, 5, d - w, d + w), sigma_of(Difference(d, 5, d - w, d + w))) for d, w in
    ...  [(0.2, 0.03), (0.01, 0.005), (0.0, 0.03)]]
    ['above', 'above, by less than 0.02', 'not decided']
    """
    equal = found.low is not None and found.high is not None and max(-found.low, found.high) < EQUAL_WITHIN
    if abs(found.mean) * sqrt(found.seeds) / sigma > level(found.seeds):
        return ("above" if found.mean > 0 else "below") + (f", by less than {EQUAL_WITHIN}" if equal else "")
    return "equal" if equal else "not decided"


def claims_table(file: Path, baseline: str) -> str:
    """A line for each row and text that has at least two seeds in common with the baseline."""
    lines = [
        _line(result, text)
        for text, results in by_text(measured_against(read_export(file), baseline))
        for result in results
        if not result.reference
    ]
    return markdown(HEADER, [line for line in lines if line])


def _line(result: Result, text: str) -> list[str] | None:
    found = result.difference
    sigma = sigma_of(found) if found else None
    if found is None or sigma is None:
        return None
    figures = [
        f"{sigma:.3f}",
        f"{found.mean:+.3f}",
        f"{found.mean * sqrt(found.seeds) / sigma:+.1f}",
        f"{level(found.seeds):.1f}",
    ]
    return [f"`{short(result)}`", text, str(found.seeds), *figures, verdict(found, sigma)]
