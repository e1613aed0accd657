"""Final losses by seed, and a paired difference as text."""

from nanogpt_bench.report.paired import MARK, Difference
from nanogpt_bench.report.rows import Row


def losses_of(row: Row) -> dict[int, float]:
    """The row's final losses by seed, of the runs that finished."""
    found = (
        (run.seed, run.number("final_val_loss")) for run in row.runs if run.status == "finished"
    )
    return {seed: loss for seed, loss in found if seed is not None and loss is not None}


def in_figures(found: Difference, sign: int = 1) -> str:
    """Return a difference and half the width of its interval, marked if its runs were
    made on two processors.

    >>> in_figures(Difference(-0.2, 5, -0.23, -0.17), -1), in_figures(Difference(-0.2, 1))
    ('0.200 ± 0.030', '-0.200')
    """
    half = (
        "" if found.low is None or found.high is None else f" ± {(found.high - found.low) / 2:.3f}"
    )
    return f"{sign * found.mean:.3f}{half}{MARK * found.apart}"
