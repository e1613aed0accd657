"""Where text comes from: the standard library's own prose, or any UTF-8 file; and how it is written to disk."""

from nanogpt_bench.corpus.stdlib import prepare_stdlib
from nanogpt_bench.corpus.text import prepare_text

__all__ = ["prepare_stdlib", "prepare_text"]
