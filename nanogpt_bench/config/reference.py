"""The float training that others are measured against: the same settings without what belongs to their rule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nanogpt_bench.config.keys import keys_where


def reference_settings(base: Mapping[str, Any], reference: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a reference: those of all runs without what belongs to their rule, and its own.

    >>> reference_settings({"rule": "nearest", "model.format": "E4M3", "seed": 1}, {"rule": "fp32"})
    {'seed': 1, 'rule': 'fp32'}
    """
    of_rule = keys_where("of_rule")
    return {key: value for key, value in base.items() if key not in of_rule} | dict(reference)


def float_rule(precision: str | None) -> str:
    """Return the rule of AdamW on float weights at a precision: autocast unless it is float32.

    >>> float_rule("float32"), float_rule("bf16-mixed")
    ('fp32', 'bf16-mixed')
    """
    return "fp32" if precision == "float32" else "bf16-mixed"
