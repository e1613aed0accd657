"""The configuration files that come with the package."""

from __future__ import annotations

from pathlib import Path

from nanogpt_bench.system.errors import BenchError, nearest

FOLDER = Path(__file__).parent.parent / "configs"


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
    return find_shipped(name, FOLDER, "config")


def find_shipped(name: str, folder: Path, kind: str) -> Path:
    """Return the path of a YAML file: `name` itself, or the file of that name in a folder of the package.

    Raises:
        BenchError: neither exists; names the nearest shipped file.
    """
    path = Path(name)
    try:
        if path.is_file():
            return path
    except OSError as error:
        raise BenchError(f"{kind} {name!r} can't be read: {error.strerror or error}") from None
    last = path.name if path.suffix else f"{path.name}.yaml"
    if path.parent.as_posix() in (".", folder.name) and (folder / last).is_file():
        return folder / last
    shipped = sorted(each.name for each in folder.glob("*.yaml"))
    guess = nearest(last, shipped)
    hint = f"; did you mean {guess!r}?" if guess else ";"
    raise BenchError(f"{kind} {name!r} does not exist{hint} shipped: {', '.join(shipped)}")
