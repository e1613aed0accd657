"""The walk of a step: the files and functions of the package that a first and a later step of two weights enter.

    python benchmarks/walk_of_a_step.py [--optimizer StiffnessAdamW] [--list]

Few of them are a short way for a reader from ``step()`` to the arithmetic.
"""

import argparse
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import fp8manifold as fm

PACKAGE = Path(fm.__file__).parent


def walk(step: Any) -> list[tuple[str, str]]:
    """Files and names of the functions that a call enters, in the order in which it does."""
    entered: dict[tuple[str, str], None] = {}

    def note(frame: FrameType, event: str, _: object) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and file.is_relative_to(PACKAGE):
            entered[str(file.relative_to(PACKAGE)), frame.f_code.co_qualname] = None

    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    return list(entered)


def main() -> None:
    """Print how many files and functions each step enters."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizer", default="StiffnessAdamW", help="a class of fp8manifold.optim")
    parser.add_argument("--list", action="store_true", help="print their names too")
    options = parser.parse_args()
    weights = [fm.FP8Parameter(torch.linspace(-1, 1, 64).view(8, 8) / n, "E4M3", seed=n) for n in (1, 2)]
    optimizer = getattr(fm.optim, options.optimizer)(weights, lr=0.01)
    for name in ("first", "later"):
        for weight in weights:
            weight.grad = torch.ones(8, 8)
        entered = walk(optimizer.step)
        print(f"{name} step: {len({file for file, _ in entered})} files, {len(entered)} functions")
        for file, function in entered if options.list else ():
            print(f"  {file}: {function}")


if __name__ == "__main__":
    main()
