"""The paired difference of two rows' losses: mean, 95% interval, and p-value by seed.

Two rows are compared run by run, where both have a run of a seed, so that what a seed
does to both rows cancels. The p-values of a table are adjusted together (Holm).
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nanogpt_bench.report.holm import holm

#: the mark behind a difference of runs that were made on different processors
MARK = " †"
CONFIDENCE = 0.95
ALPHA = 1 - CONFIDENCE


@dataclass(frozen=True)
class Difference:
    """The mean of L - L_ref in nats over the seeds that both rows have.

    `low` and `high` are the ends of its 95% t-interval, `p` is the p-value of the
    two-sided paired t-test, and `holm` that value adjusted for the number of rows
    tested. These four are None for one seed.

    `apart` is True if a pair's runs were made on different processors. Their kernels sum
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
    """Return the paired difference of two rows' losses by seed; None without a common seed.

    >>> paired = difference({1: 2.0, 2: 2.2, 3: 2.1}, {1: 1.9, 2: 2.05, 4: 2.0})
    >>> paired.seeds, round(paired.mean, 3), round(paired.low, 2), round(paired.high, 2)
    (2, 0.125, -0.19, 0.44)
    >>> round(paired.p, 2)
    0.13
    """
    gaps = [losses[seed] - reference[seed] for seed in losses if seed in reference]
    if not gaps:
        return None
    mean = math.fsum(gaps) / len(gaps)
    if len(gaps) == 1:
        return Difference(mean, seeds=1)
    # The test of paired differences is the test of one sample.
    from scipy.stats import ttest_1samp

    with warnings.catch_warnings():
        # scipy warns if all differences are equal
        warnings.simplefilter("ignore")
        test = ttest_1samp(gaps, 0.0)
        low, high = map(float, test.confidence_interval(CONFIDENCE))
    if not (math.isfinite(low) and math.isfinite(high)):
        low = mean
        high = mean
    p_value: float | None = float(test.pvalue)
    if not any(gaps):
        # All differences are 0; the row still counts as tested.
        p_value = 1.0
    elif not math.isfinite(test.pvalue):
        p_value = None
    return Difference(mean, len(gaps), low, high, p_value)


def adjusted(differences: Sequence[Difference | None]) -> list[Difference | None]:
    """Return differences with `holm`: their p-values adjusted by Holm's method."""
    # by place, the p-values of the differences that have one
    p_values: dict[int, float] = {}
    for place, paired in enumerate(differences):
        if paired is not None and paired.p is not None:
            p_values[place] = paired.p
    holm_values = dict(zip(p_values, holm(list(p_values.values())), strict=True))
    with_holm: list[Difference | None] = []
    for place, paired in enumerate(differences):
        if paired is not None and place in holm_values:
            paired = replace(paired, holm=holm_values[place])
        with_holm.append(paired)
    return with_holm


def difference_text(paired: Difference | None) -> str:
    """Format a difference for tables; a dash without one.

    >>> difference_text(Difference(-0.02, 5, -0.03, -0.01, 0.001, 0.004))
    '-0.020 [-0.030, -0.010], p 0.004'
    >>> difference_text(Difference(-0.02, 5, -0.03, -0.01, 0.02, 0.06))
    '-0.020 [-0.030, -0.010], p 0.06 (not after Holm)'
    >>> difference_text(Difference(-0.02, 5, -0.05, 0.01, 0.2, 0.4))
    'no difference found [-0.050, +0.010]'
    >>> difference_text(Difference(-0.02, 1)), difference_text(None)
    ('-0.020, one seed: a hint', '-')
    >>> difference_text(Difference(-0.02, 1, apart=True))
    '-0.020, one seed: a hint †'
    """
    if paired is None:
        return "-"
    mark = MARK if paired.apart else ""
    if paired.low is None or paired.high is None:
        return f"{paired.mean:+z.3f}, one seed: a hint{mark}"
    interval = f"[{paired.low:+z.3f}, {paired.high:+z.3f}]"
    if not paired.is_found:
        return f"no difference found {interval}{mark}"
    return f"{paired.mean:+z.3f} {interval}{_p_value_text(paired.holm)}{mark}"


def _p_value_text(p_value: float | None) -> str:
    if p_value is None:
        return ""
    note = " (not after Holm)" if p_value >= ALPHA else ""
    return f", p {p_value:.2g}{note}"
