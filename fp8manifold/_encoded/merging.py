"""Adapters that PEFT merges into stored weights, or takes out of them: said, as PEFT does of its own 8-bit layers."""

import sys
import warnings
from typing import Any


def warn_if_merged(stored: Any) -> None:
    """Warn where PEFT assigns to the ``data`` of a weight; called by the setter of that.

    Args:
        stored: the weight, or its manifold: what has its format.
    """
    if sys._getframe(2).f_globals.get("__name__", "").startswith("peft."):
        warnings.warn(
            f"an adapter is merged into a weight in {stored.format.name}, or taken out of it: the sum is rounded, so "
            "outputs may differ, and unmerging does not give the weight back; to round once, call dequantize_model, "
            "merge_and_unload and quantize_model",
            stacklevel=3,
        )
