"""Files of models of any class, as state dicts with weights in codes.

Image models are published so: one file, without the settings of a class. ComfyUI has
had two conventions for weights with one scale each::

    layer.weight       float8                        both
    layer.weight_scale float32                       comfy_quant: and layer.comfy_quant,
                                                     a JSON of the format, as bytes
    layer.scale_weight float32                       scaled_fp8: and once scaled_fp8,
                                                     an empty tensor of the codes' dtype
"""

import json
import os
import tempfile
from collections.abc import Mapping
from contextlib import closing
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from fp8manifold._base.checks import check_choice, check_int
from fp8manifold._base.tensor_writer import TensorToWrite, ready, write_tensors
from fp8manifold._encoded.dispatch import FLOAT8
from fp8manifold._encoded.scaled import WriteRounding
from fp8manifold._published.find_weights import COMFY_QUANT, SCALED_FP8
from fp8manifold._published.places import weight_of
from fp8manifold.nn._parts import unflatten
from fp8manifold.nn._tensor_files import Source, StoredTensors
from fp8manifold.random_bits import Draws
from fp8manifold.tensor import FP8Tensor

_METADATA: Final = "_quantization_metadata"
"""A key of a file's header under which ComfyUI has what `comfy_quant` tensors have."""


class StateLayout(StrEnum):
    """A convention of ComfyUI's for weights in codes."""

    COMFY_QUANT = "comfy_quant"
    SCALED_FP8 = "scaled_fp8"


_INPUT_SCALES: Final = {
    StateLayout.COMFY_QUANT: "input_scale",
    StateLayout.SCALED_FP8: "scale_input",
}
"""The names of a layer's input scale."""


def load_state(
    source: Source,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    rounding: WriteRounding = "stochastic",
    draws: Draws = "independent",
    seed: int = 0,
) -> dict[str, Tensor]:
    r"""Read files of any model into a state dict, with weights in codes as they are.

    .. math:: w = s \cdot \operatorname{decode}(code)

    It reads image models with ComfyUI's names for scales (``scale_weight``, or
    ``weight_scale`` with ``comfy_quant``), and all layouts that
    :func:`fp8manifold.load` knows.

    Args:
        source: a safetensors file, several, or their folder.
        dtype: the apparent dtype of weights in codes: bfloat16 or float32.
        device: where the tensors go.
        rounding: how weights in codes are rounded, as in
            :func:`fp8manifold.quantize_model`.
        draws: random draws for weights in codes, as in
            :func:`fp8manifold.quantize_model`.
        seed: key of the random bits, as in :func:`fp8manifold.quantize_model`.

    Returns:
        The tensors by their names in the files. A weight in codes is an
        :class:`fp8manifold.FP8Parameter` by the name that a model has for it, and its scale is part
        of it. Scales of inputs are tensors of their own; markers are left out. NaN and
        -0 are preserved.

    Raises:
        FileNotFoundError, ImportError: no such file; safetensors is missing.
        ValueError: codes that are stored in an unsupported way.

    Example:
        >>> import fp8manifold as fm
        >>> state = fm.files.load_state("flux_fp8_scaled.safetensors")  # doctest: +SKIP
        >>> fm.files.save_state(state, "trained.safetensors", "scaled_fp8")  # doctest: +SKIP

    Source: ComfyUI (QUANTIZATION.md); safetensors.
    """
    check_int("seed", seed, 0, 2**31 - 1)
    state: dict[str, Tensor] = {}
    with closing(StoredTensors(source)) as tensors:
        _refuse_other_formats(tensors)
        for name in tensors.names():
            stored = tensors.stored.get(name)
            if stored is None:
                state[name] = tensors.read(name).to(device, copy=True)
                continue
            state[name] = weight_of(
                name,
                [((), stored)],
                stored.shape,
                tensors.read,
                tensors.was_read,
                device=device,
                dtype=dtype,
                rounding=rounding,
                draws=draws,
                seed=(seed << 32) + len(state),
            )
            for extra in stored.extras:
                state[extra] = tensors.read(extra).to(device, copy=True)
    return state


def _refuse_other_formats(tensors: StoredTensors) -> None:
    """Refuse formats of ComfyUI's whose codes mean something else."""
    known = {str(dtype).removeprefix("torch.") for dtype in FLOAT8.values()}
    for name, stored in tensors.stored.items():
        header = tensors.metadata(stored.codes) or {}
        layer = name.rpartition(".")[0]
        described: Any = json.loads(header.get(_METADATA, "{}")).get("layers", {}).get(layer)
        marker = f"{layer}.{COMFY_QUANT}".lstrip(".")
        if described is None and tensors.has(marker):
            described = json.loads(bytes(tensors.read(marker).tolist()))
        form = None if described is None else described.get("format")
        if form is not None and form not in known:
            raise ValueError(
                f"{name!r} has ComfyUI's format {form!r}, which can't be read: only "
                f"{', '.join(sorted(known))} can"
            )


