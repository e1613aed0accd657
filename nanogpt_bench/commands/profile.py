"""`nanogpt-bench profile`: speed and memory over batch sizes, or the ranges of a model's tensors, as a table."""

from __future__ import annotations

import argparse
import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanogpt_bench.commands.arguments import names, positive, positives, share
from nanogpt_bench.system.errors import BenchError
from nanogpt_bench.system.overwriting import holds, mapping_with, refuse_to_replace
from nanogpt_bench.system.words import say

if TYPE_CHECKING:
    from nanogpt_bench.config.settings import Resolved

RANGES = "ranges"
BATCH_SIZES = (8, 16, 32, 64)
THROUGHPUT_STEPS = 5
RANGE_STEPS = 50
OVERFLOW, UNDERFLOW = 1e-4, 0.01

Rows = list[dict[str, Any]]


def add_profile(commands: Any) -> Any:
    """Add the command `profile` and return its parser."""
    parser = commands.add_parser(
        "profile",
        help="tokens/s and memory over batch sizes; ranges: what a model's tensors need of a format",
        usage="nanogpt-bench profile [ranges] CONFIG.yaml [--steps N] [--out DIR] [--section.key VALUE ...]",
        description="Measure tokens/s and memory of a configuration over batch sizes. With the word ranges: train in\n"
        "bfloat16 for some steps and tabulate what every weight, activation and gradient needs of a format.",
        epilog="examples:\n  nanogpt-bench profile e4m3.yaml --batch-sizes 8,16,32,64\n"
        "  nanogpt-bench profile ranges bf16_baseline.yaml --steps 50 --underflow 0.01",
    )
    parser.add_argument("words", nargs="+", metavar="[ranges] CONFIG.yaml", help="a file or a shipped configuration")
    parser.add_argument("--batch-sizes", type=positives, metavar="A,B", help="sequences a batch (default: 8,16,32,64)")
    parser.add_argument("--steps", type=positive, metavar="N", help="steps measured (default: 5 a size; ranges: 50)")
    parser.add_argument("--formats", type=names, metavar="A,B", help="ranges: formats to judge")
    parser.add_argument("--overflow", type=share, metavar="S", help="ranges: share that may saturate (default: 1e-4)")
    parser.add_argument("--underflow", type=share, metavar="S", help="ranges: share that may become 0 (default: 0.01)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for the table as CSV and JSON (default: none)")
    parser.set_defaults(handler=main_profile)
    return parser


def main_profile(args: argparse.Namespace) -> int:
    """Measure batch sizes, or ranges, print the table and write it where a folder is given.

    Raises:
        BenchError: options that don't go together, and settings or a corpus that can't be used.
    """
    from nanogpt_bench.config.settings import find_config, load_settings

    name, ranges = _what(args.words)
    gave_way: list[str] = []
    settings = load_settings(find_config(name), args.overrides, gave_way.append)
    _check_out(args.out, RANGES if ranges else "profile")
    _refuse_processes(settings)
    _check_device(settings)
    if ranges:
        _refuse(args, "goes with profile CONFIG.yaml, not with profile ranges", ("batch_sizes",))
        code = _ranges(settings, args)
    else:
        _refuse(args, "goes with profile ranges", ("formats", "overflow", "underflow"))
        code = _throughput(settings, args)
    for line in gave_way:
        say(line)
    return code


def _what(words: Sequence[str]) -> tuple[str, bool]:
    """The name of the configuration, and whether ranges are asked for."""
    if len(words) == 1 and words[0] != RANGES:
        return words[0], False
    if len(words) == 2 and words[0] == RANGES:
        return words[1], True
    raise BenchError(f"profile {' '.join(words)}: expected CONFIG.yaml, or the word ranges and CONFIG.yaml")


def _refuse(args: argparse.Namespace, why: str, options: Sequence[str]) -> None:
    for option in options:
        if getattr(args, option) is not None:
            raise BenchError(f"--{option.replace('_', '-')} {why}")


def _refuse_processes(settings: Mapping[str, Any]) -> None:
    from nanogpt_bench.setup.parallel import refuse_parallel

    refuse_parallel(settings.get("train.parallel"), "profile")


def _check_device(settings: Mapping[str, Any]) -> None:
    from nanogpt_bench.setup.runtime import check_device

    check_device(str(settings.get("runtime.device")))


