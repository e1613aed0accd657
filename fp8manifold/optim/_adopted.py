"""Conversion of states: from torch's AdamW and to it, from other ``moments``, from
whole parameters to shards.
"""

from typing import Any, Final

import torch
from torch import Tensor

from fp8manifold._numerics.stiffness import sqrt_exact
from fp8manifold._ranks import share_of
from fp8manifold.distributed import rows_of
from fp8manifold.optim._directions import MOMENT_NAMES, NUMBERS
from fp8manifold.optim._slot import Slot, is_quantized, slot_of
from fp8manifold.optim._spec import BOUND_NAMES, Spec
from fp8manifold.optim._state import check_sizes, check_state
from fp8manifold.optim._step import fit_moment, load_moments, moment_scales, store_moments
from fp8manifold.optim._streams import new_stream, twins
from fp8manifold.optim.stiffness import StiffnessAdamW

_OF_ADAMW: Final = {"step", "exp_avg", "exp_avg_sq"}
_OPTIONS: Final = ("params", "lr", "initial_lr", "betas", "eps", "weight_decay", "maximize")
_STILL: Final = {name: torch.tensor(float(name.startswith("beta"))) for name in NUMBERS}
"""Numbers of a step that leaves bounds as they are."""
_HALF: Final = 0x8000_8000 - 2**32  #: The random word by which a moment is rounded to nearest.


@torch.no_grad()
def adopted_state(state_dict: dict[str, Any], optimizer: Any) -> dict[str, Any]:
    """A state of torch's ``AdamW``, or one saved with other ``moments``, as
    ``optimizer.load_state_dict`` takes it.

    Parameters are matched by their order. Averages that need fewer bits are rounded to
    nearest. From torch's state it takes, for :class:`StiffnessAdamW`, averages, step
    counts and the options that both have; from one of this library everything but
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
    keys = {*state_dict} if isinstance(state_dict, dict) else set()
    own = "optimizer" in keys
    if own or not {"state", "param_groups"} <= keys:
        check_state(optimizer, state_dict)
    elif not isinstance(optimizer, StiffnessAdamW):
        raise ValueError(
            f"a state of torch's AdamW goes into StiffnessAdamW only, not into "
            f"{type(optimizer).__name__}"
        )
    theirs, ours = state_dict["param_groups"], optimizer.state_dict()["param_groups"]
    check_sizes(theirs, ours)
    if any(
        group.get("weight_decay") and not group.get("decoupled_weight_decay", True)
        for group in theirs
    ):
        raise ValueError(
            "this state is of Adam with L2 weight decay, not of AdamW: give it weight_decay=0 to "
            "adopt it"
        )
    groups = [
        mine
        | {name: value for name, value in saved.items() if own or name in _OPTIONS}
        | {"moments": mine["moments"]}
        for saved, mine in zip(theirs, ours, strict=True)
    ]
    everyone = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    order, entries, state = twins(everyone), dict[Tensor, Any](), dict[Any, Any]()
    for index, parameter in zip(
        (index for group in groups for index in group["params"]), everyone, strict=True
    ):
        if share_of(parameter) is not None:
            raise ValueError(
                f"parameter {index} is sharded: convert the whole state, then cut it by "
                f"rows_of_state"
            )
        if not (entry := dict(state_dict["state"].get(index, {}))) or not parameter.numel():
            continue
        if not own:
            _check_foreign(entry, index)
            twin, alone = order[parameter], len(everyone) == 1
            stream = new_stream(parameter, twin, entries, len(entries), draws=True, alone=alone)
            entry |= {"step": torch.tensor(float(entry["step"])), "stream": stream}
            entry |= (
                {}
                if (fields := slot_of({}, parameter, {}).grid_fields) is None
                else {"grid": torch.tensor(fields)}
            )
        state[index] = entries[parameter] = entry
    adopted = state_dict | {"param_groups": groups, "state": state}
    check_state(optimizer, adopted)  # the shapes, before blocks are cut
    for saved, group in zip(theirs, optimizer.param_groups, strict=True):
        if own and saved["moments"] == group["moments"]:
            continue
        for parameter in filter(entries.__contains__, group["params"]):
            stored = (
                group["moments"]
                if optimizer.stores_all_moments or is_quantized(parameter)
                else "float32"
            )
            entry = entries[parameter]
            floats = _floats(entry, saved)
            for name in (*floats, *BOUND_NAMES & entry.keys()):
                del entry[name]
            entry |= _stored(floats, group, stored, slot_of({}, parameter, {}))
    return adopted


@torch.no_grad()
def adamw_state(state_dict: dict[str, Any]) -> dict[str, Any]:
    """A state of :class:`StiffnessAdamW` as torch's ``AdamW`` loads it: averages in
    floats, step counts and options.

    Residuals, streams and entries about grids are left out; averages that were in
    float32 are the same to the bit.

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
    if (kind := state_dict.get("optimizer")) != "StiffnessAdamW":
        raise ValueError(
            f"this state is one of {kind or 'no optimizer of this library'}, not of StiffnessAdamW"
        )
    state: dict[Any, Any] = {}
    for group in state_dict["param_groups"]:
        for index in group["params"]:
            if entry := state_dict["state"].get(
                index
            ):  # bias corrections count from where averages were cleared
                state[index] = {
                    "step": entry["step"] - entry.get("since", 0),
                    **_floats(entry, group),
                }
    groups = [
        {name: group[name] for name in _OPTIONS if name in group}
        for group in state_dict["param_groups"]
    ]
    return {"state": state, "param_groups": groups}


