"""State dicts as plain tensors and strings, as the safetensors format takes them, and back."""

import json
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from fp8manifold._encoded.dispatch import as_codes, as_float8
from fp8manifold._encoded.operators import checked_remainder
from fp8manifold._ranks import share_of
from fp8manifold.formats import FloatFormat
from fp8manifold.parameter import FP8Parameter
from fp8manifold.tensor import FP8Tensor

__all__ = ["flatten_state_dict", "unflatten_state_dict"]

_PREFIX: Final = "fp8:"
_PARTS: Final = {"codes": "", "scale": "_scale", "counter": "_counter"}
_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_LEFT: Final = "remainder"
_KEYS: Final = ("format", "block_size", "rounding", "seed", "by_operator", "draws", "dtype")


def flatten_state_dict(state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Take every :class:`FP8Tensor` of a state dict apart into codes, scale and counter.

    What comes back is what ``safetensors.torch.save_file(tensors, path, metadata)`` writes: ``w`` holds the codes,
    ``w_scale`` the scales (float32 powers of two, of blocks uint8 exponents, 127 + log2, as in E8M0) and ``w_counter``
    a count (int64), and the metadata say under ``fp8:w`` in JSON how to read them; value = scale * decode(codes).
    Codes of E4M3 and E5M2 are float8_e4m3fn and float8_e5m2, which is how compressed-tensors calls and keeps its
    weights; those of other formats are uint8.  What rounding left, where a weight has kept it, is ``w_remainder``
    (int8).  Other tensors stay as they are.

    Args:
        state: ``model.state_dict()``, say.

    Returns:
        The tensors, contiguous, and the metadata.

    Raises:
        TypeError: an entry that is no tensor, or that several processes hold a part of each.
        ValueError: an entry that is called like a part of another.

    Example:
        >>> tensors, metadata = flatten_state_dict({"w": FP8Parameter(torch.ones(2, 4), "E4M3", seed=7)})
        >>> sorted(tensors), metadata["fp8:w"]
        (['w', 'w_counter', 'w_scale'], \
'{"format": "E4M3", "block_size": null, "rounding": "stochastic", "seed": 7, \
"by_operator": true, "draws": "independent", "dtype": "float32"}')
    """
    tensors: dict[str, Tensor] = {}
    metadata: dict[str, str] = {}
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"state[{name!r}] is of {type(value).__name__}: only tensors can be exported")
        if share_of(value) is not None:
            raise TypeError(f"state[{name!r}] is sharded: take get_model_state_dict with full_state_dict=True")
        if not isinstance(value, FP8Tensor):
            tensors[name] = value.detach().contiguous()
            continue
        for suffix in (*_PARTS.values(), f"_{_LEFT}"):
            if suffix and name + suffix in state:
                raise ValueError(f"state has both {name!r} and an entry called like a part of it, {name + suffix!r}")
        metadata[_PREFIX + name] = json.dumps(_description(value))
        tensors[name] = as_float8(value.codes, value.format)
        tensors[name + _PARTS["scale"]] = value.kept_scale.contiguous()
        tensors[name + _PARTS["counter"]] = value.counter.contiguous()
        if value.remainder is not None:
            tensors[f"{name}_{_LEFT}"] = value.remainder.contiguous()
    return tensors, metadata


def unflatten_state_dict(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None, like: Mapping[str, Any] | None = None
) -> dict[str, Tensor]:
    """Put a state dict together again from the tensors and metadata of :func:`flatten_state_dict`.

    Args:
        tensors: as ``safetensors.torch.load_file`` gives them, say.
        metadata: as ``safetensors.safe_open(...).metadata()`` gives it; other entries are left alone.
        like: the state dict of the model that is to take it, whose formats are then compared.

    Returns:
        A state dict with an :class:`FP8Parameter` for every one that was taken apart; the tensors are held, not copied.

    Raises:
        ValueError: metadata that can't be read, parts that are missing or do not fit, or another format than ``like``.

    Example:
        >>> state = {"w": FP8Parameter(torch.tensor([0.5]), "E4M3"), "b": torch.zeros(1)}
        >>> back = unflatten_state_dict(*flatten_state_dict(state), like=state)
        >>> back["w"].tolist(), back["b"].tolist()
        ([0.5], [0.0])
    """
    state = dict(tensors)
    for key, text in (metadata or {}).items():
        if key.startswith(_PREFIX):
            name = key.removeprefix(_PREFIX)
            parts = {part: _taken(state, name + suffix) for part, suffix in _PARTS.items()}
            state[name] = _rebuilt(name, parts, text, state)
    for name, expected in (like or {}).items():
        _check_format(name, state.get(name), expected)
    return state


def _description(value: FP8Tensor) -> dict[str, Any]:
    return {
        "format": value.format.name,
        "block_size": value.block_size,
        "rounding": value.rounding,
        "seed": value.seed,
        "by_operator": value.by_operator,
        "draws": value.draws,
        "dtype": str(value.dtype).removeprefix("torch."),
    } | ({} if value.remainder is None else {_LEFT: True})


def _taken(state: dict[str, Tensor], name: str) -> Tensor:
    if name not in state:
        raise ValueError(f"tensors lack {name!r}, which the metadata name")
    return state.pop(name)


def _rebuilt(name: str, parts: dict[str, Tensor], text: str, state: dict[str, Tensor]) -> FP8Parameter:
    try:
        described = json.loads(text)
        if not isinstance(described, dict) or described.keys() - {_LEFT} != set(_KEYS):
            raise ValueError(f"expected the keys {', '.join(_KEYS)}")
        if described["dtype"] not in _DTYPES:
            raise ValueError(f"dtype={described['dtype']!r} is unknown: one of {', '.join(_DTYPES)}")
        weight = FP8Parameter.from_codes(
            as_codes(parts["codes"]),
            parts["scale"],
            FloatFormat.from_string(described["format"]),
            block_size=described["block_size"],
            counter=parts["counter"],
            rounding=described["rounding"],
            seed=described["seed"],
            by_operator=bool(described["by_operator"]),
            draws=described["draws"],
            dtype=_DTYPES[described["dtype"]],
        )
        left = _taken(state, f"{name}_{_LEFT}") if described.get(_LEFT) else None
        weight.remainder = checked_remainder(left, parts["codes"])
        return weight
    except (ValueError, TypeError) as error:
        raise ValueError(f"{name!r} can't be put together from {text!r}: {error}") from None


def _check_format(name: str, value: Tensor | None, expected: Any) -> None:
    if isinstance(expected, FP8Tensor) and isinstance(value, FP8Tensor) and value.format != expected.format:
        raise ValueError(f"{name!r} is of {value.format.name}, but {expected.format.name} is expected")
