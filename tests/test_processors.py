"""The processor: the tests name it, and can be run as on another."""

import ast
import os
import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fp8manifold.optim import _muon

ROOT = Path(__file__).parents[1]
ASK = """
import torch
from fp8manifold.optim._muon import product_dtype
print(torch.backends.cpu.get_cpu_capability(), product_dtype(torch.device("cpu")))
"""


def baseline() -> dict[str, str]:
    """The environment of nox's session, read without nox."""
    tree = ast.parse((ROOT / "noxfile.py").read_text(encoding="utf-8"))
    (found,) = (n.value for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "BASELINE")
    variables: dict[str, str] = ast.literal_eval(found)
    return variables


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the variables are those of x86-64")
def test_the_baseline_is_a_processor_without_products_in_bfloat16():
    done = subprocess.run(
        [sys.executable, "-c", ASK], capture_output=True, text=True, check=True, env=os.environ | baseline()
    )
    assert done.stdout.split() == ["DEFAULT", "torch.float32"]


@pytest.mark.parametrize(("has_onednn", "found"), [(True, torch.bfloat16), (False, torch.float32)])
def test_torch_without_onednn_has_products_in_float32(has_onednn, found, monkeypatch):
    """Its builds for Macs of ARM lack the operator that is asked, too."""
    operators = SimpleNamespace(_is_mkldnn_bf16_supported=lambda: True) if has_onednn else SimpleNamespace()
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: has_onednn)
    monkeypatch.setattr(torch.ops, "mkldnn", operators)
    assert _muon.product_dtype(torch.device("cpu")) is found
