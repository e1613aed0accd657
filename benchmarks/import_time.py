"""The time of ``import fp8manifold``, as a ratio to that of ``import torch``.

    python benchmarks/import_time.py [--processes 9] [--slowest 10]
                                     [--markdown | --json] [--record]

Each of several fresh processes imports torch, this library and geoopt, in this order:
the library alone does not import geoopt, which a manifold needs. The times are CPU
times of the process, as whatever else the machine does only adds to wall-clock times.
The table shows medians over the processes, and the smallest and largest ratio. A first
process writes bytecode, and does not count.

Below stand the slowest files of the library, without the files that they import, by
``python -X importtime``: the least of the wall-clock times of as many processes.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
from collections import defaultdict
from typing import Any, Final, NamedTuple

from _forms import add_form_options, check_at_least, print_titled, text_table
from _record import Cell, add_option, record
from _timing import Ratio

PACKAGES: Final = ("torch", "fp8manifold", "geoopt")
"""The packages in the order of their import."""
TIMED: Final = f"""
import json, sys, time
facts = {{}}
for package in {PACKAGES}:
    known, begin = len(sys.modules), time.process_time()
    __import__(package)
    facts[package] = time.process_time() - begin, len(sys.modules) - known
print(json.dumps(facts))
"""
TRACED: Final = "import torch, sys; print('after torch', file=sys.stderr); import fp8manifold"
LINE: Final = re.compile(r"import time: +(?P<own>\d+) \| +\d+ \| +(?P<name>\S+)")


class Import(NamedTuple):
    """The import of a package after those before it."""

    seconds: float
    modules: int


def fresh_process(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python with arguments, on one thread and with bytecode."""
    environment = {
        name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"
    }
    environment["OMP_NUM_THREADS"] = "1"
    return subprocess.run(
        [sys.executable, "-W", "ignore", *arguments],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )


def imports() -> dict[str, Import]:
    """Return the import of each package in a fresh process."""
    facts = json.loads(fresh_process("-c", TIMED).stdout)
    return {package: Import(*facts[package]) for package in PACKAGES}


def own_milliseconds() -> dict[str, float]:
    """Return the time of each file that the library's import executes, by its module."""
    report = fresh_process("-X", "importtime", "-c", TRACED).stderr.partition("after torch")[2]
    return {match["name"]: int(match["own"]) / 1e3 for match in LINE.finditer(report)}


def slowest(processes: int, count: int) -> list[tuple[str, float]]:
    """Return the slowest files, each with the least of its times."""
    times: dict[str, list[float]] = defaultdict(list)
    for _ in range(processes):
        for name, milliseconds in own_milliseconds().items():
            times[name].append(milliseconds)
    least = {name: min(values) for name, values in times.items()}
    return sorted(least.items(), key=lambda item: item[1], reverse=True)[:count]


def rows_of(processes: list[dict[str, Import]]) -> list[list[Any]]:
    """Return a row for each package: name, modules, milliseconds and the ratios."""
    rows = []
    for package in PACKAGES:
        times = [process[package].seconds for process in processes]
        ratios = Ratio.of(
            process[package].seconds / process["torch"].seconds for process in processes
        )
        modules = processes[0][package].modules
        rows.append([f"import {package}", modules, 1e3 * statistics.median(times), ratios])
    return rows


def main() -> None:
    """Measure and print, and record if asked to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=9)
    parser.add_argument("--slowest", type=int, default=10, help="files that are listed")
    add_form_options(parser)
    add_option(parser)
    options = parser.parse_args()
    check_at_least(parser, options, 1, "processes")
    check_at_least(parser, options, 0, "slowest")
    imports()
    rows = rows_of([imports() for _ in range(options.processes)])
    files = slowest(options.processes, options.slowest)
    rows += [[f"{name} alone", 1, milliseconds, None] for name, milliseconds in files]
    columns = ["what, in this order", "modules", "milliseconds", "ratio"]
    if options.record:
        cells: list[list[Cell]] = [[*row[:2], round(row[2], 1), row[3]] for row in rows]
        print(record("`import torch`", columns, cells, packages=["geoopt"]))
    if options.json:
        print(json.dumps([dict(zip(columns, row, strict=True)) for row in rows]))
        return
    texts = [
        [name, str(modules), f"{milliseconds:.1f}", "" if ratio is None else str(ratio)]
        for name, modules, milliseconds, ratio in rows
    ]
    table = text_table([columns, *texts], ["---", "---:", "---:", "---:"], options.markdown)
    print_titled("Imports, CPU time", table, markdown=options.markdown)


if __name__ == "__main__":
    main()
