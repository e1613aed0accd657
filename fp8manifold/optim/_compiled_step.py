"""The same step through ``torch.compile``: what runs on devices without native code, and wherever it is asked for."""

import types
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

from fp8manifold.optim._slot import Slot, index_in
from fp8manifold.optim._spec import Spec
from fp8manifold.optim._step import step
from fp8manifold.random_bits import mix

__all__ = ["CompileUnavailableWarning", "can_compile", "exact_options", "run_compiled"]


class CompileUnavailableWarning(UserWarning):
    """Steps run without ``torch.compile``: the same results, slower on some devices."""


_functions: Final[dict[tuple[object, ...], Callable[..., None]]] = {}
"""Compiled functions by what they were compiled for."""

_failed: Final[set[tuple[object, ...]]] = set()
"""What could not be compiled, and was warned of."""


def can_compile(slot: Slot, dtype: torch.dtype) -> bool:
    """Whether a step has the same bits compiled, and has not failed to compile."""
    fits = slot.spec.compiles and slot.view.compiles and dtype is torch.float32
    small = slot.view.numel < 2**31 and slot.offset % 2**32 + slot.view.numel <= 2**32
    return fits and small and _key(slot) not in _failed


def run_compiled(slot: Slot, numbers: Tensor, keys: Tensor) -> bool:
    """Take the step in place; False, with nothing changed and one warning ever, where compiling fails.

    Args:
        slot: what to step.
        numbers: a row of hyperparameters.
        keys: a row of round keys.
    """
    key, arrays = _key(slot), slot.arrays
    if key not in _functions:
        _functions[key] = _compiled(slot.spec, tuple(arrays), slot.tensors["weight"].device.type)
    try:
        _functions[key](numbers, keys, *arrays.values())
    except torch.OutOfMemoryError:
        raise  # no failure of the compiler's: eager, it would need more
    except Exception as error:  # whatever a compiler's absence or failure raises
        if not _failed:
            first_line = next(iter(str(error).strip().splitlines()), "")
            warnings.warn(
                f"optimizer steps are not compiled: torch.compile failed with {type(error).__name__}: {first_line} "
                "(compile=False silences this)",
                CompileUnavailableWarning,
                stacklevel=2,
            )
        _failed.add(key)
        return False
    return True


def _key(slot: Slot) -> tuple[object, ...]:
    return (slot.spec, len(slot.view.dims), slot.tensors["weight"].device.type, tuple(slot.tensors))


def _compiled(spec: Spec, names: tuple[str, ...], device: str) -> Callable[..., None]:
    """The pure step with a code object of its own: specifications that share one would exhaust its cache."""

    def take_step(numbers: Tensor, keys: Tensor, *tensors: Tensor) -> None:
        arrays = dict(zip(names, tensors, strict=True))
        noise = _noise(spec, arrays["gradient"], keys)
        for name, value in step(spec, arrays, numbers, noise).stored.items():
            arrays[name].copy_(value)

    code = take_step.__code__.replace(co_name=f"take_step_{len(_functions)}")
    own = types.FunctionType(code, take_step.__globals__, code.co_name, None, take_step.__closure__)
    function: Callable[..., None] = torch.compile(own, fullgraph=True, options=exact_options(device))
    return function


_EXACT: Final = ("emulate_precision_casts", "eager_numerics.division_rounding", "eager_numerics.disable_ftz")
"""Options of Inductor's without which a GPU's code contracts products and sums, and divides approximately."""


@cache
def exact_options(device: str) -> dict[str, str | int | bool | Callable[..., Any]] | None:
    """What a step is compiled with for a device so that its bits are eager ones, of what the release of torch has."""
    if device == "cpu":
        return None
    from torch._inductor import config

    known = getattr(config, "get_config_copy", None) or config.to_dict  # older releases have the latter alone
    return {name: True for name in _EXACT if name in known()}


def _noise(spec: Spec, gradient: Tensor, keys: Tensor) -> dict[str, Tensor]:
    if not (spec.draws_for_weight or spec.draws_for_moments):
        return {}
    index = index_in(gradient.shape, gradient.device)
    noise = {}
    for name, wanted, k in (("weight", spec.draws_for_weight, 0), ("moments", spec.draws_for_moments, 4)):
        if wanted:
            noise[name] = mix(index + keys[k], keys[k + 1], keys[k + 2]) + keys[k + 3]
    return noise
