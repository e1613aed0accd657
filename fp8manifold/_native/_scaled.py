"""Rounding on a scaled grid, in native code or on a GPU where there is code, otherwise by blocks."""

from collections.abc import Callable

import torch
from torch import Tensor

from fp8manifold._base.blocks import BLOCK, runs_in_blocks
from fp8manifold._base.float_bits import check_holds, working_dtype
from fp8manifold._native._arrays import rounded
from fp8manifold._numerics.rounding import round_block
from fp8manifold.formats import FloatFormat
from fp8manifold.random_bits import Stream, draw_range
from fp8manifold.scaling import BLOCK_SIZE

Draws = Callable[[int, int], Tensor | None]


def rounded_at(
    x: Tensor, scale: Tensor, fmt: FloatFormat, rounding: str = "nearest", key: Stream | None = None, *, blocks: bool
) -> Tensor:
    """``s round(x / s)`` in ``x``'s dtype, detached, saturating; with ``blocks`` a scale is for 32 values of a row."""
    return _walk(x, scale, fmt, rounding, key, blocks, rescale=True).to(x.dtype)


def rounded_units(x: Tensor, scale: Tensor, fmt: FloatFormat) -> Tensor:
    """``round(x / s)``, nearest, in units of the scale: values of the format, in the dtype they were computed in."""
    return _walk(x, scale, fmt, "nearest", None, blocks=False, rescale=False)


def _walk(
    x: Tensor, scale: Tensor, fmt: FloatFormat, rounding: str, key: Stream | None, blocks: bool, rescale: bool
) -> Tensor:
    work = working_dtype(x)
    check_holds(work, fmt)
    x, scale = x.detach(), scale.to(work)
    shape = x.shape
    if blocks:
        x, scale = x.reshape(-1, BLOCK_SIZE), scale.reshape(-1, 1)
    rows = _rows_of(x, scale)
    if rows is not None and rounding in ("nearest", "stochastic"):
        native = rounded(x, fmt, key if rounding == "stochastic" else None, scale=scale, rescale=rescale)
        if native is not None:
            return native.view(shape)
    draws = _draws(x, rounding, key)
    if rows is None or not runs_in_blocks(x.device, x.numel()):
        units = x.to(work) / scale
        values = round_block(units.reshape(-1), fmt, rounding, "saturate", draws(0, x.numel())).view(x.shape)
        return (values * scale if rescale else values).view(shape)
    out = torch.empty(x.numel(), dtype=work, device=x.device)
    _by_pieces(x.reshape(rows, -1), scale.reshape(-1, 1), out.view(rows, -1), fmt, rounding, draws, rescale)
    return out.view(shape)


def _by_pieces(
    x: Tensor, scale: Tensor, out: Tensor, fmt: FloatFormat, rounding: str, draws: Draws, rescale: bool
) -> None:
    """Round a matrix with one scale a row, or one in all, in pieces that stay in a core's cache."""
    single = scale.shape[0] == 1
    if single:
        x, out = x.reshape(-1, 1), out.view(-1, 1)
    length = max(BLOCK // x.shape[1], 1)
    for start in range(0, len(x), length):
        part, target = x[start : start + length], out[start : start + length]
        unit = scale if single else scale[start : start + length]
        units = part.to(out.dtype) / unit
        bits = draws(start * x.shape[1], part.numel())
        flat = round_block(units.reshape(-1), fmt, rounding, "saturate", bits, target.view(-1))
        if rescale:
            flat.view(part.shape).mul_(unit)


def _rows_of(x: Tensor, scale: Tensor) -> int | None:
    """Number of rows with a scale of their own, 1 for one scale in all; None for any other way to broadcast."""
    if scale.numel() == 1:
        return 1
    leading = 0
    while leading < scale.dim() and scale.dim() == x.dim() and scale.shape[leading] == x.shape[leading]:
        leading += 1
    rest = scale.shape[leading:]
    return scale.numel() if leading and rest.numel() == 1 and scale.dim() == x.dim() else None


def _draws(x: Tensor, rounding: str, key: Stream | None) -> Draws:
    if rounding != "stochastic":
        return lambda start, size: None
    assert key is not None
    return lambda start, size: draw_range(start, size, key, x.device)
