"""Options, schedules, states and parameters: checked before anything changes, and what a loaded state changes."""

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
from fp8manifold._base.reading import known
from fp8manifold._ranks import check_share, local_of, share_of
from fp8manifold.manifolds import StiffnessManifold
from fp8manifold.optim._directions import DIRECTIONS, MOMENT_NAMES
from fp8manifold.optim._slot import own_manifold, slot_of
from fp8manifold.optim._spec import BOUND_NAMES, MOMENTS, bounds_of
from fp8manifold.optim._state import STORED, claim, described
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
    """A linear schedule from ``start`` at step 0 to ``end`` at step ``steps`` and after.

    .. math:: k(t) = start + (end - start) \\min(t / steps, 1)

    Args:
        start: the value at step 0.
        end: the value from step ``steps`` on.
        steps: how many steps it takes from one to the other.

    Returns:
        A function of the number of steps taken, for ``stiffness``, ``scale`` or ``exponent`` of an optimizer.

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


UNSUPPORTED_FLAGS: Final = ("foreach", "fused", "capturable", "differentiable")
FUNCTIONS: Final = ("stiffness", "metric")
"""Options that may be functions, in whose place a state has None."""
_NO_OPTIONS: Final = ("self", "params", "flags", "__class__")


def options_in(arguments: dict[str, Any]) -> dict[str, Any]:
    """The options among a constructor's ``locals()``.

    Raises:
        TypeError: an option that there is not.
        ValueError: a flag of torch's that would be ignored.
    """
    reject_flags(type(arguments["self"]).__name__, arguments["flags"])
    return {name: value for name, value in arguments.items() if name not in _NO_OPTIONS}


def check_finite(name: str, value: Any) -> None:
    """Raise unless ``value`` is a number in [0, inf)."""
    check_number(name, value, 0.0, math.inf, open_high=True)


def check_betas(betas: Any) -> None:
    """Raise unless ``betas`` is a pair of numbers in [0, 1)."""
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise TypeError(f"betas={betas!r} must be a pair of numbers")
    for i, beta in enumerate(betas):
        check_number(f"betas[{i}]", beta, 0.0, 1.0, open_high=True)


def reject_flags(optimizer: str, flags: dict[str, Any]) -> None:
    """Raise ValueError for a flag of torch's that would be ignored, TypeError for any other keyword."""
    for name, value in flags.items():
        if name not in UNSUPPORTED_FLAGS:
            nearest = difflib.get_close_matches(name, UNSUPPORTED_FLAGS, n=1)
            hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
            raise TypeError(f"{optimizer} got an unexpected keyword argument {name!r}{hint}")
        if value:
            raise ValueError(f"{name}={value!r} is not supported by {optimizer}: leave it out")


CHANGING: Final = dict.fromkeys(("params", "lr", "initial_lr", "previous_norm"))
"""Entries of a group that change all the time: all others are checked when they have."""


def refuse_recording(optimizer: Any) -> None:
    """Raise RuntimeError where a CUDA graph would record a step: its counts and random bits would never change."""
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"a CUDA graph can't record a step of {type(optimizer).__name__}, whose numbers and random bits would be "
            "the same in every replay: fp8manifold.optim.graphed records the whole training step and renews them"
        )


def check_lr(group: dict[str, Any]) -> None:
    """Check the learning rate, which a schedule may have set since the group was made."""
    lr = group["lr"]
    if type(lr) is not float or not 0 <= lr < math.inf:
        check_finite("lr", known(lr, Tensor.item) if isinstance(lr, Tensor) else lr)


def lr_of(group: dict[str, Any]) -> float:
    """Learning rate of a group; a tensor on a card is waited for once each time that somebody sets it."""
    lr = group["lr"]
    return float(known(lr, Tensor.item) if isinstance(lr, Tensor) else lr)


