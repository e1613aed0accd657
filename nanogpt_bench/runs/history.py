"""What was changed in the settings of a run on its way: in environment.json, told wherever the settings are shown."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from nanogpt_bench.system.errors import shortened

#: of a setting's value in a line
LONGEST_VALUE = 200


def config_history(environment: Any) -> list[dict[str, Any]]:
    """Return the changes in the order of their steps, each as {"step": N, "changed": {key: [before, after]}}.

    Only settings that change the numbers are in it, and the corpus. What does not fit is left out: the file may be
    anyone's.

    >>> config_history({"resumed": [{"step": 3, "changed": {"optimizer.lr": [0.1, 0.2]}}, {"step": 6}]})
    [{'step': 3, 'changed': {'optimizer.lr': [0.1, 0.2]}}]
    """
    resumed = environment.get("resumed") if isinstance(environment, Mapping) else None
    return [
        {"step": entry["step"], "changed": changed}
        for entry in (resumed if isinstance(resumed, list) else [])
        if isinstance(entry, Mapping) and isinstance(entry.get("step"), int) and (changed := _pairs(entry))
    ]


def _pairs(entry: Mapping[str, Any]) -> dict[str, list[Any]]:
    changed = entry.get("changed")
    if not isinstance(changed, Mapping):
        return {}
    return {str(key): list(pair) for key, pair in changed.items() if isinstance(pair, list | tuple) and len(pair) == 2}


def latest(environment: Mapping[str, Any]) -> dict[str, Any]:
    """Return environment.json as it was where a run was last taken up: machine, versions, threads and corpus.

    >>> latest({"threads": 2, "cpu": "a", "resumed": [{"step": 3, "threads": 1}]})["threads"]
    1
    """
    resumed = environment.get("resumed")
    now = dict(environment)
    for entry in resumed if isinstance(resumed, list) else []:
        now |= entry if isinstance(entry, Mapping) else {}
    return now


def history_lines(environment: Any) -> Iterator[str]:
    """Yield a line for every change.

    >>> list(history_lines({"resumed": [{"step": 3, "changed": {"optimizer.lr": [0.1, 0.2]}}]}))
    ['settings were changed after step 3: optimizer.lr was 0.1, is 0.2; config.yaml alone does not repeat the run']
    """
    for entry in config_history(environment):
        changes = ", ".join(
            f"{key} was {_shown(was)}, is {_shown(now)}" for key, (was, now) in entry["changed"].items()
        )
        yield f"settings were changed after step {entry['step']}: {changes}; config.yaml alone does not repeat the run"


def history_comment(environment: Any) -> str:
    """Return those lines as the first ones of config.yaml; nothing where the settings are those of every step."""
    return "".join(f"# {line}\n" for line in history_lines(environment))


def _shown(value: Any) -> str:
    """A value on one line of printable characters: JSON escapes all others."""
    return shortened(json.dumps(value), LONGEST_VALUE)
