"""Sources that weights are read from, in memory or in files, whose memory is given back
once they are read.

A page of a mapped file counts as memory of the process from its first reading until it
is given back.
"""

import ctypes
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from fp8manifold._base.checks import import_optional
from fp8manifold._published import Header, quantization_of, stored_weights
from fp8manifold._published.found import may_be_weight, refuse_codes
from fp8manifold._published.replaced import INDEX, WEIGHTS_FILE, indexed_names

_MAPPINGS: Final = Path("/proc/self/smaps")
_DONTNEED: Final = 4
_EVERY: Final = 2**24
_PARTS: Final = 64
"""Memory is given back whenever so many bytes, or such a part of the files, were read:
it takes milliseconds.
"""
Source = str | Path | Iterable[str | Path]


class MappedFiles:
    """Files that are mapped from now on, privately, and only read."""

    def __init__(self, paths: Iterable[str | Path]) -> None:
        self._paths = {os.path.realpath(path) for path in paths}
        self._before = {address for address, _, _ in self._mapped()}
        self._read = 0
        self._every = max(_EVERY, sum(os.path.getsize(path) for path in self._paths) // _PARTS)

    def was_read(self, size: int) -> None:
        """Count bytes that nobody needs any more, and give memory back once there are
        enough of them.
        """
        self._read += size
        if self._read >= self._every:
            self.give_back()

    def give_back(self) -> None:
        """Give back the pages of mappings made since, except those of one that was
        written to: the file lacks them.
        """
        self._read = 0
        if sys.platform != "linux":
            return
        library = ctypes.CDLL(None)
        for address, length, written in self._mapped():
            if address not in self._before and not written:
                library.madvise(
                    ctypes.c_void_p(address), ctypes.c_size_t(length), ctypes.c_int(_DONTNEED)
                )
        if hasattr(
            library, "malloc_trim"
        ):  # glibc, which keeps what was freed between tensors that live on
            library.malloc_trim(ctypes.c_size_t(0))

    def _mapped(self) -> Iterator[tuple[int, int, bool]]:
        """Address and length of every mapping of one of the files, and whether it was
        written to; Linux alone says.
        """
        if sys.platform != "linux" or not self._paths:
            return
        try:
            lines = _MAPPINGS.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return
        place = None
        for line in lines:
            words = line.split(maxsplit=5)
            if not words[0].endswith(":"):
                place = words[0] if len(words) > 5 and words[5] in self._paths else None
            elif place is not None and words[0] == "Anonymous:":
                start, end = (int(part, 16) for part in place.split("-"))
                yield start, end - start, words[1] != "0"


class GivenTensors:
    """Tensors of a mapping, which may make each when it is asked for."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._given = given

    def names(self) -> list[str]:
        return list(self._given)

    def known(self, name: str) -> tuple[tuple[int, ...] | None, torch.dtype | str | None, str]:
        """Shape and dtype, None before the tensor is made, and the name of its file."""
        if not isinstance(self._given, dict):
            return None, None, ""
        value = self.read(name)
        return tuple(value.shape), value.dtype, ""

    def read(self, name: str) -> Tensor:
        value = self._given[name]
        if not isinstance(value, Tensor):
            raise TypeError(f"{name!r} is of {type(value).__name__}: a state dict has tensors")
        return value.detach()

    def was_read(self, size: int) -> None:
        """Count nothing: the memory belongs to the caller."""

    def close(self) -> None:
        """Close nothing."""


class FileTensors:
    """Tensors of safetensors files, mapped into memory; each is the file's own pages."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._opened = ExitStack()
        self._where: dict[str, tuple[Path, Any]] = {}
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
        except Exception as error:  # safetensors raises a class of its own
            raise ValueError(f"{str(path)!r} is no whole safetensors file: {error}") from None
        for name in names:
            if name in self._where:
                raise ValueError(
                    f"{name!r} is in {str(self._where[name][0])!r} and in {str(path)!r}: give one "
                    f"of them"
                )
            self._where[name] = path, file

    def names(self) -> list[str]:
        return list(self._where)

    def known(self, name: str) -> tuple[tuple[int, ...], str, str]:
        header = self.header(name)
        return header.shape, header.dtype, header.file

    def read(self, name: str) -> Tensor:
        tensor: Tensor = self._where[name][1].get_tensor(name)
        return tensor

    def header(self, name: str) -> Header:
        path, file = self._where[name]
        part = file.get_slice(name)
        return Header(part.get_dtype(), tuple(part.get_shape()), path.name)

    def part(self, name: str) -> Any:
        return self._where[name][1].get_slice(name)

    def metadata(self, name: str) -> dict[str, str] | None:
        said: dict[str, str] | None = self._where[name][1].metadata()
        return said

    def was_read(self, size: int) -> None:
        self._pages.was_read(size)

    def close(self) -> None:
        self._opened.close()


class StoredTensors(FileTensors):
    """Tensors of files in which weights may be in codes: such a one has its model's
    name, and counts as float32.
    """

    def __init__(self, source: Source) -> None:
        paths = files_of(source)
        super().__init__(paths)
        headers = {name: self.header(name) for name in super().names()}
        said = [
            path.parent / name
            for path in paths[:1]
            for name in ("config.json", "hf_quant_config.json")
        ]
        config, of_server = (
            json.loads(path.read_text("utf-8")) if path.is_file() else None for path in said
        )
        self.stored = stored_weights(headers, quantization_of(config or {}, of_server))
        self._hidden = {
            name for each in self.stored.values() for name in (each.codes, each.scale, *each.extras)
        }

    def names(self) -> list[str]:
        return [*self.stored, *(name for name in super().names() if name not in self._hidden)]

    def known(self, name: str) -> tuple[tuple[int, ...], str, str]:
        stored = self.stored.get(name)
        return super().known(name) if stored is None else (stored.shape, "F32", stored.file)


Tensors = GivenTensors | FileTensors


def _safe_open(path: Path) -> Any:
    return import_optional("safetensors", "hf", "load_quantized").safe_open(path, framework="pt")


def files_of(source: Source) -> list[Path]:
    """The safetensors files that a path, a folder or several paths mean.

    Of a folder, those that transformers reads: the file that its settings name, else
    ``model.safetensors``, else those of the index. Without any of them, all.
    """
    if not isinstance(source, str | Path):
        paths = [Path(each) for each in source]
        if not paths:
            raise ValueError(
                "source names no file: give safetensors files, the folder they are in, or a state "
                "dict"
            )
        return paths
    path = Path(source)
    if path.is_dir():
        names = (path / WEIGHTS_FILE, path / INDEX)
        given = _named_in_settings(path)
        first = next((name for name in names if name.is_file()), None)
        path = given or first or path
    if not path.is_dir():
        is_index = path.name.endswith(".index.json")
        return [path.parent / name for name in indexed_names(path)] if is_index else [path]
    if found := sorted(path.glob("*.safetensors")):
        return found
    raise FileNotFoundError(
        f"{str(path)!r} has no *.safetensors: give the folder that has them, or the files"
    )


def _named_in_settings(folder: Path) -> Path | None:
    """The file, or the index of files, that a model's settings name for transformers."""
    try:
        settings = json.loads((folder / "config.json").read_text("utf-8"))
        name = settings["transformers_weights"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return folder / name if isinstance(name, str) and Path(name).name == name else None


def check_floats(model: nn.Module, source: Source) -> None:
    """Refuse files with codes where a model has float weights: transformers by itself
    reads codes as numbers.

    ``from_pretrained`` with :func:`quantization_config` does this itself.

    Args:
        model: with or without values.
        source: a file, several, or the folder they are in, as in
            :func:`fp8manifold.load_quantized`.

    Raises:
        ValueError: names the tensor, its file, its dtype and its scales.
        FileNotFoundError: a folder without such files.
        ImportError: safetensors is missing.

    Example:
        >>> from fp8manifold.huggingface import check_floats
        >>> check_floats(model, "DeepSeek-V3")  # doctest: +SKIP
        Traceback (most recent call last):
        ValueError: model.layers.0.mlp.down_proj.weight of 'model-00001-of-000163.safetensors' holds codes (F8_E4M3), at
        the scales of 'model.layers.0.mlp.down_proj.weight_scale_inv', which fm.load_fp8 reads, and not this: ...
    """
    start = f"{getattr(model, 'base_model_prefix', '')}."
    are_floats: dict[str, bool] = {}
    for (
        name,
        value,
    ) in (
        model.state_dict().items()
    ):  # a file may be that of the base, or of a model that has it as one
        are_floats |= dict.fromkeys(
            (name.removeprefix(start), start + name, name), value.is_floating_point()
        )
    for path in files_of(source):
        dtypes: Mapping[str, torch.dtype | str]
        if path.suffix == ".safetensors":
            with _safe_open(path) as file:
                dtypes = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118 (no mapping)
        else:
            read = import_module("transformers.modeling_utils").load_state_dict(
                str(path), map_location="meta"
            )
            dtypes = {
                name: value.dtype for name, value in read.items() if isinstance(value, Tensor)
            }
        # what the model lacks, or has under a name that transformers gives it as it
        # reads, may hold integers (masks, positions), unless it is called a weight or
        # has scales
        for name, dtype in dtypes.items():
            if are_floats.get(name, may_be_weight(name, dtype, dtypes)):
                refuse_codes(name, dtype, dtypes, path.name)
