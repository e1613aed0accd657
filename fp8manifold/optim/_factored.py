r"""Adafactor's statistics of one parameter in a step, whole or sharded.

`factors_of` advances the averages of a slot in place, and returns the `Factors` that the
rest of the step multiplies the gradient by. After that a step is one of SGD's::

    R <- b2 R + (1 - b2) mean of each row of G^2      C likewise, of each column
    row = 1 / sqrt(R / max(mean(R), eps1))            column = 1 / sqrt(C)
    u = g min(row column, 1 / eps1)                   clipped to a root mean square of d
    w - lr max(eps2, rms(w)) u                        `_eager_step.py`

Under ``fully_shard`` every process has some rows. A sum along a row is its own. Sums over
rows are taken by all processes, each in the order that one process has (`_Rows`), so that
no bit depends on their number. What a matrix needs of other processes are two numbers a
row, and of its squares one row in 32.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fp8manifold._base.blocks import block_on
from fp8manifold._interface import WeightStorage
from fp8manifold._numerics.codec import decode_with_specials
from fp8manifold._ranks import Share
from fp8manifold.optim._directions import Numbers, numbers_by_name
from fp8manifold.optim._factors import (
    RUN,
    Factors,
    Matrices,
    Preconditioner,
    averaged,
    cuts_matrices,
    inverse_root,
    matrices_of,
    mean_of,
    root_of_mean,
    sum_of_runs,
    sum_of_tiles,
    sums_of_each_run,
)
from fp8manifold.optim._slot import Slot


def factors_of(slot: Slot) -> Factors:
    """Advance the statistics of a parameter in place, and return its factors."""
    numbers = numbers_by_name(slot.number_row)
    rows = _rows_of(slot)
    size = root_of_mean(rows.total(_weight_sums(slot, rows)), rows.whole.numel)
    row, column = _advance(slot, rows, numbers)
    factors = Factors(
        row.reshape(-1),
        column,
        cap=1 / numbers["eps"],
        size=torch.where(size > numbers["least_size"], size, numbers["least_size"]),
        rows=rows.local.rows,
    )
    direction_sums = torch.zeros_like(row)
    gradient = _gradient(slot, rows)
    for matrices, some_rows in rows.pieces(slot.device):
        products = row[matrices, some_rows].unsqueeze(-1) * column[matrices].unsqueeze(1)
        directions = gradient[matrices, some_rows].to(slot.dtype)
        directions = directions * torch.minimum(products, factors.cap)
        direction_sums[matrices, some_rows] = sum_of_tiles(directions * directions)
    rms = root_of_mean(rows.total(direction_sums), rows.whole.numel)
    return factors.clipped(rms, numbers["most"])


def _gradient(slot: Slot, rows: "_Rows") -> Tensor:
    return slot.tensors["gradient"].view(rows.local)


def _advance(slot: Slot, rows: "_Rows", numbers: Numbers) -> tuple[Tensor, Tensor]:
    """Advance the averages, and return the factors of rows and of columns.

    Args:
        slot: whose averages they are.
        rows: of the parameter.
        numbers: of the step.
    """
    beta2, gain2 = numbers["beta2"], numbers["gain2"]
    gradient = _gradient(slot, rows)
    if slot.spec.preconditioner == Preconditioner.WHOLE:
        variance = slot.tensors["variance"].view(1, -1)
        variance.copy_(averaged(variance, gradient[0].to(slot.dtype).square(), beta2, gain2))
        return torch.ones_like(variance[:, :1]), inverse_root(variance)
    count, local_rows, columns = rows.local
    row_sums = torch.zeros((count, local_rows), dtype=slot.dtype, device=slot.device)
    runs = -(-max(local_rows - rows.first_run, 0) // RUN)
    run_sums = torch.zeros((count, runs, columns), dtype=slot.dtype, device=slot.device)
    for matrices, some_rows in rows.pieces(slot.device):
        squares = gradient[matrices, some_rows].to(slot.dtype).square()
        row_sums[matrices, some_rows] = sum_of_tiles(squares)
        if some_rows.start >= rows.first_run:
            sums = sums_of_each_run(squares.movedim(1, 0)).movedim(0, 1)
            first = (some_rows.start - rows.first_run) // RUN
            run_sums[matrices, first : first + sums.shape[1]] = sums
    row_means = slot.tensors["row_var"].view(count, -1)
    row_means.copy_(averaged(row_means, mean_of(row_sums, columns), beta2, gain2))
    column_means = slot.tensors["col_var"].view(-1, columns)
    if rows.cuts_matrices:
        column_sums = rows.column_sums(run_sums[0], gradient[0, :RUN].to(slot.dtype).square())
    else:
        column_sums = sum_of_runs(run_sums, 1)
    new_means = mean_of(column_sums, rows.whole.rows)
    column_means.copy_(averaged(column_means, new_means, beta2, gain2))
    mean = mean_of(sum_of_runs(rows.of_each_matrix(row_means), 1), rows.whole.rows)
    relative_means = row_means / mean.unsqueeze(1).clamp(min=numbers["eps"])
    return inverse_root(relative_means), inverse_root(column_means)


def _weight_sums(slot: Slot, rows: "_Rows") -> Tensor:
    """Return the sum of the squares of the weights in each row.

    They are the weights as they are stored, without a residual. NaN and Inf count as 0.
    """
    _, local_rows, columns = rows.local
    sums = torch.zeros(rows.local[:2], dtype=slot.dtype, device=slot.device)
    for matrices, some_rows in rows.pieces(slot.device):
        place = sums[matrices, some_rows]
        start = (matrices.start * local_rows + some_rows.start) * columns
        values = _values(slot, start, place.numel() * columns)
        values = values.nan_to_num(0.0, 0.0, 0.0).view(*place.shape, columns)
        place.copy_(sum_of_tiles(values * values))
    return sums


def _values(slot: Slot, start: int, count: int) -> Tensor:
    """Return so many weights from a position on, in value."""
    weights = slot.weight.reshape(-1)[start : start + count]
    if slot.storage != WeightStorage.CODES:
        return weights.to(slot.dtype)
    assert slot.fmt is not None
    values = decode_with_specials(weights, slot.fmt).to(slot.dtype)
    scale = slot.arrays["scale"]
    if not scale.dim():
        return values * scale
    # a scale of the view has as many neighbours
    neighbours = slot.view.numel // scale.numel()
    places = torch.arange(start, start + count, device=slot.device) // neighbours
    return values * scale.reshape(-1)[places]


@dataclass(frozen=True)
class _Rows:
    """The rows of a parameter that this process has, and sums over those of all."""

    whole: Matrices
    local: Matrices
    #: None for a whole parameter, or one that every process steps whole
    share: Share | None = None
    #: whether the rows of one matrix are spread over processes
    cuts_matrices: bool = False

    def total(self, sums: Tensor) -> Tensor:
        """Return the sum over the rows of all matrices, of one number for each."""
        return sum_of_runs(self._gathered(sums.reshape(-1)), 0)

    def of_each_matrix(self, numbers: Tensor) -> Tensor:
        """Return numbers of rows, (matrices, rows), with those of whole matrices."""
        if not self.cuts_matrices:
            return numbers
        return self._gathered(numbers.reshape(-1)).unsqueeze(0)

    def _gathered(self, numbers: Tensor) -> Tensor:
        """Return one number for each row, of all processes."""
        share = self.share
        if share is None:
            return numbers
        in_rows = self.whole.matrices * self.whole.rows // share.shape[0]
        return share.gather_rows(numbers.reshape(-1, in_rows)).reshape(-1)

    @property
    def first_run(self) -> int:
        """The first local row at which a run of rows of the whole begins."""
        if self.share is None or not self.cuts_matrices:
            return 0
        begin, _ = _bounds(self.share, self.share.ranks.rank)
        return min(_ceiling(begin) - begin, self.local.rows)

    def pieces(self, device: torch.device) -> Iterator[tuple[slice, slice]]:
        """Yield matrices and rows of them, in pieces that are whole matrices or whole runs."""
        count, rows, columns = self.local
        most = block_on(device)
        if not self.local.numel:
            return
        if rows * columns <= most and not self.first_run:
            together = most // (rows * columns)
            for start in range(0, count, together):
                yield slice(start, min(start + together, count)), slice(0, rows)
            return
        together = max(most // columns // RUN, 1) * RUN
        for matrix in range(count):
            if self.first_run:
                yield slice(matrix, matrix + 1), slice(0, self.first_run)
            for start in range(self.first_run, rows, together):
                yield slice(matrix, matrix + 1), slice(start, min(start + together, rows))

    def column_sums(self, sums: Tensor, heads: Tensor) -> Tensor:
        """Return the sums over the rows of a matrix that processes share: (1, columns).

        A process adds up the runs that begin in its rows. Rows of the last of them may
        be in the next processes, whose first rows are gathered and added.

        Args:
            sums: of each run that begins here, over the rows of this process.
            heads: the squares of its first rows, up to the length of a run.
        """
        share = self.share
        assert share is not None
        _, end = _bounds(share, share.ranks.rank)
        if share.rows % RUN:
            count = min(RUN - 1, share.rows)
            gathered = share.ranks.gather(_padded(heads[:count], count))
            stop = min(_ceiling(end), share.shape[0]) if len(sums) else end
            for row in range(end, stop):
                sums[-1] += gathered[row // share.rows * count + row % share.rows]
        runs = []
        for rank in range(share.ranks.size):
            first, last = map(_ceiling, _bounds(share, rank))
            runs.append((last - first) // RUN)
        parts = share.ranks.gather(_padded(sums, max(runs))).split(max(runs))
        whole = torch.cat([part[:count] for part, count in zip(parts, runs, strict=True)])
        return sum_of_runs(whole, 0).unsqueeze(0)


def _rows_of(slot: Slot) -> _Rows:
    """Return the rows of a parameter that are in its slot."""
    shape = slot.parameter.shape
    whole = matrices_of(shape, slot.group["matrix_shape"])
    if slot.share is None or slot.steps_all_rows:
        return _Rows(whole, whole)
    local_rows = slot.share.local.shape[0]
    if cuts_matrices(shape, slot.group["matrix_shape"]):
        return _Rows(whole, whole._replace(rows=local_rows), slot.share, cuts_matrices=True)
    local_count = whole.matrices // shape[0] * local_rows
    return _Rows(whole, whole._replace(matrices=local_count), slot.share)


def _bounds(share: Share, rank: int) -> tuple[int, int]:
    """Return the positions of the first row of a process, and of that after its last."""
    rows = share.shape[0]
    return min(rank * share.rows, rows), min((rank + 1) * share.rows, rows)


def _ceiling(row: int) -> int:
    """Return the first row from here on at which a run begins."""
    return -(-row // RUN) * RUN


def _padded(rows: Tensor, count: int) -> Tensor:
    return F.pad(rows, (0, 0, 0, count - len(rows)))
