"""Read a folder of floats, or of one byte per weight, with its side file."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fp8manifold._base.blocks import Index, indices_of_pieces
from fp8manifold._doors.grids import part_within, turned
from fp8manifold._doors.published import DTYPES_IN_FILES
from fp8manifold._doors.side_file import CODES, Content, SideFile, are_equal
from fp8manifold._published.layout import entries_of, places_of
from fp8manifold._published.places import Place
from fp8manifold._published.replace_files import CODES_FILE, INDEX, SIDE_FILE, WEIGHTS_FILE
from fp8manifold.nn._selection import is_conv1d
from fp8manifold.nn._tensor_files import FileTensors, files_of


def has_side_file(folder: str | Path) -> bool:
    """Return whether a folder has a side file."""
    return (Path(folder) / SIDE_FILE).is_file()


def saved_files(folder: Path, side: SideFile) -> list[Path]:
    """Return the files of weights that a side file goes with.

    Raises:
        ValueError: codes beside weights of another save.
        FileNotFoundError: no weights.
    """
    if side.content is not Content.CODES:
        return files_of(folder)
    for name in (WEIGHTS_FILE, INDEX):
        if (folder / name).is_file():
            raise ValueError(
                f"{str(folder)!r} has {CODES_FILE!r} and {name!r}, so one of them is from another "
                f"save: remove {name!r} to read codes, or {CODES_FILE!r} and {SIDE_FILE!r} to read "
                "floats"
            )
    return [folder / CODES_FILE]


class SavedWeights:
    """The weights of a folder, as the state of a quantised model.

    Attributes:
        side: its side file.
        tensors: of its other files.
        device: where codes go, one weight at a time.
    """

    def __init__(self, side: SideFile, tensors: FileTensors, device: Any = "cpu") -> None:
        self.side = side
        self._tensors = tensors
        self._device = device
        self._places: dict[str, Place] = {}
        self._names_at: dict[str, list[str]] = {}

    def find(self, model: nn.Module) -> None:
        """Look for the place of every tensor in a float model without values.

        Raises:
            ValueError: a tensor without a place, or a weight without a tensor.
        """
        if self.side.content is Content.CODES:
            self._find_codes(model)
        else:
            shapes = {name: self._tensors.header(name).shape for name in self._tensors.names()}
            self._places = places_of(model, shapes)
        for name in self._tensors.names():
            if name not in self._places:
                raise ValueError(f"the model has no place for {name!r} of the files")
        for name, place in self._places.items():
            self._names_at.setdefault(place.target, []).append(name)
        for name in self.side.names:
            if name not in self._names_at:
                raise ValueError(f"the files lack {name!r}, which {SIDE_FILE!r} has")

    def _find_codes(self, model: nn.Module) -> None:
        code_names = {name + CODES: name for name in self.side.names}
        entries = entries_of(model)
        for name in self._tensors.names():
            target = code_names.get(name, name)
            if target in entries or target in self.side.tensors:
                self._places[name] = Place(target)

    def state(self, model: nn.Module) -> dict[str, Any]:
        """Return the state for the model of :meth:`find`, weights in codes as parts.

        Other floats are as files have them: transformers converts them by itself.
        """
        entries = entries_of(model)
        in_codes = set(self.side.names)
        state = self._own_tensors()
        for target, names in self._names_at.items():
            if target in in_codes:
                codes = self._codes(model, target, entries[target])
                parts = self.side.parts_of(target, codes)
                # Names of files may be those of another version of the class.
                is_whole_weight = target.endswith("weight") and len(names) == 1
                key = names[0].removesuffix(CODES) if is_whole_weight else target
                state |= {key + name.removeprefix(target): part for name, part in parts.items()}
            else:
                state |= {name: self._tensors.part(name) for name in names}
        return state

    @torch.no_grad()
    def put_dtypes_back(self, model: nn.Module) -> None:
        """Give a model's floats the dtypes of the files, and the values in them.

        Transformers reads all of them in one dtype, which may round some.
        """
        entries = entries_of(model)
        in_codes = set(self.side.names)
        for target, names in self._names_at.items():
            entry = entries.get(target)
            if target in in_codes or entry is None or not entry.is_floating_point():
                continue
            if all(self._dtype_in_file(name) is entry.dtype for name in names):
                continue
            values = self._values(target, entry)
            if values.is_floating_point() and values.dtype is not entry.dtype:
                entry.data = values.to(entry.device, copy=True)
            self._tensors.was_read(values.nbytes)

    def _dtype_in_file(self, name: str) -> torch.dtype | None:
        return DTYPES_IN_FILES.get(self._tensors.header(name).dtype)

    def _own_tensors(self) -> dict[str, Any]:
        """Return what quantised layers have beside their weights."""
        in_codes: set[str] = set()
        for name in self.side.names:
            in_codes.update(name + suffix for suffix in self.side.suffixes)
        return {name: value for name, value in self.side.tensors.items() if name not in in_codes}

    def _codes(self, model: nn.Module, target: str, entry: Tensor) -> Tensor:
        """Return the codes of a weight: those of its floats, or of the file."""
        if self.side.content is Content.CODES:
            header = self._tensors.header(self._names_at[target][0])
            if DTYPES_IN_FILES.get(header.dtype) is not torch.uint8:
                raise ValueError(f"the codes of {target!r} are {header.dtype}, not U8")
            codes = torch.empty(header.shape, dtype=torch.uint8, device=self._device)
            for part, values in self._pieces(target, is_turned=False):
                codes[part] = values
            return codes
        owner = model.get_submodule(target.rpartition(".")[0])
        is_turned = target in self.side.turned or is_conv1d(owner)
        shape = tuple(entry.mT.shape if is_turned else entry.shape)
        grid = self.side.grid(target, shape, self._device)
        codes = torch.empty(shape, dtype=torch.uint8, device=self._device)
        for part, values in self._pieces(target, is_turned):
            codes[part] = grid.codes(values, part)
        self.side.put_exceptions(target, codes, grid.format)
        for part, values in self._pieces(target, is_turned):
            if not are_equal(grid.values(codes[part], part, values.dtype), values):
                raise ValueError(
                    f"{target!r} was changed since it was saved with {SIDE_FILE!r}: to read its "
                    "floats as they are now, remove that file"
                )
        return codes

    def _pieces(self, target: str, is_turned: bool) -> Iterator[tuple[Index, Tensor]]:
        """Yield the floats of a weight, some rows at a time, and their part of its codes.

        The memory of rows is given back when the next ones are asked for.
        """
        names = self._names_at[target]
        if not self._places[names[0]].index:
            # Others are of tied weights.
            names = names[:1]
        for name in names:
            values = self._tensors.read(name)
            for index in indices_of_pieces(values.shape):
                part = part_within(self._places[name].index, index)
                piece = values[index]
                on_device = piece.to(self._device)
                if is_turned:
                    yield turned(part), on_device.mT
                else:
                    yield part, on_device
                del on_device
                self._tensors.was_read_up_to(values, piece)
            self._tensors.was_read(values.nbytes)

    def _values(self, target: str, entry: Tensor) -> Tensor:
        """Return the floats of an entry, put together from the tensors of files."""
        names = self._names_at[target]
        if not self._places[names[0]].index:
            return self._tensors.read(names[0])
        dtype = self._tensors.read(names[0]).dtype
        # Transformers makes tensors without values while it makes the model.
        values = torch.empty(tuple(entry.shape), dtype=dtype, device="cpu")
        for name in names:
            part = self._tensors.read(name)
            # Parts of one parameter may have been written in two dtypes.
            values = values.to(torch.promote_types(values.dtype, part.dtype))
            values[self._places[name].index] = part.to(values.dtype)
        return values


class SavedReader:
    """Gives transformers the state of a saved folder while it makes a model.

    Attributes:
        keeps_dtypes: whether weights have the dtypes that they were saved in.
        floats: the state, once the model is known.
        reads_parts: whether the state has weights as parts, which transformers puts in.
    """

    reads_parts = True

    def __init__(self, weights: SavedWeights, *, keeps_dtypes: bool = False) -> None:
        self._weights = weights
        self.keeps_dtypes = keeps_dtypes
        self.floats: dict[str, Any] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> "SavedReader":
        """Return the reader itself: settings are copied, and files are not."""
        return self

    def wants(self, name: str) -> bool:
        """Return False: no tensor that transformers reads becomes codes."""
        return False

    def begin(self, model: Any) -> None:
        """Read the state for a float model without values."""
        self._weights.find(model)
        self.floats |= self._weights.state(model)

    def finish(self, model: Any) -> None:
        """Let go of the state."""
        self.floats.clear()
        if self.keeps_dtypes:
            self._weights.put_dtypes_back(model)
