"""The table of criteria by which runs are judged.

A row names a metric, a side of a bound, and for how many values in a row the metric has
to be there.
"""

from dataclasses import dataclass
from typing import Final

from nanogpt_bench.config import metrics
from nanogpt_bench.config.endings import FailureClass
from nanogpt_bench.config.metrics import ABOVE, BELOW
from nanogpt_bench.monitors.attention import ENTROPY
from nanogpt_bench.monitors.geometry import OFF_GRID, OFF_SPHERE, ORTHOGONALITY
from nanogpt_bench.monitors.gradients import GRAD_DEAD, GRAD_ZERO
from nanogpt_bench.monitors.ranges import CLAMPED, KURTOSIS, OVERFLOW
from nanogpt_bench.monitors.shadow import COSINE
from nanogpt_bench.monitors.stall import UPDATE_LOST

#: names of series that the judge computes from the recorded metrics
OVER_MEDIAN: Final = f"{metrics.GRAD_NORM.name} over its median so far"
OVER_FIRST: Final = f"{metrics.TRAIN_LOSS.name} over its first"
OVER_LOWEST: Final = f"{metrics.TRAIN_LOSS.name} over its lowest"
ATTENTION_ENTROPY: Final = f"{ENTROPY.name} over that of uniform attention"
REST: Final = f"share of the run until {metrics.TRAIN_LOSS.name} rests"
FLATNESS: Final = f"{metrics.VAL_LOSS.name} over its lowest before, less one"
#: kurtosis of the blocks' outputs; other activations exceed any bound on their kurtosis
#: in healthy runs
OF_BLOCKS: Final = KURTOSIS.part("residual").name


@dataclass(frozen=True)
class Limit:
    """One criterion of the table.

    It begins to hold at the first of `patience` values in a row on `side` of `bound`,
    or equal to it.

    >>> row = Limit(FailureClass.STALL, "stall/update_lost", ABOVE, bound=0.5, patience=3)
    >>> row.beyond(0.5), row.beyond(0.4)
    (True, False)
    """

    #: a `FailureClass`, or the verdict of a comparison
    kind: str
    #: a recorded metric, or one of the series named above
    figure: str
    side: str
    bound: float
    patience: int
    #: the finding in words, formatted with the fields of a `Criterion`
    message: str = ""
    #: the series is that of the worst layer at every measurement
    layers: bool = False
    #: the bound is at least so many times the first value
    growth: float = 0.0
    #: in a failed run the last values before its end are enough, however few they are
    broken_off: bool = False
    #: it holds only if it still does at the end of the series
    lasting: bool = False
    #: it begins to hold at the last of the `patience` values, and never with fewer
    filled: bool = False

    def beyond(self, value: float, first: float = 0.0) -> bool:
        """Return whether a value is on the side of the failure, the bound included."""
        limit = self.limit(first)
        return value >= limit if self.side == ABOVE else value <= limit

    def limit(self, first: float) -> float:
        """Return the bound for a series whose first value is `first`."""
        return max(self.bound, self.growth * first) if self.growth else self.bound


def _overflow_limit(metric: metrics.Metric) -> Limit:
    operand = metric.name.rsplit("/", 1)[-1].replace("_", " ")
    return Limit(
        FailureClass.OVERFLOW,
        metric.name,
        ABOVE,
        bound=0.01,
        patience=3,
        message=f"up to {{extreme:.2%}} of the {operand} values of a layer were beyond the format",
        layers=True,
    )


def _flag_limit(metric: metrics.Metric, subject: str) -> Limit:
    return Limit(
        FailureClass.NAN,
        metric.name,
        ABOVE,
        bound=1.0,
        patience=1,
        message=f"{subject} was not finite",
    )


def _manifold_limit(metric: metrics.Metric, bound: float, distance: str) -> Limit:
    return Limit(
        FailureClass.OFF_MANIFOLD,
        metric.name,
        ABOVE,
        bound=bound,
        patience=1,
        message=f"{distance} was up to {{extreme:.2g}}",
    )


