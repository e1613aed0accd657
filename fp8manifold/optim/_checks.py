"""Options, schedules and parameters, checked before anything changes."""

import difflib
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, get_args

import torch
from torch import Tensor

from fp8manifold._base.checks import check_choice, check_int, check_number
from fp8manifold._base.reading import read_cached
from fp8manifold._numerics.charts import RETRACTIONS
from fp8manifold._ranks import check_share, share_of
from fp8manifold.manifolds import StiffnessManifold
from fp8manifold.optim._directions import DIRECTIONS
from fp8manifold.optim._slot import stiffness_manifold_of
from fp8manifold.optim._spec import MOMENTS
from fp8manifold.optim._writeback import WRITEBACKS, rule_of
from fp8manifold.random_bits import Draws
from fp8manifold.scaling import broadcasts_to
from fp8manifold.tensor import FP8Tensor

Schedule = float | Callable[[int], float]
"""A number, or a function of the number of steps taken so far (0 at the first step)."""


@dataclass(frozen=True)
class _Anneal:
    start: float
    end: float
    steps: int

    def __call__(self, step: int) -> float:
        return self.start + (self.end - self.start) * min(step / self.steps, 1.0)


def anneal(start: float, end: float, steps: int) -> Callable[[int], float]:
    """A linear schedule from ``start`` at step 0 to ``end`` at step ``steps`` and
    after.

    .. math:: k(t) = start + (end - start) \\min(t / steps, 1)

    Args:
        start, end: the values at step 0, and from step ``steps`` on.
        steps: how many steps it takes from one to the other.

    Returns:
        A function of the number of steps taken, for ``stiffness``, ``scale`` or
        ``exponent`` of an optimizer.

    Raises:
        TypeError: a value of another type.
        ValueError: ``start`` or ``end`` is NaN or Inf, ``steps`` below 1.

    Example:
        >>> k = anneal(1.0, 0.0, 100)
        >>> k(0), k(50), k(1000)
        (1.0, 0.5, 0.0)
    """
    for name, value in (("start", start), ("end", end)):
        check_number(name, value, -math.inf, math.inf, open_low=True, open_high=True)
    check_int("steps", steps, 1, 2**62)
    return _Anneal(start, end, steps)


def scheduled(name: str, value: Schedule, step: int, low: float, high: float) -> float:
    current = value(step) if callable(value) else value
    check_number(name, current, low, high)
    return current


_OPTIONAL: Final = ("float_lr", "previous_norm", "stabilize_every", "reset_every")
_UNSUPPORTED: Final = ("foreach", "fused", "capturable", "differentiable")


def options_in(arguments: dict[str, Any]) -> dict[str, Any]:
    """The options among a constructor's ``locals()``; raises for a keyword that is
    none, as :func:`reject_flags`.
    """
    reject_flags(type(arguments["self"]).__name__, arguments["flags"])
    return {
        name: value
        for name, value in arguments.items()
        if name not in ("self", "params", "flags", "__class__")
    }


def check_finite(name: str, value: Any) -> None:
    """Raise unless ``value`` is a number in [0, inf)."""
    check_number(name, value, 0.0, math.inf, open_high=True)


def _check_betas(betas: Any) -> None:
    """Raise unless ``betas`` is a pair of numbers in [0, 1)."""
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise TypeError(f"betas={betas!r} must be a pair of numbers")
    for i, beta in enumerate(betas):
        check_number(f"betas[{i}]", beta, 0.0, 1.0, open_high=True)


def reject_flags(optimizer: str, flags: dict[str, Any]) -> None:
    """Raise ValueError for a flag of torch's that would be ignored, TypeError for any
    other keyword.
    """
    for name, value in flags.items():
        if name not in _UNSUPPORTED:
            nearest = difflib.get_close_matches(name, _UNSUPPORTED, n=1)
            hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
            raise TypeError(f"{optimizer} got an unexpected keyword argument {name!r}{hint}")
        if value:
            raise ValueError(f"{name}={value!r} is not supported by {optimizer}: leave it out")


CHANGING: Final = dict.fromkeys(("params", "lr", "initial_lr", "previous_norm"))
"""Entries of a group that change all the time: the group is checked again when another
one has changed.
"""


