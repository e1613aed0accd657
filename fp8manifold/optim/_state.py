"""The state of a parameter between steps: what it begins with, and what is accepted.

``optimizer.state[parameter]`` has these entries:

    step                       float32: steps taken; on the GPU if the parameter is
    stream                     int: key word of its random bits (`_streams.py`)
    grid                       format and granularity as numbers (`Slot.grid_fields`)
    reference, bounded         S_ref, and the share of weights at its bounds
    since                      the step at which moments were last cleared
    exp_avg, ...               moments, in float32, bfloat16 or uint8
    avg_bound, ...             what scales of moments in 8 bits follow from, one a block
    residual                   int8: what rounding has left, under ``residual8``
    row_var, col_var           means of squares, of a matrix's rows and columns, and of
    variance                   all of a vector (Adafactor)
    unit                       of moments, a power of two (RiemannianAdam)
    fisher_..., inverse_...,   a metric and what it is solved with
    basis_..., eigenvalues     (FisherNaturalGradient)

Everything is checked before anything changes: `check_state` and `check_entry` what is
loaded, `check_arrays` what users may have edited between two steps. A state that was made
for another format, granularity or way to store moments is refused by name.
"""

import math
import sys
import warnings
import weakref
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from fp8manifold._base.param_groups import parameters_of, saved_indices
from fp8manifold._encoded.storage import void_remainder
from fp8manifold._interface import MomentStorage
from fp8manifold._ranks import has_own_memory, local_of, spread
from fp8manifold.formats import LAYOUTS, FloatFormat
from fp8manifold.optim._directions import MOMENT_NAMES
from fp8manifold.optim._factors import (
    STATISTIC_NAMES,
    STATISTICS,
    Preconditioner,
    cuts_matrices,
    statistic_shapes,
)
from fp8manifold.optim._plan import are_same
from fp8manifold.optim._slot import Slot, slot_of
from fp8manifold.optim._spec import BOUND_NAMES, bounds_of
from fp8manifold.optim._writeback import rule_of
from fp8manifold.scaling import SQUARE_SIZE
from fp8manifold.tensor import FP8Tensor

MOMENT_DTYPES: Final = {"float32": None, "bfloat16": torch.bfloat16, "8bit": torch.uint8}
"""The dtype of moments. None is the one that is computed in."""
_SCHEDULED: Final = ("lr", "float_lr", "betas", "momentum", "weight_decay")
"""Options that schedules change: a loaded state is expected to have other values."""
_FUNCTIONS: Final = ("stiffness", "metric")
"""Options that may be functions, in whose place a state has None."""
_ARRAY_NAMES: Final = (*MOMENT_NAMES, "residual", *sorted(BOUND_NAMES), *STATISTIC_NAMES)
"""Entries that are tensors of a parameter's shape, or of its blocks."""
_NUMBERS: Final = {
    # name: the highest, whether it is whole, whether it may be 0
    "step": (2.0**53, True, True),
    "since": (2.0**53, True, True),
    "stream": (2.0**63, True, True),
    "reference": (sys.float_info.max, False, False),
}
"""Entries that are numbers."""


def first_residual(parameter: Tensor) -> Tensor:
    """Return the remainder of rounding the parameter's float weights.

    It is dropped from the parameter. Where there is none, zeros are returned.
    """
    local: Any = local_of(parameter)
    if isinstance(local, FP8Tensor) and local.remainder is not None:
        residual = local.remainder.clone()
        void_remainder(local)
    else:
        residual = torch.zeros(local.shape, dtype=torch.int8, device=local.device)
    return spread(parameter, residual)


def claim(optimizer: torch.optim.Optimizer, parameter: Tensor) -> None:
    """Let a tensor of codes find its state.

    The state has to follow when other code changes the tensor's scale.
    """
    if isinstance(parameter, FP8Tensor):
        parameter.stepped_by = weakref.ref(optimizer)


