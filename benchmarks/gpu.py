"""All measurements on a GPU, in ten minutes: first its bits beside the CPU's, then times.

    python benchmarks/gpu.py [--out gpu.json] [--part exact_steps ...] [--record]
    TRITON_INTERPRET=1 python benchmarks/gpu.py --dry   # all parts, tiny, on a CPU
    python benchmarks/gpu.py --list                     # parts, and seconds of each

Parts run in the order of their worth, each within its time, and any of them may fail
alone: the file is written after every part. A call ends within `--minutes`. The next
one does what is left, and repeats what failed, as long as GPU, torch and code are the
same. A part that is named runs again.

Times are medians of single calls with the cache flushed between them, by the GPU's
clock. `--record` writes the table of the page on performance too, once all bits are
found to be right. The script needs torch with Triton, and geoopt. torchao and
bitsandbytes are left out if they are not installed. `gpt2` needs the bench's packages
and a text.
"""

import argparse
import hashlib
import json
import platform
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from _gpu.bits import exact_arrays, exact_products, exact_steps
from _gpu.eight_billion import eight_billion
from _gpu.gpt2 import gpt2
from _gpu.layers import kernels, layers, products
from _gpu.session import Session
from _gpu.steps import launches, muon, rivals, step_calls, step_times
from _gpu.training import losses, one_block, training_768, training_2048
from _record import record

from fp8manifold.optim import _triton_step


class Part(NamedTuple):
    """A part of the measurements."""

    #: returns the figures of each case by its name
    measure: Callable[[Session], dict[str, Any]]
    #: that it may take on a GPU
    seconds: float

    @property
    def name(self) -> str:
        """The name that `--part` takes."""
        return self.measure.__name__


#: by worth: the parts before ``eight_billion`` fill the time of a first call, and
#: ``gpt2`` runs only where it is named
GPU_PARTS: Final = (
    Part(exact_steps, 40),
    Part(exact_arrays, 10),
    Part(exact_products, 40),
    Part(step_calls, 30),
    Part(layers, 25),
    Part(kernels, 15),
    Part(products, 45),
    Part(training_768, 130),
    Part(training_2048, 150),
    Part(one_block, 50),
    Part(losses, 60),
    Part(eight_billion, 420),
    Part(launches, 5),
    Part(step_times, 50),
    Part(rivals, 20),
    Part(muon, 15),
    Part(gpt2, 530),
)
NAMED_ONLY: Final = ("gpt2",)
#: the parts that have to be right before any time counts
BITS: Final = {"exact_steps", "exact_arrays", "exact_products"}


def run_parts(
    session: Session, parts: tuple[Part, ...], out: Path, minutes: float = 9.0
) -> dict[str, Any]:
    """Measure parts, and write the file after each; parts that it has already stay."""
    result = facts(session)
    result["parts"] = parts_of_earlier_calls(result, out)
    until = time.monotonic() + 60 * minutes
    for part in parts:
        if not session.dry and time.monotonic() + part.seconds > until:
            print(f"{part.name} is left for another call: it may take {part.seconds} s", flush=True)
            continue
        begin = time.monotonic()
        session.start(part.seconds)
        try:
            figures: Any = part.measure(session)
        except Exception as error:
            figures = {
                "error": f"{type(error).__name__}: {error}",
                "trace": traceback.format_exc()[-2000:],
            }
        seconds = round(time.monotonic() - begin, 1)
        result["parts"][part.name] = {"seconds": seconds, "figures": figures}
        out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(f"{part.name} ({seconds} s): {json.dumps(figures)[:4000]}", flush=True)
        if not session.dry:
            torch.cuda.empty_cache()
    return result


def facts(session: Session) -> dict[str, Any]:
    """Return what figures depend on.

    That is device, torch, Python, and a digest of all code that is measured or measures.
    """
    root = Path(__file__).parent.parent
    code = hashlib.sha256()
    for folder in ("fp8manifold", "benchmarks/_gpu"):
        for path in sorted((root / folder).rglob("*.*")):
            if path.suffix in (".py", ".c", ".h"):
                code.update(path.read_bytes())
    return {
        "device": "dry" if session.dry else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "code": code.hexdigest()[:16],
    }


def parts_of_earlier_calls(current_facts: dict[str, Any], out: Path) -> dict[str, Any]:
    """Return the parts that were measured already on the same GPU, torch and code."""
    if not out.exists():
        return {}
    result = json.loads(out.read_text(encoding="utf-8"))
    if any(result.get(name) != fact for name, fact in current_facts.items()):
        return {}
    return dict(result["parts"])


def parts_to_measure(names: list[str], measured: dict[str, Any]) -> tuple[Part, ...]:
    """Return the parts of some names, or all that are not measured yet, or failed."""
    if names:
        return tuple(part for part in GPU_PARTS if part.name in names)
    measured_parts = [name for name, part in measured.items() if "error" not in part["figures"]]
    return tuple(part for part in GPU_PARTS if part.name not in (*measured_parts, *NAMED_ONLY))


