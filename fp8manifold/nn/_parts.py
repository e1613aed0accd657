"""One-byte weights in state dicts: codes, scales, a count, the remainder of rounding,
and traits as numbers.

Codes stand under the weight's own name, which torch's and other libraries' savers know.
They have one dimension more than the weight, of size 1: whoever takes them for numbers
(``load_state_dict(strict=False)``, accelerate, diffusers, transformers without this
library) finds another shape, and refuses it.
"""

import json
from collections.abc import Mapping
from itertools import product
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from fp8manifold._encoded.dispatch import DTYPES, FLOAT8, as_codes, float8_format
from fp8manifold._encoded.operators import checked_remainder
from fp8manifold._encoded.scaled import DRAWS, ROUNDINGS, Traits
from fp8manifold._encoded.storage import block_size_of, number_of
from fp8manifold._encoded.stored_scale import as_kept
from fp8manifold._numerics.charts import RETRACTIONS
from fp8manifold._published import Header, dtype_name, read_parts, stored_weights
from fp8manifold._published.found import names_beside, refuse_codes
from fp8manifold._ranks import local_of, share_of, spread
from fp8manifold.formats import LAYOUTS, FloatFormat
from fp8manifold.parameter import FP8Parameter
from fp8manifold.tensor import FP8Tensor

_LEFT: Final = "_remainder"
PARTS: Final = ("", "_scale", "_counter", "_traits", _LEFT)
"""Suffixes of a weight's name for its parts; the last exists if a weight has a
remainder.
"""
_ADDED_DIMENSIONS: Final = 1
"""Dimensions that codes in a state have beyond the weight's; none in earlier versions."""
_NUMBERS: Final = 10
"""Traits that earlier versions wrote."""
_EARLIER: Final = "fp8:"
TAKES_PARTS: Final = (
    "_fp8_takes_parts"  #: An attribute of classes that save and load parts themselves.
)
AT_OWN_SCALE: Final = "_fp8_at_own_scale"
"""An attribute of modules whose parameters in codes load floats at a fresh scale."""
_REGISTERED: Final = "_fp8_in_states"
#: draws and retraction, which share one number, so that states keep their shapes
_STEPS: Final = tuple((draws, retraction) for retraction, draws in product(RETRACTIONS, DRAWS))


def is_in_codes(value: Any) -> bool:
    """True for a tensor of codes, or one of which this process holds codes."""
    return isinstance(local_of(value), FP8Tensor)


def holds_codes(saved: Any) -> bool:
    """True if a state has codes for a weight, with or without their scales."""
    return is_in_codes(saved) or saved.dtype == torch.uint8 or saved.dtype in FLOAT8.values()


def name_parts(module: nn.Module, name: str) -> None:
    """Give a module attributes with the names of a weight's parts: torch looks up names
    of a state in the model.
    """
    for suffix in PARTS[1:]:
        if not hasattr(module, name + suffix):
            vars(module)[name + suffix] = None


def _register(module: nn.Module, name: str, parameter: Any) -> None:
    """Let a module that is given a parameter in codes save and load it as parts;
    quantised layers do it themselves.
    """
    if isinstance(parameter, FP8Parameter) and not hasattr(type(module), TAKES_PARTS):
        name_parts(module, name)
        if not hasattr(module, _REGISTERED):
            setattr(module, _REGISTERED, True)
            module.register_state_dict_post_hook(_write_parts)
            module.register_load_state_dict_pre_hook(_read_parts)


register_module_parameter_registration_hook(_register)


