"""Find weights in codes among the tensors of a folder, by their headers.

Libraries write one weight under several names::

    DeepSeek                  layer.weight          F8_E4M3     layer.weight_scale_inv
    compressed-tensors        layer.weight          F8_E4M3     layer.weight_scale
    the same, packed          layer.weight_packed   U8          layer.weight_scale
    gpt-oss                   experts_blocks        U8          experts_scales
    ComfyUI                   layer.weight          F8_E4M3     layer.scale_weight

A tensor is taken for codes by its dtype or the end of its name. Its scale has the same
name with another end. The shape of the scale says which weights share one: all, a row,
32 of a row, or a square of 128 x 128. What remains and may change what a weight means
(a second scale, codes without a scale, settings that are not known) is refused by its
name.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

import torch

from fp8manifold._published.stored_weight import (
    EXPONENTS,
    FORMATS,
    SCALES,
    Header,
    StoredWeight,
    scale_shapes,
    unpacked,
)
from fp8manifold.formats import as_format
from fp8manifold.scaling import BLOCK_SIZE, SQUARE_SIZE, StoredGranularity

FLOATS: Final = frozenset(
    {"F64", "F32", "F16", "BF16", torch.float64, torch.float32, torch.float16, torch.bfloat16}
)
"""The dtypes that float weights are read from, as files and as torch name them."""
_WHAT_IS_READ: Final = (
    "fp8manifold reads float8 and packed E2M1, with a positive scale for the tensor, each row, 32 "
    "weights of a row or each square of 128 x 128, in float32, bfloat16, float16 or E8M0"
)
_METHODS: Final = (None, "fp8", "compressed-tensors", "modelopt", "fbgemm_fp8", "mxfp4", "torchao")
_GROUP_SIZES: Final = (
    None,
    -1,
    BLOCK_SIZE,
    [1, BLOCK_SIZE],
    [SQUARE_SIZE, SQUARE_SIZE],
    f"{SQUARE_SIZE}x{SQUARE_SIZE}",
)
"""Sizes of groups and blocks that settings may have.

Which weight has which follows from the shapes of scales.
"""
_PACKED_SUFFIXES: Final = ("_blocks", "_packed", "_qdata")
"""Ends of names of codes that are not the weight's name."""
_SCALE_SUFFIXES: Final = ("_scale_inv", "_scale", "_scales", ".absmax")
"""Ends of names of scales, after the weight's name."""
_BARE_SCALES: Final = ("scale", "scales", "scale_weight", "qscale_weight", "SCB")
"""Names of scales that do not contain the weight's."""
_SECOND_SUFFIXES: Final = ("_scale_2", "_global_scale", "_outer_scale_denominator", "_zero_point")
"""Ends of names of other tensors that a weight's values depend on."""
_ACTIVATION_SCALE: Final = re.compile(
    r"(?P<owner>\w+_)?(input|output|activation|kv|kv_cache|prob|[qkv])_scale(_ub)?|scale_input"
)
"""Names of scales of activations and caches."""
SCALED_FP8: Final = "scaled_fp8"
"""The name of an empty tensor by which ComfyUI knows that a file's weights have scales."""
COMFY_QUANT: Final = "comfy_quant"
"""The end of the names of tensors in which ComfyUI's files say how a layer is stored."""


def quantization_of(
    config: Mapping[str, Any], modelopt: Mapping[str, Any] | None = None
) -> dict[str, Any] | None:
    """Return a model's settings of quantisation, or None.

    Args:
        config: ``config.json``, which may have them in several places.
        modelopt: ``hf_quant_config.json``, which is read if it does not.
    """
    text_config = config.get("text_config") or {}
    for settings, key in (
        (config, "quantization_config"),
        (config, "compression_config"),
        (text_config, "quantization_config"),
    ):
        if settings.get(key):
            return dict(settings[key])
    if modelopt is None:
        return None
    return {"quant_method": "modelopt", **modelopt.get("quantization", {})}


def stored_weights(
    headers: Mapping[str, Header], config: Mapping[str, Any] | None = None
) -> dict[str, StoredWeight]:
    """Return every weight in codes of a folder, by the name that a model has for it.

    Args:
        headers: of all tensors of the folder.
        config: the settings of :func:`quantization_of`. Those that change what codes
            mean are refused.

    Raises:
        ValueError: codes, scales or settings that are not read.
    """
    config = config or {}
    in_squares = any(group.get("block_structure") for group in _settings_with_groups(config))
    weights = {}
    for name, header in headers.items():
        if may_be_weight(name, header.dtype, headers):
            weight = _stored_weight(name, header, headers, in_squares)
            weights[weight.name] = weight
    _check_other_tensors(weights, headers)
    if weights:
        unsupported = _unsupported_setting(config)
        if unsupported:
            codes = next(iter(weights.values())).codes
            raise _refusal(codes, headers[codes], f"by settings with {unsupported}")
    return _with_activation_scales(weights, headers)


