"""Failures of the values that flow: beyond the format, outliers, attention on one token, gradients gone or huge."""

from __future__ import annotations

import math

from nanogpt_bench.config.metrics import (
    ABOVE,
    BELOW,
    CLAMPED,
    ENTROPY,
    GRAD_DEAD,
    GRAD_NORM,
    GRAD_ZERO,
    KURTOSIS,
    OVERFLOW,
)
from nanogpt_bench.failures.criteria import clear, earliest, found, judge, not_judged, over_median, worst
from nanogpt_bench.failures.evidence import Evidence
from nanogpt_bench.failures.finding import Criterion, Facts, Finding

KURTOSIS_OF_BLOCKS = KURTOSIS.by("residual").name


def overflow(evidence: Evidence) -> Finding:
    """Values beyond the format's largest, which saturate."""
    shares = (*OVERFLOW.each, *CLAMPED.each)
    watched = [series for share in shares if (series := worst(evidence, share.name))]
    if not watched and not evidence.quantized:
        return clear("overflow", "nothing is quantised")
    if not watched:
        return not_judged("overflow", OVERFLOW.name)
    limits = evidence.limits
    criteria = [judge(series, OVERFLOW.bad, limits.overflow, limits.patience) for series in watched]
    peak = max(criteria, key=lambda criterion: criterion.extreme or 0.0)
    first = earliest(criteria)
    shown = first or peak
    layer, share = evidence.worst_layer(shown.metric)
    facts: Facts = {"metric": shown.metric, "threshold": limits.overflow, "highest": shown.extreme}
    facts |= {"worst_layer": layer, "worst_share": share}
    operand = shown.metric.rsplit("/", 1)[-1].replace("_", " ")
    said = f"up to {shown.extreme:.2%} of the {operand} values of a layer lay beyond the format"
    if first is None or first.step is None:
        return clear("overflow", said, criteria, **facts)
    where = f", most of all in {layer}" if layer else ""
    return found("overflow", first.step, f"{said}{where}; from step {first.step} on", criteria, **facts)


def outlier_explosion(evidence: Evidence) -> Finding:
    """Block outputs whose kurtosis is high and has grown: a few features dwarf all others.

    Other activations tell nothing here: those behind a nonlinearity pass any such bound in runs that are well.
    """
    kind, limits, series = "outlier_explosion", evidence.limits, worst(evidence, KURTOSIS_OF_BLOCKS)
    if not series:
        return not_judged(kind, KURTOSIS_OF_BLOCKS)
    if len(series) < 2:
        return not_judged(kind, why="not judged: one look at the kurtosis does not show it grow")
    bound = max(limits.kurtosis, limits.kurtosis_growth * series.values[0])
    criterion = judge(series, KURTOSIS.bad, bound, limits.patience, cut_off=evidence.died)
    facts: Facts = {
        "metric": KURTOSIS_OF_BLOCKS,
        "threshold": bound,
        "first": series.values[0],
        "highest": criterion.extreme,
    }
    facts |= {"highest_step": criterion.extreme_step, "worst_block": evidence.worst_layer(KURTOSIS_OF_BLOCKS)[0]}
    said = f"the kurtosis of the blocks' outputs went from {series.values[0]:.3g} to {criterion.extreme:.3g}"
    said += f" (step {criterion.extreme_step})"
    if criterion.step is None:
        return clear(kind, said, [criterion], **facts)
    return found(
        kind, criterion.step, f"{said}, beyond {bound:.3g} from step {criterion.step} on", [criterion], **facts
    )


def attention_collapse(evidence: Evidence) -> Finding:
    """Attention that looks at one token only: its entropy, meant over the heads, goes towards 0."""
    kind, series, block = "attention_collapse", evidence.series(ENTROPY.name), evidence.setting("model.block_size")
    if not series:
        return not_judged(kind, ENTROPY.name)
    if not isinstance(block, int) or block < 2:
        return not_judged(kind, why="not judged: the config does not give model.block_size")
    uniform = uniform_entropy(block)
    criterion = judge(series, ENTROPY.bad, evidence.limits.entropy * uniform, evidence.limits.patience)
    head, entropy = evidence.worst_layer(ENTROPY.name, lowest=True)
    facts: Facts = {
        "metric": ENTROPY.name,
        "threshold": criterion.threshold,
        "uniform": uniform,
        "lowest": criterion.extreme,
    }
    facts |= {"lowest_step": criterion.extreme_step, "lowest_head": head, "lowest_head_entropy": entropy}
    said = f"attention's entropy fell to {criterion.extreme:.3f} nats of the {uniform:.3f} of uniform attention"
    if criterion.step is None:
        return clear(kind, said, [criterion], **facts)
    return found(kind, criterion.step, f"{said}; collapsed from step {criterion.step} on", [criterion], **facts)


def uniform_entropy(block: int) -> float:
    """Mean entropy (nats) of causal attention that looks at all tokens alike: the mean of ln i for i up to `block`.

    >>> round(uniform_entropy(2), 4)
    0.3466
    """
    return math.lgamma(block + 1) / block


def zero_gradients(evidence: Evidence) -> Finding:
    """Gradients that are zero, or were too small for too long."""
    kind, limits = "zero_gradients", evidence.limits
    bounds = (
        (GRAD_NORM.name, BELOW, limits.gradient_norm),
        (GRAD_ZERO.name, GRAD_ZERO.bad, limits.zero_gradients),
        (GRAD_DEAD.name, GRAD_DEAD.bad, limits.zero_gradients),
    )
    watched = [(series, side, bound) for name, side, bound in bounds if (series := evidence.series(name))]
    if not watched:
        return not_judged(kind, *(name for name, _, _ in bounds))
    criteria = [judge(series, side, bound, limits.patience) for series, side, bound in watched]
    first = earliest(criteria)
    facts: Facts = {criterion.metric: criterion.extreme for criterion in criteria}
    if first is None or first.step is None:
        return clear(kind, _zero_text(criteria), criteria, **facts)
    layer = evidence.worst_layer(GRAD_ZERO.name)[0]
    facts |= {"metric": first.metric, "threshold": first.threshold, "worst_layer": layer}
    return found(kind, first.step, f"{_zero_text(criteria)}; from step {first.step} on", criteria, **facts)


def _zero_text(criteria: list[Criterion]) -> str:
    words = {
        GRAD_NORM.name: "gradient norm down to {:.2g}",
        GRAD_ZERO.name: "up to {:.1%} of it zero",
        GRAD_DEAD.name: "up to {:.1%} dead",
    }
    return ", ".join(words[criterion.metric].format(criterion.extreme) for criterion in criteria)


def exploding_gradients(evidence: Evidence) -> Finding:
    """Gradient norms far above those of the steps before."""
    kind, limits = "exploding_gradients", evidence.limits
    norms = evidence.series(GRAD_NORM.name)
    ratios = over_median(norms)
    if not norms:
        return not_judged(kind, GRAD_NORM.name)
    if not ratios:
        return not_judged(kind, why="not judged: no gradient norm has one above 0 before it")
    criterion = judge(ratios, ABOVE, limits.exploding, limits.patience, cut_off=evidence.died)
    facts: Facts = {"metric": GRAD_NORM.name, "threshold": criterion.threshold, "largest_ratio": criterion.extreme}
    facts |= {"largest_norm": max(norms.values), "median_norm": sorted(norms.values)[len(norms) // 2]}
    said = f"the gradient norm reached {criterion.extreme:.3g} times its median (step {criterion.extreme_step})"
    if criterion.step is None:
        return clear(kind, said, [criterion], **facts)
    return found(kind, criterion.step, said, [criterion], **facts)
