"""Sources of text: the standard library's own prose, packages, a file, a data set; and writing it to disk."""

import sys
from pathlib import Path

from nanogpt_bench.config.schema import DEFAULT_DATA_DIR


def prepare_default(data_dir: str) -> None:
    """Prepare the standard library's prose if a run asks for the default corpus and it is not there yet."""
    folder = Path(DEFAULT_DATA_DIR)
    if Path(data_dir) == folder and not folder.exists():
        from nanogpt_bench.data.text import prepare_stdlib

        print(f"preparing {folder} (the standard library's prose)", file=sys.stderr)
        prepare_stdlib(folder, progress=sys.stderr.isatty())
