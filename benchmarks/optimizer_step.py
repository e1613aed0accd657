"""The cost of one optimizer step beside torch's fused float32 AdamW, in time and bytes.

    python benchmarks/optimizer_step.py [--contenders 'stiffness-*' peers] [--pairs 25]
                                        [--processes 3] [--params 10M] [--device cpu]
                                        [--markdown | --json] [--record]

One thread. Each contender runs in fresh processes of its own, its steps taken in turn
with fused AdamW's over the same weights and gradients. A process has one ratio, the
median over its pairs (on the CPU of process CPU time). The table shows the median of
the processes, the smallest and the largest. Our steps include the check that every
gradient is finite. Bytes are those of the live tensors after the steps and
``zero_grad``: parameters, state and whatever else the optimizer holds, such as
gradients that it keeps itself. The first step includes work that is done once: every
weight's spacing, and the words that key its random bits.

A peer that is not installed is left out with a note; any other failure is printed, and
the exit code is 1.
"""

import argparse
import difflib
import fnmatch
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from _contenders import CONTENDERS, REFERENCE_NAME, SHAPES_OF_SIZES, Kind, Workload
from _forms import add_form_options, print_titled, text_table
from _record import Cell, add_option, record
from _timing import Ratio, Step, live_bytes, paired_seconds, wall_seconds

WARM_UP_STEPS: Final = 3
#: peers that are packages of their own
CONTENDER_PACKAGES: Final = ("geoopt", "torch-optimi", "torchao", "bitsandbytes", "sdnq")
#: groups of contenders on the command line
GROUPS: Final = {
    "all": tuple(Kind),
    "torch": (Kind.TORCH,),
    "peers": (Kind.PEER,),
    "ours": (Kind.OURS,),
}


def prepare_contender(name: str, work: Workload) -> tuple[Step, list[Any]]:
    """Return the step of one contender, and the objects that hold its memory."""
    parameters, optimizer = CONTENDERS[name].build(work)
    work.set_gradients(parameters)
    return optimizer.step, [parameters, optimizer]


