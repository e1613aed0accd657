"""Three predictions about E7M0 with nearest rounding, checked against records of runs.

E7M0 has powers of two only. A weight's neighbours are half and twice its value, so
nearest rounding leaves the weight where it is unless a step is a quarter of it towards
0, or half of it away from 0. So nearly all updates should be lost, many weights should
not move the loss by half a ULP, and the loss should stop falling at once. The script
prints a table of what the runs in the given folders recorded.
"""

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent.parent / "docs")]

from _markdown import markdown  # noqa: E402

from nanogpt_bench.runs.load import Run, load_run  # noqa: E402

LOSS_METRIC = "train/loss"
#: the step after which the loss should not fall
PLATEAU = 10
#: the least width of the moving average, in steps
WINDOW = 10
#: the fewest steps to judge by
FEWEST_STEPS = 20
#: a fall by less than this share of the loss's whole fall counts as none
NO_FALL = 0.02


@dataclass(frozen=True)
class PredictedShare:
    """The prediction that a share of the weights does something."""

    metric: str
    #: the share of the weights that the metric has to reach
    limit: float
    behaviour: str


SHARES = (
    PredictedShare("stall/update_lost", 0.9, "lose their update"),
    PredictedShare(
        "stall/zero_gradient_zone",
        0.5,
        "lie in a zone where half a ULP to either side changes nothing",
    ),
)


class Answer(Enum):
    """What a run says about a prediction."""

    CONFIRMED = "confirmed"
    REFUTED = "refuted"
    #: the run lacks the metric, or has too few steps
    NOT_JUDGED = "not judged"

    @classmethod
    def of(cls, is_confirmed: bool) -> "Answer":
        """Return the answer of a run that has the metric."""
        return cls.CONFIRMED if is_confirmed else cls.REFUTED


@dataclass(frozen=True)
class Prediction:
    """A prediction, the answer of a run, and the numbers that decide."""

    statement: str
    answer: Answer
    text: str


def predictions(run: Run) -> Iterator[Prediction]:
    """Yield the three predictions, each checked against a run."""
    yield _check_plateau(run)
    for share in SHARES:
        yield _check_share(run, share)


def is_e7m0_nearest(run: Run) -> bool:
    """Return whether all quantised weights of a run are E7M0 under nearest rounding."""
    optimizer = run.config.get("optimizer") or {}
    return run.format == "E7M0" and optimizer.get("writeback") == "nearest"


def _series(run: Run, name: str) -> list[tuple[float, float]]:
    """Return the steps and values of a metric."""
    pairs = zip(*run.curve(name), strict=True)
    return [(step, value) for step, value in pairs if value is not None]


def _check_plateau(run: Run) -> Prediction:
    """Compare the mean loss just after the predicted step with the run's lowest mean."""
    statement = f"plateau within {PLATEAU} steps: the training loss does not fall after that"
    series = _series(run, LOSS_METRIC)
    late = [value for step, value in series if step >= PLATEAU]
    if len(series) < FEWEST_STEPS or not late:
        text = f"the run has {len(series)} steps; {FEWEST_STEPS} would tell"
        return Prediction(statement, Answer.NOT_JUDGED, text)
    values = [value for _, value in series]
    width = max(WINDOW, len(values) // 40)
    means = _moving_means(values, width)
    lowest = min(means)
    fall = max(values[0] - lowest, 0.0)
    residuals = [value - mean for value, mean in zip(values[width:], means[width:], strict=True)]
    scatter = statistics.pstdev(residuals or [0.0])
    allowed = max(NO_FALL * fall, 2 * scatter / width**0.5)
    later_fall = max(statistics.fmean(late[:WINDOW]) - lowest, 0.0)
    share = later_fall / fall if fall > 0 else 0.0
    text = (
        f"after step {PLATEAU} the loss fell by another {later_fall:.3f} nats,"
        f" {share:.1%} of its whole fall"
    )
    return Prediction(statement, Answer.of(later_fall <= allowed), text)


def _moving_means(values: Sequence[float], width: int) -> list[float]:
    """Return means over `width` steps around each; fewer at the ends."""
    half = width // 2
    means = []
    for place in range(len(values)):
        means.append(statistics.fmean(values[max(0, place - half) : place + half + 1]))
    return means


def _check_share(run: Run, share: PredictedShare) -> Prediction:
    """Compare the mean of a share over the run with the limit that it has to reach."""
    statement = f"at least {share.limit:.0%} of the weights {share.behaviour}"
    series = _series(run, share.metric)
    if not series:
        text = f"the run did not record {share.metric}"
        return Prediction(statement, Answer.NOT_JUDGED, text)
    mean = statistics.fmean(value for _, value in series)
    first_step, first_value = series[0]
    last_step, last_value = series[-1]
    text = (
        f"{mean:.1%}, {first_value:.1%} at step {first_step:g}"
        f" and {last_value:.1%} at step {last_step:g}"
    )
    return Prediction(statement, Answer.of(mean >= share.limit), text)


def predictions_table(runs: Sequence[Run]) -> str:
    """Return a line for every prediction and every run of E7M0 with nearest rounding."""
    lines = []
    for run in filter(is_e7m0_nearest, runs):
        for prediction in predictions(run):
            answer = prediction.answer.value
            lines.append((f"`{run.name}`", prediction.statement, answer, prediction.text))
    return markdown(("run", "predicted", "answer", "found"), lines)


def main() -> None:
    """Print the table of the runs in the given folders."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="run folders, such as runs/e7m0"
    )
    print(predictions_table([load_run(path) for path in parser.parse_args().runs]), end="")


if __name__ == "__main__":
    main()
