"""States of optimizers, converted: from and to torch's, to other moments, to shards.

    adopted_state    torch's AdamW            -> StiffnessAdamW, in any ``moments``
                     torch's Adafactor        -> StiffnessAdafactor
                     this library's optimizer -> the same one with other ``moments``
    adamw_state      StiffnessAdamW           -> torch's AdamW
    adafactor_state  StiffnessAdafactor       -> torch's Adafactor
    rows_of_state    a whole state            -> the rows of this process

Each takes and returns what ``state_dict()`` gives, and leaves its argument as it is.
Parameters are matched by their order.

Moments change how they are stored by way of floats (`_moments_in_floats`,
`_moments_as_stored`), with the functions of a step. Where bits are lost they are rounded
to nearest: by the step's own stochastic rounding, with a draw in the middle.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from fp8manifold._base.param_groups import parameters_of, saved_indices
from fp8manifold._interface import NUMBERS, MomentStorage, WeightStorage
from fp8manifold._numerics.stiffness import sqrt_exact
from fp8manifold._ranks import share_of
from fp8manifold.distributed import rows_of
from fp8manifold.optim._directions import MOMENT_NAMES
from fp8manifold.optim._eager_step import fit_moment, load_moments, moment_scales, store_moments
from fp8manifold.optim._factors import (
    STATISTIC_NAMES,
    FactoredShape,
    statistic_shapes,
)
from fp8manifold.optim._slot import Slot, is_quantized, slot_of
from fp8manifold.optim._spec import BOUND_NAMES, Spec
from fp8manifold.optim._state import check_sizes, check_state
from fp8manifold.optim._streams import new_stream, twins
from fp8manifold.optim.stiffness import StiffnessAdamW
from fp8manifold.optim.stiffness_adafactor import StiffnessAdafactor

_SHARED_OPTIONS: Final = ("params", "lr", "initial_lr", "eps", "weight_decay", "maximize")
"""Options that these optimizers of torch and ours all have."""
_ADAMW_OPTIONS: Final = (*_SHARED_OPTIONS, "betas")
_ADAFACTOR_OPTIONS: Final = (*_SHARED_OPTIONS, "beta2_decay", "d")
# decays are 1, all else is 0
_NO_CHANGE: Final = {
    name: torch.tensor(float(name.startswith("beta")), device="cpu") for name in NUMBERS
}
"""Numbers of a step that leaves bounds as they are."""
_HALF: Final = 0x8000_8000 - 2**32
"""The random word by which a moment is rounded to nearest: half of the odds."""


@torch.no_grad()
def adopted_state(state_dict: dict[str, Any], optimizer: Any) -> dict[str, Any]:
    """Convert a state to one that ``optimizer.load_state_dict`` takes.

    The state is one of torch's ``AdamW`` or ``Adafactor``, or one of this library that
    was saved with other ``moments``. Parameters are matched by their order. Averages
    that need fewer bits are rounded to nearest.

    :class:`StiffnessAdamW` and :class:`StiffnessAdafactor` take averages, step counts and
    the options that both have from a state of torch. A state of this library is taken
    whole, except ``moments``.

    Args:
        state_dict: as ``torch.load(path, weights_only=True)`` gives it; unchanged.
        optimizer: an optimizer of this library, over whole parameters; for sharded ones
            call :func:`rows_of_state` on the result.

    Raises:
        TypeError, ValueError: no state, another optimizer's, or entries that are
            unknown, missing, of another shape, not finite or squares below 0; each is
            named.

    Example:
        >>> import fp8manifold as fm
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> weight.grad, adamw = torch.ones(2), torch.optim.AdamW([weight])
        >>> adamw.step()
        >>> optimizer = fm.optim.StiffnessAdamW([weight], lr=1e-3, moments="8bit")
        >>> optimizer.load_state_dict(adopted_state(adamw.state_dict(), optimizer))
        >>> optimizer.state[weight]["exp_avg"].dtype
        torch.uint8
    """
    peer = _check_kind(state_dict, optimizer)
    is_ours = peer is None
    saved_groups = state_dict["param_groups"]
    check_sizes(saved_groups, optimizer.param_groups)
    groups = _adopted_groups(saved_groups, optimizer, peer)
    parameters = parameters_of(optimizer)
    indices = saved_indices(groups)
    twin_numbers = twins(parameters)
    state: dict[Any, Any] = {}
    entries: dict[Tensor, Any] = {}
    for index, parameter in zip(indices, parameters, strict=True):
        if share_of(parameter) is not None:
            raise ValueError(
                f"parameter {index} is sharded: convert the whole state, then cut it by "
                f"rows_of_state"
            )
        entry = dict(state_dict["state"].get(index, {}))
        if not entry or not parameter.numel():
            continue
        if peer is not None:
            _check_entry_of_torch(entry, index, parameter, peer)
            is_alone = len(parameters) == 1
            twin = twin_numbers[parameter]
            stream = new_stream(parameter, twin, entries, len(entries), draws=True, alone=is_alone)
            _complete_entry(entry, parameter, stream)
        state[index] = entries[parameter] = entry
    adopted = state_dict | {"param_groups": groups, "state": state}
    # the shapes, before blocks are cut
    check_state(optimizer, adopted)
    for saved, group in zip(saved_groups, optimizer.param_groups, strict=True):
        if is_ours and saved["moments"] == group["moments"]:
            continue
        for parameter in group["params"]:
            if parameter in entries:
                moments = "float32"
                if optimizer.stores_all_moments or is_quantized(parameter):
                    moments = group["moments"]
                _convert_moments(entries[parameter], saved, group, moments, parameter)
    return adopted


@dataclass(frozen=True)
class _Peer:
    """An optimizer of torch's whose state one of this library's takes."""

    name: str
    ours: type[Any]
    #: that both have
    options: tuple[str, ...]
    #: the entries of a state that are no averages of squares
    first_moments: tuple[str, ...] = ()

    def averages(self, parameter: Tensor) -> dict[str, tuple[int, ...]]:
        """Return the shapes of a parameter's averages of squares, by their names."""
        if self.ours is StiffnessAdafactor:
            return statistic_shapes(parameter.shape, FactoredShape.AUTO)
        return {"exp_avg_sq": tuple(parameter.shape)}


