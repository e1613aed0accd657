"""
A run folder in pandas
======================

A run of ``nanogpt-bench`` leaves a folder of text: a line of ``metrics.jsonl`` for
every step, and the totals in ``summary.json``. This script makes a short run, or takes
a folder as its argument. With pandas it computes how the loss fell, and what share of
the requested updates each layer lost.

Needs the bench and pandas (``pip install 'fp8manifold[bench,examples]'``).

Expected output::

    stochastic, E4M3: finished after 120 steps
    steps   1 to  40: mean training loss 5.282
    steps  41 to  80: mean training loss 4.016
    steps  81 to 120: mean training loss 3.296
    blocks.0.attn.qkv            0.724 of the updates lost
    blocks.0.attn.proj           0.718 of the updates lost
    blocks.0.mlp.fc              0.732 of the updates lost
    blocks.0.mlp.proj            0.728 of the updates lost
    lm_head                      0.920 of the updates lost
"""

import contextlib
import io
import json
import sys
import tempfile
from pathlib import Path

import pandas as pd

from nanogpt_bench.cli import main as bench

COMMAND = """
    run e4m3.yaml --rule stochastic --name small --train.max_steps 120
    --model.n_layer 1 --model.n_embd 32 --model.n_head 2 --model.block_size 32
"""
LOST_SHARE = "stall/update_lost/"


def make_run() -> Path:
    """Train a tiny GPT in one byte per weight and return its run folder."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        exit_code = bench(COMMAND.split())
    assert exit_code == 0, printed.getvalue()
    return Path("runs/small")


def report(run: Path) -> None:
    """Print the run's status, its loss by thirds, and the lost share of each layer's updates."""
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    print("{rule}, {format}: {status} after {steps} steps".format(**summary))
    metrics = pd.read_json(run / "metrics.jsonl", lines=True).set_index("step")

    losses = metrics["train/loss"].dropna()
    third = -(-len(losses) // 3)
    for index, part in losses.groupby((losses.index - 1) // third):
        first, last = index * third + 1, (index + 1) * third
        print(f"steps {first:>3} to {last:>3}: mean training loss {part.mean():.3f}")

    lost_shares = metrics.filter(regex=f"^{LOST_SHARE}").mean()
    for name, share in lost_shares.items():
        print(f"{name.removeprefix(LOST_SHARE):<26}{share:>8.3f} of the updates lost")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        report(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            report(make_run())
