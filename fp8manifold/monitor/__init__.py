"""What a run can watch: small pure functions of tensors."""

from fp8manifold.monitor.bits import code_histogram
from fp8manifold.monitor.stall import code_unchanged, update_lost

__all__ = ["code_histogram", "code_unchanged", "update_lost"]
