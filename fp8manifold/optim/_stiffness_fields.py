"""The stiffness of all weights of a parameter, and how often each value is there.

A mean over weights and a share of weights need no number for each weight::

    codes with long runs     one value for each exponent field and scale, and its count
    everything else          one value for each weight

Nearly all steps are of the first kind. It takes a few bytes for each scale in place of
four for each weight, of which the largest layer has hundreds of millions.
"""

from torch import Tensor

from fp8manifold._base.float_bits import working_dtype
from fp8manifold._encoded.exponents import ExponentCounts, exponent_counts
from fp8manifold._encoded.storage import expand_scale
from fp8manifold._interface import WeightStorage
from fp8manifold._numerics.charts import Metric, MetricName, chart_of
from fp8manifold._numerics.codec import decode_with_specials, decode_with_ulp
from fp8manifold._numerics.stiffness import Field
from fp8manifold.optim._slot import Slot

_SHORTEST_RUN = 4
"""Weights for each exponent field of a run from which on counting them saves memory."""


def stiffness_at_weights(slot: Slot, metric: Metric) -> Tensor:
    """Return the field S of a metric in value, a number for each weight."""
    assert slot.fmt is not None
    assert slot.scale is not None
    if slot.storage == WeightStorage.CODES and metric == MetricName.ULP:
        stiffness = decode_with_ulp(slot.weight, slot.fmt)[1]
    else:
        if slot.storage == WeightStorage.CODES:
            x = decode_with_specials(slot.weight, slot.fmt)
        else:
            x = slot.weight.to(working_dtype(slot.weight)) / slot.scale
        stiffness = chart_of(slot.fmt, metric).stiffness(x)
    return stiffness * expand_scale(slot.scale, slot.block_size, slot.weight.shape)


def stiffness_field(slot: Slot, metric: Metric) -> Field:
    """Return the field S of a metric, with counts where that saves memory."""
    assert slot.scale is not None
    counted = _counts(slot, metric)
    if counted is None:
        return Field(stiffness_at_weights(slot, metric))
    return Field(counted.ulps * slot.scale.reshape(-1, 1), counted.counts)


def scale_of_values(slot: Slot, field: Field) -> Tensor:
    """Return the scale of each value of a slot's field, in a shape that broadcasts."""
    assert slot.scale is not None
    if field.counts is None:
        return expand_scale(slot.scale, slot.block_size, slot.weight.shape)
    return slot.scale.reshape(-1, 1)


def _counts(slot: Slot, metric: Metric) -> ExponentCounts | None:
    """Return the counts of a slot's codes, or None where they would not save memory."""
    assert slot.fmt is not None
    assert slot.scale is not None
    if slot.storage != WeightStorage.CODES or metric != MetricName.ULP:
        return None
    runs = slot.scale.numel()
    fields = 1 << slot.fmt.exponent_bits
    # an empty part of a parameter has no runs
    if not runs or slot.weight.numel() < _SHORTEST_RUN * fields * runs:
        return None
    return exponent_counts(slot.weight, slot.fmt, runs)
