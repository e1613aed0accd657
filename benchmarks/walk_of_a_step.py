"""Files and functions of the package that steps of two weights enter, and moves between
the files.

    python benchmarks/walk_of_a_step.py [--optimizer StiffnessAdamW] [--list]

The fewer there are, the shorter a reader's way from ``step()`` to the arithmetic. A
move is a function that is entered, for the first time, after one of another file.
"""

import argparse
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import fp8manifold as fm

PACKAGE = Path(fm.__file__).parent
STEPS = ("first", "later", "steady")
"""The step that begins a state, one that is planned, and one that reuses that plan."""


def walk(step: Any, package: Path = PACKAGE) -> list[tuple[str, str]]:
    """Files and names of the functions of a package that a call enters, in the order in
    which it does.
    """
    entered: dict[tuple[str, str], None] = {}

    def note(frame: FrameType, event: str, _: object) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and file.is_relative_to(package):
            entered[str(file.relative_to(package)), frame.f_code.co_qualname] = None

    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    return list(entered)


def lengths(entered: list[tuple[str, str]]) -> tuple[int, int, int]:
    """The numbers of files, of functions and of moves."""
    files = [file for file, _ in entered]
    return len(set(files)), len(files), sum(one != other for one, other in pairwise(files))


def walks(optimizer: str, names: tuple[str, ...]) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Steps of an optimizer over two weights, by their names, one after the other."""
    weights = [
        fm.FP8Parameter(torch.linspace(-1, 1, 64).view(8, 8) / n, "E4M3", seed=n) for n in (1, 2)
    ]
    steps = getattr(fm.optim, optimizer)(weights, lr=0.01)
    for name in names:
        for weight in weights:
            weight.grad = torch.ones(8, 8)
        yield name, walk(steps.step)


def main() -> None:
    """Print how many files, functions and moves there are in each step."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--optimizer", default="StiffnessAdamW", help="a class of fp8manifold.optim"
    )
    parser.add_argument("--list", action="store_true", help="print their names too")
    options = parser.parse_args()
    for name, entered in walks(options.optimizer, STEPS):
        print("{} step: {} files, {} functions, {} moves".format(name, *lengths(entered)))
        for file, function in entered if options.list else ():
            print(f"  {file}: {function}")


if __name__ == "__main__":
    main()
