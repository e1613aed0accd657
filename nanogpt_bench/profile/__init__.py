"""What a configuration costs, and what a model's tensors need of a format."""

from nanogpt_bench.profile.command import main_profile

__all__ = ["main_profile"]
