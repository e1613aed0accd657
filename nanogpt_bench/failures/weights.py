"""Failures of the write-back: updates that are lost, and updates that drown in their own rounding."""

from __future__ import annotations

from nanogpt_bench.config.metrics import UPDATE_LOST, UPDATE_TO_NOISE
from nanogpt_bench.failures.batches import BatchEffect
from nanogpt_bench.failures.criteria import clear, found, judge, not_judged
from nanogpt_bench.failures.evidence import Evidence, Series
from nanogpt_bench.failures.finding import Criterion, Facts, Finding

LOST, SIGNAL = UPDATE_LOST.name, UPDATE_TO_NOISE.name
OTHER_BATCH = "a run with another batch size"


def stall(evidence: Evidence) -> Finding:
    """Requested updates that nearest rounding undoes: the weights stand still although they should not."""
    if evidence.rounded is False:
        return clear("stall", "no step is rounded when it is written back")
    if evidence.losing is False:
        return clear("stall", "the write-back keeps what rounding loses, or returns it on average")
    series = evidence.series(LOST)
    if not series:
        return not_judged("stall", LOST)
    criterion = judge(series, UPDATE_LOST.bad, evidence.limits.stall, evidence.limits.patience)
    layer, share = evidence.worst_layer(LOST)
    facts: Facts = {"metric": LOST, "threshold": criterion.threshold, "mean": series.mean, "looks": len(series)}
    facts |= {"worst_layer": layer, "worst_share": share}
    said = f"{series.mean:.1%} of the weights lost a requested update" + (f", {share:.1%} of {layer}" if layer else "")
    if criterion.step is None:
        return clear("stall", said, [criterion], **facts)
    return found("stall", criterion.step, f"{said}; from step {criterion.step} on", [criterion], **facts)


def rounding_noise(evidence: Evidence, plateau: Finding, effect: BatchEffect | None) -> Finding:
    """A plateau kept up by the randomness of rounding: it outweighs the updates, and larger batches lie lower.

    Both signs are needed. A plateau falls with the batch size under gradient noise too, and small updates are common
    in runs that learn.
    """
    kind = "rounding_noise"
    if evidence.losing is not False or evidence.rounded is False:
        return clear(kind, "no step is rounded at random when it is written back")
    if plateau.step is None:
        return clear(kind, "the loss did not come to rest on a plateau")
    noise = _noise(evidence, plateau.step)
    if noise is None:
        return not_judged(kind, SIGNAL)
    said = f"the power of the updates on the plateau was down to {noise.extreme:.3g} of the variance of their rounding"
    if noise.step is None:
        return clear(kind, said, [noise], metric=SIGNAL, threshold=noise.threshold, lowest=noise.extreme)
    if effect is None:
        return not_judged(kind, OTHER_BATCH, why=f"not judged: {said}; {OTHER_BATCH} would tell whether it falls")
    return _with_batches(noise.step, noise, effect, said, evidence.limits.batch_fall)


def _noise(evidence: Evidence, since: int) -> Criterion | None:
    """Whether rounding outweighed the updates on the plateau; None where that was not recorded."""
    series = evidence.series(SIGNAL)
    pairs = [(s, v) for s, v in zip(series.steps, series.values, strict=True) if s >= since]
    if not pairs:
        return None
    late = Series(SIGNAL, tuple(s for s, _ in pairs), tuple(v for _, v in pairs))
    return judge(late, UPDATE_TO_NOISE.bad, evidence.limits.noise, evidence.limits.patience)


def _with_batches(step: int, noise: Criterion, effect: BatchEffect, said: str, batch_fall: float) -> Finding:
    facts: Facts = {"metric": SIGNAL, "threshold": noise.threshold, "lowest": noise.extreme}
    said = f"{said}; {effect.text}"
    if effect.fall < batch_fall:
        return clear("rounding_noise", said, [noise], **facts, **effect.facts())
    return found("rounding_noise", step, said, [noise], **facts, **effect.facts())
