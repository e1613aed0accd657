"""Options, schedules and parameters, checked before anything changes.

    constructor        options_in          picks the options from ``locals()``
    a group is added   check_parameters    dtype, device, shards, repetitions
                       check_shared        options that optimizers share, one by one
                       check_combination   options that exclude each other
    a state is loaded  all of these

An optimizer's ``_check_group`` calls the checks of its options. In later steps it is
called only for a group that has changed (`_optimizer._checked_facts`); a learning rate, which
schedules write, is checked in every step (`check_lr` of `_step_numbers.py`).

Every error names the option, the value it had, and what is allowed.
"""

import difflib
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, get_args

import torch
from torch import Tensor

from fp8manifold._base.checks import check_choice, check_int, check_number
from fp8manifold._geoopt_import import follow_geoopt
from fp8manifold._interface import MomentStorage
from fp8manifold._numerics.charts import RETRACTIONS
from fp8manifold._ranks import check_share, local_of, share_of
from fp8manifold.manifolds import StiffnessManifold
from fp8manifold.optim._directions import DIRECTIONS
from fp8manifold.optim._slot import stiffness_manifold_of
from fp8manifold.optim._spec import MOMENTS
from fp8manifold.optim._step_numbers import LARGEST_NUMBER, check_lr
from fp8manifold.optim._writeback import WRITEBACKS, rule_of
from fp8manifold.random_bits import Draws
from fp8manifold.scaling import broadcasts_to
from fp8manifold.tensor import FP8Tensor


@dataclass(frozen=True)
class _Anneal:
    """A linear schedule. It is a class so that optimizers with one can be pickled."""

    start: float
    end: float
    steps: int

    def __call__(self, step: int) -> float:
        return self.start + (self.end - self.start) * min(step / self.steps, 1.0)


def anneal(start: float, end: float, steps: int) -> Callable[[int], float]:
    r"""Return a linear schedule from ``start`` at step 0 to ``end`` at step ``steps``.

    .. math:: k(t) = start + (end - start) \min(t / steps, 1)

    Args:
        start: the value at step 0.
        end: the value from step ``steps`` on.
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


_OPTIONAL: Final = ("float_lr", "previous_norm", "stabilize_every", "reset_every")
"""Options that may be None."""
_UNSUPPORTED: Final = ("foreach", "fused", "capturable", "differentiable")
"""Flags of torch's optimizers."""


def options_in(arguments: dict[str, Any]) -> dict[str, Any]:
    """Pick the options from a constructor's ``locals()``.

    An unknown keyword is refused as by :func:`reject_flags`.
    """
    reject_flags(type(arguments["self"]).__name__, arguments["flags"])
    options = dict(arguments)
    for name in ("self", "params", "flags", "__class__"):
        options.pop(name, None)
    return options


def check_finite(name: str, value: Any) -> None:
    """Raise unless ``value`` is a number from 0 to the largest float32."""
    check_number(name, value, 0.0, LARGEST_NUMBER)


def _check_betas(betas: Any) -> None:
    """Raise unless ``betas`` is a pair of numbers in [0, 1)."""
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise TypeError(f"betas={betas!r} must be a pair of numbers")
    for i, beta in enumerate(betas):
        check_number(f"betas[{i}]", beta, 0.0, 1.0, open_high=True)


def reject_flags(optimizer: str, flags: dict[str, Any]) -> None:
    """Raise for keywords that an optimizer does not have.

    Raises:
        ValueError: a flag of torch's that would be ignored.
        TypeError: any other keyword.
    """
    for name, value in flags.items():
        if name not in _UNSUPPORTED:
            nearest = difflib.get_close_matches(name, _UNSUPPORTED, n=1)
            hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
            raise TypeError(f"{optimizer} got an unexpected keyword argument {name!r}{hint}")
        if value:
            raise ValueError(f"{name}={value!r} is not supported by {optimizer}: leave it out")


def check_shared(optimizer: str, group: dict[str, Any], damping: str) -> None:
    """Raise unless the options that optimizers share are valid.

    A group without ``start_lr`` is given it: its learning rate as it is now.

    Args:
        optimizer: its name, for errors.
        group: with the options.
        damping: the name of the option that is the lower bound of S / S_ref.
    """
    check_lr(group)
    # Adafactor's eps is a pair, which it checks itself
    has_pair = "beta2_decay" in group
    for name in ("eps", "adam_eps", "weight_decay", "float_lr", "previous_norm"):
        if name == "eps" and has_pair:
            continue
        if name in group and not (group[name] is None and name in _OPTIONAL):
            check_finite(name, group[name])
    if "betas" in group:
        _check_betas(group["betas"])
    check_int("seed", group["seed"], 0, 2**64 - 1)
    check_choice("on_nonfinite", group["on_nonfinite"], ("skip", "raise"))
    for name in ("maximize", "nesterov", "normalize"):
        value = group.get(name, False)
        if not isinstance(value, bool):
            raise TypeError(f"{name}={value!r} must be True or False, not {type(value).__name__}")
    for name in ("refresh_every", "stabilize_every", "reset_every"):
        if not (group[name] is None and name in _OPTIONAL):
            check_int(name, group[name], 1, 2**62)
    reject_flags(optimizer, {name: group[name] for name in _UNSUPPORTED if name in group})
    group.setdefault("start_lr", float(group["lr"]))
    check_number(damping, group[damping], 0.0, 1.0)
    check_number("clip", group["clip"], 1.0)