def _check_foreign(entry: dict[str, Any], index: int) -> None:
    """Raise ValueError unless an entry is one of torch's AdamW, with averages that are
    possible.
    """
    for difference, fault in (
        (entry.keys() - _OF_ADAMW, "has"),
        (_OF_ADAMW - entry.keys(), "lacks"),
    ):
        if difference:
            raise ValueError(
                f"the state of parameter {index} {fault} {', '.join(sorted(difference))}, unlike "
                f"AdamW's"
            )
    if not 0 <= float(entry["step"]) <= 2**62:
        raise ValueError(
            f"the state of parameter {index} has step={entry['step']!r}: 0 or more is needed"
        )
    for name in ("exp_avg", "exp_avg_sq"):
        value = entry[name]
        if type(value) is not Tensor or not value.is_floating_point():
            raise ValueError(
                f"the state of parameter {index} has {name}={value!r}: a plain tensor of floats is "
                f"needed"
            )
        if not value.isfinite().all() or (name == "exp_avg_sq" and (value < 0).any()):
            raise ValueError(
                f"the state of parameter {index} has {name} with values that no average of AdamW's "
                f"has"
            )


def _spec(moments: dict[str, Tensor], group: dict[str, Any], stored: Any) -> Spec:
    """The spec of a step that stores moments of these names: Adam's, or one alone."""
    alone = {
        "exp_avg": "lion",
        "momentum_buffer": group.get("direction") or "sgd",
    }
    direction = alone[next(iter(moments))] if len(moments) == 1 else "adam"
    return Spec(direction, "direction", moments=stored, amsgrad="max_exp_avg_sq" in moments)


def _floats(entry: dict[str, Any], group: dict[str, Any]) -> dict[str, Tensor]:
    """The moments of an entry, in floats that hold them exactly."""
    moments: dict[str, Tensor] = {name: entry[name] for name in MOMENT_NAMES if name in entry}
    if all(value.dtype is not torch.uint8 for value in moments.values()):
        return {
            name: value.float() if value.dtype is torch.bfloat16 else value
            for name, value in moments.items()
        }
    spec = _spec(moments, group, "8bit")
    if lacking := sorted(set(spec.bound_names.values()) - entry.keys()):
        raise ValueError(
            f"a state has moments in 8 bits without {', '.join(lacking)}, which says how they are "
            f"scaled"
        )
    arrays = {bound: entry[bound].reshape(-1, 1) for bound in spec.bound_names.values()}
    arrays |= {
        name: value.reshape(len(arrays[spec.bound_names[name]]), -1)
        for name, value in moments.items()
    }
    arrays |= moment_scales(spec, arrays, torch.zeros(1, 1), _STILL)
    return {
        n: v.reshape(moments[n].shape) for n, v in load_moments(spec, arrays, torch.float32).items()
    }


def _stored(
    floats: dict[str, Tensor], group: dict[str, Any], stored: str, slot: Slot
) -> dict[str, Tensor]:
    """Moments as they are stored, each rounded to nearest, with the bounds of their
    blocks.
    """
    if stored == "float32":
        return {name: value.to(slot.dtype) for name, value in floats.items()}
    spec, shape, dims = (
        _spec(floats, group, stored),
        slot.weight.shape,
        slot.view_in(blocks=stored == "8bit").dims,
    )
    moments = {name: value.to(torch.float32).reshape(dims) for name, value in floats.items()}
    bounds = {
        spec.bound_names[name]: moments[name].abs().amax(-1, keepdim=True)
        for name in spec.bound_names
    }
    arrays: dict[str, Tensor] = {}
    if spec.fitted:
        arrays = fit_moment(moments[spec.moment_names[0]])
    elif spec.blockwise:
        arrays = moment_scales(spec, bounds, torch.zeros(1, 1), _STILL)
    noise = torch.full(dims, _HALF, dtype=torch.int32, device=next(iter(moments.values())).device)
    root = sqrt_exact(moments["exp_avg_sq"]) if "exp_avg_sq" in moments else None
    kept = store_moments(spec, moments, arrays, noise, root)
    return {name: value.reshape(shape) for name, value in kept.items()} | bounds


@torch.no_grad()
def rows_of_state(state_dict: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """An optimizer's whole state, cut for ``load_state_dict`` of an optimizer whose
    parameters are sharded.

    Moments with the bounds of their blocks, and residuals, are cut by
    :func:`~fp8manifold.distributed.rows_of`. Counts, and entries of a parameter that is
    not sharded, stay as they are.

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
    everyone = [p for group in optimizer.param_groups for p in group["params"]]
    saved = [index for group in state_dict["param_groups"] for index in group["params"]]
    state = dict(state_dict["state"])
    for index, parameter in zip(saved, everyone, strict=True):
        if (share := share_of(parameter)) is None or index not in state:
            continue
        state[index] = dict(state[index])
        for name, value in state[index].items():
            if name in BOUND_NAMES and len(share.shape) > 1:
                state[index][name] = rows_of(value.reshape(share.shape[0], -1), parameter)
            elif (
                name not in BOUND_NAMES and isinstance(value, Tensor) and value.shape == share.shape
            ):
                state[index][name] = rows_of(value, parameter)
    return state_dict | {"state": state}
