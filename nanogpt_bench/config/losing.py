"""Where weights that stand still are a loss: which write-backs lose what rounding leaves, and which return it.

Asked by the alerts, the failure classes, the tables and the line of progress.
"""

from __future__ import annotations

from nanogpt_bench.config.schema import ROUNDED

#: write-backs that neither keep what rounding loses nor return it on average
_LOSING = ("nearest",)


def loses_steps(storage: str | None, writeback: str | None) -> bool | None:
    """Whether a small step is lost for good when it is written back; None where that is not known.

    >>> loses_steps("fp8", "nearest"), loses_steps("fp8", "residual8"), loses_steps("master", None)
    (True, False, False)
    >>> loses_steps(None, "nearest"), loses_steps("grid", None)
    (None, True)
    """
    if storage is None:
        return None
    return storage in ROUNDED and (writeback is None or writeback in _LOSING)


def stall_counts(storage: str | None, writeback: str | None) -> bool:
    """Whether the stall says something: under an unbiased write-back standing still and arriving go together.

    Of a master copy it says how many codes stayed, and it counts where it is not known how steps are written back.

    >>> stall_counts("fp8", "nearest"), stall_counts("fp8", "stochastic"), stall_counts("master", None)
    (True, False, True)
    """
    return storage not in ROUNDED or loses_steps(storage, writeback) is not False
