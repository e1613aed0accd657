"""The update rules: how weights are stored and how a step changes them. Data: one entry a rule."""

from __future__ import annotations

from dataclasses import dataclass

from nanogpt_bench.errors import unknown


@dataclass(frozen=True)
class Rule:
    """What a rule's name stands for; each field is the default of the configuration key of the same meaning."""

    #: where weights live: float32, master (float32 copy, quantised forward) or grid (no copy)
    storage: str
    #: adamw, sgd, stiffness_adamw or riemannian_adam
    optimizer: str
    #: default learning rate: in value, but in ULPs a step for riemannian_adam
    lr: float
    #: float32, bf16-mixed (autocast) or bf16-pure (bfloat16 weights and optimizer state)
    precision: str = "bf16-mixed"
    #: how a step is rounded onto the grid: nearest or stochastic (None: no grid)
    writeback: str | None = None
    #: the stiffness exponent k at the first step (None: the optimizer has none)
    stiffness: float | None = None
    #: k at the last step, reached linearly (None: k stays)
    stiffness_end: float | None = None
    #: learning rate of the parameters that stay float, where it differs in unit from lr (riemannian_adam)
    float_lr: float | None = None
    #: one line for --help and the report
    help: str = ""


RULES: dict[str, Rule] = {
    "fp32": Rule("float32", "adamw", 1e-3, "float32", help="AdamW, everything in float32"),
    "bf16-mixed": Rule("float32", "adamw", 1e-3, help="AdamW, bfloat16 autocast, float32 weights: the reference"),
    "bf16-pure": Rule("float32", "adamw", 1e-3, "bf16-pure", help="AdamW, weights and state in bfloat16"),
    "sgd": Rule("float32", "sgd", 1e-1, "float32", help="SGD with momentum 0.9, everything in float32"),
    "master": Rule("master", "adamw", 1e-3, help="AdamW on a float32 master copy, quantised forward (QAT)"),
    "nearest": Rule("grid", "adamw", 1e-3, writeback="nearest", help="AdamW, no master copy, nearest rounding"),
    "stochastic": Rule(
        "grid", "adamw", 1e-3, writeback="stochastic", help="AdamW, no master copy, stochastic rounding"
    ),
    "stiffness": Rule(
        "grid",
        "stiffness_adamw",
        1e-3,
        writeback="stochastic",
        stiffness=1.0,
        help="StiffnessAdamW with k = 1, no master copy, stochastic rounding",
    ),
    "stiffness-anneal": Rule(
        "grid",
        "stiffness_adamw",
        1e-3,
        writeback="stochastic",
        stiffness=1.0,
        stiffness_end=0.0,
        help="StiffnessAdamW with k from 1 to 0, no master copy, stochastic rounding",
    ),
    "riemannian": Rule(
        "grid",
        "riemannian_adam",
        0.5,
        writeback="stochastic",
        float_lr=1e-3,
        help="RiemannianAdam (lr in ULPs a step), no master copy, stochastic rounding",
    ),
}


def rule(name: str) -> Rule:
    """Return the rule called `name`.

    >>> rule("nearest").writeback
    'nearest'

    Raises:
        BenchError: no such rule; names the nearest one.
    """
    if name not in RULES:
        raise unknown("rule", name, RULES)
    return RULES[name]
