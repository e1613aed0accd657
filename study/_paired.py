"""Final losses by seed, and a paired difference as text."""

from nanogpt_bench.report.paired import MARK, Difference
from nanogpt_bench.report.rows import Row


def losses_of(row: Row) -> dict[int, float]:
    """Return the row's final losses by seed, of the runs that finished."""
    losses = {}
    for run in row.runs:
        loss = run.number("final_val_loss")
        if run.status == "finished" and run.seed is not None and loss is not None:
            losses[run.seed] = loss
    return losses


def in_figures(difference: Difference, sign: int = 1) -> str:
    """Return a difference and half the width of its interval.

    It is marked if its runs were made on two processors.

    >>> in_figures(Difference(-0.2, 5, -0.23, -0.17), sign=-1), in_figures(Difference(-0.2, 1))
    ('0.200 ± 0.030', '-0.200')
    """
    text = f"{sign * difference.mean:.3f}"
    if difference.low is not None and difference.high is not None:
        text += f" ± {(difference.high - difference.low) / 2:.3f}"
    return text + MARK if difference.apart else text