def make_state(slot: Slot) -> None:
    """Add the entries that the step needs and the state lacks."""
    spec, parameter, state = slot.spec, slot.parameter, slot.state
    if slot.fmt is not None and "grid" not in state:
        state["grid"] = torch.tensor(slot.grid_fields, device="cpu")
    if all(map(state.__contains__, spec.state_entries)):
        return
    local = local_of(parameter)
    for name in spec.moment_names:
        if name not in state:
            dtype = MOMENT_DTYPES[spec.moments] or slot.dtype
            zeros = torch.zeros(local.shape, dtype=dtype, device=local.device)
            state[name] = spread(parameter, zeros)
        if name in spec.bound_names and spec.bound_names[name] not in state:
            state[spec.bound_names[name]] = _first_bounds(slot, local)
    if spec.preconditioner != Preconditioner.NONE:
        _make_statistics(slot, local)
    if spec.residual_bits and "residual" not in state:
        state["residual"] = first_residual(parameter)


def _make_statistics(slot: Slot, local: Tensor) -> None:
    """Add Adafactor's averages, zeros.

    Of a sharded parameter they are those of its rows; every process has all means of the
    columns of a matrix.
    """
    names = STATISTICS[slot.spec.preconditioner]
    if names[0] in slot.state:
        return
    matrix_shape = slot.group["matrix_shape"]
    for name, shape in statistic_shapes(local.shape, matrix_shape).items():
        zeros = torch.zeros(shape, dtype=slot.dtype, device=local.device)
        is_whole = name == "col_var" and cuts_matrices(local.shape, matrix_shape)
        slot.state[name] = zeros if is_whole else spread(slot.parameter, zeros)


def _first_bounds(slot: Slot, local: Tensor) -> Tensor:
    """Return zeros, one for each block of a moment.

    A sharded matrix has those of its rows, a sharded vector all of them in every process.
    """
    if slot.share is None or slot.parameter.dim() < 2:
        return torch.zeros(slot.view.block_dims, dtype=torch.float32, device=local.device)
    blocks_in_row = local.shape[1:].numel() // slot.view.dims[-1]
    zeros = torch.zeros((local.shape[0], blocks_in_row), dtype=torch.float32, device=local.device)
    return spread(slot.parameter, zeros)


def check_state(optimizer: torch.optim.Optimizer, state_dict: Any) -> None:
    """Raise TypeError or ValueError unless a state may be loaded into an optimizer.

    It has to be one of this kind of optimizer, made for these parameters.
    """
    name = type(optimizer).__name__
    if not isinstance(state_dict, dict):
        raise TypeError(f"state_dict must be a dict, not {type(state_dict).__name__}")
    missing = sorted({"state", "param_groups"} - state_dict.keys())
    if missing:
        raise ValueError(f"this state is not one of {name}: it lacks {', '.join(missing)}")
    kind = state_dict.get("optimizer", name)
    if kind != name:
        kind = kind if isinstance(kind, str) else "a wrapper"
        raise ValueError(f"this state is one of {kind}, not of {name}")
    groups = state_dict["param_groups"]
    check_sizes(groups, optimizer.param_groups)
    for saved, group in zip(groups, optimizer.param_groups, strict=True):
        missing = _missing_options(optimizer, saved, group)
        if missing:
            raise ValueError(
                f"this state is not one of {name}: its parameter groups lack {', '.join(missing)}"
            )
        for index, parameter in zip(saved["params"], group["params"], strict=True):
            _check_origin(state_dict["state"].get(index, {}), parameter, index)


def _missing_options(
    optimizer: torch.optim.Optimizer, saved: dict[str, Any], group: dict[str, Any]
) -> list[str]:
    """Return options that a saved group lacks, and whose place ``group`` can't take."""
    missing = []
    for option in optimizer.defaults:
        if option not in group or callable(group[option]):
            continue
        was_function = option in _FUNCTIONS and option in saved and saved[option] is None
        if option not in saved or was_function:
            missing.append(option)
    return missing


def check_sizes(saved: list[dict[str, Any]], groups: list[dict[str, Any]]) -> None:
    """Raise ValueError unless saved groups have as many parameters as an optimizer's."""
    saved_sizes = [len(group["params"]) for group in saved]
    sizes = [len(group["params"]) for group in groups]
    if saved_sizes != sizes:
        raise ValueError(
            f"this state has groups of size {saved_sizes}, the optimizer of size {sizes}"
        )


def _check_origin(entry: dict[str, Any], parameter: Tensor, index: int) -> None:
    """Raise ValueError unless an entry is one of this library's for such a parameter."""
    if not entry:
        return
    subject = _words_for_state(parameter, index)
    if "step" in entry and "stream" not in entry:
        raise ValueError(f"{subject} lacks its stream: it is not one of this library's optimizers")
    _check_tensors(entry, parameter, index)
    _check_numbers(entry, subject)
    _check_residual(entry, subject)
    fields = slot_of({}, parameter, {}).grid_fields
    saved_fields = tuple(int(field) for field in entry["grid"]) if "grid" in entry else None
    if saved_fields != fields:
        raise ValueError(
            f"{subject} was made for {_words_for_grid(saved_fields)}: the parameter is "
            f"{_words_for_grid(fields)}"
        )


