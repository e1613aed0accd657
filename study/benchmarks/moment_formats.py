"""The error of a first moment in one byte, and of the update made from it, by format,
scales and draws.

    python study/benchmarks/moment_formats.py [--data-dir DIR] [--max-steps 200] [--layers
                                        0,3,9] [--seed 42] [--json] [--record]

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
largest value; those by ``the gradients' bound`` hold the average of its largest
gradients. ``the library's`` are those of an optimizer that takes the gradients, whose
draws for moments are independent. AdamW's second moment is in float32 in every line.
"""

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

import fp8manifold as fm
from fp8manifold.formats import as_format
from fp8manifold.optim._muon import COEFFICIENTS, orthogonal_factor

# modules that all benchmarks share
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from _forms import text_table
from _record import Cell, record
from _training import RULES, read_options, text_for, train, trainer_of

BETAS: Final = {"Muon": (0.95, 0.0), "AdamW": (0.9, 0.95)}
ROUNDINGS: Final = ("nearest", "independent", "dither")
FORMAT: Final = "E2M5"
BLOCK: Final = 128


@dataclass(frozen=True)
class Way:
    """One way to store a moment."""

    fmt: str
    #: fitted to each block, by the gradients' bound, or the library's own
    scale: str = "fitted"

    @property
    def label(self) -> str:
        """Name in the table."""
        return self.fmt if self.fmt == "bfloat16" else f"{self.fmt}, {self.scale}"

    @property
    def bits(self) -> int:
        """Bits per value, without its block's scale."""
        return 16 if self.fmt == "bfloat16" else as_format(self.fmt).bits


BOUND: Final = "the gradients' bound"
LIBRARY: Final = "the library's"
WAYS: Final = (
    Way("bfloat16"),
    Way("E4M3", BOUND),
    Way("E4M3"),
    Way("E3M4"),
    Way("E2M5", BOUND),
    Way("E2M5"),
    Way("E1M6"),
    Way("E2M1"),
    Way("E1M2"),
)
OWN: Final = {"Muon": Way("E2M5", LIBRARY), "AdamW": Way("E4M3", LIBRARY)}


def recorded(
    rule: str, layers: Sequence[int], max_steps: int, seed: int, data_dir: str
) -> list[list[Tensor]]:
    """Train, and record the gradients of some of the quantised matrices."""
    trainer, matrices = trainer_of(rule, FORMAT, max_steps, seed, data_dir)
    seen: list[list[Tensor]] = [[] for _ in layers]

    def look(*_: Any) -> None:
        for gradients, layer in zip(seen, layers, strict=True):
            gradient = matrices[layer].grad
            assert gradient is not None
            gradients.append(gradient.detach().clone())

    trainer.optimizer.register_step_pre_hook(look)
    train(trainer, max_steps)
    return seen


def power_above(x: Tensor) -> Tensor:
    """The smallest power of two that is not below; a tiny one for 0."""
    mantissa, exponent = torch.frexp(x.clamp(min=2.0**-120))
    return torch.ldexp(torch.ones_like(x), exponent - (mantissa == 0.5).to(exponent.dtype))


def kept(moment: Tensor, bound: Tensor, way: Way, rounding: str, step: int, seed: int) -> Tensor:
    """A moment as it is read back from its storage; each row is a block."""
    key: dict[str, int] = {"seed": seed, "step": step, "stream": 1}
    if way.fmt == "bfloat16":
        if rounding == "nearest":
            return moment.bfloat16().float()
        noise = fm.random_bits(moment.shape, **key, draws=rounding) >> 8  # type: ignore[arg-type]
        return ((moment.view(torch.int32) + noise) & -65536).view(torch.float32)
    held = moment.abs().amax(-1, keepdim=True) if way.scale == "fitted" else bound
    scale = power_above(held / as_format(way.fmt).max)
    if rounding == "nearest":
        return fm.round_to_grid(moment / scale, way.fmt) * scale
    return fm.round_to_grid(moment / scale, way.fmt, "stochastic", **key, draws=rounding) * scale  # type: ignore[arg-type]


