"""The main job: formats x rules on one corpus, same seeds and data order, one table and one report."""

from nanogpt_bench.compare.command import compare, main_compare
from nanogpt_bench.compare.demonstration import Demonstration

__all__ = ["Demonstration", "compare", "main_compare"]