def refuse_codes(
    name: str, dtype: torch.dtype | str, others: Collection[str] = (), file: str = ""
) -> None:
    """Raise ValueError unless a tensor holds floats.

    Args:
        name: the tensor from which a float weight is read.
        dtype: as files or as torch name it.
        others: names of the same files.
        file: the name of the tensor's file, for the message.
    """
    if dtype in FLOATS:
        return
    scale = scale_of(name, others)
    if scale:
        scales = f"with the scales {scale!r}, which fm.load can read"
    else:
        scales = f"and {name}_scale is missing"
    of_file = f" of {file!r}" if file else ""
    raise ValueError(
        f"{name}{of_file} holds codes ({dtype}), {scales}: here a weight must be float64, float32, "
        "float16 or bfloat16; decode it and multiply by its scales first"
    )


def may_be_weight(name: str, dtype: torch.dtype | str, others: Collection[str]) -> bool:
    """Return whether a tensor is taken for codes of a weight, by its dtype and name.

    ``others`` are the names of the same files. Masks and positions are no weights.
    """
    entry = name.rpartition(".")[2]
    is_scale = any(word in entry.lower() for word in ("scale", "scb", "absmax"))
    if dtype in FLOATS or is_scale:
        return False
    if _is_short_float(dtype) or entry.endswith(("weight", *_PACKED_SUFFIXES)):
        return True
    return scale_of(name, others) is not None


def is_marker(name: str) -> bool:
    """Return whether a tensor only says how others are stored."""
    return name.rpartition(".")[2] in (SCALED_FP8, COMFY_QUANT)


def _is_short_float(dtype: torch.dtype | str) -> bool:
    """Return whether a dtype, of files or torch, is a float of at most eight bits."""
    name = str(dtype).removeprefix("torch.").lower()
    return re.match(r"f(loat)?[468]", name) is not None and dtype not in FLOATS


def scale_of(name: str, others: Collection[str]) -> str | None:
    """Return the name of a tensor's scale among the names of its files, or None."""
    owner, dot, entry = name.rpartition(".")
    stem = _without_packed_suffix(entry)
    entries = [stem + suffix for suffix in _SCALE_SUFFIXES]
    if stem.endswith("weight"):
        entries += _BARE_SCALES
    for scale_entry in entries:
        if owner + dot + scale_entry in others:
            return owner + dot + scale_entry
    return None


def names_beside(name: str, others: Collection[str]) -> list[str]:
    """Return the other tensors that a weight's values depend on, scales first."""
    owner, dot, entry = name.rpartition(".")
    stem = owner + dot + _without_packed_suffix(entry)
    suffixes = (*_SCALE_SUFFIXES, *_SECOND_SUFFIXES)
    return [stem + suffix for suffix in suffixes if stem + suffix in others]


def _without_packed_suffix(entry: str) -> str:
    for suffix in _PACKED_SUFFIXES:
        if entry.endswith(suffix):
            return entry.removesuffix(suffix)
    return entry


def _refusal(name: str, header: Header, reason: str) -> ValueError:
    return ValueError(
        f"{name} of {header.file!r} holds {header.dtype} of shape {header.shape}, {reason}: "
        f"{_WHAT_IS_READ}"
    )


def _stored_weight(
    name: str, header: Header, headers: Mapping[str, Header], in_squares: bool
) -> StoredWeight:
    """Return a weight by the header of its codes and those beside it.

    Raises:
        ValueError: its scale is missing, or it is stored in a way that is not read.
    """
    if f"{name}_traits" in headers:
        reason = (
            "codes of this library's own states, which load_state_dict and from_pretrained read"
        )
        raise _refusal(name, header, reason)
    scale = scale_of(name, headers)
    if scale is None:
        reason = f"and its scale is missing: neither {name}_scale_inv nor {name}_scale is there"
        raise _refusal(name, header, reason)
    scale_header = headers[scale]
    at_scale = f"at {scale} of {scale_header.dtype} and shape {scale_header.shape}"
    second_scales = [other for other in names_beside(name, headers) if other != scale]
    if second_scales:
        raise _refusal(name, header, f"{at_scale}, and at {second_scales[0]}")
    if name.endswith("_qdata") and scale_header.dtype in EXPONENTS:
        # Only the file's metadata would say in which order, and no header.
        reason = f"{at_scale}, which torchao may have written in the order of a kernel"
        raise _refusal(name, header, reason)
    is_of_comfy = f"{name.rpartition('.')[0]}.{COMFY_QUANT}".lstrip(".") in headers
    if is_of_comfy and scale_header.dtype in EXPONENTS:
        reason = f"{at_scale}, which ComfyUI writes in the order of a kernel"
        raise _refusal(name, header, reason)
    packed = unpacked(header, scale_header)
    if packed:
        fmt: Any = as_format("E2M1")
        shape, code_shape = packed
    else:
        fmt = FORMATS.get(header.dtype)
        shape = code_shape = header.shape
    granularity = _granularity(shape, scale, scale_header, in_squares)
    if fmt is None or scale_header.dtype not in SCALES or granularity is None:
        raise _refusal(name, header, at_scale)
    return StoredWeight(
        name=_name_in_model(name),
        codes=name,
        scale=scale,
        format=fmt,
        granularity=granularity,
        shape=shape,
        code_dtype=header.dtype,
        code_shape=code_shape,
        scale_dtype=scale_header.dtype,
        scale_shape=scale_header.shape,
        file=header.file,
    )


