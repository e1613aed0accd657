"""A corpus of a few kilobytes and a small configuration.

Its 24 steps take half a second.
"""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

TEXT = "".join(
    f"Line {number}: the quick brown fox jumps over {number % 7} lazy dogs.\n"
    for number in range(120)
)


@pytest.fixture(scope="session")
def small_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from nanogpt_bench.data.text import prepare_text

    folder = tmp_path_factory.mktemp("reliability")
    (folder / "text").write_text(TEXT, encoding="utf-8")
    prepare_text(folder / "text", folder / "corpus", "byte")
    return folder / "corpus"