def _write_parts(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """A hook of a module's state dict: a function of the module, so that copies and
    pickles keep it.
    """
    if not hasattr(
        type(module), TAKES_PARTS
    ):  # a quantised layer has taken over the hooks of the layer it replaced
        write_parts(module, state, prefix)


def write_parts(module: nn.Module, state: dict[str, Any], prefix: str) -> None:
    """Put parts in the place of every parameter in codes that a module has written;
    with ``keep_vars`` it stays.
    """
    for name, own in module._parameters.items():
        if is_in_codes(own) and state.get(prefix + name, own) is not own:
            assert own is not None
            parts = parts_of(prefix + name, own)
            if taken := [key for key in parts if key in state and key != prefix + name]:
                raise ValueError(
                    f"{prefix + name} is in codes, and {taken[0]} has the name of one of its "
                    f"parts: rename {taken[0]}"
                )
            state.update(parts)


def _read_parts(module: nn.Module, state: dict[str, Any], prefix: str, *args: Any) -> None:
    """A hook before a module loads: parts become weights, and so do floats at a fresh
    scale if we quantised it.
    """
    for name, own in module._parameters.items():
        if own is None or not is_in_codes(own) or hasattr(type(module), TAKES_PARTS):
            continue
        key = prefix + name
        if (
            key not in state
        ):  # a tied weight, which safetensors wrote by another name, but for its new tensor of traits
            state.pop(key + "_traits", None)
            args[-3].extend(
                part for part in parts_of(key, own) if part not in (key, key + "_traits")
            )
            continue
        try:
            gather_parts(state, key, own)
        except ValueError as error:
            args[-1].append(str(error))
            for suffix in PARTS:
                state.pop(key + suffix, None)
            continue
        saved = state.get(key)
        if not isinstance(saved, Tensor) or not isinstance(own, FP8Parameter):
            continue
        if isinstance(saved, FP8Tensor):
            if saved.format != own.format:
                args[-1].append(
                    f"{key} is of {saved.format.name}, but this parameter is of {own.format.name}"
                )
        elif hasattr(module, AT_OWN_SCALE) and saved.shape == own.shape:
            how: Any = {
                name: getattr(own, name)
                for name in ("granularity", "rounding", "draws", "retraction", "seed")
            }
            state[key] = FP8Parameter(saved.detach().to(own.dtype), own.format, **how)


def parts_of(name: str, weight: Tensor) -> dict[str, Tensor]:
    """The parts by name, on the weight's memory; those that have rows are spread over
    processes like the weight.
    """
    held: FP8Tensor = local_of(weight)
    scale = spread(weight, held.kept_scale) if held.kept_scale.dim() else held.kept_scale
    numbers = _numbers(held._traits(), floats=held.exponents is None)
    traits = torch.tensor([*numbers, _ADDED_DIMENSIONS], device=held.device)
    left = [] if held.remainder is None else [spread(weight, held.remainder)]
    codes = spread(weight, held.codes.unsqueeze(-1))
    parts = (codes, scale, held.counter, traits, *left)
    return {name + suffix: part for suffix, part in zip(PARTS, parts, strict=False)}


def _numbers(traits: Traits, *, floats: bool) -> list[int]:
    fmt, size = traits.format, number_of(traits.block_size)
    return [
        *(fmt.exponent_bits, fmt.mantissa_bits, fmt.bias, LAYOUTS.index(fmt.layout)),
        *(ROUNDINGS.index(traits.rounding), traits.seed, DTYPES.index(traits.dtype)),
        *(
            -size if floats else size,
            int(traits.by_operator),
            _STEPS.index((traits.draws, traits.retraction)),
        ),
    ]


def gather_parts(state: dict[str, Any], name: str, own: Tensor) -> None:
    """Put one weight together in the place of its parts in a state; whoever loads it
    takes over its count and seed.

    Codes and scales alone are taken too, with a count of 0. Rows of several processes
    and whole tensors are both taken; ``own``, the layer's weight, says which rows this
    process holds. Unfit parts raise ValueError.
    """
    saved = state.get(name)
    if not isinstance(saved, Tensor):
        return
    if is_in_codes(saved):  # a tensor of codes itself
        state[name] = _going_on(local_of(saved).with_parts(lambda part: part), saved)
        return
    if hasattr(saved, "qdata"):  # torchao's Float8Tensor, which is both
        joined: Any = saved
        state[name + "_scale"], state[name] = joined.scale, joined.qdata
        saved = joined.qdata
    known = name + "_traits"
    if not holds_codes(saved) and known in state:
        raise ValueError(
            f"{name} holds {saved.dtype}, and {known} says codes, which can't be averaged or cast: "
            f"average decoded weights (fm.averaged_model), or leave out {name}_scale, "
            f"{name}_counter and {known}"
        )
    if not holds_codes(saved) or not {name + "_scale", name + "_scale_inv"} & state.keys():
        refuse_codes(name, saved.dtype, state)
        return
    if known not in state:
        options = _take_published(state, name, saved, local_of(own))
    scale, counter, traits, left = (state.pop(name + suffix, None) for suffix in PARTS[1:])
    if traits is not None:
        options = _read_traits(name, traits, scale)
    try:
        codes = _rows_here(saved, own)
        if traits is not None and traits.numel() > _NUMBERS:
            codes = _without_added_dimension(codes)
        scale = _rows_here(scale, own) if scale.dim() else scale
        kind = (
            type(local_of(own)) if is_in_codes(own) and share_of(own) is not None else FP8Parameter
        )
        made = kind.from_codes(
            as_codes(codes), scale, counter=0 if counter is None else counter, **options
        )
        if (
            made.block_size and scale.dtype is torch.float32
        ):  # no process decides on exponents by its own rows
            made.kept_scale = scale
        made.remainder = checked_remainder(None if left is None else _rows_here(left, own), codes)
        state[name] = _going_on(made, own)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{name} can't be put together from its parts: {error}") from None


def _without_added_dimension(codes: Tensor) -> Tensor:
    if not codes.dim() or codes.shape[-1] != 1:
        raise ValueError(f"codes have shape {tuple(codes.shape)}: the last dimension must be 1")
    return codes.squeeze(-1)


def _rows_here(part: Tensor, own: Tensor) -> Tensor:
    """The rows of a part that this process holds of the weight; ValueError where only
    the part is spread.
    """
    share = share_of(own)
    if share_of(part) is not None:
        if share is None:
            raise ValueError(
                "they are sharded, and this model is not: save the state with full_state_dict=True"
            )
        return local_of(part)  # type: ignore[no-any-return]
    return part if share is None else share.own(part)


def _going_on(made: FP8Tensor, like: Tensor) -> Tensor:
    """A weight marked so that a copy takes over its count and seed; spread over
    processes like ``like``.
    """
    spread_out = spread(like, made)
    local_of(spread_out).resumes = True
    return spread_out


def unflatten_state_dict(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> dict[str, Tensor]:
    """Put the one-byte weights of a state dict together from their parts, without their
    model.

    .. math:: w = s \\cdot \\operatorname{decode}(code)

    ``state_dict()`` of a module gives a weight ``w`` in codes as plain tensors: ``w``,
    uint8 codes in its shape with a last dimension of 1 added, so that no reader takes
    them for numbers; ``w_scale``, float32, or uint8 exponents (E8M0) of blocks and squares;
    ``w_counter``, int64, stochastic writes; ``w_remainder``, int8, the remainder of the
    first rounding, until an optimizer uses it; ``w_traits``, 11 int64: exponent bits,
    mantissa bits, bias, numbers of layout and rounding, seed, number of the dtype,
    block size or 0 (negative: scales in float32), whether operators' names enter the
    draws, the number of draws and retraction, and the added dimensions (none where there
    are ten numbers).

    ``load_state_dict`` of quantised layers loads them in every storage, and also codes
    with only scales, as compressed-tensors has them.

    Args:
        tensors: by name, as from ``safetensors.torch.load_file``.
        metadata: of a file from an earlier version, whose header has what ``w_traits``
            has now.

    Returns:
        The state with an :class:`FP8Parameter` for every weight in codes; it shares the
        memory of the tensors.

    NaN and -0 are preserved, and empty tensors allowed.

    Raises:
        TypeError: ``tensors`` is no mapping.
        ValueError: parts that are missing or do not fit together, or metadata that
            can't be read.

    Example:
        >>> layer = torch.nn.Linear(4, 2, bias=False)
        >>> layer.weight = FP8Parameter(torch.ones(2, 4), "E4M3", seed=7)
        >>> state = layer.state_dict()
        >>> {name: str(x.dtype) for name, x in state.items() if not name.endswith("s")}
        {'weight': 'torch.uint8', 'weight_scale': 'torch.float32', 'weight_counter': 'torch.int64'}
        >>> layer.load_state_dict(state), unflatten_state_dict(state)["weight"].tolist()[0]
        (<All keys matched successfully>, [1.0, 1.0, 1.0, 1.0])

    Source: the names of compressed-tensors (vllm-project); OCP Microscaling Formats 1.0
    for exponents of blocks.
    """
    if not isinstance(tensors, Mapping):
        raise TypeError(f"tensors must be a mapping by name, not {type(tensors).__name__}")
    state: dict[str, Any] = dict(tensors)
    for key, line in (metadata or {}).items():
        if key.startswith(_EARLIER):
            name = key.removeprefix(_EARLIER)
            if lacking := [name + suffix for suffix in PARTS[:3] if name + suffix not in state]:
                raise ValueError(f"tensors lack {lacking[0]!r}, which the metadata name")
            state[name + "_traits"] = _read_line(
                name, line, floats=state[name + "_scale"].dtype != torch.uint8
            )
    for name in [key.removesuffix("_traits") for key in state if key.endswith("_traits")]:
        if isinstance(state.get(name), Tensor) and name + "_scale" in state:
            gather_parts(state, name, state[name])
    return state


def _read_line(name: str, line: str, *, floats: bool) -> Tensor:
    """The numbers of what an earlier version said of a weight in a file's header, in
    JSON.
    """
    try:
        said = json.loads(line)
        block_size = (
            tuple(said["block_size"])
            if isinstance(said["block_size"], list)
            else said["block_size"]
        )
        dtype = next(dtype for dtype in DTYPES if str(dtype) == f"torch.{said['dtype']}")
        fmt = FloatFormat.from_string(said["format"])
        traits = Traits(
            fmt,
            said["rounding"],
            said["seed"],
            dtype,
            block_size,
            said["by_operator"],
            said["draws"],
        )
        traits.check()
        return torch.tensor(_numbers(traits, floats=floats))
    except (ValueError, TypeError, KeyError, StopIteration) as error:
        raise ValueError(
            f"{name!r} can't be put together from {line!r:.200}: {error!r:.200}"
        ) from None


def _read_traits(name: str, traits: Tensor, scale: Tensor) -> dict[str, Any]:
    try:
        *numbers, added = traits.tolist() if traits.numel() > _NUMBERS else [*traits.tolist(), 0]
        exponent, mantissa, bias, layout, rounding, seed, dtype, block, by_operator, steps = numbers
        if added not in (0, _ADDED_DIMENSIONS):
            raise ValueError(f"{added} added dimensions: 0 or {_ADDED_DIMENSIONS} are known")
        if block and (block > 0) is not (scale.dtype is torch.uint8):
            raise ValueError(
                f"{name}_scale is {scale.dtype}, and was "
                f"{'exponents' if block > 0 else 'torch.float32'} when it was "
                "saved: reading cast it; read it into a tensor of that dtype, or load the file "
                "into a new model first"
            )
        draws, retraction = _one_of(_STEPS, steps)
        return {
            "fmt": FloatFormat(exponent, mantissa, bias, _one_of(LAYOUTS, layout)),
            "rounding": _one_of(ROUNDINGS, rounding),
            "seed": seed,
            "dtype": _one_of(DTYPES, dtype),
            "block_size": block_size_of(abs(block)),
            "by_operator": bool(by_operator),
            "draws": draws,
            "retraction": retraction,
        }
    except (ValueError, TypeError) as error:
        raise ValueError(f"{name}_traits can't be read: {error}") from None


def _one_of(known: tuple[Any, ...], index: int) -> Any:
    if not 0 <= index < len(known):
        raise ValueError(f"{index} is out of range: 0 to {len(known) - 1}")
    return known[index]


def _take_published(
    state: dict[str, Any], name: str, saved: Tensor, weight: Tensor
) -> dict[str, Any]:
    """Convert the scale of another library's file to that of our states; other traits
    are the layer's.
    """
    if name + "_counter" in state:
        raise ValueError(
            f"{name} has a {name}_counter and no {name}_traits, as in files of earlier versions: "
            f"pass the tensors and "
            "their header's metadata through fm.unflatten_state_dict"
        )
    if float8_format(saved.dtype) is None:
        raise ValueError(
            f"{name} holds uint8 codes, and {name}_traits, which say in which format, are missing"
        )
    beside = {
        key: x for key in (name, *names_beside(name, state)) if isinstance(x := state[key], Tensor)
    }
    headers = {
        key: Header(dtype_name(x.dtype), tuple(x.shape), "the state dict")
        for key, x in beside.items()
    }
    (stored,) = stored_weights(headers).values()
    scale = state.pop(stored.scale)
    if share_of(saved) is None:
        _, scale = read_parts(stored, {stored.codes: saved, stored.scale: scale}.__getitem__)
        scale = as_kept(scale, blocks=stored.block_size is not None)
    else:
        scale = scale if scale.dtype is torch.uint8 else scale.float()
    state[name + "_scale"] = scale
    own = weight if isinstance(weight, FP8Tensor) else None
    return {
        "fmt": stored.format,
        "rounding": own.rounding if own is not None else "stochastic",
        "seed": own.seed if own is not None else 0,
        "dtype": weight.dtype if weight.dtype in DTYPES else torch.float32,
        "block_size": stored.block_size,
        "draws": own.draws if own is not None else DRAWS[0],
        "retraction": own.retraction if own is not None else RETRACTIONS[0],
    }
