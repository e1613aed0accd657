"""Where text comes from: the standard library's own prose, packages, a file, a data set; how it is written to disk."""

from nanogpt_bench.data.dataset import prepare_eurlex, prepare_hub
from nanogpt_bench.data.packages import prepare_packages
from nanogpt_bench.data.text import prepare_nanogpt, prepare_stdlib, prepare_text

__all__ = ["prepare_eurlex", "prepare_hub", "prepare_nanogpt", "prepare_packages", "prepare_stdlib", "prepare_text"]
