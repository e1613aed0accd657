"""The settings `compare` runs with when nobody says otherwise: one place to read, one place to tune."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

REFERENCE = "bf16-mixed"
# Rules tried on a format when only formats are asked for, and the format when only rules are.
DEFAULT_RULES = ("master", "nearest", "stochastic", "stiffness-anneal", "muon-stochastic", "muon-residual8")
DEFAULT_FORMATS = ("E4M3",)


@dataclass(frozen=True)
class Demonstration:
    """A GPT of about 0.8M parameters on the standard library's prose, long enough to tell the rules apart.

    `riemannian` is not among the rows: it leads after 300 steps and is behind after 2,000 (Q1 of docs/study.md). Muon
    has its row in E2M5 as well, where one byte costs it least (Q2).
    """

    # (rule, format) of every row, in the order of the table; the first is the reference.
    rows: tuple[tuple[str, str], ...] = (
        (REFERENCE, "none"),
        ("fp32", "none"),
        ("muon", "none"),
        ("master", "E4M3"),
        ("nearest", "E4M3"),
        ("stochastic", "E4M3"),
        ("stochastic-8bit", "E4M3"),
        ("stiffness-anneal", "E4M3"),
        ("muon-stochastic", "E4M3"),
        ("muon-stochastic", "E2M5"),
        ("nearest", "E7M0"),
        ("stochastic", "E7M0"),
    )
    size: str = "0.8M"
    max_steps: int = 300
    batch_size: int = 12
    eval_batches: int = 20
    # Arithmetic of the rows with 8-bit weights. bfloat16 costs as much as float32 on a CPU that has it and a third
    # more on one that has not (AVX2 only), so that just the reference pays for it.
    quantized_precision: str = "float32"
    first_seed: int = 42
    workers: int = 2

    def settings(self, rule: str, fmt: str, *, seed: int, max_steps: int, data_dir: str) -> dict[str, Any]:
        """The configuration of one run as {dotted key: value}; learning rates are the rule's own."""
        chosen: dict[str, Any] = {
            "rule": rule,
            "seed": seed,
            "data.dir": data_dir,
            "model.size": self.size,
            "train.max_steps": max_steps,
            "train.batch_size": self.batch_size,
            "optimizer.warmup_steps": min(100, max_steps // 10),
            # About ten validations and twenty looks, however long the run; every layer has three or four of them.
            "eval.interval": max(1, max_steps // 10),
            "eval.batches": self.eval_batches,
            "monitor.interval": max(1, max_steps // 20),
            "monitor.turns": 16,
            "monitor.dead_interval": 5,
            "runtime.threads": 1,
        }
        quantized = {
            "model.format": fmt,
            "train.precision": self.quantized_precision,
            "shadow.enabled": True,
            "shadow.interval": max(1, max_steps // 3),
        }
        return chosen if fmt == "none" else chosen | quantized


# Seconds a step relative to fp32, to start the longest runs first; a rule not listed counts as 1.
RELATIVE_COST = {
    "fisher": 3.0,
    "bf16-mixed": 2.0,
    "bf16-pure": 2.0,
    "bf16-stochastic": 2.0,
    "stochastic-8bit": 1.7,
    "residual8": 1.6,
    "residual4": 1.6,
    "residual2": 1.6,
    "riemannian": 1.5,
    "momentum": 1.4,
    "master": 1.2,
}