#: the criteria of all classes of failure; a class is found where one of its criteria
#: holds
CLASSES: Final = (
    Limit(
        FailureClass.STALL,
        UPDATE_LOST.name,
        ABOVE,
        bound=0.5,
        patience=3,
        message="{mean:.1%} of the weights lost a requested update",
    ),
    *(_overflow_limit(metric) for metric in OVERFLOW.parts),
    *(_overflow_limit(metric) for metric in CLAMPED.parts),
    Limit(
        FailureClass.OUTLIER_EXPLOSION,
        OF_BLOCKS,
        ABOVE,
        bound=10.0,
        patience=3,
        message="the kurtosis of the blocks' outputs went from {first:.3g} to {extreme:.3g} "
        "(step {extreme_step})",
        layers=True,
        growth=3.0,
        broken_off=True,
    ),
    Limit(
        FailureClass.ATTENTION_COLLAPSE,
        ATTENTION_ENTROPY,
        BELOW,
        bound=0.1,
        patience=3,
        message="attention's entropy fell to {extreme:.2g} of that of uniform attention",
    ),
    Limit(
        FailureClass.ZERO_GRADIENTS,
        metrics.GRAD_NORM.name,
        BELOW,
        bound=1e-8,
        patience=3,
        message="the gradient norm fell to {extreme:.2g}",
    ),
    Limit(
        FailureClass.ZERO_GRADIENTS,
        GRAD_ZERO.name,
        ABOVE,
        bound=0.9,
        patience=3,
        message="up to {extreme:.1%} of the gradient was zero",
    ),
    Limit(
        FailureClass.ZERO_GRADIENTS,
        GRAD_DEAD.name,
        ABOVE,
        bound=0.9,
        patience=3,
        message="up to {extreme:.1%} of the gradient was below 1e-8 for 100 steps",
    ),
    Limit(
        FailureClass.EXPLODING_GRADIENTS,
        OVER_MEDIAN,
        ABOVE,
        bound=100.0,
        patience=3,
        message="the gradient norm reached {extreme:.3g} times its median (step {extreme_step})",
        broken_off=True,
    ),
    _flag_limit(metrics.LOSS_IS_NAN, "the loss"),
    _flag_limit(metrics.GRAD_HAS_NAN, "the gradient"),
    _flag_limit(metrics.WEIGHT_HAS_NAN, "a weight"),
    _flag_limit(metrics.STATE_HAS_NAN, "the optimizer's state"),
    Limit(
        FailureClass.PLATEAU,
        REST,
        BELOW,
        bound=0.5,
        patience=1,
        message="the training loss stopped falling early",
    ),
    Limit(
        FailureClass.DIVERGENCE,
        OVER_FIRST,
        ABOVE,
        bound=0.5,
        patience=3,
        message="the training loss rose {extreme:.3f} nats above its first",
        broken_off=True,
    ),
    Limit(
        FailureClass.DIVERGENCE,
        OVER_LOWEST,
        ABOVE,
        bound=0.5,
        patience=3,
        message="the training loss rose {extreme:.3f} nats above its lowest",
        broken_off=True,
        lasting=True,
    ),
    Limit(
        FailureClass.DIVERGENCE,
        metrics.EXCESS.name,
        ABOVE,
        bound=0.1,
        patience=3,
        message="the smoothed training loss was {value:.1%} above its own lowest or the baseline's",
        filled=True,
    ),
    _manifold_limit(OFF_GRID, 1e-12, "the share of weights off the grid"),
    _manifold_limit(ORTHOGONALITY, 1e-4, "|Q^T Q - I|"),
    _manifold_limit(OFF_SPHERE, 1e-4, "the rows' lengths minus 1"),
)
#: the classes, in the order in which they are shown
KINDS: Final = tuple(FailureClass)

#: criteria that end a run, if `train.stop_on` names them
ENDINGS: Final = {
    FailureClass.NAN: Limit(
        FailureClass.NAN, metrics.LOSS_IS_NAN.name, ABOVE, bound=1.0, patience=3, filled=True
    ),
    FailureClass.DIVERGENCE: next(row for row in CLASSES if row.figure == metrics.EXCESS.name),
    # not a thousandth below its lowest
    FailureClass.PLATEAU: Limit(
        FailureClass.PLATEAU, FLATNESS, ABOVE, bound=-0.001, patience=5, filled=True
    ),
}


@dataclass(frozen=True)
class VerdictBounds:
    """The bounds of a comparison's verdicts."""

    #: on a row's gap over the reference's mean final validation loss
    outside: Limit
    #: on that gap in nats
    behind: Limit
    #: on the mean cosine of a row's gradients and the float32 shadow's
    cosine: Limit
    #: on the share of weights that lost a requested update
    stall: Limit


VERDICT_BOUNDS: Final = VerdictBounds(
    outside=Limit("outside", "gap over the reference's loss", ABOVE, bound=0.10, patience=1),
    behind=Limit("behind", "gap in nats", ABOVE, bound=0.05, patience=1),
    cosine=Limit("doubtful", COSINE.name, BELOW, bound=0.90, patience=1),
    stall=Limit(FailureClass.STALL, UPDATE_LOST.name, ABOVE, bound=0.5, patience=1),
)
