"""Files that a model of floats is read from, looked at before a tensor is: codes in them are refused by name."""

from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path

import torch
from torch import Tensor, nn

from fp8manifold.nn._parts import is_scale, refuse_codes, scale_of
from fp8manifold.nn._tensor_files import Source, dtypes_in, files_of

Dtypes = Mapping[str, torch.dtype | str]


def check_floats(model: nn.Module, source: Source) -> None:
    """Refuse files that hold codes where a model has float weights, which transformers alone reads as numbers.

    Those are float8 and integers, whether or not their scales lie beside them.  ``from_pretrained`` with
    :func:`quantization_config` asks this itself, and other readers of this library refuse codes in the same words.

    Args:
        model: with or without values.
        source: a file, several, or the folder they are in, as in :func:`fp8manifold.load_quantized`.

    Raises:
        ValueError: names the tensor, its file, its dtype and its scales.
        FileNotFoundError: a folder without such files.
        ImportError: safetensors is missing.

    Example:
        >>> from fp8manifold.huggingface import check_floats
        >>> check_floats(model, "DeepSeek-V3")  # doctest: +SKIP
        Traceback (most recent call last):
        ValueError: model.layers.0.mlp.down_proj.weight of 'model-00001-of-000163.safetensors' holds codes (F8_E4M3), at
        the scales of 'model.layers.0.mlp.down_proj.weight_scale_inv', which are not read: weights are read from ...
    """
    start = f"{getattr(model, 'base_model_prefix', '')}."
    are_floats: dict[str, bool] = {}
    for name, value in model.state_dict().items():  # a file may be that of the base, or of a model that has it as one
        are_floats |= dict.fromkeys((name.removeprefix(start), start + name, name), value.is_floating_point())
    for file in map(str, files_of(source)):
        _check(Path(file).name, dtypes_in(file) if file.endswith(".safetensors") else _pickled(file), are_floats)


def _pickled(file: str) -> dict[str, torch.dtype]:
    """What the tensors of another file are, as transformers reads it."""
    read = import_module("transformers.modeling_utils").load_state_dict
    return {name: value.dtype for name, value in read(file, map_location="meta").items() if isinstance(value, Tensor)}


def _check(file: str, dtypes: Dtypes, are_floats: Mapping[str, bool]) -> None:
    """Raise ValueError for the first tensor that holds codes where the model has floats.

    What the model does not have, or under a name that transformers gives it as it reads, may hold integers (masks,
    positions), unless it is called a weight or has scales.
    """
    for name, dtype in dtypes.items():
        if are_floats.get(name, _may_be_weight(name, dtype, dtypes)):
            refuse_codes(name, dtype, dtypes, file)


def _may_be_weight(name: str, dtype: torch.dtype | str, others: Iterable[str]) -> bool:
    in_float8 = str(dtype).removeprefix("torch.").lower().startswith(("f8", "float8"))
    entry = name.rpartition(".")[2]
    return in_float8 or entry.endswith("weight") or (not is_scale(entry) and scale_of(name, others) is not None)
