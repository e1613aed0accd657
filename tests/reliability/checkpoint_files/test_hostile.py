"""A checkpoint made by someone else is read or refused: nothing in it runs, and its size bounds the memory it takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hostile_checkpoints import CASES, MIB, WHOLE

SCRIPT = Path(__file__).with_name("hostile_checkpoints.py")


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Any]:
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("the memory of a process can't be measured here")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run([sys.executable, str(SCRIPT)], env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_each_is_refused_in_one_line_or_read(outcomes: dict[str, Any]) -> None:
    for case in CASES:
        for said in outcomes[case]["said"]:
            assert (said == "") == (case in WHOLE), (case, said)
            assert "\n" not in said
            assert len(said) < 400, (case, said)
            assert not said or said.startswith(f"checkpoint {case!r}: "), said


def test_nothing_is_executed(outcomes: dict[str, Any], tally: Callable[..., None]) -> None:
    assert {case: outcome["done"] for case, outcome in outcomes.items() if outcome["done"]} == {}
    tally("malicious checkpoints", len(CASES), "0 executions")


def test_memory_is_bounded_by_the_size(outcomes: dict[str, Any], tally: Callable[..., None]) -> None:
    over = {case: outcome for case, outcome in outcomes.items() if outcome["taken"] > 2 * outcome["size"] + 64 * MIB}
    assert over == {}
    most = max(outcomes, key=lambda case: outcomes[case]["taken"])
    tally(
        "memory beyond a malicious checkpoint's size",
        len(CASES),
        f"at most {outcomes[most]['taken'] / MIB:.0f} MiB: {most}",
    )
