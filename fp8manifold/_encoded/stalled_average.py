"""The warning of a running average that rounding to nearest keeps where it is."""

import warnings

from torch import Tensor

from fp8manifold._encoded.dispatch import is_averaging

__all__ = ["StalledAverageWarning", "is_average", "warn_if_stalled"]


class StalledAverageWarning(UserWarning):
    """A running average lies in weights rounded to nearest, which lose most of its updates."""


def is_average(operator: str) -> bool:
    """Whether an operator that writes is a step of a running average: ``lerp_``, or what ``AveragedModel`` copies."""
    return operator == "lerp_" or (operator == "copy_" and is_averaging())


def warn_if_stalled(wanted: Tensor, before: Tensor, unchanged: Tensor) -> None:
    """Warn where more than half of the updates are lost, once by Python's own filter: the words are always the same.

    Args:
        wanted: the values asked for.
        before: the values stored.
        unchanged: where the stored codes are the same as before.
    """
    asked = wanted != before
    if 2 * int((asked & unchanged).sum()) > int(asked.sum()):
        warnings.warn(
            "a running average in one-byte weights that are rounded to nearest loses most of its updates and stalls: "
            "use fm.averaged_model(model), which averages floats, or weights with rounding='stochastic'",
            StalledAverageWarning,
            stacklevel=2,
        )