def are_same(ours: Any, theirs: Any) -> bool:
    """True if options, or collections of them, are equal; those that can't be compared,
    as two tensors or arrays that users put into a group, are not.
    """
    try:
        return bool(ours == theirs)
    except (RuntimeError, TypeError, ValueError):
        return False


def refuse_recording(optimizer: Any) -> None:
    """Raise RuntimeError where a CUDA graph would record a step: its counts and random
    bits would never change.
    """
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"a CUDA graph can't record a step of {type(optimizer).__name__}, whose numbers and "
            f"random bits would be "
            "the same in every replay: fp8manifold.optim.graphed records the whole training step "
            "and renews them"
        )


def check_lr(group: dict[str, Any]) -> None:
    """Check the learning rate, which a schedule may have set since the group was made."""
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(
            f"lr has shape {tuple(lr.shape)}: a number or a tensor of one element is needed"
        )
    if type(lr) is not float or not 0 <= lr < math.inf:
        check_finite("lr", read_cached(lr, Tensor.item) if isinstance(lr, Tensor) else lr)


def lr_of(group: dict[str, Any]) -> float:
    """Learning rate of a group; a tensor on a GPU is waited for once after each change."""
    lr = group["lr"]
    return float(read_cached(lr, Tensor.item) if isinstance(lr, Tensor) else lr)


def check_shared(optimizer: str, group: dict[str, Any], damping: str) -> None:
    """Raise unless the options that optimizers share are valid; ``damping`` is the name
    of the lower bound.
    """
    check_lr(group)
    for name in ("eps", "adam_eps", "weight_decay", "float_lr", "previous_norm"):
        if name in group and not (group[name] is None and name in _OPTIONAL):
            check_finite(name, group[name])
    if "betas" in group:
        _check_betas(group["betas"])
    check_int("seed", group["seed"], 0, 2**64 - 1)
    check_choice("on_nonfinite", group["on_nonfinite"], ("skip", "raise"))
    for name in ("maximize", "nesterov", "normalize"):
        if not isinstance(value := group.get(name, False), bool):
            raise TypeError(f"{name}={value!r} must be True or False, not {type(value).__name__}")
    for name in ("refresh_every", "stabilize_every", "reset_every"):
        if not (group[name] is None and name in _OPTIONAL):
            check_int(name, group[name], 1, 2**62)
    reject_flags(optimizer, {name: group[name] for name in _UNSUPPORTED if name in group})
    group.setdefault("start_lr", float(group["lr"]))
    check_number(damping, group[damping], 0.0, 1.0)
    check_number("clip", group["clip"], 1.0)


def check_combination(optimizer: str, direction: str, group: dict[str, Any]) -> None:
    """Raise ValueError, with the reason, unless an optimizer of this direction can take
    the group's options.
    """
    writeback, moments = group["writeback"], group["moments"]
    if writeback is not None:
        check_choice("writeback", writeback, WRITEBACKS)
    check_choice("moments", moments, MOMENTS)
    if group.get("draws") is not None:
        check_choice("draws", group["draws"], get_args(Draws))
    if group.get("retraction") is not None:
        check_choice("retraction", group["retraction"], RETRACTIONS)
    if not rule_of(group).injects:
        return
    if (reason := DIRECTIONS[direction].takes_no_error) is not None:
        others = ", ".join(rule.name for rule in WRITEBACKS.values() if not rule.injects)
        raise ValueError(
            f"writeback={writeback!r} does not go with {optimizer}: {reason}; one of {others}"
        )
    if moments == "8bit":
        raise ValueError(
            f"writeback={writeback!r} does not go with moments='8bit': rounding errors exceed the "
            f"momentum's blocks; "
            "use moments='float32' or 'bfloat16', or a residual"
        )


def check_first_moment(group: dict[str, Any]) -> None:
    """Raise ValueError where Adam's first moment is to take errors and ``betas[0]`` is
    0.
    """
    if rule_of(group).injects and not group["betas"][0]:
        raise ValueError(
            f"writeback={group['writeback']!r} needs betas[0] > 0: there is no momentum to hold "
            f"the error"
        )


