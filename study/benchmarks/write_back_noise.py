"""The noise of a write-back: what rounding adds to real updates, by format, scales and
draws.

    python study/benchmarks/write_back_noise.py [--data-dir DIR] [--max-steps 500] [--layers
                                          0,3,9] [--seed 42] [--json] [--record]

The 0.86M model of ``compare`` trains on the standard library's prose in E4M3, under
Muon (``muon-stochastic``) and under AdamW (``stochastic``), each at its own rate, which
decays to a tenth. The updates of a few layers are recorded, and each half of the steps
is then written back in every way that a line of the table names,

    w_t = round(w_{t-1} + d_t),      error = w_T - (w_0 + d_1 + ... + d_T)

from the weights that the half began with, rounded once (``w_0``, so that an exact
write-back has no error). Shown is the root mean square of the error over that of the
weights, together over the layers, with independent draws and with dithered ones; and
the bias, the error along the movement as a share of it, of the layer and half where it
is largest.

``room`` is the factor by which the largest weight under a new scale may grow. Scales
are widened to it if a target is beyond the end, checked in every step or in every n-th
(in between such weights saturate, which is error too); ``fitted`` scales are computed
again in every step. Under a new scale the step's targets are rounded once,
stochastically, with no bias. ``the library's step`` is that of an optimizer whose
gradients are the updates: it doubles a scale after a step that has left a weight at its
end. Lines with ``residual`` store bits of the remainder; the error is that of the
codes.
"""

import json
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

import fp8manifold as fm
from fp8manifold.random_bits import Draws

# modules that all benchmarks share
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from _forms import text_table
from _record import Cell, record
from _training import RULES, read_options, text_for, train, trainer_of
from _write_back import Error, Way, error_of

DRAWS: Final[tuple[Draws, ...]] = ("independent", "dither")
FORMAT: Final = "E4M3"


FORMER: Final = Way("E2M5", room=2, every=100)
NO_SLACK: Final = Way("E2M5", stepped=True)
BAR: Final = 0.5
#: a former rule of the library, for comparison: a review every 100 steps, with room 2
#: in formats of few binades
WAYS: Final = (
    Way("E7M0", room=16, every=100),
    Way("E4M3", room=16, every=100),
    Way("E4M3", room=16),
    Way("E4M3", room=16, stepped=True),
    Way("E4M3", room=16, every=100, residual_bits=8),
    Way("E1M6", room=2, every=100),
    FORMER,
    Way("E2M5", room=2),
    Way("E2M5"),
    NO_SLACK,
    Way("E2M5", every=10),
    Way("E2M5", every=100),
    Way("E2M5", every=0),
    Way("E1M6"),
    Way("E1M6", stepped=True),
    Way("E2M5", "block"),
    Way("E2M5", "block", stepped=True),
    Way("E1M6", "block"),
    Way("E2M5", "block", every=0, pow2=False),
    Way("E1M6", "block", every=0, pow2=False),
)


@dataclass(frozen=True)
class Recording:
    """The updates of one layer in the steps of a training, from the number ``first``
    on.
    """

    start: Tensor
    updates: list[Tensor]
    stream: int
    first: int


