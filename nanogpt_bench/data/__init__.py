"""Corpora: from the standard library's prose, packages, a file or a data set;
tokenizers, files on disk, batches.
"""

import os
import sys
from pathlib import Path

from nanogpt_bench.config.schema import DEFAULT_DATA_DIR


def prepare_default(data_dir: str) -> None:
    """Prepare the standard library's prose if `data_dir` is the default corpus and does
    not exist.
    """
    folder = Path(DEFAULT_DATA_DIR)
    # a link to nothing is there, and opening the corpus says so
    if Path(data_dir) == folder and not os.path.lexists(folder):
        from nanogpt_bench.data.text import prepare_stdlib

        print(f"preparing {folder} (the standard library's prose)", file=sys.stderr)
        prepare_stdlib(folder, progress=sys.stderr.isatty())
