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


def lacks_default(data_dir: str) -> bool:
    """Return whether `data_dir` is the default and missing."""
    folder = Path(DEFAULT_DATA_DIR)
    # A link to nothing is there, and opening the corpus says so.
    return Path(data_dir) == folder and not os.path.lexists(folder)


def prepare_default(data_dir: str) -> None:
    """Prepare the standard library's prose if `data_dir` is the default and missing.

    Its tokenizer is `data.tokenizers.ByteTokenizer`.
    """
    if lacks_default(data_dir):
        from nanogpt_bench.data.text import prepare_stdlib

        print(f"preparing {DEFAULT_DATA_DIR} (the standard library's prose)", file=sys.stderr)
        prepare_stdlib(Path(DEFAULT_DATA_DIR), progress=sys.stderr.isatty())
