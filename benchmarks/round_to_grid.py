"""The time of rounding to a grid, as a ratio to ``torch.clone`` of the same tensor.

    python benchmarks/round_to_grid.py [--elements 16777216] [--repeats 15] [--record]

One thread. Every contender is timed in turn with clone (clone, contender, clone,
contender, ...), and the ratio is the median over the pairs, so that a machine whose
speed drifts does not favour either. ml_dtypes and gfloat (extra ``test``) are left out
with a note if they are not installed.
"""

import argparse
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from _record import Cell, add_option, record
from _timing import CPU, Ratio, Step, wall_seconds

import fp8manifold as fm

ROUNDING_GOALS = {"nearest": 1.1, "stochastic": 1.5}


class RoundingFunction(NamedTuple):
    """A function that is timed."""

    name: str
    function: Step
    #: elements that it rounds
    size: int


def rounding_ratio(function: Step, peer: Step, repeats: int) -> Ratio:
    """Return the ratios of the two wall-clock times over interleaved pairs."""
    function()
    peer()
    ratios = []
    for _ in range(repeats):
        reference = wall_seconds(peer, CPU)
        ratios.append(wall_seconds(function, CPU) / reference)
    return Ratio.of(ratios)


def library_functions(x: torch.Tensor) -> Iterator[RoundingFunction]:
    """Yield the library's functions, eager and compiled."""
    size = x.numel()
    for name in ("E4M3", "E5M2", "E3M4", "E1M6", "E7M0", "E4M3FNUZ"):
        nearest = partial(fm.round_to_grid, x, name)
        yield RoundingFunction(f"round_to_grid {name} nearest", nearest, size)
        stochastic = partial(fm.round_to_grid, x, name, "stochastic", seed=1)
        yield RoundingFunction(f"round_to_grid {name} stochastic", stochastic, size)
    compiled = torch.compile(fm.round_to_grid)
    for name in ("E4M3", "E7M0"):
        nearest = partial(compiled, x, name)
        yield RoundingFunction(f"round_to_grid {name} nearest, torch.compile", nearest, size)
    stochastic = partial(compiled, x, "E4M3", "stochastic", seed=1)
    yield RoundingFunction("round_to_grid E4M3 stochastic, torch.compile", stochastic, size)
    yield RoundingFunction("encode E4M3", partial(fm.encode, x, "E4M3"), size)
    codes = fm.encode(x, "E4M3")
    yield RoundingFunction("decode E4M3", partial(fm.decode, codes, "E4M3"), size)


def peer_functions(x: torch.Tensor) -> Iterator[RoundingFunction]:
    """Yield functions of other packages that round to FP8.

    One rounds a smaller tensor, as the full one would take minutes.
    """
    yield RoundingFunction(
        "torch float8_e4m3fn, there and back",
        lambda: x.to(torch.float8_e4m3fn).float(),
        x.numel(),
    )
    try:
        import ml_dtypes
    except ImportError:
        print("ml_dtypes is not installed: left out")
    else:
        array = x.numpy()
        yield RoundingFunction(
            "ml_dtypes float8_e4m3fn, there and back",
            lambda: array.astype(ml_dtypes.float8_e4m3fn).astype(np.float32),
            x.numel(),
        )
    try:
        import gfloat
        import gfloat.formats
    except ImportError:
        print("gfloat is not installed: left out")
    else:
        part = x[: x.numel() // 16].numpy()
        info = gfloat.formats.format_info_ocp_e4m3
        rounding = partial(gfloat.round_ndarray, info, part, sat=True)
        yield RoundingFunction("gfloat E4M3 nearest", rounding, part.size)


def rounding_goal_text(name: str) -> str:
    """Return the goal of a function; "" without one."""
    for rounding, goal in ROUNDING_GOALS.items():
        if "round_to_grid" in name and rounding in name:
            return f"<= {goal}"
    return ""


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--elements", type=int, default=2**24)
    parser.add_argument("--repeats", type=int, default=15)
    add_option(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x = torch.randn(options.elements)
    print(
        f"torch {torch.__version__}, {options.elements:,} float32, one thread, median of "
        f"{options.repeats} pairs"
    )
    print(f"{'':48s} {'ratio to torch.clone':>22s}  {'(min .. max)':>16s}  goal")
    rows: list[tuple[Cell, ...]] = []
    for contender in (*library_functions(x), *peer_functions(x)):
        values = x[: contender.size].clone()
        ratio = rounding_ratio(contender.function, values.clone, options.repeats)
        goal = rounding_goal_text(contender.name)
        rows.append((contender.name, ratio, goal))
        ends = f"({ratio.smallest:.2f} .. {ratio.largest:.2f})"
        print(f"{contender.name:48s} {ratio.median:21.2f}x  {ends:>16s}  {goal}", flush=True)
    if options.record:
        header = ("function", "ratio", "goal")
        peer = "`torch.clone` of the same tensor"
        record(peer, header, rows, packages=("ml_dtypes", "gfloat"))


if __name__ == "__main__":
    main()
