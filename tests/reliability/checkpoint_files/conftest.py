"""Small checkpoints of a made-up run, whole, to be damaged."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    from small_checkpoints import small

    from nanogpt_bench.checkpoint import commit_checkpoint

    folder = tmp_path / "run"
    folder.mkdir()
    for step in (1, 2):
        commit_checkpoint(folder, small(step), keep_last=5)
    return folder
