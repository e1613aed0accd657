"""What a folder has, found by its names and headers: no tensor is read."""

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from fp8manifold._base.checks import import_optional
from fp8manifold._doors.saved_folder import has_side_file
from fp8manifold._doors.side_file import Content, read_side_file
from fp8manifold._published.find_weights import may_be_weight
from fp8manifold._published.layout import CONFIG
from fp8manifold._published.replace_files import CODES_FILE, SIDE_FILE
from fp8manifold.nn._tensor_files import FileTensors, files_of

_GGUF: Final = ".gguf"
_PICKLES: Final = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_DOWNLOADED: Final = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", SIDE_FILE)
"""Files of a repository that are downloaded: weights, settings and a tokenizer's."""


class FolderKind(StrEnum):
    """What a folder has, as messages and the log call it."""

    FLOATS = "floats"
    PUBLISHED = "codes in a published layout"
    SAVED = "a model saved by fp8manifold"
    #: Its save_pretrained after `huggingface.attach`.
    ATTACHED = "a model attached and saved by fp8manifold"
    GGUF = "a GGUF file"


@dataclass(frozen=True)
class Folder:
    """A folder, or a file of one, and what it has.

    Attributes:
        path: of the folder.
        kind: what it has.
        file: the name of the file to read, for GGUF.
        size: bytes of the files of weights.
    """

    path: Path
    kind: FolderKind
    file: str
    size: int


def found_folder(
    name: str | Path, hub: Mapping[str, Any], subfolder: str = "", gguf_file: str | None = None
) -> Folder:
    """Return what a folder has, or a model on the Hub, which is downloaded.

    Args:
        name: a folder, a GGUF file, or a model's name on the Hub.
        hub: options of the download.
        subfolder: inside it.
        gguf_file: the name of a GGUF file inside it.

    Raises:
        FileNotFoundError: no such folder or model, or one without weights.
        ValueError: several GGUF files and none chosen.
    """
    path = Path(name)
    if path.is_file() and path.suffix == _GGUF:
        return _gguf_folder(path.parent, path.name)
    folder = _folder_of(path, str(name), hub, gguf_file) / subfolder
    if not folder.is_dir():
        raise FileNotFoundError(f"{str(name)!r} has no folder {subfolder!r}")
    if gguf_file is not None:
        return _gguf_folder(folder, gguf_file)
    if has_side_file(folder):
        return _saved_folder(folder)
    if any(folder.glob("*.safetensors")):
        return _folder_of_safetensors(folder)
    if any((folder / pickle).is_file() for pickle in _PICKLES):
        size = sum(path.stat().st_size for path in folder.glob("pytorch_model*.bin"))
        return Folder(folder, FolderKind.FLOATS, "", size)
    files = sorted(path.name for path in folder.glob(f"*{_GGUF}"))
    if len(files) > 1:
        raise ValueError(
            f"{str(name)!r} has {len(files)} GGUF files: give one by gguf_file=, such as "
            f"{files[0]!r}"
        )
    if files:
        return _gguf_folder(folder, files[0])
    raise FileNotFoundError(
        f"{str(name)!r} has no weights: *.safetensors, pytorch_model.bin or *.gguf"
    )


def _folder_of(path: Path, name: str, hub: Mapping[str, Any], gguf_file: str | None) -> Path:
    """Return a local folder, or the one that a model of the Hub is downloaded to."""
    if path.is_dir():
        return path.resolve()
    library = import_optional("huggingface_hub", "hf", "load")
    patterns = [*_DOWNLOADED] if gguf_file is None else ["*.json", gguf_file]
    try:
        return Path(library.snapshot_download(name, allow_patterns=patterns, **hub))
    except (OSError, ValueError) as error:
        # of a bad name and of the network
        reason = str(error).partition("\n")[0]
        raise FileNotFoundError(
            f"{name!r} is no folder, and no model on the Hugging Face Hub: {reason}"
        ) from error


def _gguf_folder(folder: Path, file: str) -> Folder:
    path = folder / file
    if not path.is_file():
        raise FileNotFoundError(f"{str(folder)!r} has no file {file!r}")
    return Folder(folder, FolderKind.GGUF, file, path.stat().st_size)


def _saved_folder(folder: Path) -> Folder:
    content = read_side_file(folder).content
    paths = [folder / CODES_FILE] if content is Content.CODES else files_of(folder)
    return Folder(folder, FolderKind.SAVED, "", _size_of([*paths, folder / SIDE_FILE]))


def _folder_of_safetensors(folder: Path) -> Folder:
    paths = files_of(folder)
    with closing(FileTensors(paths)) as tensors:
        names = tensors.names()
        dtypes = {name: tensors.header(name).dtype for name in names}
    kind = FolderKind.FLOATS
    if any(name.endswith("_traits") for name in names):
        kind = FolderKind.ATTACHED
    elif any(may_be_weight(name, dtype, dtypes) for name, dtype in dtypes.items()):
        kind = FolderKind.PUBLISHED
    return Folder(folder, kind, "", _size_of(paths))


def _size_of(paths: list[Path]) -> int:
    return sum(path.stat().st_size for path in paths if path.is_file())


def check_has_settings(folder: Folder) -> None:
    """Refuse a folder without the settings of a model of transformers."""
    if folder.kind is not FolderKind.GGUF and not (folder.path / CONFIG).is_file():
        raise FileNotFoundError(
            f"{str(folder.path)!r} has no {CONFIG}: give the folder of a transformers model, or "
            "read float weights into a model of your own with fm.load_quantized"
        )
