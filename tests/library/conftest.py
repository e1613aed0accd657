"""Shared by the library's tests: the oracle on the import path, bitwise comparison, and
a count of it.
"""

import importlib
import shutil
import sys
import warnings
from collections import Counter
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

HERE = Path(__file__).parent
sys.path[:0] = map(
    str, (HERE, *filter(Path.is_dir, HERE.iterdir()))
)  # tests import from tests of other folders

COMPARED = Counter()
INTEGER_OF_SIZE = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(x):
    canonical = torch.where(x.isnan(), torch.full_like(x, torch.nan), x)
    return canonical.view(INTEGER_OF_SIZE[x.element_size()])


def first_mismatches(ours, expected, x, limit=5):
    where = (bits(ours) != bits(expected)).nonzero().flatten()
    cases = [
        f"{x[i].item()!r} -> {ours[i].item()!r}, not {expected[i].item()!r}" for i in where[:limit]
    ]
    return f"{len(where)} of {len(ours)} differ: " + "; ".join(cases)


@pytest.fixture
def compare_bits(request):
    """Assert that a result has the bits of what is expected (float64, exact in the
    result's dtype).
    """
    group = f"{request.path.name}::{request.function.__name__}"

    def compare(ours, expected, x, context=""):
        assert ours.dtype == x.dtype
        assert ours.shape == x.shape
        assert len(expected) == len(ours) > 0
        wanted = torch.from_numpy(np.ascontiguousarray(expected, dtype=np.float64)).to(ours.dtype)
        COMPARED[group] += len(ours)
        same = torch.equal(bits(ours), bits(wanted))
        assert same, f"{context}: {first_mismatches(ours, wanted, x)}"

    return compare


@pytest.fixture
def cpp_compiler():
    """torch.compile on the CPU needs a C++ compiler."""
    if not any(shutil.which(name) for name in ("c++", "g++", "clang++")):
        pytest.skip("torch.compile needs a C++ compiler, and there is none here")
    with warnings.catch_warnings():  # Inductor's own imports use what torch has deprecated
        warnings.simplefilter("ignore", DeprecationWarning)
        importlib.import_module("torch._inductor.compile_fx")
        # And its caches look through every loaded module, deprecated names of other
        # packages included
        yield


def pytest_terminal_summary(terminalreporter):
    if COMPARED:
        terminalreporter.section("values compared bit for bit")
        for group, count in sorted(COMPARED.items()):
            terminalreporter.write_line(f"{count:>12,}  {group}")
        terminalreporter.write_line(f"{sum(COMPARED.values()):>12,}  in all")


def ranks(size, folder):
    from rank_pool import Pool  # only where there are such cases: it makes torch.distributed ready

    made = Pool(size, folder)
    yield made
    made.end()


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    """Three processes of one group, for the cases of a module."""
    yield from ranks(3, tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    yield from ranks(2, tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def pools(tmp_path_factory):
    with ExitStack() as stack:
        one_each = {
            size: contextmanager(ranks)(size, tmp_path_factory.mktemp("ranks"))
            for size in (1, 2, 3)
        }
        yield {size: stack.enter_context(each) for size, each in one_each.items()}


@pytest.fixture(params=["native", "eager"])
def each_path(request, monkeypatch):
    """Steps by each of the paths of ``paths.PATHS``."""
    if request.param == "eager":
        for module in ("_backends", "_steady"):
            monkeypatch.setattr(f"fp8manifold.optim.{module}.is_native", lambda slot: False)
