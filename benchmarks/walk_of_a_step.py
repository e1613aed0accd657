"""Files and functions of the package that steps of two weights enter.

    python benchmarks/walk_of_a_step.py [--optimizer StiffnessMuon] [--list] [--json]

The fewer there are, the shorter a reader's way from ``step()`` to the arithmetic. A
move between files is counted where a function is entered, for the first time, after one
of another file. Calls count every time that a function is entered.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch

import fp8manifold as fm

PACKAGE = Path(fm.__file__).parent
WALKED_OPTIMIZERS = ("StiffnessAdamW", "StiffnessMuon", "RiemannianAdam")
"""Optimizers that are walked through by default."""
WALKED_STEPS = ("first", "later", "steady")
"""The step that begins a state, one that is planned, and one that reuses that plan."""


class Entered(NamedTuple):
    """A function that a step enters."""

    file: str
    function: str


class Lengths(NamedTuple):
    """The numbers of files, of functions, of moves between files, and of calls."""

    files: int
    functions: int
    moves: int
    calls: int


def walk(step: Any, package: Path = PACKAGE) -> Counter[Entered]:
    """Return the functions of a package that a call enters, in that order, with counts."""
    entered: Counter[Entered] = Counter()

    def note(frame: FrameType, event: str, _: object) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and file.is_relative_to(package):
            entered[Entered(str(file.relative_to(package)), frame.f_code.co_qualname)] += 1

    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    return entered


def walk_lengths(entered: Counter[Entered]) -> Lengths:
    """Count the files, the functions, the moves and the calls of a walk."""
    files = [function.file for function in entered]
    moves = sum(one != other for one, other in pairwise(files))
    return Lengths(len(set(files)), len(files), moves, entered.total())


def walks(optimizer: str, names: Sequence[str]) -> Iterator[tuple[str, Counter[Entered]]]:
    """Yield each step of an optimizer over two weights, by its name."""
    weights = [
        fm.FP8Parameter(torch.linspace(-1, 1, 64).view(8, 8) / n, "E4M3", seed=n) for n in (1, 2)
    ]
    options: dict[str, Any] = {"momentum": 0.9} if optimizer.endswith("SGD") else {}
    stepper = getattr(fm.optim, optimizer)(weights, lr=0.01, moments="8bit", **options)
    for name in names:
        for weight in weights:
            weight.grad = torch.ones(8, 8)
        yield name, walk(stepper.step)


def record_of(optimizer: str, name: str, entered: Counter[Entered]) -> dict[str, Any]:
    """Return what is printed as JSON of a step."""
    functions = [f"{function.file}: {function.function}" for function in entered]
    return {
        "optimizer": optimizer,
        "step": name,
        **walk_lengths(entered)._asdict(),
        "entered": functions,
    }


def print_walk(
    optimizer: str, name: str, entered: Counter[Entered], *, with_functions: bool
) -> None:
    """Print how long a step's way is, and the functions on it if they are asked for."""
    files, functions, moves, calls = walk_lengths(entered)
    print(
        f"{optimizer}, {name} step: {calls} calls of {functions} functions in {files} files, "
        f"{moves} moves"
    )
    if with_functions:
        for function, count in entered.items():
            print(f"  {count:3} {function.file}: {function.function}")


def main() -> None:
    """Print how many files, functions and moves there are in each step."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--optimizer",
        action="append",
        help=f"a class of fp8manifold.optim, once or several times (default: {WALKED_OPTIMIZERS})",
    )
    parser.add_argument("--list", action="store_true", help="print their names too")
    parser.add_argument("--json", action="store_true", help="print every figure as JSON")
    options = parser.parse_args()
    records = []
    for optimizer in options.optimizer or WALKED_OPTIMIZERS:
        for name, entered in walks(optimizer, WALKED_STEPS):
            records.append(record_of(optimizer, name, entered))
            if not options.json:
                print_walk(optimizer, name, entered, with_functions=options.list)
    if options.json:
        print(json.dumps(records, indent=2))


if __name__ == "__main__":
    main()
