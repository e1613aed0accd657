"""Sources that weights are read from, in memory or in files.

The memory of files is given back once they are read. A page of a mapped file counts as
memory of the process from its first reading until it is given back.
"""

import ctypes
import json
import mmap
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from fp8manifold._base.checks import import_optional
from fp8manifold._published import Header, quantization_of, stored_weights
from fp8manifold._published.find_weights import is_marker, may_be_weight, refuse_codes
from fp8manifold._published.replace_files import INDEX, WEIGHTS_FILE, indexed_names

_MAPPINGS: Final = Path("/proc/self/maps")
#: For each page of the process's memory 64 bits, which say where it is.
_PAGES: Final = Path("/proc/self/pagemap")
_BYTES_PER_PAGE_ENTRY: Final = 8
_ENTRIES_AT_ONCE: Final = 2**16
_IS_PRESENT: Final = np.uint64(2**63)
_IS_SWAPPED: Final = np.uint64(2**62)
_IS_OF_FILE: Final = np.uint64(2**61)
#: The advice of ``madvise`` that gives pages back.
_DONTNEED: Final = 4
#: Memory is given back whenever so many bytes, or such a part of the files, were read:
#: it takes milliseconds.
_FEWEST_BYTES: Final = 2**22
_RELEASES_PER_READ: Final = 128
Source = str | Path | Iterable[str | Path]


class MappedFiles:
    """Files that are mapped from now on, privately, and only read."""

    def __init__(self, paths: Iterable[str | Path]) -> None:
        self._paths = {os.path.realpath(path) for path in paths}
        self._earlier_mappings = {address for address, _ in self._mapped()}
        self._bytes_read = 0
        self._bytes_at_once = max(
            _FEWEST_BYTES, sum(os.path.getsize(path) for path in self._paths) // _RELEASES_PER_READ
        )

    def was_read(self, size: int) -> None:
        """Count bytes that nobody needs any more.

        Memory is given back once there are enough of them.
        """
        self._bytes_read += size
        if self._bytes_read >= self._bytes_at_once:
            self.give_back()

    def give_back(self) -> None:
        """Give back the pages of the files' mappings, except earlier ones.

        A mapping that was written to stays: the file lacks its pages.
        """
        self._bytes_read = 0
        if sys.platform != "linux":
            return
        for address, length in self.later_mappings():
            if not _is_changed(address, length):
                _give_back_pages(address, length)
        # of glibc, which would keep what was freed between tensors that live on
        library = ctypes.CDLL(None)
        if hasattr(library, "malloc_trim"):
            library.malloc_trim(ctypes.c_size_t(0))

    def later_mappings(self) -> list[tuple[int, int]]:
        """Return address and length of the mappings that are later than this was made."""
        return [place for place in self._mapped() if place[0] not in self._earlier_mappings]

    def _mapped(self) -> Iterator[tuple[int, int]]:
        """Yield address and length of the files' mappings, where the system says so."""
        if sys.platform != "linux" or not self._paths:
            return
        try:
            lines = _MAPPINGS.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return
        # 7f00-7f80 r--p 00000000 08:01 42   /folder/model.safetensors
        for line in lines:
            words = line.split(maxsplit=5)
            if len(words) > 5 and words[5] in self._paths:
                start, end = (int(part, 16) for part in words[0].split("-"))
                yield start, end - start


def _is_changed(address: int, length: int) -> bool:
    """Return whether a private mapping was written to, or nobody can say.

    The page that is written to is a copy of the file's, which the process owns.
    """
    page_size = mmap.PAGESIZE
    first, end = address // page_size, -(-(address + length) // page_size)
    try:
        with _PAGES.open("rb", buffering=0) as pages:
            pages.seek(_BYTES_PER_PAGE_ENTRY * first)
            for start in range(first, end, _ENTRIES_AT_ONCE):
                count = min(_ENTRIES_AT_ONCE, end - start)
                entries = np.frombuffer(pages.read(_BYTES_PER_PAGE_ENTRY * count), np.uint64)
                is_there = entries & (_IS_PRESENT | _IS_SWAPPED) != 0
                if (is_there & (entries & _IS_OF_FILE == 0)).any():
                    return True
    except OSError:
        return True
    return False


def _give_back_pages(address: int, length: int) -> None:
    """Give back pages of a file, which is read again where they are needed."""
    ctypes.CDLL(None).madvise(
        ctypes.c_void_p(address), ctypes.c_size_t(length), ctypes.c_int(_DONTNEED)
    )


