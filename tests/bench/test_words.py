"""Numbers of things, and what the closing line of a run says of them."""

from pathlib import Path

import pytest

from nanogpt_bench.commands.run import _closing_line
from nanogpt_bench.system.errors import counted


@pytest.mark.parametrize(("steps", "said"), [(0, "0 steps"), (1, "1 step:"), (2, "2 steps:")])
def test_one_step_is_one(steps, said):
    summary = {"status": "finished", "stop": None, "steps": steps, "bytes_per_parameter": 1.0, "shadow_overhead": None}
    summary |= dict.fromkeys(("final_val_loss", "best_val_loss", "tokens_per_s"))
    assert f"finished after {said}" in _closing_line(summary, Path("runs/a"))
    assert counted(steps, "step") == said.rstrip(":")
