"""State of a parameter between steps: what it begins with, and what a loaded or edited
one has to be.
"""

import weakref
from typing import Any, Final

import torch
from torch import Tensor

from fp8manifold._encoded.storage import void_remainder
from fp8manifold._ranks import local_of, spread
from fp8manifold.formats import LAYOUTS, FloatFormat
from fp8manifold.optim._directions import MOMENT_NAMES
from fp8manifold.optim._slot import Slot, slot_of
from fp8manifold.optim._spec import BOUND_NAMES, bounds_of
from fp8manifold.optim._writeback import rule_of
from fp8manifold.scaling import SQUARE_SIZE
from fp8manifold.tensor import FP8Tensor

STORED: Final = {"float32": None, "bfloat16": torch.bfloat16, "8bit": torch.uint8}
"""The dtype of moments; None is the one that is computed in."""
_FUNCTIONS: Final = (
    "stiffness",
    "metric",
)  #: Options that may be functions, in whose place a state has None.
_KEPT: Final = (*MOMENT_NAMES, "residual", *sorted(BOUND_NAMES))


def first_residual(parameter: Tensor) -> Tensor:
    """The remainder of rounding the parameter's float weights, which is dropped there;
    zeros where it has none.
    """
    held: Any = local_of(parameter)
    start = torch.zeros(held.shape, dtype=torch.int8, device=held.device)
    if isinstance(held, FP8Tensor) and held.remainder is not None:
        start = held.remainder.clone()
        void_remainder(held)
    return spread(parameter, start)


def claim(optimizer: torch.optim.Optimizer, parameter: Tensor) -> None:
    """Let a tensor of codes find its state, which has to follow when other code changes
    its scale.
    """
    if isinstance(parameter, FP8Tensor):
        parameter.stepped_by = weakref.ref(optimizer)


def make_state(slot: Slot) -> None:
    """Add the entries that the step needs and the state lacks."""
    spec, parameter, state = slot.spec, slot.parameter, slot.state
    if slot.fmt is not None and "grid" not in state:
        state["grid"] = torch.tensor(slot.grid_fields)
    if all(map(state.__contains__, spec.state_entries)):
        return
    held = local_of(parameter)
    for name in spec.moment_names:
        if name not in state:
            dtype = STORED[spec.moments] or slot.dtype
            state[name] = spread(
                parameter, torch.zeros(held.shape, dtype=dtype, device=held.device)
            )
        if name in spec.bound_names and spec.bound_names[name] not in state:
            # one per block; a sharded matrix has those of its rows, a sharded vector
            # all of them in every process
            in_rows = parameter.dim() > 1 and slot.share is not None
            shape = (
                (held.shape[0], held.shape[1:].numel() // slot.view.dims[-1])
                if in_rows
                else slot.view.block_dims
            )
            bounds = torch.zeros(shape, dtype=torch.float32, device=held.device)
            state[spec.bound_names[name]] = spread(parameter, bounds) if in_rows else bounds
    if spec.residual_bits and "residual" not in state:
        state["residual"] = first_residual(parameter)


def check_state(optimizer: torch.optim.Optimizer, state_dict: Any) -> None:
    """Raise TypeError or ValueError unless a state is one of this kind of optimizer,
    made for these parameters.
    """
    name = type(optimizer).__name__
    if not isinstance(state_dict, dict):
        raise TypeError(f"state_dict must be a dict, not {type(state_dict).__name__}")
    if missing := sorted({"state", "param_groups"} - state_dict.keys()):
        raise ValueError(f"this state is not one of {name}: it lacks {', '.join(missing)}")
    if (kind := state_dict.get("optimizer", name)) != name:
        raise ValueError(
            f"this state is one of {kind if isinstance(kind, str) else 'a wrapper'}, not of {name}"
        )
    groups = state_dict["param_groups"]
    check_sizes(groups, optimizer.param_groups)
    for saved, ours in zip(groups, optimizer.param_groups, strict=True):
        known = [
            option for option in optimizer.defaults if option in ours and not callable(ours[option])
        ]
        lacking = [
            option
            for option in known
            if option not in saved or (saved[option] is None and option in _FUNCTIONS)
        ]
        if lacking:
            raise ValueError(
                f"this state is not one of {name}: its parameter groups lack {', '.join(lacking)}"
            )
        for index, parameter in zip(saved["params"], ours["params"], strict=True):
            _check_origin(state_dict["state"].get(index, {}), parameter, index)


def check_sizes(theirs: list[dict[str, Any]], ours: list[dict[str, Any]]) -> None:
    """Raise ValueError unless groups have as many parameters as an optimizer's."""
    sizes = [len(group["params"]) for group in theirs], [len(group["params"]) for group in ours]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"this state has groups of size {sizes[0]}, the optimizer of size {sizes[1]}"
        )


