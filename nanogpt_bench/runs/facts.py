"""What a run's numbers depend on beside its settings, and whether it is the same here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nanogpt_bench.config.keys import FIELDS
from nanogpt_bench.config.settings import flatten
from nanogpt_bench.runs.load import Run

GPU = "GPU"
#: facts of environment.json without which a number is not that of the row, and what is said of them
DECIDING = {
    "torch": ("libraries", "torch"),
    GPU: ("gpu",),
    "text (SHA-256 of its training tokens)": ("corpus", "splits", "train", "sha256"),
    "text (SHA-256 of its validation tokens)": ("corpus", "splits", "val", "sha256"),
    "first weights (SHA-256)": ("init_from", "sha256"),
}
#: facts that may change its last digits
MINOR = {
    "numpy": ("libraries", "numpy"),
    "fp8manifold": ("libraries", "fp8manifold"),
    "commit": ("commit",),
    "CPU": ("cpu",),
}


def settings_of(run: Run) -> dict[str, Any]:
    """Return the settings that a run had, by dotted key.

    Raises:
        BenchError: one that this version does not know.
    """
    return {key: value for key, value in flatten(dict(run.config)) if key in FIELDS}


def differing(run: Run, here: Mapping[str, Any], facts: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    """Yield what differs between the facts of a run and those of here, in words."""
    for name, keys in facts.items():
        then, now = (_at(each, keys) for each in (run.environment, here))
        if then != now and not (name == GPU and then is None):  # what was trained on a CPU is so again
            yield f"{name} was {_short(then)}, is {_short(now)}"


def _at(facts: Any, keys: Sequence[str]) -> Any:
    for key in keys:
        facts = facts.get(key) if isinstance(facts, Mapping) else None
    return facts


def _short(value: Any) -> str:
    return "none" if value is None else f"{str(value)[:12]}…" if len(str(value)) > 40 else str(value)
