"""The benchmark of a card runs from end to end without one, and says what differs or fails."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).parent.parent / "benchmarks"
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(FOLDER))
    yield import_module("gpu")
    sys.modules.pop("gpu", None)
    sys.modules.pop("_record", None)


@needs_triton
def test_a_dry_run_goes_through_every_part(tmp_path: Path) -> None:
    out, recorded = tmp_path / "gpu.json", FOLDER.parent / "docs" / "measured" / "gpu.json"
    before = recorded.read_bytes()
    command = [sys.executable, str(FOLDER / "gpu.py"), "--dry", "--record", "--out", str(out)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every bit is the CPU's" in done.stdout
    parts = json.loads(out.read_text(encoding="utf-8"))["parts"]
    assert list(parts) == [
        *("exact_steps", "exact_arrays", "step_times", "launches", "decoding", "rivals", "muon", "training")
    ]
    assert set(parts["exact_steps"]["figures"].values()) == {0}
    assert parts["launches"]["figures"] == {"steps": 3}
    assert not [name for name, part in parts.items() if "error" in part["figures"]]
    assert recorded.read_bytes() == before  # a dry run records nothing


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_card_it_says_so() -> None:
    done = subprocess.run([sys.executable, str(FOLDER / "gpu.py")], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "gpu.py: there is no GPU here: --dry runs it on a CPU"


def test_a_part_that_fails_leaves_the_others_and_the_file(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exact_broken(session: Any) -> Any:
        raise ValueError("broken")

    def exact_other(session: Any) -> Any:
        return {"E4M3": 2, "E5M2": 0}

    monkeypatch.setattr(gpu, "PARTS", (exact_broken, exact_other))
    result = gpu.run(gpu.Session(True), [], tmp_path / "gpu.json")
    assert json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8")) == result
    assert gpu.failures(result) == ["exact_broken: ValueError: broken", "exact_other: E4M3 differs in 2"]
