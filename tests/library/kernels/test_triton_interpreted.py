"""Triton's kernels against native code and the scalar oracle, bit for bit.

They run in Triton's interpreter: no GPU is needed.
"""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fp8manifold
from fp8manifold._native import is_available

LIBRARY_TESTS = Path(__file__).parents[1]
PACKAGE = Path(fp8manifold.__file__).parent

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="Triton is not installed"
    ),
    pytest.mark.skipif(
        not is_available(), reason="the native code was not built: there is no C compiler"
    ),
]


#: a file, what of it native code steps, and how many steps or elements are compared at
#: least: on a card about half of the interpreter's steps, since later ones go by the
#: table of a steady step
SELECTED = "native and not (test_options or in_one_loop or residual_of or widened)"
SESSIONS = {
    "optim/test_step_oracle.py": (SELECTED, "slots", 350),
    "optim/test_moments.py": ("definition and native", "slots", 60),
    "triton_cases.py": ("", "elements", 100_000),
    "operand_cases.py": ("", "elements", 500_000),
}


def run(*arguments, package=PACKAGE, interpreted=True):
    environment = {**os.environ, "TRITON_INTERPRET": str(int(interpreted)), "OMP_NUM_THREADS": "1"}
    path = [str(package.parent), str(LIBRARY_TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(path)
    quiet = (
        "-q",
        "-x",
        "--no-header",
        "-p",
        "no:cacheprovider",
        "-W",
        "ignore::RuntimeWarning",
    )  # NumPy's, of NaN
    command = (sys.executable, "-P", "-m", "pytest", "-p", "triton_twins", *quiet, *arguments)
    process = subprocess.run(
        command,
        cwd=LIBRARY_TESTS.parents[1],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    output = process.stdout + process.stderr
    counted = re.search(r"compared: (\{.*\})", output)
    assert counted, f"exit code {process.returncode}, {output[-3000:]!r}"
    return (
        process.returncode,
        output,
        {name: int(n) for name, n in re.findall(r"'(\w+)': (\d+)", counted[1])},
    )


@pytest.mark.parametrize("file", SESSIONS)
def test_kernels_have_the_bits_of_native_code_and_of_the_oracle(file):
    """Every optimizer, write-back and average; a covering set of formats, shapes, dtypes."""
    selection, counted, least = SESSIONS[file]
    code, output, counts = run(str(LIBRARY_TESTS / file), "-k", selection)
    assert code == 0, output[-3000:]
    assert counts[counted] > least
    assert counts["launches"] > 0


def test_edits_between_steps_of_a_card_are_seen():
    """Random ones, with the interpreter for a card."""
    code, output, counts = run(str(LIBRARY_TESTS / "triton_edits.py"))
    assert code == 0, output[-3000:]
    assert counts["launches"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("marked", ["not slow", "slow"])
def test_the_matrix(marked):
    files = (
        str(LIBRARY_TESTS / "optim" / "test_step_oracle.py"),
        str(LIBRARY_TESTS / "triton_cases.py"),
    )
    code, output, _ = run(*files, "-k", "native or triton_cases", "-m", marked)
    assert code == 0, output[-3000:]
