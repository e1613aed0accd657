"""States of optimizers, converted: from and to torch's AdamW, to other moments, to shards.

    adopted_state   torch's AdamW            -> StiffnessAdamW, in any ``moments``
                    this library's optimizer -> the same one with other ``moments``
    adamw_state     StiffnessAdamW           -> torch's AdamW
    rows_of_state   a whole state            -> the rows of this process

Each takes and returns what ``state_dict()`` gives, and leaves its argument as it is.
Parameters are matched by their order.

Moments change how they are stored by way of floats (`_moments_in_floats`,
`_moments_as_stored`), with the functions of a step. Where bits are lost they are rounded
to nearest: by the step's own stochastic rounding, with a draw in the middle.
"""

from typing import Any, Final

import torch
from torch import Tensor

from fp8manifold._interface import NUMBERS, MomentStorage, WeightStorage
from fp8manifold._numerics.stiffness import sqrt_exact
from fp8manifold._ranks import share_of
from fp8manifold.distributed import rows_of
from fp8manifold.optim._directions import MOMENT_NAMES
from fp8manifold.optim._slot import Slot, is_quantized, slot_of
from fp8manifold.optim._spec import BOUND_NAMES, Spec
from fp8manifold.optim._state import check_sizes, check_state
from fp8manifold.optim._step import fit_moment, load_moments, moment_scales, store_moments
from fp8manifold.optim._streams import new_stream, twins
from fp8manifold.optim.stiffness import StiffnessAdamW

_ADAMW_ENTRIES: Final = {"step", "exp_avg", "exp_avg_sq"}
_ADAMW_OPTIONS: Final = (
    "params",
    "lr",
    "initial_lr",
    "betas",
    "eps",
    "weight_decay",
    "maximize",
)
"""Options that torch's AdamW and StiffnessAdamW both have."""
# decays are 1, all else is 0
_NO_CHANGE: Final = {name: torch.tensor(float(name.startswith("beta"))) for name in NUMBERS}
"""Numbers of a step that leaves bounds as they are."""
_HALF: Final = 0x8000_8000 - 2**32
"""The random word by which a moment is rounded to nearest: half of the odds."""