def _check_origin(entry: dict[str, Any], parameter: Tensor, index: int) -> None:
    """Raise ValueError unless an entry is one of this library's, for a parameter of
    this shape and format.
    """
    whose = _whose(parameter, index)
    if entry and "step" in entry and "stream" not in entry:
        raise ValueError(f"{whose} lacks its stream: it is not one of this library's optimizers")
    _check_tensors(entry, parameter, index)
    _check_residual(entry, whose)
    if entry:
        here = slot_of({}, parameter, {}).grid_fields
        made_for = tuple(int(field) for field in entry["grid"]) if "grid" in entry else None
        if made_for != here:
            raise ValueError(
                f"{whose} was made for {_in_words(made_for)}: the parameter is {_in_words(here)}"
            )


def _in_words(fields: tuple[int, ...] | None) -> str:
    """Format and granularity in words, of the numbers of :attr:`Slot.fields`."""
    if fields is None:
        return "an ordinary parameter"
    exponent_bits, mantissa_bits, bias, layout, shares = fields
    squares = {SQUARE_SIZE**2: f"square of {SQUARE_SIZE} x {SQUARE_SIZE}"}
    shared = ({0: "tensor", 1: "channel"} | squares).get(shares, f"block of {shares}")
    return f"{FloatFormat(exponent_bits, mantissa_bits, bias, LAYOUTS[layout]).name}, one scale per {shared}"


def _check_tensors(entry: dict[str, Any], parameter: Tensor, index: int | None = None) -> None:
    """Raise ValueError unless moments, bounds and residual are tensors, and moments of
    the parameter's shape.
    """
    for name in _KEPT:
        if name in entry and not isinstance(entry[name], Tensor):
            raise ValueError(
                f"{_whose(parameter, index)} has {name}={entry[name]!r}: a tensor is needed"
            )
        if name in entry and name in MOMENT_NAMES and entry[name].shape != parameter.shape:
            whose, shapes = (
                _whose(parameter, index),
                (tuple(entry[name].shape), tuple(parameter.shape)),
            )
            raise ValueError(
                f"{whose} has {name} of shape {shapes[0]}: the parameter's is {shapes[1]}"
            )


def check_arrays(
    state: dict[str, Any], parameter: Tensor, group: dict[str, Any], *, stores_moments: bool
) -> None:
    """Raise ValueError unless a state that may have been edited can be stepped; called
    before anything changes.
    """
    _check_tensors(state, parameter)
    holds = False
    for name in _KEPT:
        if name not in state:
            continue
        holds, value = True, state[name]
        if value.device != parameter.device:
            raise ValueError(
                f"{_whose(parameter)} has {name} on {value.device}, but the parameter is on "
                f"{parameter.device}: "
                "move both to one device"
            )
        if not value.is_contiguous() or local_of(value).is_neg():
            state[name] = value.contiguous().resolve_neg()
    if holds:
        check_entry(state, parameter, group, stores_moments=stores_moments)


def _whose(parameter: Tensor, index: int | None = None) -> str:
    which = (
        f"a parameter of shape {tuple(parameter.shape)}" if index is None else f"parameter {index}"
    )
    return f"the state of {which}"


def check_entry(
    entry: dict[str, Any], parameter: Tensor, group: dict[str, Any], *, stores_moments: bool
) -> None:
    """Raise ValueError unless moments and residual are stored as a group's options say."""
    moments = group["moments"] if stores_moments else "float32"
    dtype = STORED[moments] or (
        torch.float64 if parameter.dtype is torch.float64 else torch.float32
    )
    bounds = bounds_of(group.get("direction")) if moments == "8bit" else {}
    for name in MOMENT_NAMES:
        if name in entry and entry[name].dtype != dtype:
            raise ValueError(
                f"{_whose(parameter)} has {name} in {entry[name].dtype}, but moments={moments!r} "
                f"keeps it in {dtype}: load optim.adopted_state(state, optimizer) instead"
            )
        if name in entry and bounds.get(name, name) not in entry:
            raise ValueError(
                f"{_whose(parameter)} has {name} in 8 bits without {bounds[name]}, which says how "
                f"its blocks are "
                "scaled: it was saved in another format, which can't be read; begin with a new "
                "state"
            )
    if rule_of(group).state:
        _check_residual(entry, _whose(parameter))


def _check_residual(entry: dict[str, Any], whose: str) -> None:
    """Raise ValueError for a residual that is not int8, such as one of 4 or 2 bits."""
    residual = entry.get("residual")
    if isinstance(residual, Tensor) and residual.dtype is not torch.int8:
        raise ValueError(
            f"{whose} has a residual in {residual.dtype}: residuals of 4 and 2 bits can't be read "
            f"any more; "
            "writeback='residual8' has one in torch.int8: begin with a new state"
        )


def restore_dtypes(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Restore the dtypes of a loaded state, which torch casts to the parameter's: ours
    may be wider, or codes.
    """
    saved_ids = [i for group in state_dict["param_groups"] for i in group["params"]]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, parameter in zip(saved_ids, parameters, strict=True):
        claim(optimizer, parameter)
        for name, value in state_dict["state"].get(index, {}).items():
            if isinstance(
                value, Tensor
            ):  # the host reads the grid, and counts until the first step on a GPU
                device = "cpu" if name in ("step", "grid") else parameter.device
                optimizer.state[parameter][name] = value.detach().to(device, copy=True)