def _granularity(
    shape: tuple[int, ...], scale: str, scale_header: Header, in_squares: bool
) -> StoredGranularity | None:
    """Return which weights share a scale, or None if its shape fits no granularity.

    Of granularities that mean the same for this shape, the usual name is taken.
    """
    fitting = [
        granularity
        for granularity, scale_shape in scale_shapes(shape)
        if scale_shape == scale_header.shape
    ]
    if not fitting:
        return None
    if scale_header.dtype in EXPONENTS:
        usual: StoredGranularity = "block"
    elif scale.endswith("_inv") or in_squares:
        usual = "square"
    else:
        usual = fitting[0]
    return usual if usual in fitting else fitting[0]


def _name_in_model(name: str) -> str:
    """Return the name that a model has for a weight, by that of its codes."""
    owner, dot, entry = name.rpartition(".")
    stem = _without_packed_suffix(entry)
    if stem != entry:
        entry = stem.removeprefix("_")
    return owner + dot + entry


def _check_other_tensors(
    weights: Mapping[str, StoredWeight], headers: Mapping[str, Header]
) -> None:
    """Refuse codes and scales that are no part of a weight.

    Those that only scale activations are no reason.
    """
    parts = set()
    layers = set()
    for weight in weights.values():
        parts |= {weight.codes, weight.scale}
        if weight.name.endswith("weight"):
            layers.add(weight.codes.rpartition(".")[0])
    for name, header in headers.items():
        if name in parts or is_marker(name):
            continue
        owner, _, entry = name.rpartition(".")
        if _is_short_float(header.dtype) or name.endswith(("weight_scale", "_scale_inv")):
            scaled = name.removesuffix("_inv").removesuffix("_scale")
            dtype = headers[scaled].dtype if scaled in headers else "missing"
            raise _refusal(name, header, f"as a scale, and {scaled} is {dtype}")
        if owner in layers and "scale" in entry and not _ACTIVATION_SCALE.fullmatch(entry):
            reason = f"which may change what the weights of {owner or 'the model'} do"
            raise _refusal(name, header, reason)


def _unsupported_setting(config: Mapping[str, Any]) -> str | None:
    """Return an entry of the settings that changes what codes mean, or None."""
    for group in _settings_with_groups(config):
        for key in ("weight_block_size", "group_size", "block_structure"):
            if group.get(key) not in _GROUP_SIZES:
                return f"{key}={group[key]!r}"
        if group.get("symmetric") is False:
            return "symmetric=False"
    if config.get("quant_method") not in _METHODS:
        return f"quant_method={config['quant_method']!r}"
    if config.get("transform_config"):
        return "a transform_config"
    if (config.get("sparsity_config") or {}).get("format", "dense") != "dense":
        return "a sparsity_config"
    return None


def _settings_with_groups(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the settings themselves, and those of weights in each of their groups."""
    yield config
    groups = config.get("config_groups") or {}
    try:
        weights = [dict(group.get("weights") or {}) for group in groups.values()]
    except (AttributeError, TypeError, ValueError):
        raise ValueError(
            f"config_groups={groups!r:.80} in the settings: groups by name are needed"
        ) from None
    yield from weights


def _with_activation_scales(
    weights: dict[str, StoredWeight], headers: Mapping[str, Header]
) -> dict[str, StoredWeight]:
    """Return the weights with the scales of their activations as extras.

    Those of a cache go to the first weight of its module.
    """
    first_weight_in: dict[str, str] = {}
    for weight in weights.values():
        parts = weight.name.split(".")
        for length in range(len(parts), 0, -1):
            first_weight_in.setdefault(".".join(parts[:length]), weight.name)
    extras: dict[str, list[str]] = {}
    for name in headers:
        owner, _, entry = name.rpartition(".")
        match = _ACTIVATION_SCALE.fullmatch(entry)
        if match is None:
            continue
        # without an owner, as input_scale, it is looked for at the layer's weight
        scaled_entry = (match["owner"] or "weight_").removesuffix("_")
        module = f"{owner}.{scaled_entry}".lstrip(".")
        while module and module not in first_weight_in:
            module = module.rpartition(".")[0]
        if module:
            extras.setdefault(first_weight_in[module], []).append(name)
    return {
        name: replace(weight, extras=tuple(extras.get(name, ())))
        for name, weight in weights.items()
    }