class GivenTensors:
    """Tensors of a mapping, which may make each when it is asked for."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self._tensors = tensors

    def names(self) -> list[str]:
        return list(self._tensors)

    def known(self, name: str) -> tuple[tuple[int, ...] | None, torch.dtype | str | None, str]:
        """Return shape and dtype, None before a tensor is made, and its file's name."""
        if not isinstance(self._tensors, dict):
            return None, None, ""
        value = self.read(name)
        return tuple(value.shape), value.dtype, ""

    def read(self, name: str) -> Tensor:
        value = self._tensors[name]
        if not isinstance(value, Tensor):
            raise TypeError(f"{name!r} has type {type(value).__name__}: a state dict holds tensors")
        return value.detach()

    def was_read(self, size: int) -> None:
        """Count nothing: the memory belongs to the caller."""

    def close(self) -> None:
        """Close nothing."""


class FileTensors:
    """Tensors of safetensors files, mapped into memory; each is pages of a file."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._opened = ExitStack()
        self._places: dict[str, tuple[Path, Any]] = {}
        # Address and length of the files' mappings, which stay while the files are open.
        self._mappings: list[tuple[int, int]] = []
        paths = list(paths)
        self._pages = MappedFiles(path for path in paths if path.is_file())
        try:
            for path in paths:
                self._open(path)
        except BaseException:
            self.close()
            raise

    def _open(self, path: Path) -> None:
        if not path.is_file():
            raise FileNotFoundError(
                f"{str(path)!r} does not exist: give safetensors files, or the folder they are in"
            )
        try:
            file = self._opened.enter_context(_safe_open(path))
            names = list(file.keys())
        except ImportError:
            raise
        # safetensors raises a class of its own
        except Exception as error:
            raise ValueError(f"{str(path)!r} is not a complete safetensors file: {error}") from None
        for name in names:
            if name in self._places:
                raise ValueError(
                    f"{name!r} is in {str(self._places[name][0])!r} and in {str(path)!r}: give one "
                    f"of them"
                )
            self._places[name] = path, file

    def has(self, name: str) -> bool:
        """Return whether the files have a tensor, whatever it is."""
        return name in self._places

    def names(self) -> list[str]:
        return list(self._places)

    def known(self, name: str) -> tuple[tuple[int, ...], str, str]:
        header = self.header(name)
        return header.shape, header.dtype, header.file

    def read(self, name: str) -> Tensor:
        tensor: Tensor = self._places[name][1].get_tensor(name)
        return tensor

    def header(self, name: str) -> Header:
        path, file = self._places[name]
        part = file.get_slice(name)
        return Header(part.get_dtype(), tuple(part.get_shape()), path.name)

    def part(self, name: str) -> Any:
        return self._places[name][1].get_slice(name)

    def metadata(self, name: str) -> dict[str, str] | None:
        metadata: dict[str, str] | None = self._places[name][1].metadata()
        return metadata

    def was_read(self, size: int) -> None:
        self._pages.was_read(size)

    def was_read_up_to(self, tensor: Tensor, part: Tensor) -> None:
        """Give back the pages of a tensor of :meth:`read` up to the end of a part of it.

        Those before the part were given back already.
        """
        address = tensor.data_ptr()
        if not self._is_mapped(address, tensor.nbytes):
            return
        page_size = mmap.PAGESIZE
        # Pages that are wholly in the tensor: others may have been written to.
        first = -(-address // page_size) * page_size
        first = max(first, part.data_ptr() // page_size * page_size)
        end = (part.data_ptr() + part.nbytes) // page_size * page_size
        if first < end:
            _give_back_pages(first, end - first)

    def _is_mapped(self, address: int, length: int) -> bool:
        """Return whether memory is pages of the files."""
        if not self._mappings:
            self._mappings = self._pages.later_mappings()
        return any(
            start <= address and address + length <= start + mapped_length
            for start, mapped_length in self._mappings
        )

    def close(self) -> None:
        self._mappings = []
        self._opened.close()


class StoredTensors(FileTensors):
    """Tensors of files in which weights may be in codes.

    Such a weight has its model's name, and counts as float32.
    """

    def __init__(self, source: Source) -> None:
        paths = files_of(source)
        super().__init__(paths)
        headers = {name: self.header(name) for name in super().names()}
        config, server_config = None, None
        if paths:
            config = _read_json(paths[0].parent / "config.json")
            server_config = _read_json(paths[0].parent / "hf_quant_config.json")
        self.stored = stored_weights(headers, quantization_of(config or {}, server_config))
        self._hidden: set[str] = set()
        for weight in self.stored.values():
            self._hidden.update((weight.codes, weight.scale, *weight.extras))
        self._hidden.update(name for name in headers if is_marker(name))

    def names(self) -> list[str]:
        return [*self.stored, *(name for name in super().names() if name not in self._hidden)]

    def known(self, name: str) -> tuple[tuple[int, ...], str, str]:
        stored = self.stored.get(name)
        return super().known(name) if stored is None else (stored.shape, "F32", stored.file)


Tensors = GivenTensors | FileTensors


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text("utf-8")) if path.is_file() else None


def _safe_open(path: Path) -> Any:
    return import_optional("safetensors", "hf", "fp8manifold").safe_open(path, framework="pt")


def files_of(source: Source) -> list[Path]:
    """Return the safetensors files that a path, a folder or several paths mean.

    Of a folder, those that transformers reads: the file that its settings name, else
    ``model.safetensors``, else those of the index. Without any of them, all.
    """
    if not isinstance(source, str | Path):
        paths = [Path(path) for path in source]
        if not paths:
            raise ValueError(
                "source names no file: give safetensors files, the folder they are in, or a state "
                "dict"
            )
        return paths
    path = Path(source)
    if path.is_dir():
        names = (path / WEIGHTS_FILE, path / INDEX)
        first = next((name for name in names if name.is_file()), None)
        path = _named_in_settings(path) or first or path
    if not path.is_dir():
        is_index = path.name.endswith(".index.json")
        return [path.parent / name for name in indexed_names(path)] if is_index else [path]
    files = sorted(path.glob("*.safetensors"))
    if files:
        return files
    raise FileNotFoundError(
        f"{str(path)!r} has no *.safetensors: give the folder that has them, or the files"
    )


def _named_in_settings(folder: Path) -> Path | None:
    """Return the file, or index of files, that a model's settings name."""
    try:
        settings = json.loads((folder / "config.json").read_text("utf-8"))
        name = settings["transformers_weights"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return folder / name if isinstance(name, str) and Path(name).name == name else None


def check_floats(model: nn.Module, source: Source) -> None:
    """Refuse files with codes where a model has float weights.

    transformers by itself would read the codes as numbers. :func:`fp8manifold.load`
    makes this check itself.

    Args:
        model: with or without values.
        source: a file, several, or the folder they are in, as in
            :func:`load_into`.

    Raises:
        ValueError: names the tensor, its file, its dtype and its scales.
        FileNotFoundError: a folder without such files.
        ImportError: safetensors is missing.

    Example:
        >>> from fp8manifold.files import check_floats
        >>> check_floats(model, "DeepSeek-V3")  # doctest: +SKIP
        Traceback (most recent call last):
        ValueError: model.layers.0.mlp.down_proj.weight of
        'model-00001-of-000163.safetensors' holds codes (F8_E4M3), with the scales
        'model.layers.0.mlp.down_proj.weight_scale_inv', which fm.load can read: ...
    """
    start = f"{getattr(model, 'base_model_prefix', '')}."
    are_floats: dict[str, bool] = {}
    for name, value in model.state_dict().items():
        # files may name tensors as the model inside this one does, or as one around it
        for file_name in (name.removeprefix(start), start + name, name):
            are_floats[file_name] = value.is_floating_point()
    for path in files_of(source):
        dtypes: Mapping[str, torch.dtype | str]
        if path.suffix == ".safetensors":
            with _safe_open(path) as file:
                dtypes = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118 (no mapping)
        else:
            state = import_module("transformers.modeling_utils").load_state_dict(
                str(path), map_location="meta"
            )
            dtypes = {
                name: value.dtype for name, value in state.items() if isinstance(value, Tensor)
            }
        # what the model lacks, or has under a name that transformers gives it as it
        # reads, may hold integers (masks, positions), unless it is called a weight or
        # has scales
        for name, dtype in dtypes.items():
            if are_floats.get(name, may_be_weight(name, dtype, dtypes)):
                refuse_codes(name, dtype, dtypes, path.name)
