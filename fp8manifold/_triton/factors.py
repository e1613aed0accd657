"""Adafactor's statistics as kernels, and the factors of a gradient that follow.

They are those of ``optim/_factors.py``, to the bit, and are computed before the step::

    square_kernel      squares of gradients and weights    sums of tiles of rows, and of
                                                           runs of rows for each column
    column_kernel      sums of columns   -> column_means in the state, factors of columns
    row_kernel         sums of rows      -> row_means in the state
    mean_kernel        means of a matrix's row means, the size of the weights
    direction_kernel   factors of rows; squares of directions, sums of tiles
    row_kernel         sums of rows
    clip_kernel        their root mean square -> shrink

A launch takes all parameters of a kind, and no more launches are needed for more of them.
The write kernel of `step` multiplies gradients by the factors.

A sum has one order, whatever program takes it. A tile of a row is added up by halves
(`_sum_by_halves`). Everything else is in runs of 32, and runs of runs: rows one by one as
they are read, and sums in memory by `_sum_in_runs`.

``record`` is a `JOB` as in `stages`. ``factors`` is the `GPU_FACTORS` that it points to,
in memory that the programs of a step share. ``SPEC`` is a ``Statistics`` of ``kinds.py``.
Arguments in capitals are constants that a kernel is compiled for.
"""

import triton
import triton.language as tl

from fp8manifold._interface import GPU_FACTORS, POSITIONS
from fp8manifold._triton import format as floats
from fp8manifold._triton import stages
from fp8manifold._triton.stages import (
    COLUMN_FACTORS,
    FACTORS_OF_JOB,
    GRADIENT,
    MATRIX_COLUMNS,
    MATRIX_ROWS,
    RECORD_WORDS,
    ROW_FACTORS,
    SCALE,
    WEIGHT,
    load_float,
    load_number,
    load_size,
    pointer,
)

# Of a record of factors: pointers by their index, and offsets in words.
ROW_MEANS: tl.constexpr = tl.constexpr(GPU_FACTORS.column("row_means"))
COLUMN_MEANS: tl.constexpr = tl.constexpr(GPU_FACTORS.column("column_means"))
SUMS: tl.constexpr = tl.constexpr(GPU_FACTORS.column("sums"))
WEIGHT_SUMS: tl.constexpr = tl.constexpr(GPU_FACTORS.column("weight_sums"))
COLUMN_SUMS: tl.constexpr = tl.constexpr(GPU_FACTORS.column("column_sums"))
MEANS: tl.constexpr = tl.constexpr(GPU_FACTORS.column("means"))
MATRICES: tl.constexpr = tl.constexpr(GPU_FACTORS.word("matrices"))
NEIGHBOURS: tl.constexpr = tl.constexpr(GPU_FACTORS.word("neighbours"))

# Numbers of a step, by their index.
LEAST_SIZE: tl.constexpr = tl.constexpr(POSITIONS["least_size"])
MOST: tl.constexpr = tl.constexpr(POSITIONS["most"])

#: The largest float32.
LARGEST: tl.constexpr = tl.constexpr(3.4028234663852886e38)
#: Rows that are read at a time; what has to be added up in order is, after that.
AT_ONCE: tl.constexpr = tl.constexpr(4)


# --------------------------------------------------------------------------------------
# Sums in a fixed order, and means


@triton.jit
def _halved(x):
    """Return the upper half of a vector added to its lower half."""
    HALF: tl.constexpr = x.shape[0] // 2
    return tl.sum(tl.reshape(x, (2, HALF)), axis=0)