def graphs_compiled() -> int:
    """Return the number of graphs that torch.compile has made in this process so far."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return int(dynamo.counters["stats"]["unique_graphs"]) if dynamo else 0


def measure_contender(name: str, work: Workload, pairs: int) -> dict[str, Any]:
    """Measure one contender in this process."""
    try:
        step, holders = prepare_contender(name, work)
    except (AttributeError, ImportError) as error:
        return {"missing": f"{type(error).__name__}: {error}"}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        first = wall_seconds(step, work.device)
        for _ in range(WARM_UP_STEPS - 1):
            step()
        reference, _ = prepare_contender(REFERENCE_NAME, work)
        for _ in range(WARM_UP_STEPS):
            reference()
        graphs = graphs_compiled()
        times = paired_seconds(step, reference, pairs, work.device)
    parameters, _ = holders
    work.drop_gradients(parameters)
    step_times = [pair.measured for pair in times]
    reference_times = [pair.reference for pair in times]
    texts = {
        f"{warning.category.__name__}: {warning.message}"
        for warning in caught
        if is_about_run(warning.category)
    }
    return {
        "first_step_s": first,
        "ratio": Ratio.of_pairs(times).median,
        "ratio_of_sums": sum(step_times) / sum(reference_times),
        "step_ms": 1e3 * statistics.median(step_times),
        "reference_ms": 1e3 * statistics.median(reference_times),
        "bytes_per_parameter": live_bytes(*holders) / work.numel,
        "graphs": graphs,
        "graphs_while_timed": graphs_compiled() - graphs,
        "warnings": sorted(texts),
    }


def is_about_run(category: type[Warning]) -> bool:
    """Return whether a warning is about the run, and not a deprecation inside a library."""
    return not issubclass(category, DeprecationWarning | FutureWarning)


def measure_contender_in_fresh_process(
    name: str, options: argparse.Namespace, cache: Path
) -> dict[str, Any]:
    """Measure one contender in a process of its own."""
    command = [sys.executable, __file__, "--worker", name]
    for option in ("pairs", "params", "elements", "device"):
        command += [f"--{option}", str(getattr(options, option))]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(cache / name),
    }
    try:
        process = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=options.timeout
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"no result within {options.timeout} s"}
    lines = process.stdout.splitlines()
    if process.returncode or not lines:
        return {"failed": f"exit code {process.returncode}: {reason(process.stderr)}"}
    result: dict[str, Any] = json.loads(lines[-1])
    return result


def reason(errors: str) -> str:
    """Return the line of a traceback that names the exception; hints may follow it."""
    exception = re.compile(r"^[\w.]+(?:Error|Exception|Interrupt|Unsupported)\b.*", re.MULTILINE)
    lines = exception.findall(errors) or errors.strip().splitlines() or ["no output"]
    return str(lines[-1])


def run_contenders(
    names: list[str], options: argparse.Namespace
) -> dict[str, list[dict[str, Any]]]:
    """Return what was measured of each contender, once per process.

    Every contender runs once in each round, so that a drift of the machine affects all
    of them. One without figures does not run again.
    """
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as cache:
        for turn in range(options.processes):
            for name, runs_of_name in runs.items():
                if turn > 0 and "ratio" not in runs_of_name[-1]:
                    continue
                title = f"process {turn + 1} of {options.processes}: {name}"
                print(title, file=sys.stderr, flush=True)
                runs_of_name.append(measure_contender_in_fresh_process(name, options, Path(cache)))
    return runs


def contender_row(
    name: str, runs: list[dict[str, Any]], options: argparse.Namespace
) -> dict[str, Any]:
    """Return a row: figures over the processes, or why there are none."""
    contender = CONTENDERS[name]
    head = {"name": name, "label": contender.label, "kind": contender.kind}
    last = runs[-1]
    if "ratio" not in last:
        return head | last
    ratio = Ratio.of(run["ratio"] for run in runs)
    goal = contender.goals.get((options.device, options.params))
    return head | {
        "bytes_per_parameter": last["bytes_per_parameter"],
        "ratio": ratio.median,
        "ratio_min": ratio.smallest,
        "ratio_max": ratio.largest,
        "ratio_of_sums": statistics.median(run["ratio_of_sums"] for run in runs),
        "step_ms": statistics.median(run["step_ms"] for run in runs),
        "reference_ms": statistics.median(run["reference_ms"] for run in runs),
        "first_step_s": [run["first_step_s"] for run in runs],
        "goal": goal,
        "met": None if goal is None else ratio.median <= goal,
        "graphs": last["graphs"],
        "graphs_while_timed": max(run["graphs_while_timed"] for run in runs),
        "warnings": sorted(set().union(*(run["warnings"] for run in runs))),
    }


def cells(line: dict[str, Any]) -> tuple[str, ...]:
    """Return a measured row as text."""
    first, later = _first_step_times(line)
    times = f"{first:.1f}" if later is None else f"{first:.1f}, then {later:.1f}"
    goal = ""
    if line["goal"] is not None:
        goal = f"<= {line['goal']:g}x: {'met' if line['met'] else 'NOT met'}"
    size = f"{line['bytes_per_parameter']:.2f}"
    return (line["label"], size, str(_ratio(line)), times, goal)


def contender_cells(line: dict[str, Any]) -> tuple[Cell, ...]:
    """Return a measured row as numbers, for the site."""
    first, later = _first_step_times(line)
    goal = None
    if line["goal"] is not None:
        goal = f"{line['goal']:g}x, {'met' if line['met'] else 'not met'}"
    return (
        line["label"],
        round(line["bytes_per_parameter"], 2),
        _ratio(line),
        round(first, 1),
        None if later is None else round(later, 1),
        goal,
    )


def _ratio(line: dict[str, Any]) -> Ratio:
    return Ratio(line["ratio"], line["ratio_min"], line["ratio_max"])


def _first_step_times(line: dict[str, Any]) -> tuple[float, float | None]:
    """Return the time of the first process's first step, and the median of the others'.

    The first process compiles what the others find in its cache.
    """
    first, *later = line["first_step_s"]
    return first, statistics.median(later) if later else None


CONTENDER_COLUMNS: Final = (
    "contender",
    "bytes per parameter",
    "ratio",
    "first step, s",
    "then, s",
    "goal",
)
CONTENDER_HEADER: Final = (
    "contender",
    "bytes per parameter",
    "ratio (processes)",
    "first step, s",
    "goal",
)


def contender_table(rows: list[dict[str, Any]], markdown: bool) -> str:
    """Return the measured rows as Markdown or in columns."""
    lines = [CONTENDER_HEADER, *(cells(line) for line in rows if "ratio" in line)]
    return text_table(lines, ("---", "---:", "---:", "---:", "---"), markdown)


def remarks(rows: list[dict[str, Any]]) -> list[str]:
    """Return what there is to say of contenders besides figures.

    That is a line for each one that is missing, has failed or warned, or has compiled
    while it was timed.
    """
    lines = []
    for row in rows:
        for kind in ("missing", "failed"):
            if kind in row:
                lines.append(f"{row['label']} ({row['name']}): {kind}: {row[kind]}")
        graphs = row.get("graphs_while_timed")
        if graphs:
            lines.append(f"{row['label']}: {graphs} graphs compiled while it was timed")
        if row["kind"] == Kind.OURS:
            lines += [f"{row['label']}: {text}" for text in row.get("warnings", [])]
    return lines


def title(rows: list[dict[str, Any]], options: argparse.Namespace) -> str:
    """Return the title of the table: its subject, and how long the reference took."""
    work = Workload.sized(options.params, options.elements, torch.device("cpu"))
    device = "CPU, one thread, process CPU time"
    if options.device == "cuda":
        device = torch.cuda.get_device_name()
    text = (
        f"torch {torch.__version__}, {work.numel:,} parameters in {len(work.shapes)} tensors, "
        f"{device}, {options.processes} processes of {options.pairs} pairs"
    )
    reference_times = [line["reference_ms"] for line in rows if "ratio" in line]
    if not reference_times:
        return text
    return f"{text}; fused AdamW takes {statistics.median(reference_times):.2f} ms"


def matching_contenders(patterns: list[str]) -> list[str]:
    """Return the contenders of groups, names and wildcards, in the table's order."""
    names: set[str] = set()
    for pattern in patterns:
        kinds = GROUPS.get(pattern, ())
        matching = [name for name, contender in CONTENDERS.items() if contender.kind in kinds]
        matching = matching or fnmatch.filter(CONTENDERS, pattern)
        if not matching:
            nearest = difflib.get_close_matches(pattern, [*CONTENDERS, *GROUPS], n=1)
            hint = f"; did you mean {nearest[0]}?" if nearest else ""
            raise argparse.ArgumentTypeError(
                f"--contenders {pattern}: a name, a wildcard or one of {', '.join(GROUPS)}{hint}"
            )
        names.update(matching)
    return [name for name in CONTENDERS if name in names]


