"""GPT-2's 124M trained from scratch over 50 million tokens, one row after the other, by
the bench's own sweep.
"""

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

SWEEP: Final = "gpt2_rules.yaml"  # of the bench
DATA: Final = Path("data/packages")
RUNS: Final = Path("runs/gpt2")
STOPPING: Final = 60.0  # seconds in which a run that is told to stop writes its checkpoint
FIGURES: Final = {
    "loss": "final_val_loss",
    "tokens/s": "tokens_per_s",
    "bytes": "bytes_per_parameter",
    "steps": "steps",
}


def gpt2(session: Session) -> dict[str, Any]:
    """Loss, speed and bytes per parameter of each row so far; unfinished rows continue
    in the next call.
    """
    if not session.dry:
        if not DATA.is_dir():
            prepare = "nanogpt-bench prepare packages --tokenizer gpt2"
            raise FileNotFoundError(f"no text in {str(DATA)!r}; prepare one: {prepare}")
        return sweep(session, DATA, RUNS)
    from nanogpt_bench.data.text import prepare_text  # its packages are not everywhere

    with tempfile.TemporaryDirectory() as folder:
        text, data = Path(folder) / "text.txt", Path(folder) / "data"
        text.write_text("The quick brown fox jumps over the lazy dog. " * 200, encoding="utf-8")
        prepare_text(text, data, "byte")
        return sweep(session, data, Path(folder) / "runs", "--smoke")


def sweep(session: Session, data: Path, out: Path, *more: str) -> dict[str, Any]:
    """Train until the part's time is up, and read the results so far."""
    words = ["sweep", SWEEP, "--data.dir", str(data), "--out", str(out), *more]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "nanogpt_bench", *words]
    running = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    try:
        running.wait(None if session.dry else max(session.seconds_left - STOPPING, 1.0))
    except subprocess.TimeoutExpired:
        running.send_signal(signal.SIGINT)
        running.wait(STOPPING)
    runs = json.loads((out / "sweep.json").read_text(encoding="utf-8"))["runs"]
    return {run["name"]: figures(run) for run in runs}


def figures(run: dict[str, Any]) -> dict[str, Any]:
    """Figures of a run in sweep.json."""
    found = {name: run[key] for name, key in FIGURES.items() if run.get(key) is not None}
    return (
        found if run["status"] == "finished" else {**found, "status": run["status"] or "not begun"}
    )
