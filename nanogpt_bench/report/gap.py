"""When a run leaves its reference: the smoothed gap of their training losses, at the same batches."""

from __future__ import annotations

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


def twin_of(run: Run, others: tuple[Run, ...]) -> Run | None:
    """The run of the same seed, which saw the same batches; else the first; None when there is none."""
    return next((other for other in others if seed_of(other) == seed_of(run)), others[0] if others else None)
