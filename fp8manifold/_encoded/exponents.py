"""Count the codes of each exponent field, run by run.

All codes of a field have one spacing, but that the subnormals of field 0 have that of
field 1.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fp8manifold._base.blocks import block_on
from fp8manifold._native._arrays import exponents_by_kernel
from fp8manifold.formats import FloatFormat


class ExponentCounts(NamedTuple):
    """Counts of codes by run and exponent field.

    Attributes:
        ulps: the spacing of each field, (fields,) float32.
        counts: how many codes of a run have it, (runs, fields) int64.
    """

    ulps: Tensor
    counts: Tensor


def exponent_counts(codes: Tensor, fmt: FloatFormat, runs: int) -> ExponentCounts:
    """Return the counts of ``runs`` equal runs of codes."""
    lowest = fmt.emin - fmt.mantissa_bits
    fields = range(1 << fmt.exponent_bits)
    spacings = [2.0 ** (lowest + max(field - 1, 0)) for field in fields]
    ulps = torch.tensor(spacings, dtype=torch.float32, device=codes.device)
    counts = exponents_by_kernel(codes, fmt, runs)
    if counts is None:
        counts = counts_in_pieces(codes, fmt, runs)
    return ExponentCounts(ulps, counts)


def counts_in_pieces(codes: Tensor, fmt: FloatFormat, runs: int) -> Tensor:
    """Return the counts, by operations on a piece of the codes at a time."""
    fields = 1 << fmt.exponent_bits
    by_run = codes.reshape(runs, -1)
    counts = torch.zeros(runs, fields, dtype=torch.int64, device=codes.device)
    columns = min(by_run.shape[1], block_on(codes.device))
    rows = block_on(codes.device) // columns
    for some_runs, some_counts in zip(by_run.split(rows), counts.split(rows), strict=True):
        offsets = torch.arange(len(some_runs), device=codes.device).unsqueeze(1) * fields
        for piece in some_runs.split(columns, 1):
            field = (piece >> fmt.mantissa_bits) & (fields - 1)
            places = (field + offsets).flatten()
            some_counts += torch.bincount(places, minlength=some_counts.numel()).view_as(
                some_counts
            )
    return counts
