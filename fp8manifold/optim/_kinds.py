"""The choices that tell one kind of step from another.

They are strings too, as options and states have them. Their order is that of C's
enumerations (`_native/step.h`).
"""

from enum import StrEnum


class WeightStorage(StrEnum):
    """Where the result of a step goes."""

    #: one byte a weight
    CODES = "codes"
    #: floats on the grid of a format
    GRID = "grid"
    #: floats between the ends of a format
    FREE = "free"
    #: the floats of an ordinary parameter
    PLAIN = "plain"
    #: no weight: the direction itself is stored in its place
    DIRECTION = "direction"


class MomentStorage(StrEnum):
    """How moments are stored between steps."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    #: codes in blocks of a row
    EIGHT_BIT = "8bit"


class Geometry(StrEnum):
    """How a step moves."""

    #: straight in value
    LINEAR = "linear"
    #: along the chart's geodesic
    EXPONENTIAL = "exponential"
    #: along the geodesic's tangent
    TANGENT = "tangent"
