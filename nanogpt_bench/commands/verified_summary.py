"""What a run's summary says, set against its records and its own figures: what was added up is added up again."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from nanogpt_bench.config.metrics import (
    ARRIVED,
    BESIDE_LOSS,
    SPEED,
    STALLS,
    TOKENS,
    VAL_BITS_PER_BYTE,
    VAL_LOSS,
    VAL_LOSS_SE,
)
from nanogpt_bench.runs.read import finite

#: beyond what adding up in another order can change
TOLERANCE = 1e-9
#: figures of the last validation by their name in the summary
OF_LAST = {
    "final_val_loss_se": VAL_LOSS_SE.name,
    "bits_per_byte": VAL_BITS_PER_BYTE.name,
    **{metric.figure: metric.name for metric in BESIDE_LOSS},
}


@dataclass
class Added:
    """What the records come to, taken in one by one."""

    losses: array[float] = field(default_factory=lambda: array("d"))
    last: Mapping[str, Any] = field(default_factory=dict)
    sums: dict[str, tuple[float, int]] = field(default_factory=dict)
    tokens: float = 0.0
    seconds: float = 0.0

    def take(self, record: Mapping[str, Any]) -> None:
        """Take in one more record."""
        if VAL_LOSS.name in record:
            loss = finite(record[VAL_LOSS.name])
            self.losses.append(math.nan if loss is None else loss)
            self.last = {name: record.get(name) for name in OF_LAST.values()}
        for name in (*(metric.name for metric in STALLS), ARRIVED.name, SPEED.name):
            if (value := record.get(name)) is not None:
                total, looks = self.sums.get(name, (0.0, 0))
                known = finite(value)
                self.sums[name] = total + (math.nan if known is None else known), looks + 1
        tokens, speed = finite(record.get(TOKENS.name)), finite(record.get(SPEED.name))
        if tokens is not None:
            self.seconds += (tokens - self.tokens) / speed if speed else 0.0
            self.tokens = tokens

    def mean(self, name: str) -> float | None:
        """The mean of a figure over the records that have it; None where there is none."""
        total, looks = self.sums.get(name, (0.0, 0))
        return total / looks if looks else None

    def is_known(self, name: str) -> bool:
        """Whether all values of a figure are numbers, if it has any."""
        return math.isfinite(self.sums.get(name, (0.0, 0))[0])


def contradictions(summary: Mapping[str, Any], added: Added) -> Iterator[str]:
    """Yield what a summary says otherwise than the records do, or than its own figures make it.

    What the records do not hold is not judged: runs of older versions wrote fewer figures.
    """
    expected = {**_losses(summary, added), **_shares(summary, added), **_bytes(summary)}
    for name, (value, source) in expected.items():
        if name in summary and not _same(summary[name], value):
            yield f"summary.json has {name} {_shown(summary[name])}, {source} {_shown(value)}"


def _losses(summary: Mapping[str, Any], added: Added) -> dict[str, tuple[float | None, str]]:
    """The losses; a failed run has no final one, nor what belongs to it."""
    if not added.losses:
        return {}
    failed = summary.get("status") == "failed"
    known = [loss for loss in added.losses if math.isfinite(loss)]
    final = None if failed else finite(added.losses[-1])
    found = {
        "final_val_loss": (final, "a failed run has" if failed else "the last validation"),
        "best_val_loss": (min(known, default=None), "the lowest validation"),
        "first_val_loss": (finite(added.losses[0]), "the first validation"),
    }
    if final is not None:
        found |= {name: (value, "the last validation") for name, key in OF_LAST.items() if (value := added.last[key])}
    return found


def _shares(summary: Mapping[str, Any], added: Added) -> dict[str, tuple[float | None, str]]:
    """The shares and the speed, as means over the records."""
    named = str(summary.get("stall_metric"))
    stall = next((metric.name for metric in STALLS if named in (metric.name, metric.figure)), "")
    found: dict[str, tuple[float | None, str]] = {
        key: (added.mean(name), "the mean of the records")
        for key, name in (("stall", stall), ("arrived", ARRIVED.name))
        if added.is_known(name)
    }
    if "seconds" not in summary:  # told by `compare` of a run that could not tell it itself
        found["tokens_per_s"] = added.mean(SPEED.name), "the mean of the records"
    elif added.seconds:
        found["tokens_per_s"] = added.tokens / added.seconds, "the records come to"
    return found | ({"tokens": (added.tokens, "the last record")} if added.tokens else {})


def _bytes(summary: Mapping[str, Any]) -> dict[str, tuple[float | None, str]]:
    """The bytes a parameter, of the bytes and the parameters beside them."""
    held, parameters = (finite(summary.get(name)) for name in ("held_bytes", "parameters"))
    if held is None or not parameters:
        return {}
    return {"bytes_per_parameter": (held / parameters, "held_bytes over parameters is")}


def _same(said: Any, value: float | None) -> bool:
    number = finite(said)
    if number is None or value is None:
        return said is None and value is None
    return math.isclose(number, value, rel_tol=TOLERANCE, abs_tol=1e-12)


def _shown(value: Any) -> str:
    number = finite(value)
    return "none" if value is None else f"{value!r:.40}" if number is None else f"{number:.10g}"