@torch.no_grad()
def adopted_state(state_dict: dict[str, Any], optimizer: Any) -> dict[str, Any]:
    """Convert a state to one that ``optimizer.load_state_dict`` takes.

    It is a state of torch's ``AdamW``, or one of this library's saved with other
    ``moments``. Parameters are matched by their order. Averages that need fewer bits are
    rounded to nearest.

    From torch's state :class:`StiffnessAdamW` takes averages, step counts and the
    options that both have. From a state of this library everything is taken but
    ``moments``.

    Args:
        state_dict: as ``torch.load(path, weights_only=True)`` gives it; unchanged.
        optimizer: of this library, over whole parameters; :func:`rows_of_state` comes
            after this for sharded ones.

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
    is_ours = _check_kind(state_dict, optimizer)
    saved_groups = state_dict["param_groups"]
    check_sizes(saved_groups, optimizer.param_groups)
    groups = _adopted_groups(saved_groups, optimizer, is_ours=is_ours)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    indices = [index for group in groups for index in group["params"]]
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
        if not is_ours:
            _check_adamw_entry(entry, index)
            is_alone = len(parameters) == 1
            twin = twin_numbers[parameter]
            stream = new_stream(parameter, twin, entries, len(entries), draws=True, alone=is_alone)
            _complete_adamw_entry(entry, parameter, stream)
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


def _check_kind(state_dict: Any, optimizer: Any) -> bool:
    """Return True for a state of this library's, False for one of torch's AdamW.

    Any other is refused.
    """
    keys = {*state_dict} if isinstance(state_dict, dict) else set()
    is_ours = "optimizer" in keys
    if is_ours or not {"state", "param_groups"} <= keys:
        check_state(optimizer, state_dict)
    elif not isinstance(optimizer, StiffnessAdamW):
        raise ValueError(
            f"a state of torch's AdamW goes into StiffnessAdamW only, not into "
            f"{type(optimizer).__name__}"
        )
    return is_ours


def _adopted_groups(
    saved_groups: list[dict[str, Any]], optimizer: Any, *, is_ours: bool
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
            if is_ours or name in _ADAMW_OPTIONS:
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
    kind = state_dict.get("optimizer")
    if kind != "StiffnessAdamW":
        raise ValueError(
            f"this state is one of {kind or 'no optimizer of this library'}, not of StiffnessAdamW"
        )
    state: dict[Any, Any] = {}
    groups = []
    for group in state_dict["param_groups"]:
        groups.append({name: group[name] for name in _ADAMW_OPTIONS if name in group})
        for index in group["params"]:
            entry = state_dict["state"].get(index)
            if entry:
                # bias corrections count from where averages were cleared
                step = entry["step"] - entry.get("since", 0)
                state[index] = {"step": step, **_moments_in_floats(entry, group)}
    return {"state": state, "param_groups": groups}


def _check_adamw_entry(entry: dict[str, Any], index: int) -> None:
    """Raise ValueError unless an entry is one of torch's AdamW, with possible averages."""
    subject = f"the state of parameter {index}"
    unknown = entry.keys() - _ADAMW_ENTRIES
    if unknown:
        raise ValueError(f"{subject} has {', '.join(sorted(unknown))}, unlike AdamW's")
    missing = _ADAMW_ENTRIES - entry.keys()
    if missing:
        raise ValueError(f"{subject} lacks {', '.join(sorted(missing))}, unlike AdamW's")
    if not 0 <= float(entry["step"]) <= 2**62:
        raise ValueError(f"{subject} has step={entry['step']!r}: 0 or more is needed")
    for name in ("exp_avg", "exp_avg_sq"):
        value = entry[name]
        if type(value) is not Tensor or not value.is_floating_point():
            raise ValueError(f"{subject} has {name}={value!r}: a plain tensor of floats is needed")
        if not value.isfinite().all() or (name == "exp_avg_sq" and (value < 0).any()):
            raise ValueError(f"{subject} has {name} with values that no average of AdamW's has")


def _complete_adamw_entry(entry: dict[str, Any], parameter: Tensor, stream: int) -> None:
    """Add what an entry of torch's AdamW lacks."""
    entry["step"] = torch.tensor(float(entry["step"]))
    entry["stream"] = stream
    fields = slot_of({}, parameter, {}).grid_fields
    if fields is not None:
        entry["grid"] = torch.tensor(fields)


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
    arrays |= moment_scales(spec, arrays, torch.zeros(1, 1), _NO_CHANGE)
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
        arrays = moment_scales(spec, bounds, torch.zeros(1, 1), _NO_CHANGE)
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
        state_dict: of an optimizer of the same groups in one process, or gathered; the
            same in every process.
        optimizer: of this library or of torch's, over parameters after ``fully_shard``.

    Raises:
        ValueError: entries with other rows than the parameter's.

    Example:
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
        >>> rows_of_state(optimizer.state_dict(), optimizer)["state"]
        {}
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    indices = [index for group in state_dict["param_groups"] for index in group["params"]]
    state = dict(state_dict["state"])
    for index, parameter in zip(indices, parameters, strict=True):
        share = share_of(parameter)
        if share is None or index not in state:
            continue
        entry = dict(state[index])
        for name, value in entry.items():
            if name in BOUND_NAMES:
                # a vector's blocks are not cut by rows: every process has all bounds
                if len(share.shape) > 1:
                    entry[name] = rows_of(value.reshape(share.shape[0], -1), parameter)
            elif isinstance(value, Tensor) and value.shape == share.shape:
                entry[name] = rows_of(value, parameter)
        state[index] = entry
    return state_dict | {"state": state}
