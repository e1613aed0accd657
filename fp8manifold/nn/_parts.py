"""One-byte weights in state dicts.

A weight ``w`` is five plain tensors: ``w`` has the codes, ``w_scale`` the scales,
``w_counter`` the count of stochastic writes, ``w_remainder`` the remainder of the first
rounding (if there is one), and ``w_traits`` the rest of it as numbers.

Codes stand under the weight's own name, which torch's and other libraries' savers know.
They have one dimension more than the weight, of size 1: whoever takes them for numbers
(``load_state_dict(strict=False)``, accelerate, diffusers, transformers without this
library) finds another shape, and refuses it.

`write_parts` puts the parts in the place of a weight, and `gather_parts` puts the
weight in the place of its parts. A module that is given a parameter in codes gets hooks
that do this (`_register`); a quantised layer calls them itself.
"""

import json
from collections.abc import Mapping
from itertools import product
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from fp8manifold._encoded.dispatch import DTYPES, FLOAT8, as_codes, float8_format
from fp8manifold._encoded.operators import checked_remainder
from fp8manifold._encoded.scaled import DRAWS, WRITE_ROUNDINGS, Traits
from fp8manifold._encoded.storage import block_size_of, number_of
from fp8manifold._encoded.stored_scale import as_kept
from fp8manifold._numerics.charts import RETRACTIONS
from fp8manifold._published import Header, dtype_name, read_parts, stored_weights
from fp8manifold._published.find_weights import names_beside, refuse_codes
from fp8manifold._ranks import local_of, share_of, spread
from fp8manifold.formats import LAYOUTS, FloatFormat
from fp8manifold.nn._described import show_formats
from fp8manifold.parameter import FP8Parameter
from fp8manifold.tensor import FP8Tensor

#: Suffixes of a weight's name for its parts; the last is there if it has a remainder.
PARTS: Final = ("", "_scale", "_counter", "_traits", "_remainder")
#: Dimensions that codes in a state have beyond the weight's; none in earlier versions.
_ADDED_DIMENSIONS: Final = 1
#: Traits that earlier versions wrote.
_EARLIER_TRAITS: Final = 10
#: Start of the keys under which earlier versions wrote traits into a file's header.
_EARLIER_KEY: Final = "fp8:"
#: An attribute of classes that save and load parts themselves.
TAKES_PARTS: Final = "_fp8_takes_parts"
#: An attribute of modules whose parameters in codes load floats at a fresh scale.
AT_OWN_SCALE: Final = "_fp8_at_own_scale"
_HAS_STATE_HOOKS: Final = "_fp8_in_states"
#: Draws and retraction, which share one number, so that states keep their shapes. It is
#: the index of a pair, so new pairs must come last. Those of a new retraction do; those
#: of new draws would come between the pairs that are there.
_DRAWS_AND_RETRACTIONS: Final = tuple(
    (draws, retraction) for retraction, draws in product(RETRACTIONS, DRAWS)
)


def is_in_codes(value: Any) -> bool:
    """Return True for a tensor of codes, or one of which this process holds codes."""
    return isinstance(local_of(value), FP8Tensor)


def holds_codes(saved: Any) -> bool:
    """Return True if a state has codes for a weight, with or without their scales."""
    return is_in_codes(saved) or saved.dtype == torch.uint8 or saved.dtype in FLOAT8.values()


def name_parts(module: nn.Module, name: str) -> None:
    """Give a module attributes with the names of a weight's parts.

    Torch looks up the names of a state in the model.
    """
    for suffix in PARTS[1:]:
        if not hasattr(module, name + suffix):
            vars(module)[name + suffix] = None


def _register(module: nn.Module, name: str, parameter: Any) -> None:
    """Let a module that is given a parameter in codes save and load it as parts.

    Its line in ``str(model)`` shows the format. Quantised layers do both themselves.
    """
    if isinstance(parameter, FP8Parameter) and not hasattr(type(module), TAKES_PARTS):
        show_formats(type(module))
        name_parts(module, name)
        if not hasattr(module, _HAS_STATE_HOOKS):
            setattr(module, _HAS_STATE_HOOKS, True)
            module.register_state_dict_post_hook(_write_parts)
            module.register_load_state_dict_pre_hook(_read_parts)


register_module_parameter_registration_hook(_register)