_ADAMW: Final = _Peer("AdamW", StiffnessAdamW, _ADAMW_OPTIONS, ("exp_avg",))
_ADAFACTOR: Final = _Peer("Adafactor", StiffnessAdafactor, _ADAFACTOR_OPTIONS)


def _check_kind(state_dict: Any, optimizer: Any) -> _Peer | None:
    """Return torch's optimizer that a state is of, or None for one of this library's.

    Any other is refused.
    """
    keys = {*state_dict} if isinstance(state_dict, dict) else set()
    if "optimizer" in keys or not {"state", "param_groups"} <= keys:
        check_state(optimizer, state_dict)
        return None
    is_adafactor = any("beta2_decay" in group for group in state_dict["param_groups"])
    peer = _ADAFACTOR if is_adafactor else _ADAMW
    if not isinstance(optimizer, peer.ours):
        raise ValueError(
            f"a state of torch's {peer.name} goes into {peer.ours.__name__} only, not into "
            f"{type(optimizer).__name__}"
        )
    return peer


def _adopted_groups(
    saved_groups: list[dict[str, Any]], optimizer: Any, peer: _Peer | None
) -> list[dict[str, Any]]:
    """Return an optimizer's groups with the options of a saved state, but ``moments``."""
    for saved in saved_groups:
        if saved.get("weight_decay") and not saved.get("decoupled_weight_decay", True):
            raise ValueError(
                "this state is of Adam with L2 weight decay, not of AdamW: give it weight_decay=0 "
                "to adopt it"
            )
    groups = []
    for saved, group in zip(saved_groups, optimizer.state_dict()["param_groups"], strict=True):
        adopted = dict(group)
        for name, value in saved.items():
            if peer is None or name in peer.options:
                adopted[name] = value
        adopted["moments"] = group["moments"]
        groups.append(adopted)
    return groups


def _convert_moments(
    entry: dict[str, Any],
    saved_group: dict[str, Any],
    group: dict[str, Any],
    moments: str,
    parameter: Tensor,
) -> None:
    """Store the moments of an entry as ``moments`` says, in place of what it has."""
    floats = _moments_in_floats(entry, saved_group)
    for name in (*floats, *BOUND_NAMES & entry.keys()):
        del entry[name]
    entry |= _moments_as_stored(floats, group, moments, slot_of({}, parameter, {}))


