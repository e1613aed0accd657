"""Corpora: their sources, tokenizers, files on disk, and batches.

The modules, in the order in which a text passes through them:

    text, packages, dataset    where a text comes from: a file or the standard library,
                               packages of an archive, a data set of the hub
    tokenizers                 a text -> tokens
    write                      tokens -> the files of a corpus
    batches                    the files of a corpus -> batches
"""

import os
import sys
from pathlib import Path

from nanogpt_bench.config.schema import DEFAULT_DATA_DIR


def prepare_default(data_dir: str) -> None:
    """Prepare the standard library's prose if `data_dir` is the default and missing."""
    folder = Path(DEFAULT_DATA_DIR)
    # A link to nothing is there, and opening the corpus says so.
    if Path(data_dir) == folder and not os.path.lexists(folder):
        from nanogpt_bench.data.text import prepare_stdlib

        print(f"preparing {folder} (the standard library's prose)", file=sys.stderr)
        prepare_stdlib(folder, progress=sys.stderr.isatty())
