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

FOLDER = Path(__file__).parent
# Tests import from tests of other folders.
sys.path[:0] = map(str, (FOLDER, *filter(Path.is_dir, FOLDER.iterdir())))

COMPARED = Counter()
INTEGER_OF_SIZE = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def integers_of(x):
    """Return floats as integers of their size; all NaN are one."""
    canonical = torch.where(x.isnan(), torch.full_like(x, torch.nan), x)
    return canonical.view(INTEGER_OF_SIZE[x.element_size()])


def first_mismatches(results, expected, x, limit=5):
    """Return a message that counts what differs and shows the first cases."""
    places = (integers_of(results) != integers_of(expected)).nonzero().flatten()
    cases = [
        f"{x[i].item()!r} -> {results[i].item()!r}, not {expected[i].item()!r}"
        for i in places[:limit]
    ]
    return f"{len(places)} of {len(results)} differ: " + "; ".join(cases)


@pytest.fixture
def compare_bits(request):
    """Assert that a result has the bits of what is expected (float64, exact in the
    result's dtype).
    """
    group = f"{request.path.name}::{request.function.__name__}"

    def compare(results, expected, x, context=""):
        assert results.dtype == x.dtype
        assert results.shape == x.shape
        assert len(expected) == len(results) > 0
        wanted = torch.from_numpy(np.ascontiguousarray(expected, dtype=np.float64)).to(
            results.dtype
        )
        COMPARED[group] += len(results)
        same = torch.equal(integers_of(results), integers_of(wanted))
        assert same, f"{context}: {first_mismatches(results, wanted, x)}"

    return compare


@pytest.fixture
def cpp_compiler():
    """torch.compile on the CPU needs a C++ compiler."""
    if not any(shutil.which(name) for name in ("c++", "g++", "clang++")):
        pytest.skip("torch.compile needs a C++ compiler, and there is none here")
    # Inductor's own imports use what torch has deprecated, and its caches look through
    # every loaded module, deprecated names of other packages included.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        importlib.import_module("torch._inductor.compile_fx")
        yield


def pytest_terminal_summary(terminalreporter):
    if COMPARED:
        terminalreporter.section("values compared bit for bit")
        for group, count in sorted(COMPARED.items()):
            terminalreporter.write_line(f"{count:>12,}  {group}")
        terminalreporter.write_line(f"{sum(COMPARED.values()):>12,}  in all")


def pool_of(size, folder):
    """Yield a pool of ranks, and end its processes."""
    # Imported only where there are such cases: it makes torch.distributed ready.
    from rank_pool import Pool

    group = Pool(size, folder)
    yield group
    group.end()


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    """Three processes of one group, for the cases of a module."""
    yield from pool_of(3, tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Two processes of one group, for the cases of a module."""
    yield from pool_of(2, tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def pools(tmp_path_factory):
    """Pools of one, two and three processes, by their sizes."""
    with ExitStack() as stack:
        pools = {}
        for size in (1, 2, 3):
            pool = contextmanager(pool_of)(size, tmp_path_factory.mktemp("ranks"))
            pools[size] = stack.enter_context(pool)
        yield pools


@pytest.fixture(params=["native", "eager"])
def each_path(request, monkeypatch):
    """Steps by each of the paths of ``paths.PATHS``."""
    if request.param == "eager":
        for module in ("_backends", "_steady"):
            monkeypatch.setattr(f"fp8manifold.optim.{module}.is_native", lambda slot: False)
