"""The configuration files that come with the package."""

from __future__ import annotations

from pathlib import Path

from nanogpt_bench.errors import BenchError, nearest

FOLDER = Path(__file__).parent / "configs"


def shipped_configs() -> list[str]:
    """Return the names of the shipped files.

    >>> "e4m3.yaml" in shipped_configs()
    True
    """
    return sorted(path.name for path in FOLDER.glob("*.yaml"))


def find_config(name: str) -> Path:
    """Return the path of a configuration file: `name` itself, or the shipped file of that name.

    >>> find_config("configs/e4m3.yaml").name
    'e4m3.yaml'

    Raises:
        BenchError: neither exists; names the nearest shipped file.
    """
    path = Path(name)
    if path.is_file():
        return path
    last = path.name if path.suffix else f"{path.name}.yaml"
    if path.parent.as_posix() in (".", "configs") and (FOLDER / last).is_file():
        return FOLDER / last
    guess = nearest(last, shipped_configs())
    hint = f"; did you mean {guess!r}?" if guess else ";"
    raise BenchError(f"config {name!r} does not exist{hint} shipped: {', '.join(shipped_configs())}")
