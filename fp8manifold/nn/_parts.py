"""Parts of a one-byte weight in a state of plain tensors: codes, scales, a count, and numbers that say what it is."""

from typing import Any, Final

import torch
from torch import Tensor

from fp8manifold._encoded.dispatch import DTYPES, FLOAT8, as_codes, as_float8, float8_format
from fp8manifold._encoded.operators import checked_remainder
from fp8manifold._encoded.scaled import DRAWS, ROUNDINGS
from fp8manifold._encoded.storage import block_size_of, number_of
from fp8manifold.formats import LAYOUTS, FloatFormat
from fp8manifold.nn._tensor_files import refuse_codes
from fp8manifold.parameter import FP8Parameter
from fp8manifold.tensor import FP8Tensor

_LEFT: Final = "_remainder"
PARTS: Final = ("", "_scale", "_counter", "_traits", _LEFT)
"""What is added to a weight's name for each of its parts; the last is there where a weight has kept it."""


def holds_codes(saved: Any) -> bool:
    """Whether what a state has for a weight are codes, by themselves or with their scales."""
    return isinstance(saved, FP8Tensor) or saved.dtype == torch.uint8 or saved.dtype in FLOAT8.values()


def parts_of(name: str, weight: FP8Tensor) -> dict[str, Tensor]:
    """The parts by name, which share the weight's memory."""
    fmt = weight.format
    traits = [
        *(fmt.exponent_bits, fmt.mantissa_bits, fmt.bias, LAYOUTS.index(fmt.layout)),
        *(ROUNDINGS.index(weight.rounding), weight.seed, DTYPES.index(weight.dtype)),
        *(number_of(weight.block_size), int(weight.by_operator), DRAWS.index(weight.draws)),
    ]
    codes = as_float8(weight.codes, fmt)
    parts = (codes, weight.kept_scale, weight.counter, torch.tensor(traits, device=weight.device))
    left = {} if weight.remainder is None else {name + _LEFT: weight.remainder}
    return {name + suffix: part for suffix, part in zip(PARTS, parts, strict=False)} | left


def gather_parts(state: dict[str, Any], name: str, weight: Tensor) -> None:
    """Put one weight together again in the place of its parts, where a state has them; ``weight`` is the layer's own.

    Codes and scales alone are taken too, of a file that another library wrote: the count then begins anew.

    Raises:
        ValueError: parts that do not fit together, codes that nothing says the format or the scales of, integers, or
            numbers that codes were averaged or cast to, beside what says of which format they are.
    """
    saved = state.get(name)
    if not isinstance(saved, Tensor) or isinstance(saved, FP8Tensor):
        return
    known = name + "_traits"
    if not holds_codes(saved) and known in state:
        raise ValueError(
            f"{name} holds {saved.dtype}, and by {known} it is codes, which can't be averaged or cast: average "
            f"decoded weights (fm.averaged_model), or leave out {name}_scale, {name}_counter and {known}"
        )
    if not holds_codes(saved) or name + "_scale" not in state:
        refuse_codes(name, saved.dtype, state)
        return
    scale, counter, traits, left = (state.pop(name + suffix, None) for suffix in PARTS[1:])
    options = _read_traits(name, traits) if traits is not None else _assumed(name, saved, weight)
    scale = scale if scale.dtype == torch.uint8 else scale.float()  # bytes are exponents of blocks
    if scale.shape == (1,) and saved.dim() > 1:  # as compressed-tensors has the scale of a whole tensor
        scale = scale.reshape(())
    try:
        weight = FP8Parameter.from_codes(as_codes(saved), scale, counter=0 if counter is None else counter, **options)
        weight.remainder = checked_remainder(left, saved)
        state[name] = weight
    except (ValueError, TypeError) as error:
        raise ValueError(f"{name} can't be put together from its parts: {error}") from None


def _read_traits(name: str, traits: Tensor) -> dict[str, Any]:
    try:
        exponent, mantissa, bias, layout, rounding, seed, dtype, block, by_operator, draws = traits.tolist()
        return {
            "fmt": FloatFormat(exponent, mantissa, bias, _one_of(LAYOUTS, layout)),
            "rounding": _one_of(ROUNDINGS, rounding),
            "seed": seed,
            "dtype": _one_of(DTYPES, dtype),
            "block_size": block_size_of(block),
            "by_operator": bool(by_operator),
            "draws": _one_of(DRAWS, draws),
        }
    except (ValueError, TypeError) as error:
        raise ValueError(f"{name}_traits can't be read: {error}") from None


def _one_of(known: tuple[Any, ...], index: int) -> Any:
    if not 0 <= index < len(known):
        raise ValueError(f"{index} is out of range: 0 to {len(known) - 1}")
    return known[index]


def _assumed(name: str, saved: Tensor, weight: Tensor) -> dict[str, Any]:
    """What a file of another library leaves out is as the layer has it."""
    fmt = float8_format(saved.dtype)
    if fmt is None:
        raise ValueError(f"{name} holds uint8 codes, and {name}_traits, which say of which format, are missing")
    own = weight if isinstance(weight, FP8Tensor) else None
    return {
        "fmt": fmt,
        "rounding": own.rounding if own is not None else "stochastic",
        "seed": own.seed if own is not None else 0,
        "dtype": weight.dtype if weight.dtype in DTYPES else torch.float32,
        "block_size": own.block_size if own is not None else None,
        "draws": own.draws if own is not None else DRAWS[0],
    }