def positive(kind: type[int] | type[float]) -> Callable[[str], float]:
    """Return a parser of numbers above 0."""

    def parse(text: str) -> float:
        value = kind(text)
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
        return value

    return parse


def contender_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--contenders",
        nargs="+",
        default=["all"],
        help="names, wildcards, or all, torch, peers, ours",
    )
    parser.add_argument(
        "--pairs", type=positive(int), default=25, help="pairs of steps in each process"
    )
    parser.add_argument(
        "--processes", type=positive(int), default=3, help="fresh processes for each contender"
    )
    parser.add_argument(
        "--params",
        choices=SHAPES_OF_SIZES,
        default="10M",
        help="50 tensors of mixed shapes, or GPT-2's 148",
    )
    parser.add_argument(
        "--elements", type=positive(float), default=1.0, help="factor on each tensor's elements"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--timeout", type=positive(float), default=900, help="seconds a process may take"
    )
    add_form_options(parser)
    add_option(parser)
    parser.add_argument(
        "--list", action="store_true", help="print the names of the contenders and stop"
    )
    parser.add_argument("--worker", choices=CONTENDERS, help=argparse.SUPPRESS)
    return parser


def main() -> int:
    """Measure, print, and return the exit code."""
    parser = contender_parser()
    options = parser.parse_args()
    if options.list:
        print("\n".join(f"{name:32s} {contender.label}" for name, contender in CONTENDERS.items()))
        return 0
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: no GPU is at hand")
    torch.set_num_threads(1)
    if options.worker:
        work = Workload.sized(options.params, options.elements, torch.device(options.device))
        print(json.dumps(measure_contender(options.worker, work, options.pairs)))
        return 0
    try:
        names = matching_contenders(options.contenders)
    except argparse.ArgumentTypeError as error:
        parser.error(str(error))
    rows = [
        contender_row(name, timing, options)
        for name, timing in run_contenders(names, options).items()
    ]
    if options.json:
        print(json.dumps({"title": title(rows, options), "rows": rows}, indent=1))
    else:
        parts = (title(rows, options), contender_table(rows, options.markdown), *remarks(rows))
        print_titled(*parts, markdown=options.markdown)
    if options.record:
        measured = [contender_cells(line) for line in rows if "ratio" in line]
        record(
            "fused float32 AdamW of torch",
            CONTENDER_COLUMNS,
            measured,
            options.device,
            CONTENDER_PACKAGES,
        )
    return int(any(map(is_failure, rows)))


def is_failure(line: dict[str, Any]) -> bool:
    """Return whether a contender failed, or one of ours cannot be built."""
    return "failed" in line or (line["kind"] == Kind.OURS and "missing" in line)


if __name__ == "__main__":
    sys.exit(main())
