"""Three predictions about E7M0 with nearest rounding, checked against the records of
runs: a table.

E7M0 has powers of two only. A weight's neighbours are half and twice its value, so
nearest rounding leaves the weight where it is unless a step is a quarter of it towards
0 or half of it away from 0. Three predictions follow.
"""

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent.parent / "docs")]

from _markdown import markdown  # noqa: E402

from nanogpt_bench.runs.load import Run, load_run  # noqa: E402

LOSS, LOST, ZONE = "train/loss", "stall/update_lost", "stall/zero_gradient_zone"
#: the step after which the loss should not fall, the least width of the moving average,
#: the fewest steps to judge by
PLATEAU, WINDOW, SHORTEST = 10, 10, 20
#: a fall by less than this share of the loss's whole fall counts as none
NO_FALL = 0.02
#: of each prediction: the metric, the share of the weights that it has to reach, and
#: what these weights do
SHARES = (
    (LOST, 0.9, "lose their update"),
    (ZONE, 0.5, "lie in a zone where half a ULP to either side changes nothing"),
)
ANSWERS = {True: "confirmed", False: "refuted", None: "not judged"}


@dataclass(frozen=True)
class Prediction:
    """A prediction, whether a run confirms it (None if the run lacks the metric), and
    the numbers that decide.
    """

    statement: str
    confirmed: bool | None
    text: str


def predictions(run: Run) -> Iterator[Prediction]:
    """Yield the three predictions, each checked against a run."""
    yield _plateau(run)
    yield from (_share(run, name, limit, what) for name, limit, what in SHARES)


def is_e7m0_nearest(run: Run) -> bool:
    """Return whether all quantised weights of a run are E7M0 and written back by
    nearest rounding.
    """
    return (
        run.format == "E7M0" and (run.config.get("optimizer") or {}).get("writeback") == "nearest"
    )


def _series(run: Run, name: str) -> list[tuple[float, float]]:
    return [
        (step, value) for step, value in zip(*run.curve(name), strict=True) if value is not None
    ]


def _plateau(run: Run) -> Prediction:
    """Compare the mean loss just after the predicted step with the lowest mean of the
    run.
    """
    statement = f"plateau within {PLATEAU} steps: the training loss does not fall after that"
    series = _series(run, LOSS)
    late = [value for step, value in series if step >= PLATEAU]
    if len(series) < SHORTEST or not late:
        return Prediction(
            statement, None, f"the run has {len(series)} steps; {SHORTEST} would tell"
        )
    values = [value for _, value in series]
    width = max(WINDOW, len(values) // 40)
    means = _centred(values, width)
    lowest = min(means)
    fall = max(values[0] - lowest, 0.0)
    scatter = statistics.pstdev(
        [v - m for v, m in zip(values[width:], means[width:], strict=True)] or [0.0]
    )
    allowed = max(NO_FALL * fall, 2 * scatter / width**0.5)
    later = max(statistics.fmean(late[:WINDOW]) - lowest, 0.0)
    share = later / fall if fall > 0 else 0.0
    text = f"after step {PLATEAU} the loss fell by another {later:.3f} nats, {share:.1%} of its whole fall"
    return Prediction(statement, later <= allowed, text)


def _centred(values: Sequence[float], width: int) -> list[float]:
    """Means over `width` steps around each; fewer at the ends."""
    half = width // 2
    return [
        statistics.fmean(values[max(0, at - half) : at + half + 1]) for at in range(len(values))
    ]


def _share(run: Run, name: str, limit: float, what: str) -> Prediction:
    """The prediction that a share of the weights, averaged over the run, reaches a
    limit.
    """
    statement, series = f"at least {limit:.0%} of the weights {what}", _series(run, name)
    if not series:
        return Prediction(statement, None, f"the run did not record {name}")
    mean = statistics.fmean(value for _, value in series)
    (first, begun), (last, ended) = series[0], series[-1]
    text = f"{mean:.1%}, {begun:.1%} at step {first:g} and {ended:.1%} at step {last:g}"
    return Prediction(statement, mean >= limit, text)


def table(runs: Sequence[Run]) -> str:
    """A table with a line for every prediction and every run of E7M0 with nearest
    rounding.
    """
    lines = [
        (f"`{run.name}`", each.statement, ANSWERS[each.confirmed], each.text)
        for run in filter(is_e7m0_nearest, runs)
        for each in predictions(run)
    ]
    return markdown(("run", "predicted", "answer", "found"), lines)


def main() -> None:
    """Print the table of the runs in the given folders."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="run folders, such as runs/e7m0"
    )
    print(table([load_run(path) for path in parser.parse_args().runs]), end="")


if __name__ == "__main__":
    main()
