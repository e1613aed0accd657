"""How many bytes a row of small numbers takes, and of which width they are: what the number of bytes says."""

import math
from collections.abc import Sequence

__all__ = ["packed_length", "packed_width"]


def packed_length(length: int, bits: int) -> int:
    """Bytes of a row of values of 2 or 4 bits: as many as they need, but for one or two values of 2 bits two.

    So that no row has the same size in either width.
    """
    return 2 if bits == 2 and length in (1, 2) else -(-length * bits // 8)


def packed_width(packed: Sequence[int], shape: Sequence[int]) -> int | None:
    """The bits of values of a shape that are packed flat or, in two dimensions, by rows; None if it is neither.

    Args:
        packed: the shape of the bytes.
        shape: that of the values.
    """
    length = math.prod(shape if len(packed) == 1 else shape[1:])
    return next((bits for bits in (4, 2) if packed[-1:] == (packed_length(length, bits),)), None)
