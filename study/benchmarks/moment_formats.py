"""The error of a first moment in one byte, and of the update made from it.

    python study/benchmarks/moment_formats.py [--data-dir DIR] [--max-steps 200]
                                              [--layers 0,3,9] [--seed 42] [--json]
                                              [--record]

The 0.86M model of ``compare`` trains on the standard library's prose in E2M5, under
Muon (``muon-stochastic``) and under AdamW (``stochastic``), each at its own rate. The
gradients of a few layers are recorded, clipped as for the step. From the same gradients
the first moment is computed in float32, and in every way that a line of the table
names:

    m = round(beta m + (1 - beta) g)

Shown are, in the second half of the steps and over layers, the root mean square of two
relative errors: that of the moment, and that of the update made from it before the
moment is rounded. Under Muon the update is the orthogonal factor of Nesterov's
momentum, in float32; under AdamW it is the moment over the root of an exact second
moment. ``bias`` is the error along the moment, as a share of it: 0 up to chance if
rounding is right on average.

A block has 128 values. ``fitted`` scales are the smallest power of two that holds its
largest value. Those by ``the gradients' bound`` hold the average of its largest
gradients. ``the library's`` are those of an optimizer that takes the gradients, whose
draws for moments are independent. AdamW's second moment is in float32 in every line.
"""

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

import fp8manifold as fm
from fp8manifold.formats import as_format
from fp8manifold.optim._matrices import COEFFICIENTS, orthogonal_factor

# All benchmarks share these modules.
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from _forms import text_table
from _record import Cell, record
from _training import RULES, read_options, take_training_steps, text_for, trainer_of


class Betas(NamedTuple):
    """Decays of an optimizer's moments."""

    first: float
    second: float


BETAS_OF_OPTIMIZERS: Final = {"Muon": Betas(0.95, 0.0), "AdamW": Betas(0.9, 0.95)}
ROUNDINGS: Final = ("nearest", "independent", "dither")
TRAINED_FORMAT: Final = "E2M5"
SCALE_BLOCK: Final = 128


BFLOAT16: Final = "bfloat16"
# kinds of scales
FITTED: Final = "fitted"
BOUND: Final = "the gradients' bound"
LIBRARY_SCALE: Final = "the library's"


@dataclass(frozen=True)
class MomentWay:
    """One way to store a moment."""

    fmt: str
    scale: str = FITTED

    @property
    def label(self) -> str:
        """Name in the table."""
        return self.fmt if self.fmt == BFLOAT16 else f"{self.fmt}, {self.scale}"

    @property
    def bits(self) -> int:
        """Bits per value, without its block's scale."""
        return 16 if self.fmt == BFLOAT16 else as_format(self.fmt).bits


MOMENT_WAYS: Final = (
    MomentWay(BFLOAT16),
    MomentWay("E4M3", BOUND),
    MomentWay("E4M3"),
    MomentWay("E3M4"),
    MomentWay("E2M5", BOUND),
    MomentWay("E2M5"),
    MomentWay("E1M6"),
    MomentWay("E2M1"),
    MomentWay("E1M2"),
)
LIBRARY_WAYS: Final = {
    "Muon": MomentWay("E2M5", LIBRARY_SCALE),
    "AdamW": MomentWay("E4M3", LIBRARY_SCALE),
}


def recorded_gradients(
    rule: str, layers: Sequence[int], max_steps: int, seed: int, data_dir: str
) -> list[list[Tensor]]:
    """Train, and return the gradients of some of the quantised matrices, by step."""
    trainer, matrices = trainer_of(rule, TRAINED_FORMAT, max_steps, seed, data_dir)
    gradients: dict[int, list[Tensor]] = {layer: [] for layer in layers}

    def record_gradients(*_: Any) -> None:
        for layer, gradients_of_layer in gradients.items():
            gradient = matrices[layer].grad
            assert gradient is not None
            gradients_of_layer.append(gradient.detach().clone())

    trainer.optimizer.register_step_pre_hook(record_gradients)
    take_training_steps(trainer, max_steps)
    return [gradients[layer] for layer in layers]


def power_above(x: Tensor) -> Tensor:
    """Return the smallest power of two that is not below; a tiny one for 0."""
    mantissa, exponent = torch.frexp(x.clamp(min=2.0**-120))
    return torch.ldexp(torch.ones_like(x), exponent - (mantissa == 0.5).to(exponent.dtype))


