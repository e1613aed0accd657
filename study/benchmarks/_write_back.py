"""Recorded updates written back again: in a format, with scales of some kind, with
independent or dithered draws.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from torch import Tensor

import fp8manifold as fm
from fp8manifold._numerics.codec import decode_signed, decode_with_ulp, encode_signed, split_codes
from fp8manifold.formats import as_format
from fp8manifold.random_bits import Draws
from fp8manifold.scaling import BLOCK_SIZE, amax_of, amax_scale, storage_scale, widened_scale

__all__ = ["Error", "Way", "error_of", "replayed"]

ROW: Final = 128
"""Weights in a row, for the bytes that scales take."""


@dataclass(frozen=True)
class Way:
    """One way to write back: a format, its scales, and the bits of a residual."""

    fmt: str
    granularity: Literal["channel", "block"] = "channel"
    room: float = 1.0
    #: scales are reviewed in every n-th step; 0: fitted again in every step
    every: int = 1
    #: scales are powers of two (in blocks a byte each), or floats
    pow2: bool = True
    residual_bits: int = 0
    #: by an optimizer of the library, which doubles a scale in the step that leaves a
    #: weight at its end
    stepped: bool = False

    @property
    def label(self) -> str:
        """Name in the table."""
        words = [self.fmt, "rows" if self.granularity == "channel" else f"blocks of {BLOCK_SIZE}"]
        words += [] if self.pow2 else ["float scale"]
        words += ["fitted in every step"] if not self.every else [f"room {self.room:g}", self.looks]
        return ", ".join(
            [*words, *([f"residual of {self.residual_bits} bits"] if self.residual_bits else [])]
        )

    @property
    def looks(self) -> str:
        """Steps between two reviews of the scales."""
        if self.stepped:
            return "the library's step"
        return "widened at once" if self.every == 1 else f"every {self.every} steps"

    @property
    def scale_bytes(self) -> float:
        """Bytes per weight for scales: float32, or for powers of two in blocks one
        byte.
        """
        return 4 / ROW if self.granularity == "channel" else (1 if self.pow2 else 4) / BLOCK_SIZE


def spread(scale: Tensor, way: Way) -> Tensor:
    """Scales as they broadcast against the weights."""
    return scale.repeat_interleave(BLOCK_SIZE, -1) if way.granularity == "block" else scale


def fresh_scale(w: Tensor, way: Way) -> Tensor:
    """The scale of weights that have none yet."""
    if way.pow2:
        return storage_scale(w, way.fmt, way.granularity, headroom=way.room)
    blocks = w.unflatten(
        -1, (-1, BLOCK_SIZE)
    )  # a channel each: scales of blocks are powers of two in the library
    return amax_scale(blocks.flatten(0, -2), way.fmt, "channel").view(blocks.shape[:-1])


def next_scale(target: Tensor, scale: Tensor, way: Way, step: int) -> Tensor:
    """The scale that a step writes under: widened where a target is beyond its end, or
    fitted again.
    """
    if not way.every:
        return fresh_scale(target, way)
    if step % way.every:
        return scale
    return widened_scale(amax_of(target, way.granularity), scale, way.fmt, way.room).maximum(scale)


def rounded(
    x: Tensor, way: Way, step: int, stream: int, seed: int, draws: Draws
) -> tuple[Tensor, Tensor]:
    """Stored weights in units of their scale, and the values of their codes: the same
    without a residual.
    """
    if not way.residual_bits:
        code = fm.round_to_grid(
            x, way.fmt, "stochastic", seed=seed, step=step, stream=stream, draws=draws
        )
        return code, code
    words = fm.random_bits(x.shape, seed=seed, step=step, stream=stream, draws=draws)
    fmt, bits = as_format(way.fmt), way.residual_bits
    signed = encode_signed(
        x, fmt, words, bits
    )  # code and residual in one, as the optimizers store them
    codes, _ = split_codes(signed, fmt, bits, 0 * signed)
    return decode_signed(signed, fmt, bits)[0], decode_with_ulp(codes, fmt)[0]


def replayed(
    start: Tensor, updates: Iterable[Tensor], way: Way, draws: Draws, **key: int
) -> tuple[Tensor, Tensor]:
    """The weights that updates lead to, written back in a way, and without rounding:
    both from the same start.

    ``key`` has ``seed``, ``stream`` and ``first``, the number of the first of the
    updates.
    """
    if way.stepped:
        return stepped(start, updates, way, draws, key["seed"])
    seed, stream, first = key["seed"], key["stream"], key["first"]
    scale = fresh_scale(start, way)
    # another seed, independent of the steps' draws
    kept, code = rounded(start / spread(scale, way), way, 0, stream, seed + 1, "independent")
    kept, code = kept * spread(scale, way), code * spread(scale, way)
    exact = kept.double()
    for step, update in enumerate(updates, first):
        exact += update
        target = kept + update
        scale = next_scale(target, scale, way, step)
        factor = spread(scale, way)
        kept, code = (
            part * factor for part in rounded(target / factor, way, step, stream, seed, draws)
        )
    return code, exact


def stepped(
    start: Tensor, updates: Iterable[Tensor], way: Way, draws: Draws, seed: int
) -> tuple[Tensor, Tensor]:
    """:func:`replayed` by steps of an optimizer whose gradients are the updates."""
    p = fm.FP8Parameter(start, way.fmt, granularity=way.granularity, headroom=way.room, seed=seed)
    plain = {
        "lr": 1.0,
        "momentum": 0.0,
        "weight_decay": 0.0,
        "stiffness": 0.0,
        "writeback": "stochastic",
    }
    optimizer = fm.optim.StiffnessSGD([p], **plain, draws=draws, seed=seed)
    exact = p.dequantize().double()
    for update in updates:
        exact += update
        p.grad = -update
        optimizer.step()
    return p.dequantize(), exact


class Error(NamedTuple):
    """The error of a write-back over the weights of a layer."""

    noise: float
    """The root mean square of the error over that of the weights."""
    bias: float
    """The error along the movement, as a share of it: 0 up to chance if rounding is
    right on average.
    """


def error_of(start: Tensor, updates: Iterable[Tensor], way: Way, draws: Draws, **key: int) -> Error:
    """The error of a replay."""
    code, exact = replayed(start, updates, way, draws, **key)
    error, moved = code - exact, exact - start
    noise = error.square().mean().sqrt() / exact.square().mean().sqrt()
    return Error(float(noise), float((error * moved).sum() / moved.square().sum()))
