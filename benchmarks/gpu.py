"""All measurements on a GPU, in ten minutes: first whether its bits are the CPU's, then
times.

    python benchmarks/gpu.py [--out gpu.json] [--part exact_steps ...] [--record]
    TRITON_INTERPRET=1 python benchmarks/gpu.py --dry the same from end to end, tiny, on
    a CPU python benchmarks/gpu.py --list the parts, and the seconds that each may take

Parts run in the order of their worth, each within its own time, and any of them may
fail alone: the file is written after every part. A call ends within `--minutes`; the
next one does what is left, and repeats what failed, as long as GPU, torch and code are
the same. A part that is named runs again. Times are medians of single calls with the
cache flushed between them, by the GPU's own clock. `--record` writes the table of the
page on performance too, once all bits are found to be right. It needs torch with
Triton, and geoopt; torchao and bitsandbytes are left out if they are not installed, and
`gpt2` needs the bench's packages and a text.
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
    """A function of the session that returns figures, and the seconds that it may take
    on a GPU.
    """

    measure: Callable[[Session], dict[str, Any]]
    seconds: float

    @property
    def name(self) -> str:
        """As `--part` has it."""
        return self.measure.__name__


#: by worth: the first call is full before ``eight_billion``, and ``gpt2`` runs where it
#: is named
PARTS: Final = (
    Part(exact_steps, 30),
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
    Part(eight_billion, 230),
    Part(launches, 5),
    Part(step_times, 40),
    Part(rivals, 20),
    Part(muon, 15),
    Part(gpt2, 530),
)
NAMED_ONLY: Final = ("gpt2",)


def run(
    session: Session, parts: tuple[Part, ...], out: Path, minutes: float = 9.0
) -> dict[str, Any]:
    """Measure, with the file written after each part; parts that it has already stay."""
    result = facts(session)
    result["parts"] = before(result, out)
    until = time.monotonic() + 60 * minutes
    for part in parts:
        if not session.dry and time.monotonic() + part.seconds > until:
            print(f"{part.name} is left for another call: it may take {part.seconds} s", flush=True)
            continue
        begun = time.monotonic()
        session.start(part.seconds)
        try:
            figures: Any = part.measure(session)
        except Exception as error:
            figures = {
                "error": f"{type(error).__name__}: {error}",
                "trace": traceback.format_exc()[-2000:],
            }
        seconds = round(time.monotonic() - begun, 1)
        result["parts"][part.name] = {"seconds": seconds, "figures": figures}
        out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(f"{part.name} ({seconds} s): {json.dumps(figures)[:4000]}", flush=True)
        if not session.dry:
            torch.cuda.empty_cache()
    return result


def facts(session: Session) -> dict[str, Any]:
    """Facts that figures depend on: device, torch, Python, and a digest of all code
    that is measured or measures.
    """
    root = Path(__file__).parent.parent
    files = [
        path
        for name in ("fp8manifold", "benchmarks/_gpu")
        for path in sorted((root / name).rglob("*.*"))
    ]
    code = hashlib.sha256(
        b"".join(path.read_bytes() for path in files if path.suffix in (".py", ".c", ".h"))
    )
    device = "dry" if session.dry else torch.cuda.get_device_name()
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    return {"device": device, **versions, "code": code.hexdigest()[:16]}


def before(now: dict[str, Any], out: Path) -> dict[str, Any]:
    """The parts that an earlier call has measured on the same GPU, torch and code."""
    if not out.exists():
        return {}
    then = json.loads(out.read_text(encoding="utf-8"))
    return (
        dict(then.pop("parts"))
        if then.keys() >= now.keys() and all(then[key] == now[key] for key in now)
        else {}
    )


def chosen(named: list[str], measured: dict[str, Any]) -> tuple[Part, ...]:
    """The parts that were named, or all that are not measured yet, or failed."""
    if named:
        return tuple(part for part in PARTS if part.name in named)
    done = [name for name, part in measured.items() if "error" not in part["figures"]]
    return tuple(part for part in PARTS if part.name not in (*done, *NAMED_ONLY))


def failures(result: dict[str, Any]) -> list[str]:
    """A line for each case of bits that differ and each part that failed."""
    found = []
    for name, part in result["parts"].items():
        figures = part["figures"]
        nested = [
            (f"{name}: {what}", case) for what, case in figures.items() if isinstance(case, dict)
        ]
        found += [
            f"{what}: {case['error']}"
            for what, case in [(name, figures), *nested]
            if "error" in case
        ]
        if name.startswith("exact") and "error" not in figures:
            found += [
                f"{name}: {what} differs in {n}"
                for what, case in figures.items()
                if (n := counted(case))
            ]
    return found


def counted(case: Any) -> int:
    """The count of differing bits in a case."""
    return int(case.get("count", 0) if isinstance(case, dict) else case)


#: of the page's table: a column by the name of its figures, and their decimals
COLUMNS: Final = {
    "a call, ms": ("ms", 3),
    "its kernels, ms": ("kernels ms", 3),
    "bytes per weight": ("bytes", 2),
    "TFLOP/s": ("TFLOP/s", 0),
    "TB/s": ("TB/s", 2),
    "tokens a second": ("tokens/s", None),
    "MFU": ("MFU", 2),
    "peak GB": ("peak GB", 1),
    "loss": ("loss", 3),
    "count": ("count", None),
}


def row(what: str, figures: dict[str, Any]) -> list[str | float | None]:
    """A row of the page's table, empty where nothing was measured."""
    found = [(figures.get(name), places) for name, places in COLUMNS.values()]
    return [
        what,
        *(x if x is None or isinstance(x, str) else round(x, places) for x, places in found),
    ]


def rows(result: dict[str, Any]) -> list[list[str | float | None]]:
    """The table of the page: times are of one call of the step, of a layer, or of a
    whole step of training.
    """
    made = []
    for name, part in result["parts"].items():
        figures = part["figures"]
        if name.startswith("exact"):
            differing = {"count": sum(map(counted, figures.values()))}
            made.append(
                row(f"{name.removeprefix('exact_')}: values that differ from the CPU's", differing)
            )
            continue
        for what, case in figures.items():
            made.append(row(f"{name}: {what}", case if isinstance(case, dict) else {"count": case}))
    return made


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("gpu.json"),
        help="the file that is written after every part",
    )
    names = [part.name for part in PARTS]
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
    asked = parser.parse_args()
    if asked.list:
        print("\n".join(f"{part.seconds:5.0f} s  {part.name}" for part in PARTS))
        return 0
    if not asked.dry and not torch.cuda.is_available():
        print("gpu.py: there is no GPU here: --dry runs it on a CPU", file=sys.stderr)
        return 2
    if asked.dry:
        torch.compiler.set_stance("force_eager")
    session = Session(asked.dry)
    parts = (
        PARTS
        if asked.dry and not asked.part
        else chosen(asked.part, before(facts(session), asked.out))
    )
    print(
        f"{', '.join(part.name for part in parts)}: at most "
        f"{sum(part.seconds for part in parts):.0f} s",
        flush=True,
    )
    result = run(session, parts, asked.out, asked.minutes)
    found = failures(result) + [f"no kernels: {reason}" for reason in _triton_step._given_up]
    print("\n".join(found) or "every part ran, and every bit is the CPU's")
    proven = {"exact_steps", "exact_arrays", "exact_products"} <= result["parts"].keys()
    if (
        asked.record
        and not asked.dry
        and proven
        and not any(line.startswith("exact") for line in found)
    ):
        record("", ["what", *COLUMNS], rows(result), "cuda", ("triton", "torchao", "bitsandbytes"))
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
