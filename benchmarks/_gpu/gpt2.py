"""GPT-2's 124M trained from scratch over 50 million tokens, by the bench's sweep."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from _gpu.session import Session

__all__ = ["gpt2"]

#: one of the bench's
SWEEP_FILE: Final = "gpt2_rules.yaml"
DATA: Final = Path("data/packages")
RUNS: Final = Path("runs/gpt2")
#: seconds in which an interrupted run writes its checkpoint
STOPPING: Final = 60.0
#: keys of a run in sweep.json, by the names of the figures
FIGURES: Final = {
    "loss": "final_val_loss",
    "tokens/s": "tokens_per_s",
    "bytes": "bytes_per_parameter",
    "steps": "steps",
}


def gpt2(session: Session) -> dict[str, Any]:
    """Return loss, speed and bytes per parameter of each row so far.

    Rows are trained one after the other. Unfinished ones continue in the next call.
    """
    if not session.dry:
        if not DATA.is_dir():
            prepare = "nanogpt-bench prepare packages --tokenizer gpt2"
            raise FileNotFoundError(f"no text in {str(DATA)!r}; prepare one: {prepare}")
        return run_sweep(session, DATA, RUNS)
    # The packages of the bench are not everywhere.
    from nanogpt_bench.data.text import prepare_text

    with tempfile.TemporaryDirectory() as folder:
        text, data = Path(folder) / "text.txt", Path(folder) / "data"
        text.write_text("The quick brown fox jumps over the lazy dog. " * 200, encoding="utf-8")
        prepare_text(text, data, "byte")
        return run_sweep(session, data, Path(folder) / "runs", "--smoke")


def run_sweep(session: Session, data: Path, out: Path, *arguments: str) -> dict[str, Any]:
    """Train until the part's time is up, and read the results so far."""
    words = ["sweep", SWEEP_FILE, "--data.dir", str(data), "--out", str(out), *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "nanogpt_bench", *words]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    timeout = None if session.dry else max(session.seconds_left - STOPPING, 1.0)
    try:
        process.wait(timeout)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        process.wait(STOPPING)
    runs = json.loads((out / "sweep.json").read_text(encoding="utf-8"))["runs"]
    return {run["name"]: figures(run) for run in runs}


def figures(run: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of a run in sweep.json, with its status if it is unfinished."""
    known = {name: run[key] for name, key in FIGURES.items() if run.get(key) is not None}
    if run["status"] != "finished":
        known["status"] = run["status"] or "not begun"
    return known