def check_shared(optimizer: str, group: dict[str, Any], damping: str) -> None:
    """Raise unless the options that every optimizer has are valid; ``damping`` is what its lower bound is called."""
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"lr has shape {tuple(lr.shape)}: a number or a tensor of one element is needed")
    check_lr(group)
    check_finite("weight_decay", group["weight_decay"])
    check_int("seed", group["seed"], 0, 2**64 - 1)
    check_choice("on_nonfinite", group["on_nonfinite"], ("skip", "raise"))
    if not isinstance(maximize := group["maximize"], bool):
        raise TypeError(f"maximize={maximize!r} must be True or False, not {type(maximize).__name__}")
    if group.get("previous_norm") is not None:
        check_finite("previous_norm", group["previous_norm"])
    for name in ("stabilize_every", "reset_every"):
        if group[name] is not None:
            check_int(name, group[name], 1, 2**62)
    reject_flags(optimizer, {name: group[name] for name in UNSUPPORTED_FLAGS if name in group})
    group.setdefault("start_lr", float(lr))
    check_number(damping, group[damping], 0.0, 1.0)
    check_number("clip", group["clip"], 1.0)
    check_int("refresh_every", group["refresh_every"], 1, 2**62)


def check_combination(optimizer: str, direction: str, group: dict[str, Any]) -> None:
    """Raise ValueError, with the reason, unless an optimizer of this direction has the group's options."""
    writeback, moments = group["writeback"], group["moments"]
    if writeback is not None:
        check_choice("writeback", writeback, WRITEBACKS)
    check_choice("moments", moments, MOMENTS)
    if group.get("draws") is not None:
        check_choice("draws", group["draws"], get_args(Draws))
    if not rule_of(group).injects:
        return
    if (reason := DIRECTIONS[direction].takes_no_error) is not None:
        others = ", ".join(rule.name for rule in WRITEBACKS.values() if not rule.injects)
        raise ValueError(f"writeback={writeback!r} does not go with {optimizer}: {reason}; one of {others}")
    if moments == "8bit":
        raise ValueError(
            f"writeback={writeback!r} does not go with moments='8bit': errors put into the momentum exceed its blocks; "
            "use moments='float32' or 'bfloat16', or a residual"
        )


def check_first_moment(group: dict[str, Any]) -> None:
    """Raise ValueError where Adam's first moment is to take errors and keeps nothing."""
    if rule_of(group).injects and not group["betas"][0]:
        raise ValueError(
            f"writeback={group['writeback']!r} needs betas[0] > 0: there is no momentum to put the error into"
        )


_DTYPES: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_KEPT: Final = (*MOMENT_NAMES, "residual", *sorted(BOUND_NAMES))


def check_parameters(parameters: list[Tensor]) -> None:
    """Raise ValueError unless each is a whole float tensor with values, and there but once."""
    for parameter in parameters:
        check_share(parameter)
        if _is_in_pieces(parameter):
            raise ValueError(
                f"a parameter of shape {tuple(parameter.shape)} is sharded by FullyShardedDataParallel, without the "
                "scales of its pieces: use DistributedDataParallel, or storage='fp8' or 'master' with fully_shard"
            )
        if parameter.dtype not in _DTYPES:
            raise ValueError(
                f"a parameter has dtype {parameter.dtype}: only real floats (float16, bfloat16, float32, float64) and "
                "one-byte FP8Parameters can be stepped"
            )
        if parameter.is_meta:
            raise ValueError(f"a parameter of shape {tuple(parameter.shape)} is on the meta device: it has no values")
        manifold = None if isinstance(parameter, FP8Tensor) else own_manifold(parameter)
        if manifold is not None and manifold.scale.device != parameter.device:
            raise ValueError(
                f"a parameter of shape {tuple(parameter.shape)} is on {parameter.device} and its manifold on "
                f"{manifold.scale.device}: move both to one device"
            )
    seen: set[int] = set()
    for parameter in parameters:
        if id(parameter) in seen:
            raise ValueError(
                f"a parameter of shape {tuple(parameter.shape)} appears twice in a group: each may be stepped once"
            )
        seen.add(id(parameter))


def check_unshared(name: str, parameters: Iterable[Tensor]) -> None:
    """Raise ValueError for a parameter that several processes hold, in an optimizer that needs all of it."""
    for parameter in parameters:
        if share_of(parameter) is not None:
            raise ValueError(
                f"{name} can't step a parameter of shape {tuple(parameter.shape)} that is sharded: it needs the whole; "
                "use StiffnessAdamW or another of fp8manifold.optim, or DistributedDataParallel"
            )


