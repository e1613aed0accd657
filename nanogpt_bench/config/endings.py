"""How runs end, in the words of summary.json: statuses, kinds of stops, failures.

Files have the plain words. Code compares them with the members, which are equal to
their words.
"""

from enum import StrEnum


class RunStatus(StrEnum):
    """How far a run came."""

    FINISHED = "finished"
    #: ended early without a failure, see `StopKind`
    STOPPED = "stopped"
    FAILED = "failed"
    #: its folder has no summary
    INCOMPLETE = "incomplete"


class StopKind(StrEnum):
    """What ended a run early that did not fail."""

    #: a validation loss that does not fall, if `train.stop_on` names it
    PLATEAU = "plateau"
    #: `train.max_seconds`
    TIME = "time"
    SIGNAL = "signal"
    #: a file could not be written
    DISK = "disk"
    #: its process was killed
    KILLED = "killed"


class FailureClass(StrEnum):
    """A class of failure of a training."""

    STALL = "stall"
    OVERFLOW = "overflow"
    OUTLIER_EXPLOSION = "outlier_explosion"
    ATTENTION_COLLAPSE = "attention_collapse"
    ZERO_GRADIENTS = "zero_gradients"
    EXPLODING_GRADIENTS = "exploding_gradients"
    NAN = "nan"
    PLATEAU = "plateau"
    DIVERGENCE = "divergence"
    OFF_MANIFOLD = "off_manifold"


#: stops that settings ask for; the others come from outside
ASKED_STOPS = (StopKind.PLATEAU, StopKind.TIME)
#: stops from outside, after which a run can be resumed
OUTSIDE_STOPS = (StopKind.KILLED, StopKind.SIGNAL, StopKind.DISK)
#: failures of the loss itself, which end a run and which the same settings cause again;
#: the other classes are possible causes
LOSS_FAILURES = (FailureClass.NAN, FailureClass.DIVERGENCE)
