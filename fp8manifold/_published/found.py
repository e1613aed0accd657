"""Weights in codes found among the tensors of a folder by their headers; what is not known is refused by its name."""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from fp8manifold._published.stored import FORMATS, SCALES, Header, StoredWeight, scale_shapes, unpacked
from fp8manifold.formats import as_format
from fp8manifold.scaling import BLOCK_SIZE, SQUARE_SIZE

FLOATS: Final = ("F64", "F32", "F16", "BF16")
_READ: Final = (
    "read are float8 and packed E2M1, with a positive scale for the tensor, each row, 32 of a row or each square of "
    "128 x 128, of float32, bfloat16, float16 or E8M0"
)
_METHODS: Final = (None, "fp8", "compressed-tensors", "modelopt", "fbgemm_fp8", "mxfp4", "torchao")
_SIZES: Final = (None, -1, BLOCK_SIZE, [1, BLOCK_SIZE], [SQUARE_SIZE, SQUARE_SIZE], f"{SQUARE_SIZE}x{SQUARE_SIZE}")
"""Sizes of groups and blocks in settings; shapes of scales say which weight has which."""
_PACKING: Final = ("_blocks", "_packed", "_qdata")
"""What names of codes end with where they are called otherwise than the weight."""
_SCALES: Final = ("{0}_scale_inv", "{0}_scale", "{0}_scales", "{0}.absmax")
_PLAIN: Final = ("scale", "scales", "qscale_weight", "SCB")
"""Names of scales, by that of the weight, and by none."""
_OF_OTHERS: Final = re.compile(r"(\w+_)?(input|output|activation|kv|kv_cache|prob|[qkv])_scale(_ub)?")
"""Scales of activations and caches."""


def quantization_of(config: Mapping[str, Any], modelopt: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
    """The settings of quantisation that a folder has, wherever they are.

    Args:
        config: ``config.json``.
        modelopt: ``hf_quant_config.json``, if there is one.
    """
    inner = config.get("text_config") or {}
    for place, key in ((config, "quantization_config"), (config, "compression_config"), (inner, "quantization_config")):
        if place.get(key):
            return dict(place[key])
    return None if modelopt is None else {"quant_method": "modelopt", **modelopt.get("quantization", {})}


def stored_weights(headers: Mapping[str, Header], config: Mapping[str, Any] | None = None) -> dict[str, StoredWeight]:
    """Find every weight in codes of a folder: dtypes, names and shapes say what each is.

    Args:
        headers: of all tensors of all its files, by name.
        config: what :func:`quantization_of` gives: settings that change what codes mean are refused.

    Returns:
        The weights by the names that a model has; none of a folder of floats.

    Raises:
        ValueError: names a tensor, its file, what is there and what is read.
    """
    found = {}
    for name, header in headers.items():
        if may_be_weight(name, header.dtype, headers):
            weight = _stored(name, header, headers)
            found[weight.name] = weight
    scales = {weight.scale for weight in found.values()}
    for name, header in headers.items():
        base = name.removesuffix("_inv").removesuffix("_scale")
        if name not in scales and (header.dtype == "F8_E8M0" or name.endswith(("weight_scale", "_scale_inv"))):
            beside = headers[base].dtype if base in headers else "missing"
            raise _refused(name, header, f"as a scale, and {base} is {beside}")
    for weight in found.values():
        if unread := _unread(config or {}):
            raise _refused(weight.codes, headers[weight.codes], f"by settings with {unread}")
        break
    return _with_extras(found, headers)


def may_be_weight(name: str, dtype: str, others: Collection[str]) -> bool:
    """Whether a tensor that holds no floats is a weight: masks and positions are not, nor are scales."""
    entry = name.rpartition(".")[2]
    if dtype in FLOATS or dtype == "F8_E8M0" or is_scale(entry):
        return False
    return dtype.startswith("F") or entry.endswith(("weight", *_PACKING)) or scale_of(name, others) is not None


def is_scale(entry: str) -> bool:
    """Whether a tensor is called a scale."""
    return any(word in entry.lower() for word in ("scale", "scb", "absmax"))


def scale_of(name: str, others: Collection[str]) -> str | None:
    """The name of a tensor's scale among those of the same files, or None."""
    owner, dot, entry = name.rpartition(".")
    stem = _stem(entry)
    entries = [each.format(stem) for each in _SCALES] + list(_PLAIN if stem.endswith("weight") else ())
    return next((owner + dot + each for each in entries if owner + dot + each in others), None)


def _stem(entry: str) -> str:
    return next((entry.removesuffix(end) for end in _PACKING if entry.endswith(end)), entry)


def _refused(name: str, header: Header, why: str) -> ValueError:
    return ValueError(f"{name} of {header.file!r} holds {header.dtype} of shape {header.shape}, {why}: {_READ}")


def _stored(name: str, header: Header, headers: Mapping[str, Header]) -> StoredWeight:
    """One weight by its header and those beside it."""
    if f"{name}_traits" in headers:
        raise _refused(
            name, header, "codes of this library's own states, which load_state_dict and from_pretrained read"
        )
    scale = scale_of(name, headers)
    if scale is None:
        raise _refused(name, header, f"and its scale is missing: neither {name}_scale_inv nor {name}_scale is there")
    beside = headers[scale]
    at = f"at {scale} of {beside.dtype} and shape {beside.shape}"
    if more := _more(name, scale, headers):
        raise _refused(name, header, f"{at}, and at {more}")
    packed = unpacked(header, beside)
    shape, held = packed or (header.shape, header.shape)
    fmt = as_format("E2M1") if packed else FORMATS.get(header.dtype)
    fits = [granularity for granularity, known in scale_shapes(shape) if known == beside.shape]
    if fmt is None or beside.dtype not in SCALES or not fits:
        raise _refused(name, header, at)
    granularity = "square" if "square" in fits and scale.endswith("_inv") else fits[0]
    owner, dot, entry = name.rpartition(".")
    stem = _stem(entry)
    own = owner + dot + (stem.removeprefix("_") if stem != entry else entry)
    found = (fmt, granularity, shape, header.dtype, held, beside.dtype, beside.shape, header.file)
    return StoredWeight(own, name, scale, *found)


def _more(name: str, scale: str, headers: Mapping[str, Header]) -> str | None:
    """A tensor beside a weight that changes what it is, such as a second scale or a zero point."""
    owner, dot, entry = name.rpartition(".")
    stem = _stem(entry)
    ends = (
        "_scale_2",
        "_global_scale",
        "_outer_scale_denominator",
        "_zero_point",
        "_g_idx",
        *(each.removeprefix("{0}") for each in _SCALES),
    )
    return next((each for end in ends if (each := owner + dot + stem + end) in headers and each != scale), None)


def _unread(config: Mapping[str, Any]) -> str | None:
    """What settings say that no shape of a tensor does, and that is not read."""
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
    for group in (config.get("config_groups") or {}).values():
        yield group.get("weights") or {}


def _with_extras(found: dict[str, StoredWeight], headers: Mapping[str, Header]) -> dict[str, StoredWeight]:
    """The weights, each with the scales of its activations; those of a cache go with the first weight of its module."""
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
    return {name: replace(weight, extras=tuple(extras.get(name, ()))) for name, weight in found.items()}