def failures(result: dict[str, Any]) -> list[str]:
    """Return a line for each case of bits that differ and each part that failed."""
    lines = []
    for name, part in result["parts"].items():
        figures = part["figures"]
        if "error" in figures:
            lines.append(f"{name}: {figures['error']}")
            continue
        for title, case in figures.items():
            if isinstance(case, dict) and "error" in case:
                lines.append(f"{name}: {title}: {case['error']}")
            elif name.startswith("exact") and differing_count(case):
                lines.append(f"{name}: {title} differs in {differing_count(case)}")
    return lines


def differing_count(case: Any) -> int:
    """Return the number of values of a case that differ from the CPU's."""
    return int(case.get("count", 0) if isinstance(case, dict) else case)


class Column(NamedTuple):
    """A column of the page's table."""

    #: name of its figures
    figure: str
    #: None for whole numbers
    decimals: int | None


PAGE_COLUMNS: Final = {
    "a call, ms": Column("ms", 3),
    "its kernels, ms": Column("kernels ms", 3),
    "bytes per weight": Column("bytes", 2),
    "TFLOP/s": Column("TFLOP/s", 0),
    "TB/s": Column("TB/s", 2),
    "tokens a second": Column("tokens/s", None),
    "MFU": Column("MFU", 2),
    "peak GB": Column("peak GB", 1),
    "loss": Column("loss", 3),
    "count": Column("count", None),
}


def page_row(title: str, figures: dict[str, Any]) -> list[str | float | None]:
    """Return a row of the page's table, empty where nothing was measured."""
    cells: list[str | float | None] = [title]
    for column in PAGE_COLUMNS.values():
        value = figures.get(column.figure)
        is_number = value is not None and not isinstance(value, str)
        cells.append(round(value, column.decimals) if is_number else value)
    return cells


def page_rows(result: dict[str, Any]) -> list[list[str | float | None]]:
    """Return the table of the page.

    Times are of one call of the step, of a layer, or of a whole step of training.
    """
    table = []
    for name, part in result["parts"].items():
        figures = part["figures"]
        if name.startswith("exact"):
            title = f"{name.removeprefix('exact_')}: values that differ from the CPU's"
            table.append(page_row(title, {"count": sum(map(differing_count, figures.values()))}))
            continue
        for title, case in figures.items():
            table.append(
                page_row(f"{name}: {title}", case if isinstance(case, dict) else {"count": case})
            )
    return table


def gpu_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("gpu.json"),
        help="the file that is written after every part",
    )
    names = [part.name for part in GPU_PARTS]
    parser.add_argument(
        "--part", nargs="+", default=[], choices=names, metavar="NAME", help="these parts, again"
    )
    parser.add_argument(
        "--minutes", type=float, default=9.0, help="what a call takes at most (default: 9)"
    )
    parser.add_argument(
        "--list", action="store_true", help="only print the parts, and the seconds each may take"
    )
    parser.add_argument(
        "--dry", action="store_true", help="tiny, on a CPU, with TRITON_INTERPRET=1"
    )
    parser.add_argument(
        "--record", action="store_true", help="also write the table of the page on performance"
    )
    return parser


def main() -> int:
    """Measure, print what failed, and return the exit code."""
    options = gpu_parser().parse_args()
    if options.list:
        print("\n".join(f"{part.seconds:5.0f} s  {part.name}" for part in GPU_PARTS))
        return 0
    if not options.dry and not torch.cuda.is_available():
        print("gpu.py: there is no GPU here: --dry runs it on a CPU", file=sys.stderr)
        return 2
    if options.dry:
        torch.compiler.set_stance("force_eager")
    session = Session(options.dry)
    if options.dry and not options.part:
        parts = GPU_PARTS
    else:
        parts = parts_to_measure(options.part, parts_of_earlier_calls(facts(session), options.out))
    names = ", ".join(part.name for part in parts)
    print(f"{names}: at most {sum(part.seconds for part in parts):.0f} s", flush=True)
    result = run_parts(session, parts, options.out, options.minutes)
    lines = failures(result) + [f"no kernels: {reason}" for reason in _triton_step._given_up]
    print("\n".join(lines) or "every part ran, and every bit is the CPU's")
    is_exact = result["parts"].keys() >= BITS and not any(map(is_about_bits, lines))
    if options.record and not options.dry and is_exact:
        packages = ("triton", "torchao", "bitsandbytes")
        record("", ["what", *PAGE_COLUMNS], page_rows(result), "cuda", packages)
    return int(bool(lines))


def is_about_bits(line: str) -> bool:
    """Return whether a line of `failures` is about bits."""
    return line.startswith("exact")


if __name__ == "__main__":
    sys.exit(main())
