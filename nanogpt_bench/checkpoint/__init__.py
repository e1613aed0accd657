"""Writing and reading checkpoints.

A checkpoint is written whole or not at all, and every byte is checked before any of it
is used. It is one file of a run, `checkpoints/step-N.safetensors`, with all tensors;
everything else is in its header. Its SHA-256 is in `step-N.safetensors.sha256` in the
same folder.

To be whole after any interruption, a checkpoint is written as
`.step-N.safetensors.part` and synced, then its digest is written, then it is renamed. A
digest without a checkpoint and a part are litter, which the next start removes.
"""

import hashlib
import os
import shutil
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from nanogpt_bench.checkpoint.format import (
    BrokenCheckpoint,
    CheckpointNotWritten,
    Contents,
    clean,
    compose,
    part_file,
    read_head,
    step_file,
    step_of,
    steps,
    sum_file,
)
from nanogpt_bench.system.errors import BenchError, one_line
from nanogpt_bench.system.untrusted import open_file, read_text


def newest(run_dir: Path) -> tuple[Path | None, list[str]]:
    """Return a run's newest checkpoint that verifies, and what was skipped.

    That is a line for each newer one that does not verify, newest first.
    """
    skipped: list[str] = []
    for step in reversed(steps(run_dir)):
        path = step_file(run_dir, step)
        try:
            verify(path)
        except BrokenCheckpoint as error:
            skipped.append(str(error))
        else:
            return path, skipped
    return None, skipped


def says_best(path: Path) -> bool:
    """Return whether a checkpoint says that its validation loss was the lowest so far.

    Only its header is read.
    """
    try:
        with _errors_named(path), open_file(path, links=False) as file:
            return _read_contents(file, path).facts.get("best") is True
    except BrokenCheckpoint:
        return False


def verify(path: Path) -> None:
    """Check every byte of a checkpoint against its SHA-256.

    It takes little memory, whatever the checkpoint's size.
    """
    read_checkpoint(path, only=())


def read_checkpoint(path: Path, only: Collection[str] | None = None) -> Contents:
    """Return the contents of a checkpoint, after checking all of it.

    `only` names the parts whose tensors are read.
    """
    with _errors_named(path), open_file(path, links=False) as file:
        _check_digest(file, path)
        contents = _read_contents(file, path)
        with safe_open(path, framework="pt") as opened:
            # A safetensors file is no mapping.
            for full_name in opened.keys():  # noqa: SIM118
                part, _, name = full_name.partition("/")
                if only is None or part in only:
                    tensor = opened.get_tensor(full_name).clone()
                    contents.tensors.setdefault(part, {})[name] = tensor
        return contents


def read_sum(path: Path) -> str:
    """Return the SHA-256 in the file beside a checkpoint."""
    with _errors_named(path):
        return read_text(sum_file(path), 500, links=False).partition(" ")[0]


def _read_contents(file: BufferedReader, path: Path) -> Contents:
    file.seek(0)
    contents = read_head(file)
    # A file under another name, such as a copy, may hold any step.
    if step_of(path.name) not in (None, contents.step):
        raise ValueError(
            f"holds step {contents.step}, but its file name gives step {step_of(path.name)}"
        )
    return contents


def _check_digest(file: BufferedReader, path: Path) -> None:
    size = os.fstat(file.fileno()).st_size
    if size > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
        raise ValueError(f"has {size:,} bytes, which do not fit into this machine's memory")
    digest_file = sum_file(path)
    saved_line = read_text(digest_file, 500, links=False)
    digest = hashlib.file_digest(file, "sha256").hexdigest()
    if saved_line != sum_line(digest, path):
        raise ValueError(
            f"has another sha256 than {digest_file.name} gives: one of the two files was cut off "
            "or changed"
        )


def sum_line(digest: str, path: Path) -> str:
    """Return a checkpoint's digest as a line in the format of `sha256sum`."""
    return f"{digest}  {path.name}\n"