@triton.jit
def _sum_by_halves(x, LENGTH: tl.constexpr):
    """Return the sum of a vector by halves, as a vector of one number."""
    # No loop: the vector gets another type each time.
    if LENGTH > 256:
        x = _halved(x)
    if LENGTH > 128:
        x = _halved(x)
    if LENGTH > 64:
        x = _halved(x)
    if LENGTH > 32:
        x = _halved(x)
    if LENGTH > 16:
        x = _halved(x)
    if LENGTH > 8:
        x = _halved(x)
    if LENGTH > 4:
        x = _halved(x)
    if LENGTH > 2:
        x = _halved(x)
    if LENGTH > 1:
        x = _halved(x)
    return x


@triton.jit
def _sum_in_runs(numbers, count, stride, lane, mask, RUN: tl.constexpr, J: tl.constexpr):
    """Add up numbers of each lane in runs, and runs of runs; the first becomes the sum.

    A lane's numbers are in memory, ``stride`` apart, and are not negative. ``lane`` is the
    place of its first one, (1, lanes). J runs are added up at a time.
    """
    while count > 1:
        runs = (count + (RUN - 1)) // RUN
        for first in range(0, runs, J):
            run = first + tl.arange(0, J).to(tl.int64)[:, None]
            # 0 plus a number that is not negative is that number.
            total = tl.zeros((J, lane.shape[1]), tl.float32)
            for i in tl.static_range(RUN):
                place = run * RUN + i
                number = tl.load(
                    numbers + lane + place * stride, mask=mask & (place < count), other=0.0
                )
                total = total + number
            # All threads have read what is written over.
            tl.debug_barrier()
            tl.store(numbers + lane + run * stride, total, mask=mask & (run < runs))
        # And all has been written that is read next.
        tl.debug_barrier()
        count = runs


@triton.jit
def _mean_of(total, count):
    """Return a mean, of a sum that ends at the largest float32."""
    return tl.math.div_rn(tl.where(total < LARGEST, total, LARGEST), count.to(tl.float32))


@triton.jit
def _inverse_root(x):
    # The dividend is 1, in the shape of x, which is not negative.
    return tl.math.div_rn(tl.where(x < 0.0, 0.0, 1.0), tl.math.sqrt_rn(x))


# --------------------------------------------------------------------------------------
# Places


@triton.jit
def _record_of(table, chunk):
    """Return the record of a program's parameter, and that of its factors."""
    record = table + tl.load(chunk).to(tl.int64) * RECORD_WORDS
    return record, pointer(record, FACTORS_OF_JOB, tl.int32, False)


@triton.jit
def _tiles_in_row(factors, SPEC: tl.constexpr):
    return (load_size(factors, MATRIX_COLUMNS) + (SPEC.tile - 1)) // SPEC.tile


@triton.jit
def _place_of(factors, start, SPEC: tl.constexpr):
    """Return which run of rows and which tile of columns a program takes.

    Return the run, its matrix, its first row, the row after its last one, and the tile.
    """
    tiles = _tiles_in_row(factors, SPEC)
    rows = load_size(factors, MATRIX_ROWS)
    runs = (rows + (SPEC.run - 1)) // SPEC.run
    run = start.to(tl.int64) // tiles
    matrix = run // runs
    row = matrix * rows + run % runs * SPEC.run
    stop = tl.minimum(row + SPEC.run, (matrix + 1) * rows)
    return run, matrix, row, stop, start.to(tl.int64) % tiles


@triton.jit
def _columns_of(factors, SPEC: tl.constexpr):
    # Not by load_size: see `step.py`.
    columns = tl.load((factors + MATRIX_COLUMNS).to(tl.pointer_type(tl.int64)))
    if SPEC.aligned:
        columns = tl.multiple_of(columns, 16)
    return columns


@triton.jit
def _load_gradient(record, row, column, columns, mask, SPEC: tl.constexpr):
    return load_float(record, GRADIENT, SPEC.gradient, row * columns + column, mask, SPEC.aligned)


