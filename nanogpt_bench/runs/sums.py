"""SHA256SUMS of a run folder: the digests of its files as they were written, for `verify` and for `sha256sum -c`.

Settings and environment are in it from the run's start on, everything else from its end; checkpoints have their own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from nanogpt_bench.system.errors import one_line
from nanogpt_bench.system.files import sha256, write_text
from nanogpt_bench.system.untrusted import Refused, read_text

SUMS = "SHA256SUMS"
AT_START = ("config.yaml", "environment.json")
AT_END = (*AT_START, "metrics.jsonl", "alerts.jsonl", "summary.json")
_LINE = re.compile(r"([0-9a-f]{64})  ([\w.]+)")


def write_sums(run_dir: Path, names: Sequence[str] = AT_END) -> None:
    """Write down the digests of those of a run's files that there are."""
    there = [name for name in names if (run_dir / name).is_file()]
    write_text(run_dir / SUMS, "".join(f"{sha256(run_dir / name)}  {name}\n" for name in there))


def not_as_written(run_dir: Path, *, ended: bool) -> Iterator[tuple[str, str]]:
    """Yield name and what is wrong for every file that is not what was written; nothing of a run without digests.

    Of a run that has not `ended` only what it began with is looked at: the rest grows, or was being written. In one
    that has, every file has a digest.
    """
    try:
        known = _read(run_dir / SUMS)
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        yield SUMS, f"can't be read: {one_line(error)}"
        return
    if ended and (without := [name for name in AT_END if name not in known and (run_dir / name).is_file()]):
        yield SUMS, f"has no sha256 of {', '.join(without)}: it was cut off or changed"
    for name, digest in known.items():
        if not ended and name not in AT_START:
            continue
        path = run_dir / name
        if not path.is_file() or path.is_symlink():
            yield name, f"is no ordinary file, and {SUMS} has its sha256" if path.exists() else "is missing"
        elif sha256(path) != digest:
            yield name, f"does not have the sha256 that {SUMS} gives: it was cut off or changed"


def _read(path: Path) -> dict[str, str]:
    text = read_text(path, 1 << 16, links=False)
    lines = [_LINE.fullmatch(line) for line in text.splitlines()]
    found = {line[2]: line[1] for line in lines if line is not None}
    whole = tuple(found) == AT_START or AT_END[-1] in found
    if not text.endswith("\n") or len(found) < len(lines) or not whole:
        raise Refused("it is cut off or changed")
    return found
