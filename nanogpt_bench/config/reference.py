"""The float training that others are measured against: the same settings without what belongs to their rule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: what a rule means; a reference of another rule leaves it behind
RULE_KEYS = (
    *("rule", "model.format", "model.formats", "model.storage", "model.headroom", "model.granularity", "model.tied"),
    *("optimizer.name", "optimizer.lr", "optimizer.float_lr", "optimizer.beta1", "optimizer.beta2", "optimizer.eps"),
    *("optimizer.momentum", "optimizer.weight_decay", "optimizer.writeback", "optimizer.moments"),
    *("optimizer.stiffness", "optimizer.stiffness_end", "optimizer.stiffness_schedule"),
    *("optimizer.weight_decay_end", "optimizer.weight_decay_schedule", "optimizer.representation"),
    *("optimizer.refresh",),
    *("optimizer.damping", "optimizer.compile", "train.precision"),
)


def reference_settings(base: Mapping[str, Any], reference: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a reference: those of all runs without what belongs to their rule, and its own.

    >>> reference_settings({"rule": "nearest", "model.format": "E4M3", "seed": 1}, {"rule": "fp32"})
    {'seed': 1, 'rule': 'fp32'}
    """
    return {key: value for key, value in base.items() if key not in RULE_KEYS} | dict(reference)


def float_rule(precision: str | None) -> str:
    """Return the rule of AdamW on float weights at a precision: autocast unless it is float32.

    >>> float_rule("float32"), float_rule("bf16-mixed")
    ('fp32', 'bf16-mixed')
    """
    return "fp32" if precision == "float32" else "bf16-mixed"
