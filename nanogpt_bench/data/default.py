"""The corpus of whoever names none: the standard library's prose, prepared when it is first needed."""

from __future__ import annotations

import sys
from pathlib import Path

from nanogpt_bench.config.schema import DEFAULT_DATA_DIR
from nanogpt_bench.data.stdlib import prepare_stdlib


def prepare_default(data_dir: str) -> None:
    """Prepare the standard library's prose if a run asks for the default corpus and it is not there yet."""
    folder = Path(DEFAULT_DATA_DIR)
    if Path(data_dir) == folder and not folder.exists():
        print(f"preparing {folder} (the standard library's prose)", file=sys.stderr)
        prepare_stdlib(folder, progress=sys.stderr.isatty())
