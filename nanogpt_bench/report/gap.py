"""When a run leaves its reference: the smoothed gap of their training losses, at the same batches."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from nanogpt_bench.config.metrics import TOKENS, TRAIN_LOSS
from nanogpt_bench.report.seeds import seed_of
from nanogpt_bench.runs.curves import smooth, smoothing_window
from nanogpt_bench.runs.load import Run


def tokens_to_gap(run: Run, reference: Run, nats: float) -> float | None:
    """First tokens at which the smoothed gap of the training losses exceeds `nats`; None when it never does.

    gap_t = EMA(L_t - L_ref,t) over the steps both recorded, with the window of the loss curves. A loss
    that is not finite where the reference's is exceeds every gap.
    """
    base = {step: loss for step, loss in zip(*reference.curve(TRAIN_LOSS.name), strict=True) if loss is not None}
    shared = [(step, loss) for step, loss in zip(*run.curve(TRAIN_LOSS.name), strict=True) if step in base]
    gaps = [None if loss is None else loss - base[step] for step, loss in shared]
    smoothed = smooth(gaps, smoothing_window(len(gaps)))
    for (step, _), gap in zip(shared, smoothed, strict=True):
        if gap is None or gap > nats:
            return next((tokens for at, tokens in zip(*run.curve(TOKENS.name), strict=True) if at == step), None)
    return None


def gap_to(run: Run, others: Sequence[Run]) -> float | None:
    """L - L_ref, against the reference's run of the same seed where there is one, else against its mean.

    A run that ended early has none: its loss belongs to another number of steps.
    """
    twins = [other for other in others if other.status == "finished" and seed_of(other) == seed_of(run)]
    base = [loss for other in twins or others if (loss := other.at_end("final_val_loss")) is not None]
    loss = run.at_end("final_val_loss")
    return loss - statistics.fmean(base) if loss is not None and base else None


def error_of(gaps: Sequence[float], errors: Sequence[float | None]) -> float | None:
    """The standard error of a row's gap: over its seeds, of one seed that of both losses over their batches.

    The batches are the same, so that of one seed it is rather too large.

    >>> error_of([1.0, 3.0, 5.0, 3.0], []), error_of([0.1], [3.0, 4.0]), error_of([0.1], [0.03, None])
    (0.816496580927726, 5.0, None)
    """
    if len(gaps) > 1:
        return statistics.stdev(gaps) / math.sqrt(len(gaps))
    known = [error for error in errors if error is not None]
    return math.hypot(*known) if known and len(known) == len(errors) else None


def twin_of(run: Run, others: tuple[Run, ...]) -> Run | None:
    """The run of the same seed, which saw the same batches; else the first; None when there is none."""
    return next((other for other in others if seed_of(other) == seed_of(run)), others[0] if others else None)
