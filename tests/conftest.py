"""Options, fixtures and hooks of all tests.

The full tier, a covering sample of a marked matrix, and a tally that is printed at the
end.
"""

import functools
import gc
import importlib.util
import os
import platform
import sys
from collections.abc import Callable, Hashable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from covering import covering

# Sums depend on the number of threads: a test and the processes it starts take one,
# unless told otherwise.
os.environ.setdefault("OMP_NUM_THREADS", "1")

#: why a test marked `extra` is skipped where a package is missing
TEST_ALL = 'pip install -e ".[test-all]"'
#: characters of a case's name that is made of a value's parts
LONGEST_ID = 80
_TALLY = pytest.StashKey[list[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full",
        action="store_true",
        help="reliability tests: every fault, not a sample (takes hours)",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_TALLY] = []
    expression = config.option.markexpr
    # `-m extra` replaces `-m 'not slow'`, and would run for hours.
    if expression and "slow" not in expression:
        config.option.markexpr = f"({expression}) and not slow"


def pytest_make_parametrize_id(val: object) -> str | None:
    """Name a case by its value, so that ``-k`` finds it.

    Formats, classes, dtypes and small dicts and sequences of these have names here.
    pytest itself names strings, numbers and functions.
    """
    if val is None or isinstance(val, str | int | float):
        return None
    name = _name_of(val)
    return name if name is None or len(name) <= LONGEST_ID else None


def _name_of(value: object) -> str | None:
    import torch

    if isinstance(value, torch.dtype | torch.device):
        return str(value).removeprefix("torch.")
    if value is None or isinstance(value, str | int | float):
        return str(value)
    if isinstance(value, dict):
        names = {key: _name_of(part) for key, part in value.items()}
        parts = [None if name is None else f"{key}={name}" for key, name in names.items()]
        return _joined(parts)
    if isinstance(value, list | tuple):
        return _joined([_name_of(part) for part in value])
    name = getattr(value, "name", None) or getattr(value, "__name__", None)
    return name if isinstance(name, str) else None


def _joined(parts: list[str | None]) -> str | None:
    """Join the names of a value's parts; None if a part has none."""
    if not parts:
        return "empty"
    names = [part for part in parts if part is not None]
    return ",".join(names) if len(names) == len(parts) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests whose package is missing, and sample marked matrices.

    The default run gets a covering sample of a marked matrix.
    """
    for item in items:
        packages = chain.from_iterable(mark.args for mark in item.iter_markers("extra"))
        if not all(map(_installed, packages)):
            item.add_marker(pytest.mark.skip(reason=TEST_ALL))
    if config.getoption("--full"):
        return
    matrices: dict[str, list[pytest.Item]] = {}
    for item in items:
        is_marked = item.get_closest_marker("covering") is not None
        is_slow = item.get_closest_marker("slow") is not None
        if is_marked and not is_slow and hasattr(item, "callspec"):
            matrices.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for matrix in matrices.values():
        (strength,) = matrix[0].get_closest_marker("covering").args  # type: ignore[union-attr]
        sample = covering([_values(item) for item in matrix], strength)
        for index, item in enumerate(matrix):
            if index not in sample:
                item.add_marker(pytest.mark.slow)


@functools.cache
def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _values(item: Any) -> dict[str, Hashable]:
    return {
        name: value if isinstance(value, str | int) else id(value)
        for name, value in item.callspec.params.items()
    }


def pytest_report_header() -> str:
    """Name the processor, and what torch makes of it.

    Numbers may differ with it, and so may the code that runs.
    """
    import torch

    from fp8manifold.optim._matrices import product_dtype

    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    model = models[0] if models else platform.processor() or platform.machine()
    capability = torch.backends.cpu.get_cpu_capability()
    products = str(product_dtype(torch.device("cpu"))).removeprefix("torch.")
    return f"processor: {model}; torch: {capability}, products in {products}"


def pytest_collection_finish() -> None:
    """Leave imported and collected objects out of garbage collection.

    They would be searched in every test.
    """
    gc.collect()
    gc.freeze()


def pytest_sessionstart() -> None:
    """Start autograd before anything is compiled.

    Later, torch may start a thread for a device, and refuses forks.
    """
    import torch

    torch.ones((), requires_grad=True).backward()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """One of several processes hands its tally to the one that prints."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["tally"] = session.config.stash[_TALLY]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash[_TALLY].extend(getattr(node, "workeroutput", {}).get("tally", []))


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    lines = config.stash[_TALLY]
    if lines:
        terminalreporter.section("what was tried")
        for line in lines:
            terminalreporter.line(line)


@pytest.fixture(scope="session")
def full(pytestconfig: pytest.Config) -> bool:
    return bool(pytestconfig.getoption("--full"))


@pytest.fixture(scope="session")
def tally(pytestconfig: pytest.Config) -> Callable[..., None]:
    """Return a function that counts what was tried.

    It takes what, how often, and a note, for the end of the session's output.
    """

    def count(subject: str, number: int, note: str = "") -> None:
        pytestconfig.stash[_TALLY].append(f"{subject}: {number:,}{f' ({note})' if note else ''}")

    return count


@pytest.fixture(scope="module")
def attacks(request: pytest.FixtureRequest, tally: Callable[..., None]) -> Iterator[list[int]]:
    """Yield a list for the bytes by which memory grew, an entry for each attack."""
    grown: list[int] = []
    yield grown
    largest = max(grown, default=0) / 2**20
    tally(
        f"attacks of {request.module.__name__}",
        len(grown),
        f"0 executions, most memory {largest:.0f} MiB",
    )


@pytest.fixture(params=["bfloat16", "float32"])
def products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The dtype that Muon multiplies in by default.

    Bfloat16 as on a processor with such products, float32 as on one without.

    Children that are forked in the test have it too; those that start anew ask the
    processor.
    """
    import torch

    from fp8manifold.optim import _matrices

    monkeypatch.setattr(_matrices, "product_dtype", lambda device: getattr(torch, request.param))
    return str(request.param)


@pytest.fixture(autouse=True)
def no_accelerator_is_left() -> Iterator[None]:
    """Reset the one accelerator that accelerate keeps in a process.

    Trainer's is one too, and the next test wants another.
    """
    yield
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
