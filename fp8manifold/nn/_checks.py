"""Which options of a layer exclude each other."""

from collections.abc import Mapping
from typing import TypeGuard

from torch import Tensor, nn

from fp8manifold._encoded.traits import DRAWS
from fp8manifold._numerics.checks import check_choice
from fp8manifold._ranks import share_of
from fp8manifold.nn._spec import LayerSpec, OperandName, OperandSpec, check_options_are_taken
from fp8manifold.scaling import BLOCK_SIZE
from fp8manifold.tensor import FP8Tensor

__all__ = ["check_blocks", "check_codes_fit", "check_draws", "check_storage", "is_stored"]


def check_storage(storage: str, spec: LayerSpec, keep_remainder: bool) -> None:
    """Refuse options of the weight that its storage would ignore."""
    weight = spec.operands.get("weight")
    if weight is not None and weight.granularity == "block" and storage == "grid":
        raise ValueError(f"granularity='block' needs storage='fp8' or 'master', not storage={storage!r}")
    if weight is not None and weight.granularity == "square" and storage != "fp8":
        raise ValueError(f"granularity='square' needs storage='fp8', not storage={storage!r}")
    if keep_remainder and storage != "fp8":
        raise ValueError(f"keep_remainder=True needs storage='fp8', not storage={storage!r}")
    _check_stored(storage, spec)
    check_options_are_taken(spec, storage)


def _check_stored(storage: str, spec: LayerSpec) -> None:
    if storage == "master" or spec.weight is None:
        return
    for option in ("policy", "history", "rounding", "scale", "ste"):
        value = getattr(spec.weight, option)
        if value is not None:
            raise ValueError(
                f"weight has {option}={value!r}, which needs storage='master', not storage={storage!r}: a stored "
                "weight has a static power-of-two scale, and is rounded when it is written"
            )


def check_draws(draws: str, storage: str) -> None:
    """Refuse a kind of draws that there is not, or one for weights that are not written back."""
    check_choice("draws", draws, DRAWS)
    if draws != "independent" and storage == "master":
        raise ValueError(
            f"draws={draws!r} needs storage='fp8' or 'grid', not storage={storage!r}, whose weights are floats: "
            "nothing is drawn for them"
        )


def check_blocks(operands: Mapping[OperandName, OperandSpec], in_features: int, out_features: int) -> None:
    for name, operand in operands.items():
        length = out_features if name == "activation_gradient" else in_features
        if operand.granularity == "block" and length % BLOCK_SIZE:
            raise ValueError(
                f"granularity='block' of {name} needs rows whose length {BLOCK_SIZE} divides, not {length}: "
                "take 'channel' or 'tensor'"
            )


def check_codes_fit(codes: FP8Tensor, linear: nn.Linear, spec: LayerSpec, storage: str) -> None:
    """Refuse codes that are not those of the layer that is to hold them."""
    operand = spec.operands.get("weight")
    if storage != "fp8" or operand is None:
        raise ValueError(
            f"codes are given, and the layer has storage={storage!r}, weight={spec.weight!r}: it holds none"
        )
    found = (tuple(codes.shape), codes.format.name, codes.granularity)
    wanted = (tuple(linear.weight.shape), operand.format.name, operand.granularity)
    if found != wanted:
        raise ValueError(f"codes are of (shape, format, granularity) {found}, and the layer's weight is {wanted}")


def is_stored(weight: Tensor) -> TypeGuard[FP8Tensor]:
    """Whether a weight is one of codes.

    Raises:
        RuntimeError: this process holds some of its rows only.
    """
    if share_of(weight) is not None:
        raise RuntimeError(
            f"a weight of shape {tuple(weight.shape)} is sharded: call unshard() of the module that fully_shard made, "
            "read it, and reshard()"
        )
    return isinstance(weight, FP8Tensor)
