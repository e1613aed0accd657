"""On a card: the bits of the CPU, and a steady step of few launches; skipped where there is none."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module("gpu")
    for name in [name for name in sys.modules if name.partition(".")[0] in ("gpu", "_gpu", "_record")]:
        sys.modules.pop(name)


@pytest.mark.parametrize("part", ["exact_steps", "exact_arrays", "exact_products"])
def test_every_bit_is_the_cpus(part, gpu, tmp_path):
    result = gpu.run(gpu.Session(False), gpu.chosen([part], {}), tmp_path / "gpu.json")
    assert gpu.failures(result) == []
    assert result["parts"][part]["figures"]


def test_a_steady_step_is_a_few_launches_and_no_wait(gpu):
    """But for events of the step before."""
    counted = gpu.launches(gpu.Session(False))
    assert counted["launches"] <= 12
    assert counted["waits"] == 0
