"""Differences paired by seed: the mean, its 95% t-interval, and p-values adjusted over all rows by Holm's method."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

CONFIDENCE = 0.95
ALPHA = 1 - CONFIDENCE


@dataclass(frozen=True)
class Difference:
    """L - L_ref in nats a token, the mean over the seeds that both have; of one seed there is no more than that.

    `low` and `high` are the ends of its 95% interval, `p` the probability of so large a difference where there is none
    (two-sided paired t-test), `holm` the same adjusted for the number of rows that were tested.
    """

    mean: float
    seeds: int
    low: float | None = None
    high: float | None = None
    p: float | None = None
    holm: float | None = None

    @property
    def is_lead(self) -> bool:
        """Whether it rests on one seed."""
        return self.low is None or self.high is None

    @property
    def is_found(self) -> bool:
        """Whether the interval leaves 0 out."""
        return self.low is not None and self.high is not None and not self.low <= 0.0 <= self.high


def difference(losses: Mapping[Any, float], reference: Mapping[Any, float]) -> Difference | None:
    """Return the difference of losses by seed to the reference's; None without a seed that both have.

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
        warnings.simplefilter("ignore")  # all differences alike: an interval of no width
        test = ttest_1samp(apart, 0.0)
        low, high = map(float, test.confidence_interval(CONFIDENCE))
    if not (math.isfinite(low) and math.isfinite(high)):
        low = high = mean
    p = float(test.pvalue)
    if not any(apart):
        p = 1.0  # the same at every seed, and one of the family all the same
    return Difference(mean, len(apart), low, high, p if math.isfinite(p) else None)


def adjusted(found: Sequence[Difference | None]) -> list[Difference | None]:
    """Return differences with `holm`: their p-values adjusted for being one of so many (statsmodels' Holm)."""
    tested = [each.p for each in found if each is not None and each.p is not None]
    if not tested:
        return list(found)
    from statsmodels.stats.multitest import multipletests

    left = iter(multipletests(tested, method="holm")[1].tolist())
    return [each if each is None or each.p is None else replace(each, holm=next(left)) for each in found]


def difference_text(found: Difference | None, digits: int = 3) -> str:
    """Return a difference as tables show it; a dash where there is none.

    >>> difference_text(Difference(-0.02, 5, -0.03, -0.01, 0.001, 0.004))
    '-0.020 [-0.030, -0.010], p 0.004'
    >>> difference_text(Difference(-0.02, 5, -0.03, -0.01, 0.02, 0.06))
    '-0.020 [-0.030, -0.010], p 0.06 (not after Holm)'
    >>> difference_text(Difference(-0.02, 5, -0.05, 0.01, 0.2, 0.4))
    'no difference found [-0.050, +0.010]'
    >>> difference_text(Difference(-0.02, 1)), difference_text(None)
    ('-0.020, one seed: a lead', '-')
    """
    if found is None:
        return "-"
    if found.low is None or found.high is None:
        return f"{found.mean:+z.{digits}f}, one seed: a lead"
    interval = f"[{found.low:+z.{digits}f}, {found.high:+z.{digits}f}]"
    if not found.is_found:
        return f"no difference found {interval}"
    after = "" if found.holm is None else f", p {found.holm:.2g}" + (" (not after Holm)" if found.holm >= ALPHA else "")
    return f"{found.mean:+z.{digits}f} {interval}{after}"
