"""Where weights that stand still are a loss: which write-backs lose what rounding leaves, and which return it."""

from __future__ import annotations

from nanogpt_bench.config import ROUNDED

#: write-backs that neither keep what rounding loses nor return it on average
LOSING = ("nearest",)


def stall_counts(storage: str | None, writeback: str | None) -> bool:
    """Whether the stall says something: under an unbiased write-back standing still and arriving go together.

    Of a master copy it says how many codes stayed, and it counts where it is not known how steps are written back.

    >>> stall_counts("fp8", "nearest"), stall_counts("fp8", "stochastic"), stall_counts("master", None)
    (True, False, True)
    """
    return storage not in ROUNDED or writeback is None or writeback in LOSING