def _words_for_state(parameter: Tensor, index: int | None = None) -> str:
    if index is None:
        return f"the state of a parameter of shape {tuple(parameter.shape)}"
    return f"the state of parameter {index}"


def _words_for_grid(fields: tuple[int, ...] | None) -> str:
    """Return format and granularity in words, of the numbers of :attr:`Slot.grid_fields`."""
    if fields is None:
        return "an ordinary parameter"
    exponent_bits, mantissa_bits, bias, layout, granularity = fields
    fmt = FloatFormat(exponent_bits, mantissa_bits, bias, LAYOUTS[layout])
    names = {
        0: "tensor",
        1: "channel",
        SQUARE_SIZE**2: f"square of {SQUARE_SIZE} x {SQUARE_SIZE}",
    }
    return f"{fmt.name}, one scale per {names.get(granularity, f'block of {granularity}')}"


def _check_tensors(entry: dict[str, Any], parameter: Tensor, index: int | None = None) -> None:
    """Raise ValueError unless an entry's arrays are tensors, and moments have the shape.

    ``index`` names the entry in the error.
    """
    for name in _ARRAY_NAMES:
        if name not in entry:
            continue
        value = entry[name]
        if not isinstance(value, Tensor):
            subject = _words_for_state(parameter, index)
            raise ValueError(f"{subject} has {name}={value!r}: a tensor is needed")
        if type(value) is not Tensor and not has_own_memory(local_of(value)):
            subject = _words_for_state(parameter, index)
            raise ValueError(
                f"{subject} has {name} as a {type(value).__name__}, which holds other tensors: an "
                "ordinary tensor is needed"
            )
        if name in MOMENT_NAMES and value.shape != parameter.shape:
            subject = _words_for_state(parameter, index)
            raise ValueError(
                f"{subject} has {name} of shape {tuple(value.shape)}: the parameter's is "
                f"{tuple(parameter.shape)}"
            )


def _check_numbers(entry: dict[str, Any], subject: str) -> None:
    """Raise ValueError unless a saved count, stream and S_ref are numbers of their ranges."""
    for name, (highest, is_whole, is_zero_allowed) in _NUMBERS.items():
        if name not in entry:
            continue
        try:
            number = float(entry[name])
        except (TypeError, ValueError, RuntimeError, OverflowError):
            number = math.nan
        fits = 0 <= number <= highest and (is_zero_allowed or number > 0)
        if not fits or (is_whole and number != int(number)):
            kind = "a whole number" if is_whole else "a number"
            low = ">= 0" if is_zero_allowed else "> 0"
            raise ValueError(f"{subject} has {name}={entry[name]!r}: {kind} {low} is needed")


def check_arrays(
    state: dict[str, Any], parameter: Tensor, group: dict[str, Any], *, stores_moments: bool
) -> None:
    """Raise ValueError unless a state that may have been edited can be stepped.

    It is called before anything changes. Arrays that are not contiguous are made so.

    Args:
        state: of the parameter.
        parameter: that is to be stepped.
        group: its group, whose options say how the state is stored.
        stores_moments: whether the option ``moments`` holds for the parameter.
    """
    _check_tensors(state, parameter)
    has_arrays = False
    for name in _ARRAY_NAMES:
        if name not in state:
            continue
        has_arrays = True
        value = state[name]
        if value.device != parameter.device:
            raise ValueError(
                f"{_words_for_state(parameter)} has {name} on {value.device}, but the parameter "
                f"is on {parameter.device}: move both to one device"
            )
        if not value.is_contiguous() or local_of(value).is_neg():
            state[name] = value.contiguous().resolve_neg()
    if has_arrays:
        check_entry(state, parameter, group, stores_moments=stores_moments)


