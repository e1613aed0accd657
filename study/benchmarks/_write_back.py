"""Recorded updates written back again, in several ways.

    w_t = round(w_{t-1} + d_t) under the scale of the step

A way is a format, the kind of its scales, and the bits of a residual. Draws are
independent or dithered.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

from torch import Tensor

import fp8manifold as fm
from fp8manifold._numerics.codec import decode_signed, decode_with_ulp, encode_signed, split_codes
from fp8manifold.formats import as_format
from fp8manifold.random_bits import Draws
from fp8manifold.scaling import BLOCK_SIZE, amax_of, amax_scale, storage_scale, widened_scale

__all__ = ["DRAWS", "WriteBack", "WriteBackError", "error_of", "replayed"]

#: kinds of draws that a write-back rounds by
DRAWS: Final[tuple[Draws, ...]] = ("independent", "dither")
#: weights in a row, for the bytes that scales take
ROW_LENGTH: Final = 128


@dataclass(frozen=True)
class WriteBack:
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
        if not self.pow2:
            words.append("float scale")
        if self.every:
            words += [f"room {self.room:g}", self._review]
        else:
            words.append("fitted in every step")
        if self.residual_bits:
            words.append(f"residual of {self.residual_bits} bits")
        return ", ".join(words)

    @property
    def _review(self) -> str:
        """When scales are reviewed, in words."""
        if self.stepped:
            return "the library's step"
        return "widened at once" if self.every == 1 else f"every {self.every} steps"

    @property
    def scale_bytes(self) -> float:
        """Bytes per weight for scales.

        Scales are float32, but powers of two in blocks take one byte.
        """
        if self.granularity == "channel":
            return 4 / ROW_LENGTH
        return (1 if self.pow2 else 4) / BLOCK_SIZE


def expanded(scale: Tensor, way: WriteBack) -> Tensor:
    """Return scales as they broadcast against the weights."""
    return scale.repeat_interleave(BLOCK_SIZE, -1) if way.granularity == "block" else scale


def fresh_scale(weights: Tensor, way: WriteBack) -> Tensor:
    """Return the scale of weights that have none yet."""
    if way.pow2:
        return storage_scale(weights, way.fmt, way.granularity, headroom=way.room)
    # The library's scales of blocks are powers of two, so a block is a channel here.
    blocks = weights.unflatten(-1, (-1, BLOCK_SIZE))
    return amax_scale(blocks.flatten(0, -2), way.fmt, "channel").view(blocks.shape[:-1])


def next_scale(target: Tensor, scale: Tensor, way: WriteBack, step: int) -> Tensor:
    """Return the scale that a step writes under.

    It is widened where a target is beyond its end, or fitted again.
    """
    if not way.every:
        return fresh_scale(target, way)
    if step % way.every:
        return scale
    return widened_scale(amax_of(target, way.granularity), scale, way.fmt, way.room).maximum(scale)


class Stored(NamedTuple):
    """Weights as they are stored; without a residual the two are the same."""

    #: with the residual
    values: Tensor
    #: of the codes alone
    code_values: Tensor

    def scaled(self, factor: Tensor) -> "Stored":
        """Return the weights times a factor."""
        return Stored(self.values * factor, self.code_values * factor)


def rounded_weights(
    x: Tensor, way: WriteBack, step: int, stream: int, seed: int, draws: Draws
) -> Stored:
    """Return weights as they are stored, in units of their scale."""
    key: dict[str, Any] = {"seed": seed, "step": step, "stream": stream, "draws": draws}
    if not way.residual_bits:
        values = fm.round_to_grid(x, way.fmt, "stochastic", **key)
        return Stored(values, values)
    fmt, bits = as_format(way.fmt), way.residual_bits
    # The optimizers store code and residual in one.
    signed = encode_signed(x, fmt, fm.random_bits(x.shape, **key), bits)
    codes, _ = split_codes(signed, fmt, bits, 0 * signed)
    values, _ = decode_signed(signed, fmt, bits)
    code_values, _ = decode_with_ulp(codes, fmt)
    return Stored(values, code_values)


class Replay(NamedTuple):
    """The weights that updates lead to, from the same start."""

    #: written back in every step
    code_values: Tensor
    #: without rounding
    exact: Tensor


def replayed(
    start: Tensor, updates: Iterable[Tensor], way: WriteBack, draws: Draws, **key: int
) -> Replay:
    """Write updates back in a way, and add them up without rounding.

    ``key`` has ``seed``, ``stream`` and ``first``, the number of the first update.
    """
    if way.stepped:
        return replayed_by_optimizer(start, updates, way, draws, key["seed"])
    seed, stream, first = key["seed"], key["stream"], key["first"]
    scale = fresh_scale(start, way)
    factor = expanded(scale, way)
    # Another seed is independent of the steps' draws.
    stored = rounded_weights(start / factor, way, 0, stream, seed + 1, "independent").scaled(factor)
    exact = stored.values.double()
    for step, update in enumerate(updates, first):
        exact += update
        target = stored.values + update
        scale = next_scale(target, scale, way, step)
        factor = expanded(scale, way)
        stored = rounded_weights(target / factor, way, step, stream, seed, draws).scaled(factor)
    return Replay(stored.code_values, exact)


def replayed_by_optimizer(
    start: Tensor, updates: Iterable[Tensor], way: WriteBack, draws: Draws, seed: int
) -> Replay:
    """Write updates back by steps of an optimizer whose gradients they are."""
    weight = fm.FP8Parameter(
        start, way.fmt, granularity=way.granularity, headroom=way.room, seed=seed
    )
    optimizer = fm.optim.StiffnessSGD(
        [weight],
        lr=1.0,
        momentum=0.0,
        weight_decay=0.0,
        stiffness=0.0,
        writeback="stochastic",
        draws=draws,
        seed=seed,
    )
    exact = weight.dequantize().double()
    for update in updates:
        exact += update
        weight.grad = -update
        optimizer.step()
    return Replay(weight.dequantize(), exact)


class WriteBackError(NamedTuple):
    """The error of a write-back over the weights of a layer."""

    #: the root mean square of the error over that of the weights
    noise: float
    #: the error along the movement, as a share of it: 0 up to chance if rounding is
    #: right on average
    bias: float


def error_of(
    start: Tensor, updates: Iterable[Tensor], way: WriteBack, draws: Draws, **key: int
) -> WriteBackError:
    """Return the error of a replay."""
    code_values, exact = replayed(start, updates, way, draws, **key)
    error = code_values - exact
    moved = exact - start
    noise = error.square().mean().sqrt() / exact.square().mean().sqrt()
    return WriteBackError(float(noise), float((error * moved).sum() / moved.square().sum()))