def _write_parts(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Write the parts, as a hook of a module's state dict.

    It is a function of this module, so that copies and pickles keep it.
    """
    # a quantised layer has taken over the hooks of the layer it replaced
    if not hasattr(type(module), TAKES_PARTS):
        write_parts(module, state, prefix)


def write_parts(module: nn.Module, state: dict[str, Any], prefix: str) -> None:
    """Put parts in the place of every parameter in codes that a module has written.

    With ``keep_vars`` the parameter itself stays.
    """
    for name, parameter in module._parameters.items():
        key = prefix + name
        if parameter is None or not is_in_codes(parameter):
            continue
        # not written, or as the parameter itself under keep_vars
        if state.get(key, parameter) is parameter:
            continue
        parts = parts_of(key, parameter)
        for part_key in parts:
            if part_key in state and part_key != key:
                raise ValueError(
                    f"{key} is in codes, and {part_key} has the name of one of its parts: rename "
                    f"{part_key}"
                )
        state.update(parts)


def _read_parts(
    module: nn.Module,
    state: dict[str, Any],
    prefix: str,
    local_metadata: Any,
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_messages: list[str],
) -> None:
    """Gather the parts, as a hook before a module loads.

    Parts become weights. Floats become codes at a fresh scale if this library quantised
    the parameter.
    """
    if hasattr(type(module), TAKES_PARTS):
        return
    for name, parameter in module._parameters.items():
        if parameter is None or not is_in_codes(parameter):
            continue
        key = prefix + name
        if key not in state:
            # a tied weight: safetensors wrote its parts by its other name only. Traits
            # are a new tensor each time, so they are here too
            state.pop(key + "_traits", None)
            parts = parts_of(key, parameter)
            missing_keys += [part for part in parts if part not in (key, key + "_traits")]
            continue
        try:
            gather_parts(state, key, parameter)
        except ValueError as error:
            error_messages.append(str(error))
            for suffix in PARTS:
                state.pop(key + suffix, None)
            continue
        refusal = _prepare_values(module, parameter, state, key)
        if refusal is not None:
            error_messages.append(refusal)


def _prepare_values(
    module: nn.Module, parameter: Tensor, state: dict[str, Any], key: str
) -> str | None:
    """Encode floats for a parameter of a module that loads them at a fresh scale.

    Returns:
        Why codes can't be loaded into the parameter, or None.
    """
    saved = state.get(key)
    if not isinstance(saved, Tensor) or not isinstance(parameter, FP8Parameter):
        return None
    if not isinstance(saved, FP8Tensor):
        if hasattr(module, AT_OWN_SCALE) and saved.shape == parameter.shape:
            state[key] = _encode_like(saved, parameter)
        return None
    if saved.format == parameter.format:
        return None
    return f"{key} is in {saved.format.name}, but this parameter is in {parameter.format.name}"


def _encode_like(values: Tensor, parameter: FP8Parameter) -> FP8Parameter:
    granularity: Any = parameter.granularity
    return FP8Parameter(
        values.detach().to(parameter.dtype),
        parameter.format,
        granularity=granularity,
        rounding=parameter.rounding,
        draws=parameter.draws,
        retraction=parameter.retraction,
        seed=parameter.seed,
    )


def parts_of(name: str, weight: Tensor) -> dict[str, Tensor]:
    """Return the parts of a weight by name, on its memory.

    Those that have rows are spread over processes like the weight.
    """
    local: FP8Tensor = local_of(weight)
    traits = [*_numbers_of(local._traits(), floats=local.exponents is None), _ADDED_DIMENSIONS]
    parts = {
        name: spread(weight, local.codes.unsqueeze(-1)),
        name + "_scale": (
            spread(weight, local.kept_scale) if local.kept_scale.dim() else local.kept_scale
        ),
        name + "_counter": local.counter,
        name + "_traits": torch.tensor(traits, device=local.device),
    }
    if local.remainder is not None:
        parts[name + "_remainder"] = spread(weight, local.remainder)
    return parts


class _Numbers(NamedTuple):
    """The numbers of a tensor of traits, in their order.

    Attributes:
        exponent: bits.
        mantissa: bits.
        bias: of the exponent.
        layout: index of the layout.
        rounding: index of the rounding.
        seed: of draws.
        dtype: index of the dtype.
        block_size: as a number, 0 for none; negative if the scales are float32.
        by_operator: 1 if operators' names enter the draws.
        draws_and_retraction: index of the pair.
    """

    exponent: int
    mantissa: int
    bias: int
    layout: int
    rounding: int
    seed: int
    dtype: int
    block_size: int
    by_operator: int
    draws_and_retraction: int


def _numbers_of(traits: Traits, *, floats: bool) -> _Numbers:
    """Return traits as numbers; ``floats`` says that the scales are float32."""
    fmt = traits.format
    block_size = number_of(traits.block_size)
    return _Numbers(
        exponent=fmt.exponent_bits,
        mantissa=fmt.mantissa_bits,
        bias=fmt.bias,
        layout=LAYOUTS.index(fmt.layout),
        rounding=WRITE_ROUNDINGS.index(traits.rounding),
        seed=traits.seed,
        dtype=DTYPES.index(traits.dtype),
        block_size=-block_size if floats else block_size,
        by_operator=int(traits.by_operator),
        draws_and_retraction=_DRAWS_AND_RETRACTIONS.index((traits.draws, traits.retraction)),
    )


def gather_parts(state: dict[str, Any], name: str, weight: Tensor) -> None:
    """Put one weight together in the place of its parts in a state.

    Whoever loads it takes over its count, seed and options of rounding. Codes and scales
    alone, without traits, are taken too, with a count of 0. Rows of several processes
    and whole tensors are both taken.

    Args:
        state: changed in place.
        name: of the weight in the state.
        weight: the model's, which says which rows this process holds.

    Raises:
        ValueError: parts that do not fit together, or that are not all there.
    """
    saved = state.get(name)
    if not isinstance(saved, Tensor):
        return
    # a tensor of codes itself
    if is_in_codes(saved):
        state[name] = _mark_resumed(local_of(saved).with_parts(lambda part: part), saved)
        return
    # torchao's Float8Tensor has both
    if hasattr(saved, "qdata"):
        float8: Any = saved
        state[name + "_scale"] = float8.scale
        state[name] = float8.qdata
        saved = float8.qdata
    has_codes = holds_codes(saved)
    has_traits = name + "_traits" in state
    if has_traits and not has_codes:
        raise ValueError(
            f"{name} holds {saved.dtype}, but {name}_traits says codes, which can't be averaged or "
            f"cast: average decoded weights (fm.averaged_model), or leave out {name}_scale, "
            f"{name}_counter and {name}_traits"
        )
    has_scale = name + "_scale" in state
    if not has_traits:
        # files of other libraries may call it so
        has_scale = has_scale or name + "_scale_inv" in state
    if not has_codes or not has_scale:
        refuse_codes(name, saved.dtype, state)
        return
    if has_traits and name + "_counter" not in state:
        raise ValueError(
            f"{name} has {name}_traits but no {name}_counter, the count of its random draws; "
            "without it, training would not continue as it was: take the whole state"
        )
    if has_traits:
        options = read_traits(name, state[name + "_traits"], state[name + "_scale"])
    else:
        options = _take_published(state, name, saved, local_of(weight))
    parts = _Parts(
        codes=saved,
        scale=state.pop(name + "_scale", None),
        counter=state.pop(name + "_counter", None),
        traits=state.pop(name + "_traits", None),
        remainder=state.pop(name + "_remainder", None),
    )
    try:
        state[name] = _mark_resumed(_assemble(parts, options, weight), weight)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{name} can't be put together from its parts: {error}") from None


class _Parts(NamedTuple):
    codes: Tensor
    scale: Tensor
    counter: Tensor | None
    traits: Tensor | None
    remainder: Tensor | None


def _assemble(parts: _Parts, options: Mapping[str, Any], weight: Tensor) -> FP8Tensor:
    """Return the rows that this process holds of a weight, from its parts."""
    codes = _local_rows(parts.codes, weight)
    if parts.traits is not None and parts.traits.numel() > _EARLIER_TRAITS:
        codes = _without_added_dimension(codes)
    scale = _local_rows(parts.scale, weight) if parts.scale.dim() else parts.scale
    is_sharded = is_in_codes(weight) and share_of(weight) is not None
    kind = type(local_of(weight)) if is_sharded else FP8Parameter
    counter = 0 if parts.counter is None else parts.counter
    assembled: FP8Tensor = kind.from_codes(as_codes(codes), scale, counter=counter, **options)
    # float32 stays: no process decides on exponents by its own rows
    if assembled.block_size and scale.dtype is torch.float32:
        assembled.kept_scale = scale
    remainder = None if parts.remainder is None else _local_rows(parts.remainder, weight)
    assembled.remainder = checked_remainder(remainder, codes)
    return assembled


def _without_added_dimension(codes: Tensor) -> Tensor:
    if not codes.dim() or codes.shape[-1] != 1:
        raise ValueError(f"codes have shape {tuple(codes.shape)}: the last dimension must be 1")
    return codes.squeeze(-1)


def _local_rows(part: Tensor, weight: Tensor) -> Tensor:
    """Return the rows of a part that this process holds of the weight.

    Raises:
        ValueError: only the part is spread over processes.
    """
    share = share_of(weight)
    if share_of(part) is not None:
        if share is None:
            raise ValueError(
                "they are sharded, and this model is not: save the state with full_state_dict=True"
            )
        return local_of(part)  # type: ignore[no-any-return]
    return part if share is None else share.local_rows(part)


def _mark_resumed(codes: FP8Tensor, weight: Tensor) -> FP8Tensor:
    """Return a weight, marked so that a copy takes over its count and seed.

    It is spread over processes like ``weight``.
    """
    spread_codes: Any = spread(weight, codes)
    local_of(spread_codes).resumes = True
    return spread_codes  # type: ignore[no-any-return]


def unflatten(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> dict[str, Tensor]:
    r"""Put the one-byte weights of a state dict together from their parts.

    .. math:: w = s \cdot \operatorname{decode}(code)

    The model is not needed.

    ``state_dict()`` of a module gives a weight ``w`` in codes as plain tensors: ``w``,
    uint8 codes in its shape with a last dimension of 1 added, so that no reader takes
    them for numbers; ``w_scale``, float32, or uint8 exponents (E8M0) of blocks and
    squares; ``w_counter``, int64, stochastic writes; ``w_remainder``, int8, the
    remainder of the first rounding, until an optimizer uses it; ``w_traits``, 11 int64.

    The numbers of ``w_traits`` are exponent bits, mantissa bits, bias, numbers of
    layout and rounding, seed, number of the dtype, block size or 0 (negative: scales in
    float32), whether operators' names enter the draws, the number of draws and
    retraction, and the added dimensions (none where there are ten numbers).

    ``load_state_dict`` of quantised layers loads them in every storage, and also codes
    with only scales, as compressed-tensors has them.

    Args:
        tensors: by name, as from ``safetensors.torch.load_file``.
        metadata: the metadata of a file from an earlier version, whose header has what
            ``w_traits`` has now.

    Returns:
        The state with an :class:`fp8manifold.FP8Parameter` for every weight in codes;
        it shares the memory of the tensors.

    NaN and -0 are preserved, and empty tensors allowed.

    Raises:
        TypeError: ``tensors`` is not a mapping.
        ValueError: parts that are missing or do not fit together, or metadata that
            can't be read.

    Example:
        >>> layer = torch.nn.Linear(4, 2, bias=False)
        >>> layer.weight = FP8Parameter(torch.ones(2, 4), "E4M3", seed=7)
        >>> state = layer.state_dict()
        >>> {name: str(x.dtype) for name, x in state.items() if not name.endswith("s")}
        {'weight': 'torch.uint8', 'weight_scale': 'torch.float32', 'weight_counter': 'torch.int64'}
        >>> layer.load_state_dict(state), unflatten(state)["weight"].tolist()[0]
        (<All keys matched successfully>, [1.0, 1.0, 1.0, 1.0])

    Source: the names of compressed-tensors (vllm-project); OCP Microscaling Formats 1.0
    for exponents of blocks.
    """
    if not isinstance(tensors, Mapping):
        raise TypeError(f"tensors must be a mapping by name, not {type(tensors).__name__}")
    state: dict[str, Any] = dict(tensors)
    for key, line in (metadata or {}).items():
        if not key.startswith(_EARLIER_KEY):
            continue
        name = key.removeprefix(_EARLIER_KEY)
        for suffix in ("", "_scale", "_counter"):
            if name + suffix not in state:
                raise ValueError(f"tensors lack {name + suffix!r}, which the metadata name")
        floats = state[name + "_scale"].dtype != torch.uint8
        state[name + "_traits"] = _read_line(name, line, floats=floats)
    names = [key.removesuffix("_traits") for key in state if key.endswith("_traits")]
    for name in names:
        if isinstance(state.get(name), Tensor) and name + "_scale" in state:
            gather_parts(state, name, state[name])
    return state


def _read_line(name: str, line: str, *, floats: bool) -> Tensor:
    """Return the traits, as numbers, that an earlier version wrote into a header."""
    try:
        entries = json.loads(line)
        block_size = entries["block_size"]
        if isinstance(block_size, list):
            block_size = tuple(block_size)
        dtype = next(dtype for dtype in DTYPES if str(dtype) == f"torch.{entries['dtype']}")
        traits = Traits(
            FloatFormat.from_string(entries["format"]),
            entries["rounding"],
            entries["seed"],
            dtype,
            block_size,
            entries["by_operator"],
            entries["draws"],
        )
        traits.check()
        return torch.tensor(_numbers_of(traits, floats=floats), device="cpu")
    except (ValueError, TypeError, KeyError, StopIteration) as error:
        raise ValueError(
            f"{name!r} can't be put together from {line!r:.200}: {error!r:.200}"
        ) from None


def read_traits(name: str, traits: Tensor, scale: Tensor) -> dict[str, Any]:
    """Return the options of ``FP8Tensor.from_codes`` that a tensor of traits has."""
    try:
        values = traits.tolist()
        added_dimensions = values.pop() if len(values) > _EARLIER_TRAITS else 0
        numbers = _Numbers._make(values)
        if added_dimensions not in (0, _ADDED_DIMENSIONS):
            raise ValueError(
                f"{added_dimensions} added dimensions: 0 or {_ADDED_DIMENSIONS} are known"
            )
        had_exponents = numbers.block_size > 0
        if numbers.block_size and had_exponents is not (scale.dtype is torch.uint8):
            saved_as = "exponents" if had_exponents else "torch.float32"
            raise ValueError(
                f"{name}_scale is {scale.dtype}, but was {saved_as} when it was saved, so reading "
                "has cast it: read it into a tensor of that dtype, or load the file into a new "
                "model first"
            )
        layout = _one_of(LAYOUTS, numbers.layout)
        draws, retraction = _one_of(_DRAWS_AND_RETRACTIONS, numbers.draws_and_retraction)
        return {
            "fmt": FloatFormat(numbers.exponent, numbers.mantissa, numbers.bias, layout),
            "rounding": _one_of(WRITE_ROUNDINGS, numbers.rounding),
            "seed": numbers.seed,
            "dtype": _one_of(DTYPES, numbers.dtype),
            "block_size": block_size_of(abs(numbers.block_size)),
            "by_operator": bool(numbers.by_operator),
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
    """Convert the scale of another library's file to that of our states.

    Returns:
        Options of ``FP8Tensor.from_codes``: what the file does not say is the weight's.
    """
    if name + "_counter" in state:
        raise ValueError(
            f"{name} has a {name}_counter but no {name}_traits, as in files of earlier versions: "
            "pass the tensors and their header's metadata through fm.files.unflatten"
        )
    if float8_format(saved.dtype) is None:
        raise ValueError(
            f"{name} holds uint8 codes, but {name}_traits, which say in which format, are missing"
        )
    headers = {}
    for key in (name, *names_beside(name, state)):
        part = state[key]
        if isinstance(part, Tensor):
            headers[key] = Header(dtype_name(part.dtype), tuple(part.shape), "the state dict")
    (stored,) = stored_weights(headers).values()
    scale = state.pop(stored.scale)
    if share_of(saved) is None:
        tensors = {stored.codes: saved, stored.scale: scale}
        _, scale = read_parts(stored, tensors.__getitem__)
        scale = as_kept(scale, blocks=stored.block_size is not None)
    elif scale.dtype is not torch.uint8:
        scale = scale.float()
    state[name + "_scale"] = scale
    options = {
        "fmt": stored.format,
        "rounding": "stochastic",
        "seed": 0,
        "dtype": weight.dtype if weight.dtype in DTYPES else torch.float32,
        "block_size": stored.block_size,
        "draws": DRAWS[0],
        "retraction": RETRACTIONS[0],
    }
    if isinstance(weight, FP8Tensor):
        options["rounding"] = weight.rounding
        options["seed"] = weight.seed
        options["draws"] = weight.draws
        options["retraction"] = weight.retraction
    return options