@triton.jit
def _load_values(record, factors, row, column, columns, mask, SPEC: tl.constexpr):
    """Return weights as they are stored, in value; NaN and Inf count as 0."""
    offsets = row * columns + column
    if SPEC.coded:
        # Not in pieces of 16 bytes: their halves would be added up across threads.
        code = stages.load(record, WEIGHT, tl.uint8, offsets, mask, False).to(tl.int32)
        place = offsets
        if SPEC.scales == "one":
            place = 0
        elif SPEC.scales == "row":
            place = row * columns // load_size(factors, NEIGHBOURS)
        elif SPEC.scales == "run":
            place = row * (columns // SPEC.neighbours) + column // SPEC.neighbours
        is_read = mask
        if SPEC.scales == "one" or SPEC.scales == "row":
            is_read = True
        scale = stages.load_scales(record, SCALE, place, is_read, SPEC)
        value = floats.any_value(code, SPEC.format) * scale
    else:
        value = load_float(record, WEIGHT, SPEC.weight, offsets, mask, SPEC.aligned)
    return tl.where(tl.abs(value) <= LARGEST, value, 0.0)


# --------------------------------------------------------------------------------------
# Passes over the elements


@triton.jit
def square_kernel(table, chunks, report, SPEC: tl.constexpr):
    """Add up the squares of some rows and columns of a gradient, and of the weights."""
    if tl.load(report) == 0:
        chunk = chunks + 2 * tl.program_id(0)
        record, factors = _record_of(table, chunk)
        run, _, first, stop, tile = _place_of(factors, tl.load(chunk + 1), SPEC)
        columns = _columns_of(factors, SPEC)
        tiles = _tiles_in_row(factors, SPEC)
        column = tile * SPEC.tile + tl.arange(0, SPEC.tile)
        in_row = column < columns
        one = tl.arange(0, 1)
        sums = pointer(factors, SUMS, tl.float32, False)
        weight_sums = pointer(factors, WEIGHT_SUMS, tl.float32, False)
        column_sum = tl.zeros((SPEC.tile,), tl.float32)
        for some in range(((stop - first + (AT_ONCE - 1)) // AT_ONCE).to(tl.int32)):
            for i in tl.static_range(AT_ONCE):
                row = first + some * AT_ONCE + i
                mask = in_row & (row < stop)
                gradient = _load_gradient(record, row, column, columns, mask, SPEC)
                square = gradient * gradient
                # in the order of the rows
                column_sum = column_sum + square
                place = row * tiles + tile + one
                total = _sum_by_halves(square, SPEC.tile)
                tl.store(sums + place, total, mask=row < stop)
                value = _load_values(record, factors, row, column, columns, mask, SPEC)
                total = _sum_by_halves(value * value, SPEC.tile)
                tl.store(weight_sums + place, total, mask=row < stop)
        place = pointer(factors, COLUMN_SUMS, tl.float32, SPEC.aligned) + run * columns + column
        tl.store(place, column_sum, mask=in_row)


@triton.jit
def _row_factor(factors, row, matrix, EPS):
    """Return the factor of a row; that of a vector is 1."""
    address = tl.load(factors.to(tl.pointer_type(tl.int64)) + ROW_MEANS)
    has_means = address != 0
    row_means = pointer(factors, ROW_MEANS, tl.float32, False)
    row_mean = tl.load(row_means + row, mask=has_means, other=1.0)
    mean = tl.load(pointer(factors, MEANS, tl.float32, False) + matrix, mask=has_means, other=1.0)
    factor = _inverse_root(tl.math.div_rn(row_mean, tl.where(mean > EPS, mean, EPS)))
    return tl.where(has_means, factor, 1.0)


@triton.jit
def direction_kernel(table, chunks, report, SPEC: tl.constexpr):
    """Store factors of rows, and add up the squares of gradients times their factors."""
    if tl.load(report) == 0:
        chunk = chunks + 2 * tl.program_id(0)
        record, factors = _record_of(table, chunk)
        _, matrix, first, stop, tile = _place_of(factors, tl.load(chunk + 1), SPEC)
        columns = _columns_of(factors, SPEC)
        tiles = _tiles_in_row(factors, SPEC)
        column = tile * SPEC.tile + tl.arange(0, SPEC.tile)
        in_row = column < columns
        one = tl.arange(0, 1)
        eps = load_number(record, stages.EPS)
        cap = tl.math.div_rn(eps * 0.0 + 1.0, eps)
        sums = pointer(factors, SUMS, tl.float32, False)
        row_factors = pointer(factors, ROW_FACTORS, tl.float32, False)
        column_factors = pointer(factors, COLUMN_FACTORS, tl.float32, SPEC.aligned)
        column_factor = tl.load(column_factors + matrix * columns + column, mask=in_row, other=0.0)
        for some in range(((stop - first + (AT_ONCE - 1)) // AT_ONCE).to(tl.int32)):
            for i in tl.static_range(AT_ONCE):
                row = first + some * AT_ONCE + i
                exists = row < stop
                mask = in_row & exists
                row_factor = _row_factor(factors, tl.minimum(row, stop - 1), matrix, eps)
                tl.store(row_factors + row, row_factor, mask=exists & (tile == 0))
                factor = row_factor * column_factor
                gradient = _load_gradient(record, row, column, columns, mask, SPEC)
                direction = gradient * tl.where(factor < cap, factor, cap)
                total = _sum_by_halves(direction * direction, SPEC.tile)
                tl.store(sums + row * tiles + tile + one, total, mask=exists)


# --------------------------------------------------------------------------------------
# Between the passes


@triton.jit
def column_kernel(table, chunks, report, RUN: tl.constexpr, J: tl.constexpr, LANES: tl.constexpr):
    """Advance the averages of some columns of a matrix, and store their factors."""
    if tl.load(report) == 0:
        chunk = chunks + 2 * tl.program_id(0)
        record, factors = _record_of(table, chunk)
        columns = load_size(factors, MATRIX_COLUMNS)
        rows = load_size(factors, MATRIX_ROWS)
        parts = (columns + (LANES - 1)) // LANES
        start = tl.load(chunk + 1).to(tl.int64)
        matrix = start // parts
        column = start % parts * LANES + tl.arange(0, LANES)[None, :]
        mask = column < columns
        runs = (rows + (RUN - 1)) // RUN
        sums = pointer(factors, COLUMN_SUMS, tl.float32, False) + matrix * runs * columns
        _sum_in_runs(sums, runs, columns, column, mask, RUN, J)
        total = tl.load(sums + column, mask=mask, other=0.0)
        place = matrix * columns + column
        means = pointer(factors, COLUMN_MEANS, tl.float32, False) + place
        mean = tl.load(means, mask=mask, other=0.0) * load_number(record, stages.BETA2)
        mean = mean + _mean_of(total, rows) * load_number(record, stages.GAIN2)
        tl.store(means, mean, mask=mask)
        factor = pointer(factors, COLUMN_FACTORS, tl.float32, False) + place
        tl.store(factor, _inverse_root(mean), mask=mask)


@triton.jit
def row_kernel(
    table,
    chunks,
    report,
    AVERAGES: tl.constexpr,
    TILE: tl.constexpr,
    RUN: tl.constexpr,
    J: tl.constexpr,
    LANES: tl.constexpr,
):
    """Add up the sums of tiles of some rows.

    With AVERAGES those of weights, too, and averages of rows are advanced.
    """
    if tl.load(report) == 0:
        chunk = chunks + 2 * tl.program_id(0)
        record, factors = _record_of(table, chunk)
        columns = load_size(factors, MATRIX_COLUMNS)
        tiles = (columns + (TILE - 1)) // TILE
        rows = load_size(factors, MATRICES) * load_size(factors, MATRIX_ROWS)
        row = tl.load(chunk + 1).to(tl.int64) * LANES + tl.arange(0, LANES)[None, :]
        mask = row < rows
        sums = pointer(factors, SUMS, tl.float32, False)
        _sum_in_runs(sums, tiles, 1, row * tiles, mask, RUN, J)
        if AVERAGES:
            weight_sums = pointer(factors, WEIGHT_SUMS, tl.float32, False)
            _sum_in_runs(weight_sums, tiles, 1, row * tiles, mask, RUN, J)
            address = tl.load(factors.to(tl.pointer_type(tl.int64)) + ROW_MEANS)
            # a vector has no averages of rows
            mask = mask & (address != 0)
            total = tl.load(sums + row * tiles, mask=mask, other=0.0)
            means = pointer(factors, ROW_MEANS, tl.float32, False) + row
            mean = tl.load(means, mask=mask, other=0.0) * load_number(record, stages.BETA2)
            mean = mean + _mean_of(total, columns) * load_number(record, stages.GAIN2)
            tl.store(means, mean, mask=mask)
            # a copy, which is added up
            tl.store(pointer(factors, ROW_FACTORS, tl.float32, False) + row, mean, mask=mask)


@triton.jit
def _store_result(factors, WORD: tl.constexpr, value):
    tl.store((factors + WORD).to(tl.pointer_type(tl.float32)), value)


@triton.jit
def _root_mean_square(factors, sums, TILE: tl.constexpr, RUN: tl.constexpr, J: tl.constexpr):
    """Return that of all elements, of sums of squares of rows."""
    columns = load_size(factors, MATRIX_COLUMNS)
    rows = load_size(factors, MATRICES) * load_size(factors, MATRIX_ROWS)
    tiles = (columns + (TILE - 1)) // TILE
    lane = tl.zeros((1, 1), tl.int64)
    _sum_in_runs(sums, rows, tiles, lane, lane == 0, RUN, J)
    return tl.math.sqrt_rn(_mean_of(tl.load(sums), rows * columns))


@triton.jit
def mean_kernel(table, chunks, report, TILE: tl.constexpr, RUN: tl.constexpr, J: tl.constexpr):
    """Store the size of the weights, or the mean of the row means of a matrix."""
    if tl.load(report) == 0:
        chunk = chunks + 2 * tl.program_id(0)
        record, factors = _record_of(table, chunk)
        start = tl.load(chunk + 1).to(tl.int64)
        if start == 0:
            weight_sums = pointer(factors, WEIGHT_SUMS, tl.float32, False)
            size = _root_mean_square(factors, weight_sums, TILE, RUN, J)
            least = load_number(record, LEAST_SIZE)
            _store_result(factors, stages.SIZE_OF_WEIGHTS, tl.where(size > least, size, least))
        else:
            matrix = start - 1
            rows = load_size(factors, MATRIX_ROWS)
            row_means = pointer(factors, ROW_FACTORS, tl.float32, False) + matrix * rows
            lane = tl.zeros((1, 1), tl.int64)
            _sum_in_runs(row_means, rows, 1, lane, lane == 0, RUN, J)
            mean = _mean_of(tl.load(row_means), rows)
            tl.store(pointer(factors, MEANS, tl.float32, False) + matrix, mean)


@triton.jit
def clip_kernel(table, chunks, report, TILE: tl.constexpr, RUN: tl.constexpr, J: tl.constexpr):
    """Store what factors are multiplied by, so that a direction is not too long."""
    if tl.load(report) == 0:
        record, factors = _record_of(table, chunks + 2 * tl.program_id(0))
        sums = pointer(factors, SUMS, tl.float32, False)
        rms = _root_mean_square(factors, sums, TILE, RUN, J)
        most = load_number(record, MOST)
        shrink = tl.where(rms > most, tl.math.div_rn(most, rms), 1.0)
        _store_result(factors, stages.SHRINK, shrink)
        eps = load_number(record, stages.EPS)
        _store_result(factors, stages.CAP, tl.math.div_rn(eps * 0.0 + 1.0, eps))