def _check_out(out: Path | None, name: str) -> None:
    """Refuse a folder for the tables that is a file, or has others of their names, before any work is done."""
    if out is None:
        return
    if out.exists() and not out.is_dir():
        raise BenchError(f"--out {str(out)!r} is a file; give a folder")
    wrote, table = holds(mapping_with("rows")), out / f"{name}.json"
    refuse_to_replace("--out", table, wrote, "a folder of its own")
    refuse_to_replace("--out", out / f"{name}.csv", lambda _: wrote(table), "a folder of its own")


def _throughput(settings: Mapping[str, Any], args: argparse.Namespace) -> int:
    from nanogpt_bench.config.settings import parse_overrides
    from nanogpt_bench.loop.profile import BATCH_COLUMNS, batch_cells, configs_of, profile_batch_sizes

    if "train.batch_size" in parse_overrides(args.overrides):
        raise BenchError("--train.batch_size is what profile varies; give --batch-sizes")
    sizes = args.batch_sizes or BATCH_SIZES
    configs_of(settings, sizes)  # before a text is prepared
    _prepare(settings)
    rows = profile_batch_sizes(settings, sizes, args.steps or THROUGHPUT_STEPS, say=say)
    print(markdown(BATCH_COLUMNS, [batch_cells(row) for row in rows]), end="")
    write_tables(args.out, "profile", rows)
    return 0 if any(row["tokens_per_s"] is not None for row in rows) else 1


def _ranges(settings: Mapping[str, Any], args: argparse.Namespace) -> int:
    from nanogpt_bench.loop.profile import (
        RANGE_COLUMNS,
        Tolerance,
        merged,
        profile_ranges,
        range_cells,
        read_formats,
    )
    from nanogpt_bench.setup.fits import check_fits

    formats = read_formats(args.formats)
    tolerance = Tolerance(
        OVERFLOW if args.overflow is None else args.overflow, UNDERFLOW if args.underflow is None else args.underflow
    )
    config = float_config(settings)
    check_fits(config)
    _prepare(settings)
    rows = profile_ranges(config, formats, tolerance, args.steps or RANGE_STEPS, say=say)
    print(markdown(RANGE_COLUMNS, [range_cells(row) for row in merged(rows)]), end="")
    write_tables(args.out, "ranges", rows)
    return 0


def float_config(settings: Mapping[str, Any]) -> Resolved:
    """Return the configuration with float weights: as it is, or AdamW under autocast (in float32 if asked for)."""
    from nanogpt_bench.config.rules import float_rule, reference_settings
    from nanogpt_bench.config.settings import build_config
    from nanogpt_bench.setup.resolve import resolve
    from nanogpt_bench.sweep.axes import assemble

    given = assemble({}, settings)
    config = resolve(build_config(given))
    if config.model.storage == "float32":
        return config
    return resolve(build_config(reference_settings(given, {"rule": float_rule(config.train.precision)})))


def _prepare(settings: Mapping[str, Any]) -> None:
    from nanogpt_bench.config.schema import DEFAULT_DATA_DIR
    from nanogpt_bench.data.stdlib import prepare_default

    prepare_default(str(settings.get("data.dir", DEFAULT_DATA_DIR)))


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table whose columns are padded, the first to the left and the others to the right.

    >>> print(markdown(("a", "bb"), [("x", "1")]), end="")
    | a | bb |
    |---|---:|
    | x |  1 |
    """
    widths = [max(len(line[place]) for line in (header, *rows)) for place in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(w) if not i else cell.rjust(w) for i, (cell, w) in enumerate(zip(cells, widths, strict=True))
        ]
        return f"| {' | '.join(padded)} |"

    rule = "|" + "|".join("-" * (w + 2) if not i else "-" * (w + 1) + ":" for i, w in enumerate(widths)) + "|"
    return "\n".join([line(header), rule, *map(line, rows)]) + "\n"


def write_tables(out: Path | None, name: str, rows: Rows) -> None:
    """Write NAME.json and NAME.csv into `out`, if there is one; mappings and lists are one column each entry."""
    if out is None:
        return
    from nanogpt_bench.system.files import write_text

    out.mkdir(parents=True, exist_ok=True)
    write_text(out / f"{name}.json", json.dumps({"rows": rows}, indent=1) + "\n")
    flat = [_flat(row) for row in rows]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(key for row in flat for key in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    write_text(out / f"{name}.csv", text.getvalue())


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, Mapping):
            flat |= {f"{key}/{name}": entry for name, entry in value.items()}
        else:
            flat[key] = " ".join(value) if isinstance(value, list) else value
    return flat