def check_combination(optimizer: str, direction: str, group: dict[str, Any]) -> None:
    """Raise ValueError, with the reason, for options that exclude each other.

    Args:
        optimizer: its name, for errors.
        direction: what it descends along.
        group: with the options.
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
    reason = DIRECTIONS[direction].takes_no_error
    if reason is not None:
        others = ", ".join(rule.name for rule in WRITEBACKS.values() if not rule.injects)
        raise ValueError(
            f"writeback={writeback!r} does not go with {optimizer}: {reason}; one of {others}"
        )
    if moments == MomentStorage.EIGHT_BIT:
        raise ValueError(
            f"writeback={writeback!r} does not go with moments='8bit': rounding errors exceed the "
            f"momentum's blocks; "
            "use moments='float32' or 'bfloat16', or a residual"
        )


def check_first_moment(group: dict[str, Any]) -> None:
    """Raise ValueError where Adam's first moment takes errors and ``betas[0]`` is 0."""
    if rule_of(group).injects and not group["betas"][0]:
        raise ValueError(
            f"writeback={group['writeback']!r} needs betas[0] > 0: there is no momentum to hold "
            f"the error"
        )


_DTYPES: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_parameters(parameters: list[Tensor]) -> None:
    """Raise ValueError for a parameter that can't be stepped.

    It has to be a real float tensor with values, appear once, and if it is sharded be so
    by rows.
    """
    # another finder may have imported it
    follow_geoopt()
    seen: set[int] = set()
    for parameter in parameters:
        check_share(parameter)
        manifold = None if isinstance(parameter, FP8Tensor) else stiffness_manifold_of(parameter)
        if _is_flattened(parameter, manifold):
            raise ValueError(
                f"a parameter of shape {tuple(parameter.shape)} is sharded by "
                f"FullyShardedDataParallel, without the "
                "scales of its pieces: use DistributedDataParallel, or storage='codes' or 'master' "
                "with fully_shard"
            )
        part = local_of(parameter)
        holds_others = hasattr(part, "__tensor_flatten__")
        if holds_others and not isinstance(part, FP8Tensor):
            raise ValueError(
                f"a parameter of shape {tuple(parameter.shape)} is a {type(parameter).__name__}, "
                "which holds other tensors: these optimizers step ordinary parameters and those of "
                "fp8manifold"
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


def check_distinct(groups: list[dict[str, Any]]) -> None:
    """Raise ValueError for a parameter that is twice in the groups of an optimizer."""
    seen: set[int] = set()
    for group in groups:
        for parameter in group["params"]:
            if id(parameter) in seen:
                raise ValueError(
                    f"a parameter of shape {tuple(parameter.shape)} appears twice in the groups: "
                    "each may be stepped once"
                )
            seen.add(id(parameter))


def check_memory(groups: list[dict[str, Any]]) -> None:
    """Raise ValueError for two parameters of an optimizer that share memory.

    Threads would step them at the same time. Only tensors without gaps are compared:
    views with strides may lie between one another's elements.
    """
    spans: list[tuple[str, int, int, Tensor]] = []
    for group in groups:
        for parameter in group["params"]:
            part = local_of(parameter)
            memory = part.codes if isinstance(part, FP8Tensor) else part
            start = memory.data_ptr()
            # tensors without memory, such as those of the meta device, have the address 0
            if start and memory.is_contiguous():
                stop = start + memory.numel() * memory.element_size()
                spans.append((str(memory.device), start, stop, parameter))
    spans.sort(key=lambda span: span[:3])
    for (device, _, stop, one), (other_device, start, _, other) in itertools.pairwise(spans):
        if other_device == device and start < stop:
            raise ValueError(
                f"parameters of shapes {tuple(one.shape)} and {tuple(other.shape)} share memory: "
                "give one parameter to both modules"
            )


def _is_flattened(parameter: Tensor, manifold: StiffnessManifold | None) -> bool:
    """Return True for what the first version of FSDP makes of weights on a grid.

    That is a flat parameter of several weights, or a flat piece of one, whose shape its
    manifold's scale does not fit.
    """
    if manifold is not None and not broadcasts_to(manifold.scale.shape, parameter.shape):
        return True
    for part in getattr(parameter, "_param_infos", ()):
        if isinstance(getattr(part.module, "manifold", None), StiffnessManifold):
            return True
    return False


def refuse_sharded(name: str, parameters: Iterable[Tensor]) -> None:
    """Raise ValueError for a sharded parameter, in an optimizer that needs all of it.

    ``name`` is the optimizer's.
    """
    for parameter in parameters:
        if share_of(parameter) is not None:
            raise ValueError(
                f"{name} can't step a parameter of shape {tuple(parameter.shape)} that is sharded: "
                f"it needs the whole; "
                "use StiffnessAdamW or another of fp8manifold.optim, or DistributedDataParallel"
            )


def copy_shared_tensors(groups: Sequence[dict[str, Any]]) -> None:
    """Copy tensors that groups share, such as a learning rate.

    Schedulers that write in place, a group at a time, would write them several times.
    """
    uses: Counter[int] = Counter()
    for group in groups:
        uses.update(value.data_ptr() for value in group.values() if isinstance(value, Tensor))
    for group in groups:
        for name, value in group.items():
            if isinstance(value, Tensor) and uses[value.data_ptr()] > 1:
                group[name] = value.clone()