def stored(
    moment: Tensor, bound: Tensor, way: MomentWay, rounding: str, step: int, seed: int
) -> Tensor:
    """Return a moment as it is read back from its storage; each row is a block."""
    key: dict[str, Any] = {"seed": seed, "step": step, "stream": 1}
    if rounding != "nearest":
        key["draws"] = rounding
    if way.fmt == BFLOAT16:
        if rounding == "nearest":
            return moment.bfloat16().float()
        noise = fm.random_bits(moment.shape, **key) >> 8
        return ((moment.view(torch.int32) + noise) & -65536).view(torch.float32)
    largest = moment.abs().amax(-1, keepdim=True) if way.scale == FITTED else bound
    scale = power_above(largest / as_format(way.fmt).max)
    if rounding == "nearest":
        return fm.round_to_grid(moment / scale, way.fmt) * scale
    return fm.round_to_grid(moment / scale, way.fmt, "stochastic", **key) * scale


class StoredMoment:
    """A moment that is stored in one way, over steps."""

    def __init__(
        self, shape: torch.Size, optimizer: str, way: MomentWay, rounding: str, seed: int
    ) -> None:
        self.way, self.rounding, self.seed = way, rounding, seed
        self.beta = BETAS_OF_OPTIMIZERS[optimizer].first
        self.step = 0
        self.moment = torch.zeros(shape)
        #: the average of the largest gradient of each block
        self.bound = torch.zeros(shape.numel() // SCALE_BLOCK, 1)

    def advance(self, gradient: Tensor) -> Tensor:
        """Return the moment that a step is taken with; it is rounded when it is stored."""
        self.step += 1
        new = self.moment * self.beta + gradient * (1 - self.beta)
        largest = gradient.view(-1, SCALE_BLOCK).abs().amax(-1, keepdim=True)
        self.bound = self.bound * self.beta + largest * (1 - self.beta)
        blocks = stored(
            new.view(-1, SCALE_BLOCK), self.bound, self.way, self.rounding, self.step, self.seed
        )
        self.moment = blocks.view_as(new)
        return new


class LibraryFirstMoment(StoredMoment):
    """The moment of an optimizer of the library, as it is in its state."""

    def __init__(
        self, shape: torch.Size, optimizer: str, way: MomentWay, rounding: str, seed: int
    ) -> None:
        super().__init__(shape, optimizer, way, rounding, seed)
        self.weight = torch.nn.Parameter(torch.zeros(shape))
        options: dict[str, Any] = {"lr": 0.0, "moments": "8bit", "seed": seed}
        self.optimizer: torch.optim.Optimizer
        if optimizer == "Muon":
            self.optimizer = fm.optim.StiffnessMuon([self.weight], momentum=self.beta, **options)
        else:
            betas = BETAS_OF_OPTIMIZERS[optimizer]
            self.optimizer = fm.optim.StiffnessAdamW([self.weight], betas=betas, **options)

    def advance(self, gradient: Tensor) -> Tensor:
        """Return the moment that a step is taken with, from the one stored before."""
        new = self.moment * self.beta + gradient * (1 - self.beta)
        self.weight.grad = gradient.clone()
        self.optimizer.step()
        state = self.optimizer.state[self.weight]
        if "avg_largest" in state:
            codes = state["momentum_buffer"]
            scale = power_above(state["avg_largest"] / as_format(self.way.fmt).max)
        else:
            codes = state["exp_avg"]
            # the power of two that takes the bound to 2^6 .. 2^7
            scale = power_above(state["avg_bound"] * (1 + 2.0**-23)) * 2.0**-7
        values = fm.decode(codes, self.way.fmt).view(*scale.shape[:1], -1) * scale.view(-1, 1)
        self.moment = values.view_as(new)
        return new


def update_of(optimizer: str, moment: Tensor, gradient: Tensor, second: Tensor) -> Tensor:
    """Return the direction of a step."""
    if optimizer == "AdamW":
        return moment / (second.sqrt() + 1e-12)
    beta = BETAS_OF_OPTIMIZERS["Muon"].first
    nesterov = gradient * (1 - beta) + moment * beta
    return orthogonal_factor(nesterov, COEFFICIENTS, 5, 1e-7, torch.float32)


class MomentError(NamedTuple):
    """The relative errors of a moment."""

    moment: float
    update: float
    #: along the moment, as a share of it
    bias: float


LOOK_EVERY: Final = 10


def moment_errors(
    optimizer: str, gradients: Sequence[Tensor], way: MomentWay, rounding: str, seed: int
) -> list[MomentError]:
    """Return the errors in every tenth step of the second half."""
    shape = gradients[0].shape
    make_moment = LibraryFirstMoment if way.scale == LIBRARY_SCALE else StoredMoment
    stored_moment = make_moment(shape, optimizer, way, rounding, seed)
    beta1, beta2 = BETAS_OF_OPTIMIZERS[optimizer]
    exact, second = torch.zeros(shape), torch.zeros(shape)
    errors = []
    for step, gradient in enumerate(gradients, 1):
        exact = exact * beta1 + gradient * (1 - beta1)
        second = second * beta2 + gradient.square() * (1 - beta2)
        moment = stored_moment.advance(gradient)
        is_first_half = 2 * step <= len(gradients)
        if is_first_half or (len(gradients) - step) % LOOK_EVERY:
            continue
        error, size = moment - exact, exact.norm()
        update = update_of(optimizer, moment, gradient, second)
        exact_update = update_of(optimizer, exact, gradient, second)
        errors.append(
            MomentError(
                moment=float(error.norm() / size),
                update=float((update - exact_update).norm() / exact_update.norm()),
                bias=float((error * exact).sum() / size.square()),
            )
        )
    return errors


def mean_moment_error(errors: Sequence[MomentError]) -> MomentError:
    """Return the root mean squares and the mean bias over steps and layers."""
    return MomentError(
        moment=math.sqrt(fmean(error.moment**2 for error in errors)),
        update=math.sqrt(fmean(error.update**2 for error in errors)),
        bias=fmean(error.bias for error in errors),
    )


MOMENT_HEADER: Final = (
    "under",
    "first moment in",
    "bits",
    *(f"moment, {rounding}" for rounding in ROUNDINGS),
    *(f"update, {rounding}" for rounding in ROUNDINGS),
    *(f"bias, {rounding}" for rounding in ROUNDINGS),
)


def moment_rows(optimizer: str, layers: Sequence[Sequence[Tensor]], seed: int) -> list[list[Cell]]:
    """Return the table of one optimizer.

    The library's way has independent draws only.
    """
    rows: list[list[Cell]] = []
    for way in (*MOMENT_WAYS, LIBRARY_WAYS[optimizer]):
        print(f"{optimizer}: {way.label}", file=sys.stderr, flush=True)
        by_rounding: dict[str, MomentError] = {}
        for rounding in ("independent",) if way.scale == LIBRARY_SCALE else ROUNDINGS:
            errors: list[MomentError] = []
            for gradients in layers:
                errors += moment_errors(optimizer, gradients, way, rounding, seed)
            by_rounding[rounding] = mean_moment_error(errors)
        row: list[Cell] = [optimizer, way.label, way.bits]
        for name in MomentError._fields:
            for rounding in ROUNDINGS:
                error = by_rounding.get(rounding)
                row.append(None if error is None else getattr(error, name))
        rows.append(row)
    return rows


def moment_cell_text(cell: Cell) -> str:
    """Return a cell as it is printed."""
    if cell is None:
        return ""
    return f"{cell:.3f}" if isinstance(cell, float) else str(cell)


def main() -> int:
    """Measure, print, and return the exit code."""
    options, layers = read_options(__doc__, max_steps=200)
    torch.set_num_threads(1)
    rows: dict[str, list[list[Cell]]] = {}
    with text_for(options) as data_dir:
        for optimizer, rule in RULES.items():
            gradients = recorded_gradients(rule, layers, options.max_steps, options.seed, data_dir)
            rows[optimizer] = moment_rows(optimizer, gradients, options.seed)
    if options.json:
        print(json.dumps(rows))
    else:
        seed = f"seed {options.seed}, {options.max_steps} steps, layers {options.layers}"
        print(f"torch {torch.__version__}, {seed}")
        rule_line = ("---", *["---:"] * (len(MOMENT_HEADER) - 2))
        for optimizer, lines in rows.items():
            print(f"\n{optimizer} ({RULES[optimizer]}):\n")
            texts = [tuple(map(moment_cell_text, line[1:])) for line in lines]
            print(text_table([MOMENT_HEADER[1:], *texts], rule_line, markdown=True))
    if options.record:
        record("", MOMENT_HEADER, chain.from_iterable(rows.values()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
