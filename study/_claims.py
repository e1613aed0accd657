"""Differences of Q16 to the same optimizer in float32, each with n, its standard
deviation over seeds, and a verdict.

A difference is claimed where `|d| sqrt(n) / sigma` is beyond Student's t at a p-value
of 0.01 (4.6 at five seeds), and two rows are equal where the 95% interval lies within
0.02. Both levels were announced before the runs.
"""

from collections.abc import Mapping, Sequence
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev

from _compared import TEXTS, short, text_of_row
from _markdown import markdown
from _study import FOLDER, against_baseline
from scipy.stats import t

from nanogpt_bench.report.paired import Difference
from nanogpt_bench.report.results import Result
from nanogpt_bench.report.results_file import read_export

CLAIMED_P, EQUAL_WITHIN = 0.01, 0.02
HEADER = (
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
#: the runs of the baselines that are longer by so many steps
LONGER, BY = "study_q16_steps", 200
BASELINE = {"fp32": "study_q16_adamw", "muon": "study_q16_muon"}


def sigma_of(found: Difference) -> float | None:
    """Standard deviation of paired differences over seeds, from the half width of their
    95% interval.

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
    equal = (
        found.low is not None
        and found.high is not None
        and max(-found.low, found.high) < EQUAL_WITHIN
    )
    if abs(found.mean) * sqrt(found.seeds) / sigma > level(found.seeds):
        return ("above" if found.mean > 0 else "below") + (
            f", by less than {EQUAL_WITHIN}" if equal else ""
        )
    return "equal" if equal else "not decided"


def gain_per_step(longer: Mapping[int, float], shorter: Mapping[int, float]) -> float | None:
    """Nats that a baseline gains per step at its end, from its losses by seed; None
    where the 95% interval holds 0.

    >>> shorter = {1: 1.53, 2: 1.54, 3: 1.51}
    >>> round(gain_per_step({1: 1.5, 2: 1.52, 3: 1.49}, shorter) or 0, 6), gain_per_step({1: 1.5}, shorter)
    (0.000117, None)
    """
    gains = [shorter[seed] - longer[seed] for seed in shorter if seed in longer]
    if len(gains) < 2:
        return None
    mean, half = fmean(gains), float(t.ppf(0.975, len(gains) - 1)) * stdev(gains) / sqrt(len(gains))
    return mean / BY if abs(mean) > half else None


def losses(file: Path, baseline: str, text: str) -> dict[int, float]:
    """Final losses of a baseline by seed, on one text."""
    rows = [
        row
        for row in read_export(file).rows
        if row.rule == baseline and TEXTS[text_of_row(row)] == text
    ]
    return {run.seed: run.summary["final_val_loss"] for row in rows for run in row.runs}


def claims_table(lines: Sequence[tuple[str, str, str, str]]) -> str:
    """A line for each text and row: its results files, its rule, its title, and the
    rule of its baseline.
    """
    found = [
        (text, title, next(r for r in results if short(r) == rule), baseline)
        for stems, rule, title, baseline in lines
        for text, results in against_baseline(stems, baseline)
        if rule != baseline
    ]
    order = list(dict.fromkeys(text for text, *_ in found))
    rows = [_line(*each) for each in sorted(found, key=lambda each: order.index(each[0]))]
    return markdown(HEADER, [row for row in rows if row])


def _line(text: str, title: str, result: Result, baseline: str) -> list[str] | None:
    found = result.difference
    sigma = sigma_of(found) if found else None
    if found is None or sigma is None:
        return None
    gain = gain_per_step(
        *(losses(FOLDER / f"{stem}.json", baseline, text) for stem in (LONGER, BASELINE[baseline]))
    )
    figures = [
        f"{sigma:.3f}",
        f"{found.mean:+.3f}",
        f"{found.mean / gain:+.0f}" if gain else "",
        f"{found.mean * sqrt(found.seeds) / sigma:+.1f}",
        f"{level(found.seeds):.1f}",
    ]
    return [title, text, str(found.seeds), *figures, verdict(found, sigma)]
