"""The inside of a child that runs one command line of the bench.

A callback hears of what it does to files.
"""

import os
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

# What packages announce at import is not what these tests are about.
warnings.simplefilter("ignore")

#: called before an operation that changes a file or folder, or makes it durable: the
#: operation's name and the path
BeforeOperation = Callable[[str, str], None]
#: exit code of a command that ended with an exception, as no command of the bench does
CRASHED = 70

#: audit events of such operations: where their arguments have the path, and the folder
#: it is relative to
_EVENTS = {
    "open": (0, None),
    "os.mkdir": (0, 2),
    "os.rename": (1, 3),
    "os.remove": (0, 1),
    "os.rmdir": (0, 1),
}
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


def command(
    folder: str, words: Sequence[str], before_operation: BeforeOperation | None = None
) -> NoReturn:
    """Run a command line of the bench in `folder`, and end with its exit code.

    Its output goes to output.txt.
    """
    os.chdir(folder)
    _redirect("output.txt")
    torch.set_num_threads(1)
    if before_operation is not None:
        watch_files(before_operation)
    from nanogpt_bench.cli import main

    try:
        code = main(list(words))
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = CRASHED
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _redirect(name: str) -> None:
    output = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)


def watch_files(before_operation: BeforeOperation) -> None:
    """Call `before_operation` before every such operation of this process from now on.

    Writes are done in two halves.
    """
    fsync, write = os.fsync, os.write

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in _EVENTS and _changes(event, arguments):
            before_operation(event.removeprefix("os."), _path(arguments, *_EVENTS[event]))

    def sync(file: Any) -> None:
        before_operation("fsync", _name_of(file if isinstance(file, int) else file.fileno()))
        fsync(file)

    def write_in_halves(file: int, data: Any) -> int:
        half, path = len(data) // 2, _name_of(file)
        before_operation("write", path)
        count = write(file, data[:half])
        if count < half:
            return count
        before_operation("write", path)
        return count + write(file, data[half:])

    sys.addaudithook(hook)
    os.fsync, os.write = sync, write_in_halves


def _changes(event: str, arguments: tuple[Any, ...]) -> bool:
    if not isinstance(arguments[_EVENTS[event][0]], str | os.PathLike):
        return False  # a descriptor, or bytes
    return event != "open" or bool((arguments[2] or 0) & _WRITING)


def _path(arguments: tuple[Any, ...], path: int, folder: int | None) -> str:
    below = arguments[folder] if folder is not None else -1
    name = os.fspath(arguments[path])
    return name if below in (-1, None) else os.path.join(_name_of(below), name)


def _name_of(file: int) -> str:
    return os.readlink(f"/proc/self/fd/{file}")


def below_checkpoints(path: str) -> str | None:
    """Return a path relative to a run's folder of checkpoints.

    "." is the folder itself, None a path elsewhere.
    """
    parts = Path(path).parts
    return str(Path(*parts[parts.index("checkpoints") + 1 :])) if "checkpoints" in parts else None


class Record:
    """Writes down what happens to the checkpoints, a line an operation."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self, name: str, path: str) -> None:
        place = below_checkpoints(path)
        if place is not None:
            append(self._path, f"{name} {place}")


class DieBefore:
    """Kill this process before the operation on checkpoints of number `index`.

    Numbers begin at 0, and the operation is written down.
    """

    def __init__(self, index: int, note: Path) -> None:
        self._left, self._note = index, note

    def __call__(self, name: str, path: str) -> None:
        place = below_checkpoints(path)
        if place is None:
            return
        if self._left == 0:
            append(self._note, f"{name} {place}")
            os.kill(os.getpid(), signal.SIGKILL)
        self._left -= 1


def append(path: Path, line: str) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(file, f"{line}\n".encode())
    os.close(file)