@torch.no_grad()
def adamw_state(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Convert a state of :class:`StiffnessAdamW` to one that torch's ``AdamW`` loads.

    It has averages in floats, step counts and options. Residuals, streams and entries
    about grids are left out. Averages that were in float32 are the same to the bit.

    Args:
        state_dict: as ``optimizer.state_dict()`` gives it; unchanged.

    Raises:
        ValueError: the state of another optimizer.

    Example:
        >>> import fp8manifold as fm
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> weight.grad, optimizer = torch.ones(2), fm.optim.StiffnessAdamW([weight], lr=1e-3)
        >>> optimizer.step()
        >>> adamw = torch.optim.AdamW([weight])
        >>> adamw.load_state_dict(adamw_state(optimizer.state_dict()))
        >>> adamw.state[weight]["exp_avg"]
        tensor([0.1000, 0.1000])
    """
    _check_saved_by(state_dict, "StiffnessAdamW")
    return _state_for_torch(state_dict, _ADAMW_OPTIONS, _moments_in_floats)


@torch.no_grad()
def adafactor_state(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Convert a state of :class:`StiffnessAdafactor` to one that torch's ``Adafactor`` loads.

    It has averages of squares, the same to the bit, step counts and options. A
    momentum, which torch's ``Adafactor`` does not have, is left out, and so are
    residuals, streams and entries about grids.

    Args:
        state_dict: as ``optimizer.state_dict()`` gives it; unchanged.

    Raises:
        ValueError: the state of another optimizer, or ``matrix_shape="flatten"``.

    Example:
        >>> import fp8manifold as fm
        >>> weight = torch.nn.Parameter(torch.ones(2, 2))
        >>> weight.grad, optimizer = torch.ones(2, 2), fm.optim.StiffnessAdafactor([weight])
        >>> optimizer.step()
        >>> adafactor = torch.optim.Adafactor([weight])
        >>> adafactor.load_state_dict(adafactor_state(optimizer.state_dict()))
        >>> adafactor.state[weight]["col_var"]
        tensor([[1., 1.]])
    """
    _check_saved_by(state_dict, "StiffnessAdafactor")
    for group in state_dict["param_groups"]:
        if group["matrix_shape"] != FactoredShape.AUTO:
            raise ValueError(
                f"torch's Adafactor has no matrix_shape={group['matrix_shape']!r}: it reads the "
                "last two dimensions as matrices"
            )
    return _state_for_torch(state_dict, _ADAFACTOR_OPTIONS, _statistics_of)


def _statistics_of(entry: dict[str, Any], group: dict[str, Any]) -> dict[str, Tensor]:
    return {name: entry[name] for name in STATISTIC_NAMES if name in entry}


def _check_saved_by(state_dict: dict[str, Any], name: str) -> None:
    """Raise ValueError unless an optimizer of this name has saved a state."""
    kind = state_dict.get("optimizer")
    if kind != name:
        raise ValueError(
            f"this state is one of {kind or 'no optimizer of this library'}, not of {name}"
        )


def _state_for_torch(
    state_dict: dict[str, Any],
    options: tuple[str, ...],
    averages_of: Callable[[dict[str, Any], dict[str, Any]], dict[str, Tensor]],
) -> dict[str, Any]:
    """Return a state with some options, and averages of each entry in floats."""
    state: dict[Any, Any] = {}
    groups = []
    for group in state_dict["param_groups"]:
        groups.append({name: group[name] for name in options if name in group})
        for index in group["params"]:
            entry = state_dict["state"].get(index)
            if entry:
                # bias corrections count from where averages were cleared
                step = entry["step"] - entry.get("since", 0)
                state[index] = {"step": step, **averages_of(entry, group)}
    return {"state": state, "param_groups": groups}


def _check_entry_of_torch(
    entry: dict[str, Any], index: int, parameter: Tensor, peer: _Peer
) -> None:
    """Raise ValueError unless an entry is one of torch's optimizer, with possible averages."""
    subject = f"the state of parameter {index}"
    squares = peer.averages(parameter)
    names = {"step", *peer.first_moments, *squares}
    unknown = entry.keys() - names
    if unknown:
        raise ValueError(f"{subject} has {', '.join(sorted(unknown))}, unlike {peer.name}'s")
    missing = names - entry.keys()
    if missing:
        raise ValueError(f"{subject} lacks {', '.join(sorted(missing))}, unlike {peer.name}'s")
    if not 0 <= float(entry["step"]) <= 2**62:
        raise ValueError(f"{subject} has step={entry['step']!r}: 0 or more is needed")
    for name in (*peer.first_moments, *squares):
        value = entry[name]
        if type(value) is not Tensor or not value.is_floating_point():
            raise ValueError(f"{subject} has {name}={value!r}: a plain tensor of floats is needed")
        if not value.isfinite().all() or (name in squares and (value < 0).any()):
            raise ValueError(
                f"{subject} has {name} with values that no average of {peer.name}'s has"
            )


def _complete_entry(entry: dict[str, Any], parameter: Tensor, stream: int) -> None:
    """Add what an entry of torch's lacks, and store averages as a step of ours does."""
    entry["step"] = torch.tensor(float(entry["step"]), device="cpu")
    entry["stream"] = stream
    dtype = torch.float64 if parameter.dtype is torch.float64 else torch.float32
    for name in set(STATISTIC_NAMES) & entry.keys():
        entry[name] = entry[name].to(dtype)
    fields = slot_of({}, parameter, {}).grid_fields
    if fields is not None:
        entry["grid"] = torch.tensor(fields, device="cpu")


def _spec_for(floats: dict[str, Tensor], group: dict[str, Any], moments: Any) -> Spec:
    """Return the spec of a step with moments of these names."""
    direction = "adam"
    if len(floats) == 1:
        directions = {
            "exp_avg": "lion",
            "momentum_buffer": group.get("direction") or "sgd",
        }
        direction = directions[next(iter(floats))]
    return Spec(
        direction,
        WeightStorage.DIRECTION,
        moments=MomentStorage(moments),
        amsgrad="max_exp_avg_sq" in floats,
    )


def _moments_in_floats(entry: dict[str, Any], group: dict[str, Any]) -> dict[str, Tensor]:
    """Return the moments of an entry, in floats that have their exact values."""
    moments: dict[str, Tensor] = {name: entry[name] for name in MOMENT_NAMES if name in entry}
    if all(value.dtype is not torch.uint8 for value in moments.values()):
        return {
            name: value.float() if value.dtype is torch.bfloat16 else value
            for name, value in moments.items()
        }
    spec = _spec_for(moments, group, "8bit")
    missing = sorted(set(spec.bound_names.values()) - entry.keys())
    if missing:
        raise ValueError(
            f"a state has moments in 8 bits without {', '.join(missing)}, which says how they are "
            f"scaled"
        )
    arrays = {bound: entry[bound].reshape(-1, 1) for bound in spec.bound_names.values()}
    for name, value in moments.items():
        blocks = len(arrays[spec.bound_names[name]])
        arrays[name] = value.reshape(blocks, -1)
    arrays |= moment_scales(spec, arrays, torch.zeros(1, 1, device="cpu"), _NO_CHANGE)
    floats = load_moments(spec, arrays, torch.float32)
    return {name: value.reshape(moments[name].shape) for name, value in floats.items()}


def _moments_as_stored(
    floats: dict[str, Tensor], group: dict[str, Any], moments: str, slot: Slot
) -> dict[str, Tensor]:
    """Return moments as they are stored, with the bounds of their blocks.

    Each is rounded to nearest.
    """
    if moments == MomentStorage.FLOAT32:
        return {name: value.to(slot.dtype) for name, value in floats.items()}
    spec = _spec_for(floats, group, moments)
    dims = slot.view_in(blocks=moments == MomentStorage.EIGHT_BIT).dims
    values = {name: value.to(torch.float32).reshape(dims) for name, value in floats.items()}
    # a bound that is the largest magnitude of today is exceeded by none
    bounds = {}
    for name, bound in spec.bound_names.items():
        bounds[bound] = values[name].abs().amax(-1, keepdim=True)
    arrays: dict[str, Tensor] = {}
    if spec.fitted:
        arrays = fit_moment(values[spec.moment_names[0]])
    elif spec.blockwise:
        arrays = moment_scales(spec, bounds, torch.zeros(1, 1, device="cpu"), _NO_CHANGE)
    device = next(iter(values.values())).device
    noise = torch.full(dims, _HALF, dtype=torch.int32, device=device)
    root = sqrt_exact(values["exp_avg_sq"]) if "exp_avg_sq" in values else None
    stored = store_moments(spec, values, arrays, noise, root)
    shape = slot.weight.shape
    return {name: value.reshape(shape) for name, value in stored.items()} | bounds


@torch.no_grad()
def rows_of_state(state_dict: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Cut an optimizer's whole state for an optimizer whose parameters are sharded.

    Its ``load_state_dict`` takes the result. Moments with the bounds of their blocks,
    and residuals, are cut by :func:`~fp8manifold.distributed.rows_of`. Counts, and
    entries of a parameter that is not sharded, stay as they are.

    Args:
        state_dict: the state of an optimizer of the same groups in one process, or a
            gathered one; the same in every process.
        optimizer: one of this library or of torch, over parameters after
            ``fully_shard``.

    Raises:
        ValueError: entries with other rows than the parameter's.

    Example:
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
        >>> rows_of_state(optimizer.state_dict(), optimizer)["state"]
        {}
    """
    parameters = parameters_of(optimizer)
    indices = saved_indices(state_dict["param_groups"])
    state = dict(state_dict["state"])
    for index, parameter in zip(indices, parameters, strict=True):
        share = share_of(parameter)
        if share is None or index not in state:
            continue
        entry = dict(state[index])
        for name, value in entry.items():
            if name in STATISTIC_NAMES:
                # every process has all means of the columns of a matrix; those of experts
                # have one more dimension
                if name != "col_var" or value.dim() > 2:
                    entry[name] = rows_of(value, parameter)
            elif name in BOUND_NAMES:
                # a vector's blocks are not cut by rows: every process has all bounds
                if len(share.shape) > 1:
                    entry[name] = rows_of(value.reshape(share.shape[0], -1), parameter)
            elif isinstance(value, Tensor) and value.shape == share.shape:
                entry[name] = rows_of(value, parameter)
        state[index] = entry
    return state_dict | {"state": state}
