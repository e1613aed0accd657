"""When a run leaves its reference: the smoothed gap of their training losses, at the same batches."""

from __future__ import annotations

from nanogpt_bench.report.curves import smooth, smoothing_window
from nanogpt_bench.report.load import Run
from nanogpt_bench.report.read import finite

LOSS = "train/loss"


def tokens_to_gap(run: Run, reference: Run, nats: float) -> float | None:
    """First tokens at which the smoothed gap of the training losses exceeds `nats`; None when it never does.

    gap_t = EMA(L_t - L_ref,t) over the steps both recorded, with the window of the loss curves. A loss
    that is not finite where the reference's is exceeds every gap.
    """
    base = {record["step"]: loss for record in reference.metrics if (loss := finite(record.get(LOSS))) is not None}
    shared = [record for record in run.metrics if LOSS in record and record["step"] in base]
    gaps = [None if (loss := finite(r[LOSS])) is None else loss - base[r["step"]] for r in shared]
    smoothed = smooth(gaps, smoothing_window(len(gaps)))
    for record, gap in zip(shared, smoothed, strict=True):
        if gap is None or gap > nats:
            return finite(record.get("tokens"))
    return None


def twin_of(run: Run, others: tuple[Run, ...]) -> Run | None:
    """The run of the same seed, which saw the same batches; else the first; None when there is none."""
    return next((other for other in others if other.seed == run.seed), others[0] if others else None)
