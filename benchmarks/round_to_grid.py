"""The time of rounding to a grid, as a ratio to ``torch.clone`` of the same tensor
measured in the same run.

    python benchmarks/round_to_grid.py [--elements 16777216] [--repeats 15] [--record]

One thread. Every contender is timed in turn with clone (clone, contender, clone,
contender, ...), and the ratio is the median over the pairs, so that a machine whose
speed drifts does not favour either. ml_dtypes and gfloat (extra ``test``) are left out
with a note if they are not installed.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
from _record import Cell, add_option, record

import fp8manifold as fm

GOALS = {"nearest": 1.1, "stochastic": 1.5}
Contender = tuple[str, Callable[[], object], int]


def seconds(function: Callable[[], object]) -> float:
    """Wall-clock time of one call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def ratio(
    function: Callable[[], object], peer: Callable[[], object], repeats: int
) -> tuple[float, float, float]:
    """Smallest, median and largest ratio of the two times over interleaved pairs."""
    function()
    peer()
    ratios = []
    for _ in range(repeats):
        reference = seconds(peer)
        ratios.append(seconds(function) / reference)
    return min(ratios), statistics.median(ratios), max(ratios)


def ours(x: torch.Tensor) -> Iterator[Contender]:
    """The library, eager and compiled."""
    for name in ("E4M3", "E5M2", "E3M4", "E1M6", "E7M0", "E4M3FNUZ"):
        yield f"round_to_grid {name} nearest", lambda n=name: fm.round_to_grid(x, n), x.numel()
        yield (
            f"round_to_grid {name} stochastic",
            lambda n=name: fm.round_to_grid(x, n, "stochastic", seed=1),
            x.numel(),
        )
    compiled = torch.compile(fm.round_to_grid)
    for name in ("E4M3", "E7M0"):
        yield (
            f"round_to_grid {name} nearest, torch.compile",
            lambda n=name: compiled(x, n),
            x.numel(),
        )
    yield (
        "round_to_grid E4M3 stochastic, torch.compile",
        lambda: compiled(x, "E4M3", "stochastic", seed=1),
        x.numel(),
    )
    codes = fm.encode(x, "E4M3")
    yield "encode E4M3", lambda: fm.encode(x, "E4M3"), x.numel()
    yield "decode E4M3", lambda: fm.decode(codes, "E4M3"), x.numel()


def peers(x: torch.Tensor) -> Iterator[Contender]:
    """Other packages that round to FP8, on a smaller tensor where the full one would
    take minutes.
    """
    yield (
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
        yield (
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
        yield "gfloat E4M3 nearest", lambda: gfloat.round_ndarray(info, part, sat=True), part.size


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
    for contenders in (ours(x), peers(x)):
        for name, function, size in contenders:
            like = x[:size].clone()
            low, median, high = ratio(function, like.clone, options.repeats)
            goal = next(
                (
                    f"<= {g}"
                    for mode, g in GOALS.items()
                    if "round_to_grid" in name and mode in name
                ),
                "",
            )
            rows.append((name, (median, low, high), goal))
            print(
                f"{name:48s} {median:21.2f}x  {f'({low:.2f} .. {high:.2f})':>16s}  {goal}",
                flush=True,
            )
    if options.record:
        record(
            "`torch.clone` of the same tensor",
            ("function", "ratio", "goal"),
            rows,
            packages=("ml_dtypes", "gfloat"),
        )


if __name__ == "__main__":
    main()
