"""Where text comes from: the standard library's own prose, a file, or a data set; and how it is written to disk."""

from nanogpt_bench.data.dataset import prepare_eurlex, prepare_hub
from nanogpt_bench.data.text import prepare_nanogpt, prepare_stdlib, prepare_text

__all__ = ["prepare_eurlex", "prepare_hub", "prepare_nanogpt", "prepare_stdlib", "prepare_text"]