def check_entry(
    entry: dict[str, Any], parameter: Tensor, group: dict[str, Any], *, stores_moments: bool
) -> None:
    """Raise ValueError unless moments and residual are stored as a group's options say."""
    moments = group["moments"] if stores_moments else "float32"
    dtype = MOMENT_DTYPES[moments]
    if dtype is None:
        dtype = torch.float64 if parameter.dtype is torch.float64 else torch.float32
    bounds = bounds_of(group.get("direction")) if moments == MomentStorage.EIGHT_BIT else {}
    for name in MOMENT_NAMES:
        if name not in entry:
            continue
        if entry[name].dtype != dtype:
            raise ValueError(
                f"{_words_for_state(parameter)} has {name} in {entry[name].dtype}, but "
                f"moments={moments!r} keeps it in {dtype}: load "
                "optim.adopted_state(state, optimizer) instead"
            )
        if name in bounds and bounds[name] not in entry:
            raise ValueError(
                f"{_words_for_state(parameter)} has {name} in 8 bits without {bounds[name]}, which "
                "says how its blocks are scaled: it was saved in another format, which can't be "
                "read; begin with a new state"
            )
    if "beta2_decay" in group:
        _check_statistics(entry, parameter, group)
    if rule_of(group).state:
        _check_residual(entry, _words_for_state(parameter))


def _check_statistics(entry: dict[str, Any], parameter: Tensor, group: dict[str, Any]) -> None:
    """Raise ValueError unless Adafactor's averages are those of a parameter's matrices."""
    dtype = torch.float64 if parameter.dtype is torch.float64 else torch.float32
    shapes = statistic_shapes(parameter.shape, group["matrix_shape"])
    missing = [name for name in shapes if name not in entry]
    if len(missing) == len(shapes):
        return
    if missing:
        raise ValueError(
            f"{_words_for_state(parameter)} lacks {missing[0]}, and has "
            f"{next(name for name in shapes if name in entry)}: both are needed"
        )
    for name, shape in shapes.items():
        value = entry[name]
        if tuple(value.shape) != shape or value.dtype != dtype:
            raise ValueError(
                f"{_words_for_state(parameter)} has {name} of shape {tuple(value.shape)} in "
                f"{value.dtype}: matrix_shape={group['matrix_shape']!r} needs {shape} in {dtype}"
            )


def _check_residual(entry: dict[str, Any], subject: str) -> None:
    """Raise ValueError for a residual that is not int8, such as one of 4 or 2 bits."""
    residual = entry.get("residual")
    if isinstance(residual, Tensor) and residual.dtype is not torch.int8:
        raise ValueError(
            f"{subject} has a residual in {residual.dtype}: residuals of 4 and 2 bits can't be "
            "read any more; writeback='residual8' has one in torch.int8: begin with a new state"
        )


def restore_dtypes(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Restore the dtypes of a loaded state, which torch casts to the parameter's.

    Ours may be wider, or codes.
    """
    indices = saved_indices(state_dict["param_groups"])
    for index, parameter in zip(indices, parameters_of(optimizer), strict=True):
        claim(optimizer, parameter)
        for name, value in state_dict["state"].get(index, {}).items():
            if isinstance(value, Tensor):
                # the host reads the grid, and counts until the first step on a GPU
                device = "cpu" if name in ("step", "grid") else parameter.device
                optimizer.state[parameter][name] = value.detach().to(device, copy=True)


def warn_of_overridden(optimizer: Any, groups_before: Sequence[dict[str, Any]]) -> None:
    """Warn of options that a loaded state has overridden, and name both values.

    Args:
        optimizer: that has loaded a state.
        groups_before: its groups before that.
    """
    changes: dict[str, None] = {}
    for before, loaded in zip(groups_before, optimizer.param_groups, strict=True):
        for name in sorted(optimizer.defaults.keys() - _SCHEDULED):
            old = _without_tuple(before.get(name))
            new = _without_tuple(loaded.get(name))
            # a line that names two alike tells nothing
            if are_same(old, new) or repr(old) == repr(new):
                continue
            hint = ""
            if name == "moments":
                hint = " (optim.adopted_state(state, optimizer) keeps these)"
            changes[f"{name}={new!r} in place of {old!r}{hint}"] = None
    if changes:
        warnings.warn(
            f"{type(optimizer).__name__} goes on with options of the loaded state, not with those "
            f"that it was made with: {', '.join(changes)}",
            UserWarning,
            stacklevel=3,
        )


def _without_tuple(value: Any) -> Any:
    """Return an option as JSON has it: lists in place of tuples."""
    return list(value) if isinstance(value, tuple) else value
