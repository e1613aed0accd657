"""The same step through ``torch.compile``: what runs on devices without native code, and wherever it is asked for."""

import types
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

from fp8manifold.optim._job import Job, index_in
from fp8manifold.optim._step import step
from fp8manifold.optim._variant import Variant
from fp8manifold.random_bits import mix

__all__ = ["CompileUnavailableWarning", "can_compile", "exact_options", "run_compiled"]


class CompileUnavailableWarning(UserWarning):
    """Steps run without ``torch.compile``: the same results, slower on some devices."""


_functions: Final[dict[tuple[object, ...], Callable[..., None]]] = {}
"""Compiled functions by what they were compiled for."""

_failed: Final[set[tuple[object, ...]]] = set()
"""What could not be compiled, and was warned of."""


def can_compile(job: Job, dtype: torch.dtype) -> bool:
    """Whether a step has the same bits compiled, and has not failed to compile."""
    fits = job.variant.compiles and job.layout.compiles and dtype is torch.float32
    small = job.layout.numel < 2**31 and job.offset % 2**32 + job.layout.numel <= 2**32
    return fits and small and _key(job) not in _failed


def run_compiled(job: Job, numbers: Tensor, keys: Tensor) -> bool:
    """Take the step in place; False, with nothing changed and one warning ever, where compiling fails.

    Args:
        job: what to step.
        numbers: a row of hyperparameters.
        keys: a row of round keys.
    """
    key, arrays = _key(job), job.arrays
    if key not in _functions:
        _functions[key] = _compiled(job.variant, tuple(arrays), job.held["weight"].device.type)
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


def _key(job: Job) -> tuple[object, ...]:
    return (job.variant, len(job.layout.dims), job.held["weight"].device.type, tuple(job.held))


def _compiled(variant: Variant, names: tuple[str, ...], device: str) -> Callable[..., None]:
    """The pure step with a code object of its own: specifications that share one would exhaust its cache."""

    def take_step(numbers: Tensor, keys: Tensor, *tensors: Tensor) -> None:
        arrays = dict(zip(names, tensors, strict=True))
        noise = _noise(variant, arrays["gradient"], keys)
        for name, value in step(variant, arrays, numbers, noise).stored.items():
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


def _noise(variant: Variant, gradient: Tensor, keys: Tensor) -> dict[str, Tensor]:
    if not (variant.draws_for_weight or variant.draws_for_moments):
        return {}
    index = index_in(gradient.shape, gradient.device)
    noise = {}
    for name, wanted, k in (("weight", variant.draws_for_weight, 0), ("moments", variant.draws_for_moments, 4)):
        if wanted:
            noise[name] = mix(index + keys[k], keys[k + 1], keys[k + 2]) + keys[k + 3]
    return noise