def recorded_steps(
    rule: str, layers: Sequence[int], max_steps: int, seed: int, data_dir: str
) -> list[Recording]:
    """Train, and record the updates of some of the quantised matrices, one recording
    for each half of the steps.
    """
    trainer, matrices = trainer_of(rule, FORMAT, max_steps, seed, data_dir)
    watched = {id(matrices[layer]): layer for layer in layers}
    seen: dict[int, list[tuple[Tensor, Tensor]]] = {layer: [] for layer in layers}

    def observe(view: fm.optim.StepView) -> None:
        before = view.before.clone()
        seen[watched[id(view.parameter)]].append((before, view.target - before))

    optimizer: Any = trainer.optimizer
    optimizer.observer, optimizer.observes = observe, lambda parameter: id(parameter) in watched

    def drop_weights(number: int) -> None:
        for steps in seen.values():  # those that a half begins with are enough
            steps[-1] = (
                steps[-1][0] if number in (1, max_steps // 2 + 1) else torch.empty(0),
                steps[-1][1],
            )

    train(trainer, max_steps, drop_weights)
    halves = ((0, max_steps // 2), (max_steps // 2, max_steps))
    return [
        Recording(
            seen[layer][low][0], [update for _, update in seen[layer][low:high]], layer, low + 1
        )
        for low, high in halves
        for layer in layers
    ]


Found = dict[Way, dict[Draws, list[Error]]]


def measure(recordings: Sequence[Recording], seed: int) -> Found:
    """The errors of every way and kind of draws, for every recording."""
    found: Found = {}
    for way in WAYS:
        print(way.label, file=sys.stderr, flush=True)
        found[way] = {
            draws: [
                error_of(r.start, r.updates, way, draws, seed=seed, stream=r.stream, first=r.first)
                for r in recordings
            ]
            for draws in DRAWS
        }
    return found


def spread_of(over: Sequence[Error], under: Sequence[Error]) -> list[float]:
    """Ratios of noise to noise: their median, the smallest and the largest."""
    ratios = [a.noise / b.noise for a, b in zip(over, under, strict=True)]
    return [statistics.median(ratios), min(ratios), max(ratios)]


def together(errors: Sequence[Error]) -> float:
    """The noise over layers: the root of the mean square."""
    return math.sqrt(statistics.fmean(error.noise**2 for error in errors))


def worst(errors: Sequence[Error]) -> float:
    """The largest bias, with its sign."""
    return max((error.bias for error in errors), key=abs)


HEADER: Final = (
    "under",
    "written back in",
    "bytes for scales",
    *(
        f"{draws}, {half}"
        for half in ("1st half", "2nd half")
        for draws in ("independent", "dithered")
    ),
    "dithered / independent",
    "dithered / the former rule's",
    "bias, independent",
    "bias, dithered",
)


def rows_of(optimizer: str, found: Found) -> list[list[Cell]]:
    """The table of one optimizer: the noise of each half, and ratios over layers and
    halves.
    """
    rows: list[list[Cell]] = []
    for way, (independent, dithered) in (
        (way, [noises[draws] for draws in DRAWS]) for way, noises in found.items()
    ):
        half = len(independent) // 2
        figures = [
            together(part)
            for at in (slice(half), slice(half, None))
            for part in (independent[at], dithered[at])
        ]
        ratios = spread_of(dithered, independent), spread_of(dithered, found[FORMER]["independent"])
        rows.append(
            [
                optimizer,
                way.label,
                round(way.scale_bytes, 3),
                *figures,
                *ratios,
                worst(independent),
                worst(dithered),
            ]
        )
    return rows


def bar(found: Found) -> str:
    """The bar for scales of rows without room: half of the noise of the former rule, in
    the median.
    """
    median, smallest, largest = spread_of(found[NO_SLACK]["dither"], found[FORMER]["independent"])
    figures = f"{median:.3f} ({smallest:.3f} .. {largest:.3f})"
    met = "met" if median <= BAR else "NOT met"
    return f"{NO_SLACK.label}, dithered, over the former rule's: {figures}, bar <= {BAR}: {met}"


def cell_text(cell: Cell) -> str:
    """A cell as it is printed."""
    if isinstance(cell, list):
        return f"{cell[0]:.2f} ({cell[1]:.2f} .. {cell[2]:.2f})"
    return f"{cell:.3f}" if isinstance(cell, float) else str(cell)


def main() -> int:
    options, layers = read_options(__doc__, max_steps=500)
    torch.set_num_threads(1)
    rows: dict[str, list[list[Cell]]] = {}
    bars: dict[str, str] = {}
    with text_for(options) as data_dir:
        for optimizer, rule in RULES.items():
            recordings = recorded_steps(rule, layers, options.max_steps, options.seed, data_dir)
            found = measure(recordings, options.seed)
            rows[optimizer], bars[optimizer] = rows_of(optimizer, found), bar(found)
    if options.json:
        print(json.dumps(rows))
    else:
        print(
            f"torch {torch.__version__}, seed {options.seed}, {options.max_steps} steps, layers "
            f"{options.layers}"
        )
        print(f"the former rule: {FORMER.label}, independent draws")
        print("ratios: median of layers and halves (smallest .. largest)")
        for optimizer, lines in rows.items():
            print(f"\n{optimizer} ({RULES[optimizer]}):\n")
            texts = [tuple(cell_text(cell) for cell in line[1:]) for line in lines]
            print(text_table([HEADER[1:], *texts], ("---", *["---:"] * 9), markdown=True))
            print(f"\n{bars[optimizer]}")
    if options.record:
        record(
            f"the second of the two named, the former rule to {FORMER.label}, independent",
            HEADER,
            [line for part in rows.values() for line in part],
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