@contextmanager
def _errors_named(path: Path) -> Iterator[None]:
    """Turn any error of reading a checkpoint into one line that names it."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or one_line(error)
        if error.filename:
            file_name = Path(error.filename).name
            if file_name != path.name:
                reason = f"{file_name}: {reason}"
        raise BrokenCheckpoint(f"checkpoint {str(path)!r}: {reason}") from None
    except MemoryError:
        raise BrokenCheckpoint(
            f"checkpoint {str(path)!r} does not fit into this machine's memory"
        ) from None
    except (ValueError, SafetensorError, RuntimeError) as error:
        raise BrokenCheckpoint(f"checkpoint {str(path)!r}: {one_line(error)}") from None


def commit_checkpoint(run_dir: Path, contents: Contents, *, keep_last: int) -> Path:
    """Write a checkpoint, remove older ones, and return its file.

    The file is `run_dir`/checkpoints/step-N.safetensors. It is written under another
    name, and renamed once it and its digest are on the disk: if anything fails before,
    earlier checkpoints are unchanged. The `keep_last` newest stay, this one included,
    and the newest whose `facts["best"]` is true. A checkpoint of the same step is
    removed first; those of later steps are left alone.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as run_dir:
        ...     for step in (1, 2, 3):
        ...         facts = {"best": step == 1}
        ...         weights = {"w": torch.ones(2)}
        ...         contents = Contents(step, {"model": weights}, facts=facts)
        ...         path = commit_checkpoint(Path(run_dir), contents, keep_last=1)
        ...     steps(Path(run_dir)), path.name
        ([1, 3], 'step-3.safetensors')

    Raises:
        CheckpointNotWritten: the disk is full, can't be written or fails; unfinished
            files are removed if possible.
        ValueError: `keep_last` below 1, or contents that a file can't hold.
    """
    if keep_last < 1:
        raise ValueError(f"keep_last={keep_last} is not allowed; give 1 or more")
    path = step_file(run_dir, contents.step)
    header, tensors = compose(contents)
    pieces: list[bytes | memoryview] = [header]
    for tensor in tensors:
        pieces.append(tensor.reshape(-1).view(torch.uint8).numpy().data)
    try:
        clean(run_dir)
        if not path.parent.is_dir():
            os.mkdir(path.parent)
            _sync_folder(run_dir)
            _sync_folder(run_dir.parent)
        check_room(path.parent, tensor_bytes(contents) + len(header), "it")
        try:
            _write_checkpoint(path, pieces)
        except BaseException:
            # Removing may fail, too; the next start removes the litter.
            with suppress(OSError):
                clean(run_dir)
            raise
        # This checkpoint is on the disk, and the next commit tries again to prune.
        with suppress(OSError):
            _prune(run_dir, contents.step, keep_last)
    except (OSError, BenchError) as error:
        reason = f"{error.strerror or error}" if isinstance(error, OSError) else str(error)
        raise CheckpointNotWritten(
            f"checkpoint of step {contents.step} can't be written to {str(path.parent)!r}: "
            f"{one_line(reason)}; earlier checkpoints are unchanged"
        ) from None
    return path


def _write_checkpoint(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    digest = _write_file(part_file(path), pieces)
    _remove(path)
    _write_file(sum_file(path), [sum_line(digest, path).encode()])
    os.rename(part_file(path), path)
    _sync_folder(path.parent)


def _remove(path: Path) -> None:
    """Remove a checkpoint, its digest last: without its digest it would look broken."""
    for file in (path, sum_file(path)):
        if file.exists():
            os.unlink(file)


def _prune(run_dir: Path, step: int, keep_last: int) -> None:
    """Remove old checkpoints up to the one of `step`.

    The last `keep_last` and the best stay.
    """
    paths = [step_file(run_dir, number) for number in steps(run_dir) if number <= step]
    old = paths[:-keep_last]
    if not old:
        return
    best = next(filter(says_best, reversed(paths)), None)
    for path in old:
        if path != best:
            _remove(path)


#: bytes written at a time
WRITTEN_AT_A_TIME = 1 << 20


def _write_file(path: Path, pieces: Iterable[bytes | memoryview]) -> str:
    """Write a new file and return the SHA-256 of its bytes, once it is on the disk."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    digest = hashlib.sha256()
    size = 0
    try:
        for piece in pieces:
            rest = memoryview(piece)
            digest.update(rest)
            size += len(rest)
            while len(rest):
                count = os.write(file, rest[:WRITTEN_AT_A_TIME])
                if count <= 0:
                    raise OSError(f"only {count} of {len(rest)} bytes could be written")
                rest = rest[count:]
        os.fsync(file)
        size_on_disk = os.fstat(file).st_size
        if size_on_disk != size:
            raise OSError(f"{size:,} bytes were written, but the file has {size_on_disk:,}")
    finally:
        os.close(file)
    return digest.hexdigest()


def _sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


#: bytes for digests and the file system's bookkeeping
SPARE_BYTES = 1 << 20


def tensor_bytes(contents: Contents) -> int:
    """Return the bytes that a checkpoint's tensors take on disk, without its header."""
    size = 0
    for tensors in contents.tensors.values():
        size += sum(tensor.nbytes for tensor in tensors.values())
    return size


def check_room(folder: Path, needed: int, subject: str) -> None:
    """Refuse `subject` if its `needed` bytes do not fit on the disk of `folder`.

    The folder need not exist yet.
    """
    existing = folder.absolute()
    while not existing.is_dir() and existing != existing.parent:
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    if free < needed + SPARE_BYTES:
        raise BenchError(
            f"{subject} needs {(needed + SPARE_BYTES) / 1e6:,.1f} MB in {str(folder)!r}, but "
            f"{free / 1e6:,.1f} MB are free; make room or choose another folder"
        )
