"""Weights in codes found among the tensors of a folder by their headers; what is not
known is refused by its name.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

import torch

from fp8manifold._published.stored import (
    EXPONENTS,
    FORMATS,
    SCALES,
    Header,
    StoredWeight,
    scale_shapes,
    unpacked,
)
from fp8manifold.formats import as_format
from fp8manifold.scaling import BLOCK_SIZE, SQUARE_SIZE

FLOATS: Final = frozenset(
    {"F64", "F32", "F16", "BF16", torch.float64, torch.float32, torch.float16, torch.bfloat16}
)
"""The dtypes that float weights are read from, as files and as torch name them."""
_READ: Final = (
    "fp8manifold reads float8 and packed E2M1, with a positive scale for the tensor, each row, 32 "
    "weights of a row or each square of 128 x 128, in float32, bfloat16, float16 or E8M0"
)
_METHODS: Final = (None, "fp8", "compressed-tensors", "modelopt", "fbgemm_fp8", "mxfp4", "torchao")
_SIZES: Final = (
    None,
    -1,
    BLOCK_SIZE,
    [1, BLOCK_SIZE],
    [SQUARE_SIZE, SQUARE_SIZE],
    f"{SQUARE_SIZE}x{SQUARE_SIZE}",
)
"""Sizes of groups and blocks that settings may have; which weight has which follows
from the shapes of scales.
"""
_PACKING: Final = ("_blocks", "_packed", "_qdata")
"""Ends of names of codes, where these names are not the weight's."""
_SCALES: Final = (
    "_scale_inv",
    "_scale",
    "_scales",
    ".absmax",
)  #: Ends of names of scales, after the weight's name.
_PLAIN: Final = (
    "scale",
    "scales",
    "qscale_weight",
    "SCB",
)  #: Names of scales without that of the weight.
_SECOND: Final = ("_scale_2", "_global_scale", "_outer_scale_denominator", "_zero_point")
"""Ends of names of other tensors that a weight's values depend on."""
_OF_OTHERS: Final = re.compile(
    r"(\w+_)?(input|output|activation|kv|kv_cache|prob|[qkv])_scale(_ub)?"
)
"""Scales of activations and caches."""


def quantization_of(
    config: Mapping[str, Any], modelopt: Mapping[str, Any] | None = None
) -> dict[str, Any] | None:
    """The settings of quantisation in ``config.json``, wherever they are, or else in
    ``hf_quant_config.json``.
    """
    inner = config.get("text_config") or {}
    for place, key in (
        (config, "quantization_config"),
        (config, "compression_config"),
        (inner, "quantization_config"),
    ):
        if place.get(key):
            return dict(place[key])
    return (
        None
        if modelopt is None
        else {"quant_method": "modelopt", **modelopt.get("quantization", {})}
    )


def stored_weights(
    headers: Mapping[str, Header], config: Mapping[str, Any] | None = None
) -> dict[str, StoredWeight]:
    """Every weight in codes of a folder, by the name that a model has for it; found by
    dtypes, names and shapes.

    Settings (of :func:`quantization_of`) that change what codes mean are refused.
    """
    found = {}
    in_squares = any(where.get("block_structure") for where in _with_groups(config or {}))
    for name, header in headers.items():
        if may_be_weight(name, header.dtype, headers):
            weight = _stored(name, header, headers, in_squares)
            found[weight.name] = weight
    _check_others(found, headers)
    for weight in found.values():
        if unread := _unread(config or {}):
            raise _refused(weight.codes, headers[weight.codes], f"by settings with {unread}")
        break
    return _with_extras(found, headers)


def refuse_codes(
    name: str, dtype: torch.dtype | str, others: Collection[str] = (), file: str = ""
) -> None:
    """Raise ValueError unless the tensor from which a float weight is read holds
    floats.
    """
    if dtype in FLOATS:
        return
    scale = scale_of(name, others)
    beside = (
        f"with the scales {scale!r}, which fm.load_fp8 can read"
        if scale
        else f"and {name}_scale is missing"
    )
    where = f" of {file!r}" if file else ""
    raise ValueError(
        f"{name}{where} holds codes ({dtype}), {beside}: here a weight must be float64, float32, "
        f"float16 or bfloat16; "
        "decode it and multiply by its scales first"
    )


def may_be_weight(name: str, dtype: torch.dtype | str, others: Collection[str]) -> bool:
    """True for codes of a weight, by dtype and name among the names of the same files;
    masks and positions are none.
    """
    entry = name.rpartition(".")[2]
    if dtype in FLOATS or any(word in entry.lower() for word in ("scale", "scb", "absmax")):
        return False
    return (
        _is_short(dtype)
        or entry.endswith(("weight", *_PACKING))
        or scale_of(name, others) is not None
    )


def _is_short(dtype: torch.dtype | str) -> bool:
    """True for a float of at most eight bits, as files or as torch name it."""
    return (
        re.match(r"f(loat)?[468]", str(dtype).removeprefix("torch.").lower()) is not None
        and dtype not in FLOATS
    )


def scale_of(name: str, others: Collection[str]) -> str | None:
    """The name of a tensor's scale among the names of the same files, or None."""
    owner, dot, entry = name.rpartition(".")
    stem = _stem(entry)
    names = [stem + end for end in _SCALES] + list(_PLAIN if stem.endswith("weight") else ())
    return next((owner + dot + each for each in names if owner + dot + each in others), None)


