"""Ctrl-C while a command is still importing ends it with one line."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
#: a module that is imported slowly, and in which Ctrl-C comes
SLOW = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n"


def started(folder, module, *words, slow=SLOW, preparation=None):
    """Start the program with a slow module in place of one that it imports."""
    (folder / f"{module}.py").write_text(slow)
    path = os.pathsep.join([str(folder), str(ROOT)])
    return subprocess.run(
        [sys.executable, "-m", "nanogpt_bench", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        preexec_fn=preparation,
    )


@pytest.mark.parametrize("module", ["argparse", "difflib", "yaml", "pydantic", "rich", "torch"])
def test_an_import_is_interrupted_in_one_line(module, tmp_path):
    process = started(tmp_path, module, "run", "fp32")
    assert (process.returncode, process.stdout) == (130, "")
    assert process.stderr == "nanogpt-bench: interrupted\n"


def test_a_command_that_was_started_to_ignore_it_goes_on(tmp_path):
    """As a shell starts what it has in the background."""

    def ignore():
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    slow = SLOW.replace("time.sleep(60)", "raise SystemExit(5)")
    process = started(tmp_path, "argparse", "run", "fp32", slow=slow, preparation=ignore)
    assert (process.returncode, process.stderr) == (5, "")
