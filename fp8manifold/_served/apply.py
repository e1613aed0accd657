"""Patches written into tensors, or into the files of a folder."""

import shutil
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import Tensor

from fp8manifold._base.checks import import_optional
from fp8manifold._served.patch import Patch, check_fits, check_patch, write_patch
from fp8manifold._served.patch_files import CHANGES_FILE


def apply_changes(target: Mapping[str, Tensor] | str | Path, patches: Iterable[Patch]) -> None:
    r"""Write patches into tensors, or into the weights of a folder: all of them, or none.

    .. math:: t_{i_k} = v_k

    Args:
        target: contiguous tensors by name, on any device, which are changed in place; or
            a folder of safetensors, such as :func:`save` writes and a server reads. A
            file that has changed tensors is written anew and takes the place of the old
            one, so that a reader which has mapped the old one keeps it.
        patches: the result of :meth:`ServedChanges.since_last` or :func:`read_changes`,
            or those of several processes together.

    Bits are copied: NaN and -0 are those of the patch. All files of a folder are written
    before the first is replaced; then each is replaced as a whole, one after the other.
    If that was interrupted, apply the same patches again. Patches do not have the counts
    of stochastic rounding, which :func:`save` writes beside the weights.

    Raises:
        ImportError: safetensors is missing, for a folder.
        FileNotFoundError: a folder without safetensors files.
        TypeError, ValueError: a target or a patch of another type; a patch that fits no
            tensor: another name, shape or dtype, indices out of range or not ascending,
            or fewer values than indices.

    Example:
        >>> import torch
        >>> import fp8manifold as fm
        >>> codes = {"w": torch.zeros(2, 2, dtype=torch.uint8)}
        >>> changed = torch.tensor([3]), torch.tensor([7], dtype=torch.uint8)
        >>> fm.apply_changes(codes, [fm.Patch("w", (2, 2), torch.uint8, *changed)])
        >>> codes["w"].tolist()
        [[0, 0], [0, 7]]
    """
    patches = list(patches)
    for patch in patches:
        check_patch(patch)
    if isinstance(target, str | Path):
        _apply_to_folder(Path(target), patches)
        return
    if not isinstance(target, Mapping):
        raise TypeError(f"target must be tensors by name, or a folder, not {type(target).__name__}")
    for patch in patches:
        check_fits(patch, target.get(patch.name))
    for patch in patches:
        write_patch(patch, target[patch.name])


def _apply_to_folder(folder: Path, patches: list[Patch]) -> None:
    paths = [path for path in sorted(folder.glob("*.safetensors")) if path.name != CHANGES_FILE]
    if not paths:
        raise FileNotFoundError(f"{str(folder)!r} has no weights: *.safetensors")
    patches_by_path = _patches_by_path(paths, patches)
    save_file = import_optional("safetensors.torch", "hf", "apply_changes").save_file
    # All files are written before the first is replaced.
    with tempfile.TemporaryDirectory(prefix=".saving-", dir=folder) as temporary:
        for path, patches_of_file in patches_by_path.items():
            tensors, metadata = _content_of(path)
            for patch in patches_of_file:
                tensors[patch.name] = tensors[patch.name].clone()
                write_patch(patch, tensors[patch.name])
            save_file(tensors, Path(temporary) / path.name, metadata=metadata)
            shutil.copymode(path, Path(temporary) / path.name)
        for path in patches_by_path:
            (Path(temporary) / path.name).replace(path)


def _patches_by_path(paths: list[Path], patches: list[Patch]) -> dict[Path, list[Patch]]:
    """Return the patches of each file that has some; refuse those that fit no tensor."""
    patches_by_path: dict[Path, list[Patch]] = {}
    with ExitStack() as stack:
        files = {path: stack.enter_context(_opened(path)) for path in paths}
        path_of: dict[str, Path] = {}
        for path, file in files.items():
            names = file.keys()
            path_of |= dict.fromkeys(names, path)
        for patch in patches:
            tensor = None
            if patch.name in path_of:
                tensor = files[path_of[patch.name]].get_tensor(patch.name)
            check_fits(patch, tensor)
            patches_by_path.setdefault(path_of[patch.name], []).append(patch)
    return patches_by_path


def _content_of(path: Path) -> tuple[dict[str, Tensor], dict[str, str] | None]:
    with _opened(path) as file:
        names = file.keys()
        return {name: file.get_tensor(name) for name in names}, file.metadata()


def _opened(path: Path) -> Any:
    return import_optional("safetensors", "hf", "apply_changes").safe_open(path, "pt")