def _is_in_pieces(parameter: Tensor) -> bool:
    """True for a flat piece of a weight on a grid, and for the flat parameter that FSDP's first version makes."""
    manifold = None if isinstance(parameter, FP8Tensor) else own_manifold(parameter)
    if manifold is not None:
        return not broadcasts_to(manifold.scale.shape, parameter.shape)
    parts = getattr(parameter, "_param_infos", ())
    return any(isinstance(getattr(part.module, "manifold", None), StiffnessManifold) for part in parts)


def check_state(optimizer: torch.optim.Optimizer, state_dict: Any) -> None:
    """Raise TypeError or ValueError unless a state is one of this kind of optimizer, made for these parameters."""
    name = type(optimizer).__name__
    if not isinstance(state_dict, dict):
        raise TypeError(f"state_dict must be a dict, not {type(state_dict).__name__}")
    if missing := sorted({"state", "param_groups"} - state_dict.keys()):
        raise ValueError(f"this state is not one of {name}: it lacks {', '.join(missing)}")
    if (kind := state_dict.get("optimizer", name)) != name:
        raise ValueError(f"this state is one of {kind if isinstance(kind, str) else 'a wrapper'}, not of {name}")
    groups = state_dict["param_groups"]
    sizes = [len(group["params"]) for group in groups], [len(group["params"]) for group in optimizer.param_groups]
    if sizes[0] != sizes[1]:
        raise ValueError(f"this state has groups of size {sizes[0]}, the optimizer of size {sizes[1]}")
    for saved, ours in zip(groups, optimizer.param_groups, strict=True):
        known = [option for option in optimizer.defaults if option in ours and not callable(ours[option])]
        lacking = [option for option in known if option not in saved or (saved[option] is None and option in FUNCTIONS)]
        if lacking:
            raise ValueError(f"this state is not one of {name}: its parameter groups lack {', '.join(lacking)}")
        for index, parameter in zip(saved["params"], ours["params"], strict=True):
            _check_entry(state_dict["state"].get(index, {}), parameter, index)


def check_arrays(state: dict[str, Any], parameter: Tensor, group: dict[str, Any], *, stores_moments: bool) -> None:
    """Raise ValueError unless a state that may have been edited can be stepped; called before anything changes."""
    kept = False
    for name in _KEPT:
        if name not in state:
            continue
        kept, value = True, state[name]
        if not isinstance(value, Tensor):
            raise ValueError(f"{_state_of(parameter)} has {name}={value!r}: a tensor is needed")
        if name in MOMENT_NAMES and value.shape != parameter.shape:
            raise ValueError(f"{_state_of(parameter)} has {name} of shape {tuple(value.shape)}")
        if value.device != parameter.device:
            raise ValueError(
                f"{_state_of(parameter)} has {name} on {value.device}, but the parameter is on {parameter.device}: "
                "move both to one device"
            )
        if not value.is_contiguous() or local_of(value).is_neg():
            state[name] = value.contiguous().resolve_neg()
    if kept:
        check_entry(state, parameter, group, stores_moments=stores_moments)


def _state_of(parameter: Tensor) -> str:
    return f"the state of a parameter of shape {tuple(parameter.shape)}"


def check_entry(entry: dict[str, Any], parameter: Tensor, group: dict[str, Any], *, stores_moments: bool) -> None:
    """Raise ValueError unless moments and residual are kept as a group's options have it."""
    moments = group["moments"] if stores_moments else "float32"
    dtype = STORED[moments] or (torch.float64 if parameter.dtype is torch.float64 else torch.float32)
    bounds = bounds_of(group.get("direction")) if moments == "8bit" else {}
    for name in MOMENT_NAMES:
        if name in entry and entry[name].dtype != dtype:
            raise ValueError(
                f"{_state_of(parameter)} has {name} in {entry[name].dtype}, but "
                f"moments={moments!r} keeps it in {dtype}: load optim.adopted_state(state, optimizer) instead"
            )
        if name in entry and bounds.get(name, name) not in entry:
            raise ValueError(
                f"{_state_of(parameter)} has {name} in 8 bits without {bounds[name]}, which says how its blocks are "
                "scaled: it was kept in another format, which is not read; begin with a new state"
            )
    if rule_of(group).state and "residual" in entry:
        _check_residual(entry["residual"], _state_of(parameter))


