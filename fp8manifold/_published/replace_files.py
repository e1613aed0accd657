"""Write a model's folder over an earlier one, wholly or not at all.

::

    folder/.saving-xyz/     the new files are written here first
    folder/                 then each is moved over the one of its name
                            then earlier weights and indices go, which would be read
                            beside the new files, or instead of them

Files that no save of weights has written, and that readers would take too, are refused
before anything is written.
"""

import json
import os
import re
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

WEIGHTS_FILE: Final = "model.safetensors"
"""The file that every reader takes first, before an index of shards."""
INDEX: Final = "model.safetensors.index.json"
ADAPTER: Final = "adapter_config.json"
SIDE_FILE: Final = "fp8manifold.grids"
"""What brings codes back from floats: of an earlier save, it would be read with new
weights."""
CODES_FILE: Final = "codes.safetensors"
"""One byte per weight, in a file that no float model is read from."""
LARGEST_INDEX: Final = 2**26
"""Bytes; the indices of the largest models have ten million."""
_SHARD: Final = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
_SUFFIX: Final = ".safetensors"
_READ_BESIDE_WEIGHTS: Final = {
    ADAPTER: "an adapter, which transformers would put over the weights",
    "hf_quant_config.json": "settings of other weights in codes, which servers would read",
}
"""Files that readers take beside weights, and what they are."""


@contextmanager
def replacing(folder: Path, names: Collection[str] = (WEIGHTS_FILE,)) -> Iterator[Path]:
    """Give a folder to write a model's files to, which then go to ``folder`` together.

    Of an earlier save, the weights and the index that would be read beside the new
    files, or instead of them, are removed. Nothing is changed where the body raises.

    Args:
        folder: made if it is not there.
        names: of the files to come, as far as they are known; others may come too.

    Raises:
        ValueError: a file of ``folder`` that would change what is read, and that no
            save of weights has written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    earlier = _earlier_weights(folder)
    _check_nothing_else_is_read(folder, names, earlier)
    with tempfile.TemporaryDirectory(prefix=".saving-", dir=folder) as temporary_name:
        temporary = Path(temporary_name)
        yield temporary
        new_files = sorted(path for path in temporary.rglob("*") if path.is_file())
        new_names = {path.relative_to(temporary).as_posix() for path in new_files}
        for path in new_files:
            target = folder / path.relative_to(temporary)
            target.parent.mkdir(parents=True, exist_ok=True)
            # Moved, never written into the old file, which may be mapped.
            path.replace(target)
    for name in earlier - new_names:
        (folder / name).unlink(missing_ok=True)


def indexed_names(index: Path) -> list[str]:
    """Return the files that an index of shards names, all of them in its folder."""
    try:
        size = index.stat().st_size
        if size > LARGEST_INDEX:
            raise ValueError(f"it has {size} bytes, but at most {LARGEST_INDEX} are read")
        document: Any = json.loads(index.read_text(encoding="utf-8"))
        names = sorted(set(document["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{str(index)!r} can't be read as an index of safetensors files: {error!r:.200}"
        ) from None
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise ValueError(f"{str(index)!r} names {name!r}, which is not a file beside it")
    return names


def _earlier_weights(folder: Path) -> set[str]:
    """Return the names of weights and of an index from an earlier save."""
    files = {name for name in os.listdir(folder) if (folder / name).is_file()}
    written = (WEIGHTS_FILE, INDEX, SIDE_FILE, CODES_FILE)
    names = {name for name in files if name in written or _SHARD.fullmatch(name)}
    # An index that can't be read names nothing, and is replaced or removed itself.
    with suppress(ValueError):
        names |= {name for name in indexed_names(folder / INDEX) if name.endswith(_SUFFIX)}
    return names & files


def _check_nothing_else_is_read(
    folder: Path, names: Collection[str], earlier: Collection[str]
) -> None:
    """Refuse files that readers would take too, and that are not to be removed."""
    for name, description in _READ_BESIDE_WEIGHTS.items():
        if name not in names and (folder / name).is_file():
            raise ValueError(
                f"{str(folder)!r} has {name!r}, {description}: remove it, or give another folder"
            )
    if WEIGHTS_FILE in names or INDEX in names:
        return
    for path in sorted(folder.glob(f"*{_SUFFIX}")):
        if path.name not in names and path.name not in earlier:
            raise ValueError(
                f"{str(folder)!r} has {path.name!r}, which would be read with {min(names)!r}: "
                f"remove it, or give another folder"
            )