_DTYPES: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_parameters(parameters: list[Tensor]) -> None:
    """Raise ValueError unless each is a real float tensor with values, appears once,
    and if sharded is so by rows.
    """
    seen: set[int] = set()
    for parameter in parameters:
        check_share(parameter)
        manifold = None if isinstance(parameter, FP8Tensor) else stiffness_manifold_of(parameter)
        # a flat piece of a weight on a grid, or the flat parameter that FSDP's first
        # version makes
        flat = [
            getattr(part.module, "manifold", None)
            for part in getattr(parameter, "_param_infos", ())
        ]
        fits = manifold is None or broadcasts_to(manifold.scale.shape, parameter.shape)
        if not fits or any(isinstance(each, StiffnessManifold) for each in flat):
            raise ValueError(
                f"a parameter of shape {tuple(parameter.shape)} is sharded by "
                f"FullyShardedDataParallel, without the "
                "scales of its pieces: use DistributedDataParallel, or storage='fp8' or 'master' "
                "with fully_shard"
            )
        if parameter.dtype not in _DTYPES:
            raise ValueError(
                f"a parameter has dtype {parameter.dtype}: only real floats (float16, bfloat16, "
                f"float32, float64) and "
                "one-byte FP8Parameters can be stepped"
            )
        if parameter.is_meta:
            raise ValueError(
                f"a parameter of shape {tuple(parameter.shape)} is on the meta device: it has no "
                f"values"
            )
        if manifold is not None and manifold.scale.device != parameter.device:
            raise ValueError(
                f"a parameter of shape {tuple(parameter.shape)} is on {parameter.device} and its "
                f"manifold on {manifold.scale.device}: move both to one device"
            )
        if id(parameter) in seen:
            raise ValueError(
                f"a parameter of shape {tuple(parameter.shape)} appears twice in a group: each may "
                f"be stepped once"
            )
        seen.add(id(parameter))


def check_unshared(name: str, parameters: Iterable[Tensor]) -> None:
    """Raise ValueError for a parameter that several processes hold, in an optimizer
    that needs all of it.
    """
    for parameter in parameters:
        if share_of(parameter) is not None:
            raise ValueError(
                f"{name} can't step a parameter of shape {tuple(parameter.shape)} that is sharded: "
                f"it needs the whole; "
                "use StiffnessAdamW or another of fp8manifold.optim, or DistributedDataParallel"
            )


_MOVING: Final = ("lr", "float_lr", "betas", "momentum", "weight_decay")
"""Options that schedules change: a loaded state is expected to have other values."""


def unshare(groups: Sequence[dict[str, Any]]) -> None:
    """Copy tensors that groups share: schedulers that write in place, a group at a
    time, would write them twice.
    """
    held = Counter(
        value.data_ptr()
        for group in groups
        for value in group.values()
        if isinstance(value, Tensor)
    )
    for group in groups:
        shared = [
            name
            for name, value in group.items()
            if isinstance(value, Tensor) and held[value.data_ptr()] > 1
        ]
        group.update({name: group[name].clone() for name in shared})


def warn_of_overridden(optimizer: Any, before: Sequence[dict[str, Any]]) -> None:
    """Warn where options of a loaded state take the place of those that an optimizer
    was made with; name both.
    """
    found: dict[str, None] = {}
    for given, loaded in zip(before, optimizer.param_groups, strict=True):
        for name in sorted(optimizer.defaults.keys() - _MOVING):
            values = given.get(name), loaded.get(name)
            ours, theirs = (list(value) if isinstance(value, tuple) else value for value in values)
            # a line that names two alike tells nothing
            if not are_same(ours, theirs) and repr(ours) != repr(theirs):
                other = (
                    " (optim.adopted_state(state, optimizer) keeps these)"
                    if name == "moments"
                    else ""
                )
                found[f"{name}={theirs!r} in place of {ours!r}{other}"] = None
    if found:
        warnings.warn(
            f"{type(optimizer).__name__} goes on with options of the loaded state, not with those "
            f"that it was made with: {', '.join(found)}",
            UserWarning,
            stacklevel=3,
        )
