"""Native code of narrower vectors than this processor's: other processors take it, and it has the same bits."""

import copy
import platform
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from optimizer_cases import bits_of, normal
from test_native import build_hook, needs_native, needs_sources, sources
from test_step_paths import CASES, everything, take

import fp8manifold as fm
from fp8manifold import _native, optim
from fp8manifold._native import _arrays

#: of each width that code is made for, but the widest: its name, and what a processor has that runs it
WIDTHS = {"x86-64": {"sse2"}, "x86-64-v3": {"avx2", "bmi2", "fma"}}


def flags_of_this_processor() -> set[str]:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    return set(next((line.partition(":")[2] for line in lines if line.startswith("flags")), "").split())


@pytest.fixture(params=WIDTHS, scope="module")
def narrow(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if platform.machine() != "x86_64" or shutil.which("gcc") is None:
        pytest.skip("code of several widths is made by gcc for x86-64 alone")
    if not WIDTHS[request.param] <= flags_of_this_processor():
        pytest.skip(f"this processor does not run {request.param}")
    folder = sources(tmp_path_factory.mktemp("width"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CC", "gcc")
        assert build_hook().build(folder, print, ("-DONE_CLONE", f"-march={request.param}")) is not None
    return folder


def results() -> dict[str, Any]:
    assert _native.is_available()
    found: dict[str, Any] = {}
    for name, (kind, make, options) in CASES.items():
        optimizer = getattr(optim, kind)(make(), **copy.deepcopy(options))
        for step in range(2):
            take(optimizer, step)
        found[name] = everything(optimizer)
    for fmt in ("E4M3", "E5M2", "E7M0", "E2M5"):
        x = normal(1003, seed=1) * torch.exp2(normal(1003, seed=2).mul(5).round())
        codes = fm.encode(x, fmt)
        arrays = [codes, fm.decode(codes, fmt), fm.FP8Parameter(x, fmt, seed=4).dequantize()]
        arrays += [fm.round_to_grid(x, fmt), fm.round_to_grid(x, fmt, "stochastic", seed=3)]
        found[fmt] = [bits_of(each) for each in arrays]
    found["content"] = _arrays.content(normal(1003), (1, 2, 3), 5)
    return found


@needs_native
@needs_sources
def test_every_width_has_the_same_bits(narrow: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = results()
    monkeypatch.setattr(_native, "__file__", str(narrow / "__init__.py"))
    _native._found.cache_clear()
    try:
        found = results()
    finally:
        _native._found.cache_clear()
    assert not [name for name in own if own[name] != found[name]]