def save_state(state: Mapping[str, Tensor], path: str | Path, layout: str = "comfy_quant") -> None:
    r"""Write a state dict with weights in codes to a file that ComfyUI reads.

    .. math:: w = s \cdot \operatorname{decode}(code)

    - ``comfy_quant``: codes, ``weight_scale`` in float32, and the format in a tensor
      ``comfy_quant`` beside them: today's convention.
    - ``scaled_fp8``: codes, ``scale_weight`` in float32, and one tensor ``scaled_fp8``
      for the whole file.

    Args:
        state: a module's ``state_dict()``, or of :func:`load_state`. Floats are written
            as they are. Seeds, counts of stochastic rounding and the
            ``weight_remainder`` of a weight in codes are not written. A layer's scale
            of inputs gets the layout's name for it.
        path: the file; an existing one is replaced once the new one is written.
        layout: one of the above.

    NaN and -0 are preserved.

    Raises:
        ValueError: an unknown layout; a weight with more than one scale, or in a format
            that has no dtype of torch; several formats with ``scaled_fp8``; a weight in
            codes whose name does not end in ``weight``; two tensors that would have
            one name in the file.

    Example:
        >>> import fp8manifold as fm
        >>> from tempfile import mkdtemp
        >>> options = {"granularity": "tensor"}
        >>> model = fm.quantize_model(torch.nn.Sequential(torch.nn.Linear(4, 2)), **options)
        >>> path = f"{mkdtemp()}/model.safetensors"
        >>> fm.files.save_state(model.state_dict(), path)
        >>> again = fm.files.load_state(path, dtype=torch.float32)
        >>> torch.equal(again["0.weight"].codes, model[0].weight.codes)
        True

    Source: ComfyUI (QUANTIZATION.md); safetensors.
    """
    check_choice("layout", layout, [str(known) for known in StateLayout])
    chosen = StateLayout(layout)
    tensors: dict[str, TensorToWrite] = {}
    dtypes: set[torch.dtype] = set()
    gathered = unflatten(state)
    for name, value in gathered.items():
        if isinstance(value, FP8Tensor):
            added = _tensors_of_weight(name, value, chosen)
            dtypes.add(FLOAT8[value.format])
        else:
            added = {_name_in(chosen, name, gathered): ready(value)}
        _refuse_taken(name, added, tensors)
        tensors |= added
    if chosen is StateLayout.SCALED_FP8 and dtypes:
        if len(dtypes) > 1:
            raise ValueError(
                "layout='scaled_fp8' has one format for all weights, but the state has "
                f"{len(dtypes)}: take layout='comfy_quant'"
            )
        marker = {SCALED_FP8: ready(torch.empty(0, dtype=dtypes.pop(), device="cpu"))}
        _refuse_taken(SCALED_FP8, marker, tensors)
        tensors |= marker
    _write_whole(Path(path), tensors)


def _refuse_taken(
    name: str, added: Mapping[str, TensorToWrite], tensors: Mapping[str, TensorToWrite]
) -> None:
    """Refuse tensors of a name whose names in the file are taken."""
    for other in added:
        if other in tensors:
            raise ValueError(
                f"the file would have {other!r} twice, once for {name!r}: rename the other tensor "
                "of the state"
            )


def _name_in(layout: StateLayout, name: str, state: Mapping[str, Tensor]) -> str:
    """Return the name of a float in a layout; scales of inputs have one in each."""
    owner, dot, entry = name.rpartition(".")
    is_of_codes = isinstance(state.get(f"{owner}{dot}weight"), FP8Tensor)
    if is_of_codes and entry in _INPUT_SCALES.values():
        return f"{owner}{dot}{_INPUT_SCALES[layout]}"
    return name


def _tensors_of_weight(
    name: str, weight: FP8Tensor, layout: StateLayout
) -> dict[str, TensorToWrite]:
    """Return the tensors of a weight in codes by their names."""
    dtype = FLOAT8.get(weight.format)
    if dtype is None:
        known = ", ".join(fmt.name for fmt in FLOAT8)
        raise ValueError(
            f"{name!r} is in {weight.format.name}, but ComfyUI's files take {known} only"
        )
    if weight.granularity != "tensor":
        raise ValueError(
            f"{name!r} has a scale for each {weight.granularity}, but ComfyUI's files take one for "
            "the tensor: quantise with granularity='tensor'"
        )
    owner, dot, entry = name.rpartition(".")
    if entry != "weight":
        raise ValueError(f"{name!r} is in codes, but ComfyUI's files take codes of 'weight' only")
    tensors = {name: ready(weight.codes.view(dtype))}
    scale = weight.scale.float().reshape(())
    if layout is StateLayout.SCALED_FP8:
        return tensors | {f"{owner}{dot}scale_weight": ready(scale)}
    text = json.dumps({"format": str(dtype).removeprefix("torch.")}).encode()
    marker = torch.tensor(list(text), dtype=torch.uint8, device="cpu")
    return tensors | {
        f"{name}_scale": ready(scale),
        f"{owner}{dot}{COMFY_QUANT}": ready(marker),
    }


def _write_whole(path: Path, tensors: Mapping[str, TensorToWrite]) -> None:
    """Write a file wholly, or leave what was there."""
    handle, temporary_name = tempfile.mkstemp(prefix=".saving-", dir=path.parent)
    os.close(handle)
    temporary = Path(temporary_name)
    try:
        write_tensors(temporary, tensors, {"format": "pt"})
        temporary.chmod(0o644)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