class Kept:
    """A moment that is stored in one way, over steps."""

    def __init__(
        self, shape: torch.Size, optimizer: str, way: Way, rounding: str, seed: int
    ) -> None:
        self.way, self.rounding, self.seed = way, rounding, seed
        self.beta, self.step = BETAS[optimizer][0], 0
        self.moment, self.bound = torch.zeros(shape), torch.zeros(shape.numel() // BLOCK, 1)

    def advanced(self, gradient: Tensor) -> Tensor:
        """The moment that a step is taken with; it is rounded when it is stored."""
        self.step += 1
        new = self.moment * self.beta + gradient * (1 - self.beta)
        self.bound = self.bound * self.beta + gradient.view(-1, BLOCK).abs().amax(
            -1, keepdim=True
        ) * (1 - self.beta)
        self.moment = kept(
            new.view(-1, BLOCK), self.bound, self.way, self.rounding, self.step, self.seed
        ).view_as(new)
        return new


class OfTheLibrary(Kept):
    """The moment of an optimizer of the library, as it is in its state."""

    def __init__(
        self, shape: torch.Size, optimizer: str, way: Way, rounding: str, seed: int
    ) -> None:
        super().__init__(shape, optimizer, way, rounding, seed)
        self.weight = torch.nn.Parameter(torch.zeros(shape))
        options: dict[str, Any] = {"lr": 0.0, "moments": "8bit", "seed": seed}
        self.optimizer: torch.optim.Optimizer = (
            fm.optim.StiffnessMuon([self.weight], momentum=self.beta, **options)
            if optimizer == "Muon"
            else fm.optim.StiffnessAdamW([self.weight], betas=BETAS[optimizer], **options)
        )

    def advanced(self, gradient: Tensor) -> Tensor:
        """The moment that a step is taken with, from the one that the step before has
        stored.
        """
        new = self.moment * self.beta + gradient * (1 - self.beta)
        self.weight.grad = gradient.clone()
        self.optimizer.step()
        state = self.optimizer.state[self.weight]
        if "avg_largest" in state:
            codes, scale = (
                state["momentum_buffer"],
                power_above(state["avg_largest"] / as_format(self.way.fmt).max),
            )
        else:  # the power of two that takes the bound to 2^6 .. 2^7
            codes, scale = (
                state["exp_avg"],
                power_above(state["avg_bound"] * (1 + 2.0**-23)) * 2.0**-7,
            )
        values = fm.decode(codes, self.way.fmt).view(*scale.shape[:1], -1) * scale.view(-1, 1)
        self.moment = values.view_as(new)
        return new


def update_of(optimizer: str, moment: Tensor, gradient: Tensor, second: Tensor) -> Tensor:
    """Direction of a step."""
    if optimizer == "AdamW":
        return moment / (second.sqrt() + 1e-12)
    beta = BETAS["Muon"][0]
    return orthogonal_factor(
        gradient * (1 - beta) + moment * beta, COEFFICIENTS, 5, 1e-7, torch.float32
    )


@dataclass(frozen=True)
class Error:
    """Relative errors, and the share of the moment that is lost along it."""

    moment: float
    update: float
    bias: float


LOOK_EVERY: Final = 10


def errors_of(
    optimizer: str, gradients: Sequence[Tensor], way: Way, rounding: str, seed: int
) -> list[Error]:
    """The errors in some steps of the second half."""
    shape = gradients[0].shape
    make = OfTheLibrary if way.scale == LIBRARY else Kept
    ours, beta = make(shape, optimizer, way, rounding, seed), BETAS[optimizer]
    exact, second, found = torch.zeros(shape), torch.zeros(shape), []
    for step, gradient in enumerate(gradients, 1):
        exact = exact * beta[0] + gradient * (1 - beta[0])
        second = second * beta[1] + gradient.square() * (1 - beta[1])
        moment = ours.advanced(gradient)
        if 2 * step <= len(gradients) or (len(gradients) - step) % LOOK_EVERY:
            continue
        error, size = moment - exact, exact.norm()
        wanted = update_of(optimizer, exact, gradient, second)
        missed = (update_of(optimizer, moment, gradient, second) - wanted).norm() / wanted.norm()
        found.append(
            Error(
                float(error.norm() / size),
                float(missed),
                float((error * exact).sum() / size.square()),
            )
        )
    return found


def together(errors: Sequence[Error]) -> Error:
    """The root mean squares and the mean bias over steps and layers."""
    mean = lambda values: math.fsum(values) / len(errors)  # noqa: E731
    return Error(
        math.sqrt(mean([e.moment**2 for e in errors])),
        math.sqrt(mean([e.update**2 for e in errors])),
        mean([e.bias for e in errors]),
    )


HEADER: Final = (
    "under",
    "first moment in",
    "bits",
    *(f"{what}, {rounding}" for what in ("moment", "update", "bias") for rounding in ROUNDINGS),
)


def rows_of(optimizer: str, layers: Sequence[Sequence[Tensor]], seed: int) -> list[list[Cell]]:
    """The table of one optimizer."""
    rows: list[list[Cell]] = []
    for way in (*WAYS, OWN[optimizer]):
        print(f"{optimizer}: {way.label}", file=sys.stderr, flush=True)
        found = [
            None
            if rounding != "independent" and way.scale == LIBRARY
            else together(
                [
                    e
                    for gradients in layers
                    for e in errors_of(optimizer, gradients, way, rounding, seed)
                ]
            )
            for rounding in ROUNDINGS
        ]
        figures = [
            None if e is None else getattr(e, what)
            for what in ("moment", "update", "bias")
            for e in found
        ]
        rows.append([optimizer, way.label, way.bits, *figures])
    return rows


def cell_text(cell: Cell) -> str:
    """A cell as it is printed."""
    return "" if cell is None else f"{cell:.3f}" if isinstance(cell, float) else str(cell)


def main() -> int:
    options, layers = read_options(__doc__, max_steps=200)
    torch.set_num_threads(1)
    rows: dict[str, list[list[Cell]]] = {}
    with text_for(options) as data_dir:
        for optimizer, rule in RULES.items():
            gradients = recorded(rule, layers, options.max_steps, options.seed, data_dir)
            rows[optimizer] = rows_of(optimizer, gradients, options.seed)
    if options.json:
        print(json.dumps(rows))
    else:
        print(
            f"torch {torch.__version__}, seed {options.seed}, {options.max_steps} steps, layers "
            f"{options.layers}"
        )
        for optimizer, lines in rows.items():
            print(f"\n{optimizer} ({RULES[optimizer]}):\n")
            texts = [tuple(cell_text(cell) for cell in line[1:]) for line in lines]
            print(
                text_table(
                    [HEADER[1:], *texts], ("---", *["---:"] * (len(HEADER) - 2)), markdown=True
                )
            )
    if options.record:
        record("", HEADER, [line for part in rows.values() for line in part])
    return 0


if __name__ == "__main__":
    sys.exit(main())
