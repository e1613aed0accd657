"""What a folder has, found by its names and headers: no tensor is read."""

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path, PurePosixPath
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
_DOWNLOADED_PICKLES: Final = "pytorch_model*.bin"
"""Files that are downloaded too where a repository has no safetensors."""


class FolderKind(StrEnum):
    """What a folder has, as messages and the log call it."""

    FLOATS = "floats"
    PUBLISHED = "codes in a published layout"
    SAVED = "a model saved by fp8manifold"
    #: Its `save_pretrained` in earlier versions.
    ATTACHED = "a model saved by an earlier fp8manifold"
    GGUF = "a GGUF file"


@dataclass(frozen=True)
class Folder:
    """A folder, or a file of one, and what it has.

    Attributes:
        path: of the folder.
        kind: what it has.
        file: the name of the file to read, for GGUF.
        size: bytes of the files of weights.
        content: of a saved folder, what stands beside its side file.
    """

    path: Path
    kind: FolderKind
    file: str
    size: int
    content: Content | None = None


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
    if path.is_file():
        raise ValueError(
            f"{str(name)!r} is a file, and load reads folders and GGUF files: read its tensors "
            "with fm.files.load_state, or into a model of your own with fm.files.load_into"
        )
    folder = _folder_of(path, str(name), hub, subfolder, gguf_file)
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
        f"{str(name)!r} has no weights: *.safetensors, pytorch_model.bin or *.gguf; one GGUF file "
        "of a model on the Hub is downloaded by gguf_file="
    )


def _folder_of(
    path: Path, name: str, hub: Mapping[str, Any], subfolder: str, gguf_file: str | None
) -> Path:
    """Return a local folder, or the one that a model of the Hub is downloaded to."""
    if path.is_dir():
        return path.resolve() / subfolder
    if gguf_file is not None:
        file = PurePosixPath(subfolder, gguf_file)
        return _downloaded(name, ["*.json", str(file)], hub) / subfolder
    folder = _downloaded(name, [*_DOWNLOADED], hub) / subfolder
    if folder.is_dir() and not any(folder.glob("*.safetensors")):
        file = PurePosixPath(subfolder, _DOWNLOADED_PICKLES)
        folder = _downloaded(name, [*_DOWNLOADED, str(file)], hub) / subfolder
    return folder


def _downloaded(name: str, patterns: list[str], hub: Mapping[str, Any]) -> Path:
    """Return the folder that those files of a repository are downloaded to."""
    library = import_optional("huggingface_hub", "hf", "load")
    try:
        return Path(library.snapshot_download(name, allow_patterns=patterns, **hub))
    except (OSError, ValueError) as error:
        # of a bad name and of the network
        reason = str(error).partition("\n")[0]
        raise FileNotFoundError(
            f"{name!r} is neither a folder nor a model on the Hugging Face Hub: {reason}"
        ) from error


def _gguf_folder(folder: Path, file: str) -> Folder:
    path = folder / file
    if not path.is_file():
        raise FileNotFoundError(f"{str(folder)!r} has no file {file!r}")
    return Folder(folder, FolderKind.GGUF, file, path.stat().st_size)


def _saved_folder(folder: Path) -> Folder:
    content = read_side_file(folder).content
    paths = [folder / CODES_FILE] if content is Content.CODES else files_of(folder)
    size = _size_of([*paths, folder / SIDE_FILE])
    return Folder(folder, FolderKind.SAVED, "", size, content)


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
            "read its tensors with fm.files.load_state, or into a model of your own with "
            "fm.files.load_into"
        )