def names_beside(name: str, others: Collection[str]) -> list[str]:
    """The names of the other tensors that a weight's values depend on, scales first."""
    owner, dot, entry = name.rpartition(".")
    stem = owner + dot + _stem(entry)
    return [stem + end for end in (*_SCALES, *_SECOND) if stem + end in others]


def _stem(entry: str) -> str:
    return next((entry.removesuffix(end) for end in _PACKING if entry.endswith(end)), entry)


def _refused(name: str, header: Header, why: str) -> ValueError:
    return ValueError(
        f"{name} of {header.file!r} holds {header.dtype} of shape {header.shape}, {why}: {_READ}"
    )


def _stored(
    name: str, header: Header, headers: Mapping[str, Header], in_squares: bool
) -> StoredWeight:
    """One weight by its header and those beside it; of granularities that mean the same
    the usual name is taken.
    """
    if f"{name}_traits" in headers:
        raise _refused(
            name,
            header,
            "codes of this library's own states, which load_state_dict and from_pretrained read",
        )
    scale = scale_of(name, headers)
    if scale is None:
        raise _refused(
            name,
            header,
            f"and its scale is missing: neither {name}_scale_inv nor {name}_scale is there",
        )
    beside = headers[scale]
    at = f"at {scale} of {beside.dtype} and shape {beside.shape}"
    if more := [each for each in names_beside(name, headers) if each != scale]:
        raise _refused(name, header, f"{at}, and at {more[0]}")
    if (
        name.endswith("_qdata") and beside.dtype in EXPONENTS
    ):  # only the file's metadata would say, and no header
        raise _refused(
            name, header, f"{at}, which torchao may have written in the order of a kernel"
        )
    packed = unpacked(header, beside)
    shape, held = packed or (header.shape, header.shape)
    fmt = as_format("E2M1") if packed else FORMATS.get(header.dtype)
    fits = [granularity for granularity, known in scale_shapes(shape) if known == beside.shape]
    if fmt is None or beside.dtype not in SCALES or not fits:
        raise _refused(name, header, at)
    usual = (
        "block"
        if beside.dtype in EXPONENTS
        else "square"
        if scale.endswith("_inv") or in_squares
        else fits[0]
    )
    granularity = usual if usual in fits else fits[0]
    owner, dot, entry = name.rpartition(".")
    stem = _stem(entry)
    own = owner + dot + (stem.removeprefix("_") if stem != entry else entry)
    found = (fmt, granularity, shape, header.dtype, held, beside.dtype, beside.shape, header.file)
    return StoredWeight(own, name, scale, *found)


def _check_others(found: Mapping[str, StoredWeight], headers: Mapping[str, Header]) -> None:
    """Refuse codes and scales that are no part of a weight, unless they only scale
    activations.
    """
    read = {name for weight in found.values() for name in (weight.codes, weight.scale)}
    layers = {
        weight.codes.rpartition(".")[0]
        for weight in found.values()
        if weight.name.endswith("weight")
    }
    for name, header in headers.items():
        owner, _, entry = name.rpartition(".")
        if name in read:
            continue
        if _is_short(header.dtype) or name.endswith(("weight_scale", "_scale_inv")):
            base = name.removesuffix("_inv").removesuffix("_scale")
            beside = headers[base].dtype if base in headers else "missing"
            raise _refused(name, header, f"as a scale, and {base} is {beside}")
        if owner in layers and "scale" in entry and not _OF_OTHERS.fullmatch(entry):
            raise _refused(
                name, header, f"which may change what the weights of {owner or 'the model'} do"
            )


def _unread(config: Mapping[str, Any]) -> str | None:
    """An entry of the settings that changes what codes mean and is not supported, or
    None.
    """
    for where in _with_groups(config):
        for key in ("weight_block_size", "group_size", "block_structure"):
            if where.get(key) not in _SIZES:
                return f"{key}={where[key]!r}"
        if where.get("symmetric") is False:
            return "symmetric=False"
    if config.get("quant_method") not in _METHODS:
        return f"quant_method={config['quant_method']!r}"
    if config.get("transform_config"):
        return "a transform_config"
    if (config.get("sparsity_config") or {}).get("format", "dense") != "dense":
        return "a sparsity_config"
    return None


def _with_groups(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The settings themselves, and those of weights in each of their groups."""
    yield config
    groups = config.get("config_groups") or {}
    try:
        weights = [dict(group.get("weights") or {}) for group in groups.values()]
    except (AttributeError, TypeError, ValueError):
        raise ValueError(
            f"config_groups={groups!r:.80} in the settings: groups by name are needed"
        ) from None
    yield from weights


def _with_extras(
    found: dict[str, StoredWeight], headers: Mapping[str, Header]
) -> dict[str, StoredWeight]:
    """The weights with the scales of their activations; those of a cache go to the
    first weight of its module.
    """
    first: dict[str, str] = {}
    for weight in found.values():
        parts = weight.name.split(".")
        for length in range(len(parts), 0, -1):
            first.setdefault(".".join(parts[:length]), weight.name)
    extras: dict[str, list[str]] = {}
    for name in headers:
        owner, _, entry = name.rpartition(".")
        if match := _OF_OTHERS.fullmatch(entry):
            own = f"{owner}.{(match[1] or 'weight_')[:-1]}".lstrip(".")
            while own and own not in first:
                own = own.rpartition(".")[0]
            if own:
                extras.setdefault(first[own], []).append(name)
    return {
        name: replace(weight, extras=tuple(extras.get(name, ()))) for name, weight in found.items()
    }
