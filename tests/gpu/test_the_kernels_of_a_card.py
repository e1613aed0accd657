"""Every case of the interpreter's, by kernels that were compiled for the card; skipped where there is none."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fp8manifold

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
CASES = Path(__file__).parents[1] / "library"
#: the file, what of it native code steps, and how many steps or elements are compared at least
SESSIONS = {
    "test_step_oracle.py": ("native and not (test_options or in_one_loop or residual_of or widened)", "slots", 400),
    "test_fitted_momentum.py": ("definition and native", "slots", 60),
    "triton_cases.py": ("", "elements", 100_000),
}


@pytest.mark.parametrize("file", SESSIONS)
def test_kernels_have_the_bits_of_native_code(file: str) -> None:
    which, counted, least = SESSIONS[file]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(Path(fp8manifold.__file__).parents[1]), str(CASES), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    command = [sys.executable, "-P", "-m", "pytest", "-p", "triton_twins", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, str(CASES / file), "-k", which], env=environment, capture_output=True, text=True, check=False
    )
    output = done.stdout + done.stderr
    counts = {name: int(n) for name, n in re.findall(r"'(\w+)': (\d+)", output)}
    assert done.returncode == 0, output[-3000:]
    assert counts[counted] > least
