"""Failures of the write-back: updates that are lost, and updates that drown in their own rounding."""

from __future__ import annotations

from nanogpt_bench.failures.batches import BatchEffect
from nanogpt_bench.failures.criteria import ABOVE, BELOW, clear, found, judge, not_judged
from nanogpt_bench.failures.evidence import Evidence, Series
from nanogpt_bench.failures.finding import Criterion, Facts, Finding

LOST = "stall/update_lost"
SIGNAL = "grad/update_to_noise"


def stall(evidence: Evidence) -> Finding:
    """Requested updates that nearest rounding undoes: the weights stand still although they should not."""
    if evidence.rounded is False:
        return clear("stall", "no step is rounded when it is written back")
    if evidence.losing is False:
        return clear("stall", "the write-back keeps what rounding loses, or returns it on average")
    series = evidence.series(LOST)
    if not series:
        return not_judged("stall", LOST)
    criterion = judge(series, ABOVE, evidence.limits.stall, evidence.limits.patience)
    layer, share = evidence.worst_layer(LOST)
    facts: Facts = {"metric": LOST, "threshold": criterion.threshold, "mean": series.mean, "looks": len(series)}
    facts |= {"worst_layer": layer, "worst_share": share}
    said = f"{series.mean:.1%} of the weights lost a requested update" + (f", {share:.1%} of {layer}" if layer else "")
    if criterion.step is None:
        return clear("stall", said, [criterion], **facts)
    return found("stall", criterion.step, f"{said}; from step {criterion.step} on", [criterion], **facts)


def rounding_noise(evidence: Evidence, plateau: Finding, effect: BatchEffect | None) -> Finding:
    """A plateau kept up by the randomness of rounding: updates are smaller than it, and larger batches lie lower."""
    kind = "rounding_noise"
    if evidence.losing is not False or evidence.rounded is False:
        return clear(kind, "no step is rounded at random when it is written back")
    if not plateau.found:
        return clear(kind, "the loss did not come to rest on a plateau")
    noise = _noise(evidence, plateau.step or 0)
    if noise is None and effect is None:
        return not_judged(kind, SIGNAL, "a run with another batch size")
    return _weigh(plateau.step or 0, noise, effect, evidence.limits.batch_fall)


def _noise(evidence: Evidence, since: int) -> Criterion | None:
    """Whether updates on the plateau were smaller than their rounding; None where that was not recorded."""
    series = evidence.series(SIGNAL)
    pairs = [(s, v) for s, v in zip(series.steps, series.values, strict=True) if s >= since]
    if not pairs:
        return None
    late = Series(SIGNAL, tuple(s for s, _ in pairs), tuple(v for _, v in pairs))
    return judge(late, BELOW, evidence.limits.noise, evidence.limits.patience)


def _weigh(since: int, noise: Criterion | None, effect: BatchEffect | None, batch_fall: float) -> Finding:
    """Both signs must be there, as far as both are known: gradient noise falls with the batch size as well."""
    small = noise is None or noise.fired
    falls = effect is None or effect.fall >= batch_fall
    criteria = [noise] if noise is not None else []
    facts: Facts = {"plateau_step": since}
    parts = []
    if noise is not None:
        facts |= {"metric": SIGNAL, "threshold": noise.threshold, "lowest": noise.extreme}
        parts.append(f"updates down to {noise.extreme:.3g} of their rounding noise on the plateau")
    if effect is not None:
        facts |= effect.facts()
        parts.append(effect.text)
    said = "; ".join(parts)
    if not (small and falls):
        return clear("rounding_noise", said, criteria, **facts)
    step = noise.step if noise is not None and noise.step is not None else since
    return found("rounding_noise", step, said, criteria, **facts)