def _check_residual(residual: Any, state: str) -> None:
    """Raise ValueError for a residual of several weights in a byte, as earlier releases kept of 4 and 2 bits."""
    if isinstance(residual, Tensor) and residual.dtype is not torch.int8:
        raise ValueError(
            f"{state} has a residual in {residual.dtype}: those of 4 and 2 bits are not read any more; only "
            "writeback='residual8' keeps one, in torch.int8: begin with a new state"
        )


def _check_entry(entry: dict[str, Any], parameter: Tensor, index: int) -> None:
    """Check one parameter's state: its moments have the parameter's shape, and are of its format."""
    if entry and "step" in entry and "stream" not in entry:
        raise ValueError(f"the state of parameter {index} lacks its stream: it is not one of this library's optimizers")
    for name in MOMENT_NAMES:
        if name in entry and not isinstance(entry[name], Tensor):
            raise ValueError(f"the state of parameter {index} has {name}={entry[name]!r}: a tensor is needed")
        if name in entry and entry[name].shape != parameter.shape:
            raise ValueError(
                f"the state of parameter {index} has {name} of shape {tuple(entry[name].shape)}: "
                f"the parameter's is {tuple(parameter.shape)}"
            )
    _check_residual(entry.get("residual"), f"the state of parameter {index}")
    if entry:
        here = slot_of({}, parameter, {}).fields
        made_for = tuple(int(field) for field in entry["grid"]) if "grid" in entry else None
        if made_for != here:
            raise ValueError(
                f"the state of parameter {index} was made for {described(made_for)}: the parameter is {described(here)}"
            )


def restore_dtypes(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Restore the dtypes of a loaded state, which torch casts to the parameter's: ours may be wider, or codes.

    The grid's fields are read on the host: they go there, wherever they were loaded to, and so do counts, until the
    first step on a card.
    """
    saved_ids = [i for group in state_dict["param_groups"] for i in group["params"]]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, parameter in zip(saved_ids, parameters, strict=True):
        claim(optimizer, parameter)
        for name, value in state_dict["state"].get(index, {}).items():
            if isinstance(value, Tensor):
                device = "cpu" if name in ("step", "grid") else parameter.device
                optimizer.state[parameter][name] = value.detach().to(device, copy=True)


_MOVING: Final = ("lr", "float_lr", "betas", "momentum", "weight_decay")
"""Options that schedules change, so that those of a run under way are expected to be other than at its start."""


def unshare(groups: Sequence[dict[str, Any]]) -> None:
    """Give each group tensors of its own: what schedulers write in place, a group at a time, they would write twice."""
    held = Counter(value.data_ptr() for group in groups for value in group.values() if isinstance(value, Tensor))
    for group in groups:
        shared = [name for name, value in group.items() if isinstance(value, Tensor) and held[value.data_ptr()] > 1]
        group.update({name: group[name].clone() for name in shared})


def warn_of_overridden(optimizer: Any, before: Sequence[dict[str, Any]]) -> None:
    """Warn where options of a loaded state take the place of those that an optimizer was made with; both are named.

    Warns:
        UserWarning: there are some.
    """
    found: dict[str, None] = {}
    for given, loaded in zip(before, optimizer.param_groups, strict=True):
        for name in sorted(optimizer.defaults.keys() - _MOVING):
            ours, theirs = _comparable(given.get(name)), _comparable(loaded.get(name))
            if ours != theirs:
                other = " (optim.adopted_state(state, optimizer) keeps these)" if name == "moments" else ""
                found[f"{name}={theirs!r} in place of {ours!r}{other}"] = None
    if found:
        warnings.warn(
            f"{type(optimizer).__name__} goes on with options of the loaded state, not with those that it was made "
            f"with: {', '.join(found)}",
            UserWarning,
            stacklevel=3,
        )


def _comparable(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
