"""An optimizer's whole state, cut into the rows that a process holds of sharded parameters."""

from typing import Any, Final

import torch
from torch import Tensor

from fp8manifold._encoded.packed import packed_width
from fp8manifold._ranks import Share, share_of
from fp8manifold.distributed import rows_of
from fp8manifold.optim._residuals import pack_residual, unpack_residual
from fp8manifold.optim._variant import BOUNDS

__all__ = ["rows_of_state"]

_BOUNDS: Final = frozenset(BOUNDS.values())


@torch.no_grad()
def rows_of_state(state_dict: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """An optimizer's whole state as one of its sharded parameters: what their ``load_state_dict`` takes.

    What has a row for each of the parameter's is cut, as :func:`~fp8manifold.distributed.rows_of` does: averages with
    the magnitudes of their blocks, and residuals.  Counts, and what belongs to a parameter that is not sharded, stay as
    they are.

    Args:
        state_dict: of an optimizer of the same groups in one process, or gathered; the same in every process.
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
        share = share_of(parameter)
        if share is not None and index in state:
            state[index] = {name: _entry(name, value, parameter, share) for name, value in state[index].items()}
    return state_dict | {"state": state}


def _entry(name: str, value: Any, parameter: Tensor, share: Share) -> Any:
    if not isinstance(value, Tensor):
        return value
    if name in _BOUNDS:
        in_rows = value.reshape(share.shape[0], -1) if len(share.shape) > 1 else None
    elif name == "residual" and value.dtype == torch.uint8:
        in_rows = _residual_in_rows(value, share.shape)
    else:
        in_rows = value if value.shape == share.shape else None
    return value if in_rows is None else rows_of(in_rows, parameter)


def _residual_in_rows(packed: Tensor, shape: torch.Size) -> Tensor:
    bits = packed_width(packed.shape, shape)
    if packed.dim() > 1 or bits is None:
        return packed
    return pack_residual(unpack_residual(packed, shape, bits), bits, in_rows=True)
