"""Triton's kernels against native code and the scalar oracle, bit for bit, in its interpreter: no GPU is needed."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fp8manifold
from fp8manifold._native import is_available

HERE = Path(__file__).parents[1]
PACKAGE = Path(fp8manifold.__file__).parent

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.skipif(not is_available(), reason="the native code was not built: there is no C compiler"),
]


#: a file, what of it native code steps, and how many steps or elements are compared at least
MOST = "native and not (test_options or in_one_loop or residual_of or widened)"
SESSIONS = {
    "optim/test_step_oracle.py": (MOST, "slots", 400),
    "optim/test_fitted_momentum.py": ("definition and native", "slots", 60),
    "triton_cases.py": ("", "elements", 100_000),
    "operand_cases.py": ("", "elements", 500_000),
}


def run(*arguments: str, package: Path = PACKAGE, interpreted: bool = True) -> tuple[int, str, dict[str, int]]:
    environment = {**os.environ, "TRITON_INTERPRET": str(int(interpreted)), "OMP_NUM_THREADS": "1"}
    path = [str(package.parent), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(path)
    quiet = ("-q", "-x", "--no-header", "-p", "no:cacheprovider", "-W", "ignore::RuntimeWarning")  # NumPy's, of NaN
    command = (sys.executable, "-P", "-m", "pytest", "-p", "triton_twins", *quiet, *arguments)
    done = subprocess.run(command, cwd=HERE.parents[1], env=environment, capture_output=True, text=True, check=False)
    output = done.stdout + done.stderr
    counted = re.search(r"compared: (\{.*\})", output)
    assert counted, f"exit code {done.returncode}, {output[-3000:]!r}"
    return done.returncode, output, {name: int(n) for name, n in re.findall(r"'(\w+)': (\d+)", counted[1])}


@pytest.mark.parametrize("file", SESSIONS)
def test_kernels_have_the_bits_of_native_code_and_of_the_oracle(file: str) -> None:
    """Every optimizer, write-back and kind of average; a covering set of formats, shapes, dtypes and storages."""
    which, counted, least = SESSIONS[file]
    code, output, counts = run(str(HERE / file), "-k", which)
    assert code == 0, output[-3000:]
    assert counts[counted] > least
    assert counts["launches"] > 0


@pytest.mark.slow
def test_the_matrix() -> None:
    both = (str(HERE / "optim" / "test_step_oracle.py"), str(HERE / "triton_cases.py"))
    for marked in ("not slow", "slow"):
        code, output, _ = run(*both, "-k", "native or triton_cases", "-m", marked)
        assert code == 0, output[-3000:]


FAULTS = {
    "hash": ("format.py", "0xED5AD4BB", "0xED5AD4BA"),
    "phase": ("format.py", "0x31848BAB + tl.load(keys + 3)", "0x31848BAB"),
    "subnormal": ("format.py", "tl.maximum(magnitude & 0x7F800000, (127 + F.EMIN) << 23)", "magnitude & 0x7F800000"),
    "root": ("stages.py", "whole + below + away.to(tl.int32)", "whole + below"),
    "bound": ("stages.py", "- 125) >> 1) + 120", "- 125) >> 1) + 121"),
    "draw": ("format.py", "(0xFFFFFF - draw)", "draw"),
    "fitted": ("stages.py", "- F.EMAX, 1) << 23", "- F.EMAX + 1, 1) << 23"),
    "inverse": ("stages.py", 'S.storage == "codes" and S.exponents', 'S.storage == "codes"'),
    "logarithm": ("format.py", "if not EXPONENTS", "if EXPONENTS"),
    "doubled": ("step.py", "scale * 2.0 <= S.widest", "scale < S.widest"),
    "zero": ("format.py", "tl.where(old == F.SIGN, F.SIGN, 0)", "0"),
    "scale": ("arrays.py", "> (LARGEST & 0x7FFFFF)", ">= (LARGEST & 0x7FFFFF)"),
    "not finite": ("arrays.py", "tl.where(reciprocal == 0.0, 0.0, x) *", "x *"),
    "turn": ("arrays.py", "tl.maximum(amax, _largest(value, 1))", "_largest(value, 1)"),
    "integers": ("arrays.py", "((code & 127) ^ negative) - negative", "(code & 127) ^ negative"),
}
CASES = {"phase": "test_arrays", "doubled": "without_a_number", "fitted": "test_momentum_of_matrices"}


@pytest.mark.parametrize(
    "fault", ["hash", *(pytest.param(name, marks=pytest.mark.slow) for name in FAULTS if name != "hash")]
)
def test_a_fault_in_one_constant_is_seen(fault: str, tmp_path: Path) -> None:
    package = tmp_path / "fp8manifold"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    file, right, wrong = FAULTS[fault]
    source = package / "_triton" / file
    text = source.read_text(encoding="utf-8")
    assert text.count(right) == 1
    source.write_text(text.replace(right, wrong), encoding="utf-8")
    of_operands = file == "arrays.py"
    cases = "" if of_operands else CASES.get(fault, "test_steps_of_every_shape")
    session = str(HERE / ("operand_cases.py" if of_operands else "triton_cases.py"))
    code, output, _ = run(session, "-k", cases, package=package)
    assert code == 1
    assert "AssertionError" in output
    assert any(words in output for words in ("different", "of a step of Spec", "assert same_bits(")), output[-3000:]
