"""The noise of a write-back: what rounding adds to real updates.

    python study/benchmarks/write_back_noise.py [--data-dir DIR] [--max-steps 500]
                                                [--layers 0,3,9] [--seed 42] [--json]
                                                [--record]

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
from itertools import chain
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

import fp8manifold as fm
from fp8manifold.random_bits import Draws

# All benchmarks share these modules.
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from _forms import text_table
from _record import Cell, record
from _timing import Ratio
from _training import RULES, read_options, take_training_steps, text_for, trainer_of
from _write_back import DRAWS, WriteBack, WriteBackError, error_of

RECORDED_FORMAT: Final = "E4M3"
#: a former rule of the library, for comparison: a review every 100 steps, with room 2
#: in formats of few binades
FORMER: Final = WriteBack("E2M5", room=2, every=100)
#: the library's rule: scales of rows without room
PRESENT: Final = WriteBack("E2M5", stepped=True)
#: the largest ratio of noise that the present rule may have to the former one
NOISE_BAR: Final = 0.5
WRITE_BACKS: Final = (
    WriteBack("E7M0", room=16, every=100),
    WriteBack("E4M3", room=16, every=100),
    WriteBack("E4M3", room=16),
    WriteBack("E4M3", room=16, stepped=True),
    WriteBack("E4M3", room=16, every=100, residual_bits=8),
    WriteBack("E1M6", room=2, every=100),
    FORMER,
    WriteBack("E2M5", room=2),
    WriteBack("E2M5"),
    PRESENT,
    WriteBack("E2M5", every=10),
    WriteBack("E2M5", every=100),
    WriteBack("E2M5", every=0),
    WriteBack("E1M6"),
    WriteBack("E1M6", stepped=True),
    WriteBack("E2M5", "block"),
    WriteBack("E2M5", "block", stepped=True),
    WriteBack("E1M6", "block"),
    WriteBack("E2M5", "block", every=0, pow2=False),
    WriteBack("E1M6", "block", every=0, pow2=False),
)


@dataclass(frozen=True)
class Recording:
    """The updates of one layer in some steps of a training."""

    #: the weights before the first of the steps
    start: Tensor
    updates: list[Tensor]
    #: of the random bits
    stream: int
    #: number of the first of the steps
    first: int


def recorded_steps(
    rule: str, layers: Sequence[int], max_steps: int, seed: int, data_dir: str
) -> list[Recording]:
    """Train, and record the updates of some of the quantised matrices.

    There is a recording for each layer and each half of the steps, half by half.
    """
    trainer, matrices = trainer_of(rule, RECORDED_FORMAT, max_steps, seed, data_dir)
    layer_of = {id(matrices[layer]): layer for layer in layers}
    half = max_steps // 2
    updates: dict[int, list[Tensor]] = {layer: [] for layer in layers}
    #: weights before the first step of a half, by layer and number of earlier steps
    starts: dict[tuple[int, int], Tensor] = {}

    def record_update(view: fm.optim.StepView) -> None:
        layer = layer_of[id(view.parameter)]
        old_weights = view.before.clone()
        earlier_steps = len(updates[layer])
        if earlier_steps in (0, half):
            starts[layer, earlier_steps] = old_weights
        updates[layer].append(view.target - old_weights)

    optimizer: Any = trainer.optimizer
    optimizer.observer = record_update
    optimizer.observes = lambda parameter: id(parameter) in layer_of
    take_training_steps(trainer, max_steps)
    recordings = []
    for low, high in ((0, half), (half, max_steps)):
        for layer in layers:
            start = starts[layer, low]
            recordings.append(Recording(start, updates[layer][low:high], layer, low + 1))
    return recordings


Errors = dict[WriteBack, dict[Draws, list[WriteBackError]]]
"""The errors by way and draws, one for each recording."""


def measure_write_backs(recordings: Sequence[Recording], seed: int) -> Errors:
    """Write every recording back in every way."""
    errors: Errors = {}
    for way in WRITE_BACKS:
        print(way.label, file=sys.stderr, flush=True)
        errors[way] = {}
        for draws in DRAWS:
            errors[way][draws] = [error_of_recording(r, way, draws, seed) for r in recordings]
    return errors


def error_of_recording(
    recording: Recording, way: WriteBack, draws: Draws, seed: int
) -> WriteBackError:
    """Return the error of writing a recording back in one way."""
    return error_of(
        recording.start,
        recording.updates,
        way,
        draws,
        seed=seed,
        stream=recording.stream,
        first=recording.first,
    )


def ratio_of_noise(over: Sequence[WriteBackError], under: Sequence[WriteBackError]) -> Ratio:
    """Return the ratios of noise to noise."""
    return Ratio.of(a.noise / b.noise for a, b in zip(over, under, strict=True))


def mean_noise(errors: Sequence[WriteBackError]) -> float:
    """Return the noise over layers: the root of the mean square."""
    return math.sqrt(statistics.fmean(error.noise**2 for error in errors))


def worst(errors: Sequence[WriteBackError]) -> float:
    """Return the largest bias, with its sign."""
    return max((error.bias for error in errors), key=abs)


WRITE_BACK_HEADER: Final = (
    "under",
    "written back in",
    "bytes for scales",
    "independent, 1st half",
    "dithered, 1st half",
    "independent, 2nd half",
    "dithered, 2nd half",
    "dithered / independent",
    "dithered / the former rule's",
    "bias, independent",
    "bias, dithered",
)


def write_back_rows(optimizer: str, errors: Errors) -> list[list[Cell]]:
    """Return the table of one optimizer.

    It has the noise of each half, and ratios over layers and halves.
    """
    former = errors[FORMER]["independent"]
    rows: list[list[Cell]] = []
    for way, by_draws in errors.items():
        independent, dithered = by_draws["independent"], by_draws["dither"]
        half = len(independent) // 2
        rows.append(
            [
                optimizer,
                way.label,
                round(way.scale_bytes, 3),
                mean_noise(independent[:half]),
                mean_noise(dithered[:half]),
                mean_noise(independent[half:]),
                mean_noise(dithered[half:]),
                ratio_of_noise(dithered, independent),
                ratio_of_noise(dithered, former),
                worst(independent),
                worst(dithered),
            ]
        )
    return rows


def bar_text(errors: Errors) -> str:
    """Return whether the present rule has half of the noise of the former, in the median."""
    ratio = ratio_of_noise(errors[PRESENT]["dither"], errors[FORMER]["independent"])
    figures = f"{ratio.median:.3f} ({ratio.smallest:.3f} .. {ratio.largest:.3f})"
    met = "met" if ratio.median <= NOISE_BAR else "NOT met"
    return (
        f"{PRESENT.label}, dithered, over the former rule's: {figures}, bar <= {NOISE_BAR}: {met}"
    )


def noise_cell_text(cell: Cell) -> str:
    """Return a cell as it is printed."""
    if isinstance(cell, Ratio):
        return f"{cell.median:.2f} ({cell.smallest:.2f} .. {cell.largest:.2f})"
    return f"{cell:.3f}" if isinstance(cell, float) else str(cell)


def main() -> int:
    """Measure, print, and return the exit code."""
    options, layers = read_options(__doc__, max_steps=500)
    torch.set_num_threads(1)
    rows: dict[str, list[list[Cell]]] = {}
    bars: dict[str, str] = {}
    with text_for(options) as data_dir:
        for optimizer, rule in RULES.items():
            recordings = recorded_steps(rule, layers, options.max_steps, options.seed, data_dir)
            errors = measure_write_backs(recordings, options.seed)
            rows[optimizer] = write_back_rows(optimizer, errors)
            bars[optimizer] = bar_text(errors)
    if options.json:
        print(json.dumps(rows))
    else:
        seed = f"seed {options.seed}, {options.max_steps} steps, layers {options.layers}"
        print(f"torch {torch.__version__}, {seed}")
        print(f"the former rule: {FORMER.label}, independent draws")
        print("ratios: median of layers and halves (smallest .. largest)")
        for optimizer, lines in rows.items():
            print(f"\n{optimizer} ({RULES[optimizer]}):\n")
            texts = [tuple(map(noise_cell_text, line[1:])) for line in lines]
            print(
                text_table([WRITE_BACK_HEADER[1:], *texts], ("---", *["---:"] * 9), markdown=True)
            )
            print(f"\n{bars[optimizer]}")
    if options.record:
        peer = f"the second of the two named, the former rule to {FORMER.label}, independent"
        record(peer, WRITE_BACK_HEADER, chain.from_iterable(rows.values()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
