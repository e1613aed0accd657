"""Running averages of quantised weights, in float32: an average moves by fractions of a
step of the grid.
"""

import copy
import sys
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim.swa_utils import AveragedModel

from fp8manifold._ranks import share_of
from fp8manifold.nn._linear import QuantizedConv1D, QuantizedLinear
from fp8manifold.nn._surgery import dequantize_model
from fp8manifold.tensor import FP8Tensor

__all__ = ["averaged_model"]

_SHARD_BOTH: Final = "call averaged_model before fully_shard, then fully_shard on the average's module as on the model"


def averaged_model(model: nn.Module, **options: Any) -> AveragedModel:
    """An ``AveragedModel`` (``torch.optim.swa_utils``) of a quantised model, with the
    average in float32.

    .. math:: a \\leftarrow a + (w - a) / (n + 1)

    ``AveragedModel(model)`` itself is refused, because averages in codes stall. To
    quantise the average, call
    :func:`quantize_model` on its ``module``.  Under ``fully_shard`` each process averages its rows.

    Args:
        model: is not changed; its quantised layers are ordinary ones in the average.
        options: ``device``, ``avg_fn`` and ``multi_avg_fn`` of ``AveragedModel``.

    Returns:
        The average; NaN, Inf and -0 are averaged as floats are, and a model without
        parameters has an empty one.

    Raises:
        TypeError: ``model`` is not an ``nn.Module``.
        ValueError: ``use_buffers=True``; a model that ``fully_shard`` has cut into
            rows; in ``update_parameters`` a model that is cut into other rows than the
            average.

    Example:
        >>> import torch, fp8manifold as fm
        >>> model = fm.quantize_model(nn.Sequential(nn.Linear(4, 2)), "E4M3", "fp8", rounding="nearest")
        >>> average = averaged_model(model)
        >>> average.update_parameters(model)
        >>> torch.equal(average.module[0].weight, model[0].weight)
        True

    Source: Izmailov et al. 2018 (stochastic weight averaging).
    """
    if options.get("use_buffers"):
        raise ValueError(
            "use_buffers=True is not supported: quantised layers have buffers that the average "
            "lacks"
        )
    if _sharded_of(model):
        raise ValueError(
            f"averaged_model can't copy a model that fully_shard has cut into rows: {_SHARD_BOTH}"
        )
    return _Average(dequantize_model(copy.deepcopy(model)).float(), **options)


class _Average(AveragedModel):
    """An average whose module lacks what the model's layers have beside their weights:
    scales, counts, manifolds.
    """

    def update_parameters(self, model: nn.Module) -> None:
        """Take a model's parameters into the average; other buffers than those of
        quantised layers are copied.
        """
        floats = _AsFloats(model)
        sharded = (*_sharded_of(model), *_sharded_of(self.module))
        for module in sharded:
            # What is written into rows that a forward pass has left whole would be lost
            module.reshard()
        for (name, own), its in zip(
            self.module.named_parameters(), floats.parameters(), strict=bool(sharded)
        ):
            if sharded and _rows_of(own) != _rows_of(its):
                raise ValueError(
                    f"{name!r} has other rows in the average than in the model: {_SHARD_BOTH}"
                )
        # Which asks for parameters and buffers only
        super().update_parameters(floats)  # type: ignore[arg-type]


def _sharded_of(model: nn.Module) -> list[Any]:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # not imported: no module is sharded
    if fsdp is None or not isinstance(model, nn.Module):
        return []
    return [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)]


def _rows_of(parameter: Tensor) -> tuple[Any, ...] | None:
    """A key of the rows of a parameter that this process holds; None for one that is
    whole.
    """
    share = share_of(parameter)
    return None if share is None else (share.shape, share.mesh, tuple(share.placements))


class _AsFloats:
    """Parameters and buffers of a model in the order and shapes that they have once its
    layers are dequantised.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.layers = [module for module in model.modules() if isinstance(module, QuantizedLinear)]

    def parameters(self) -> Iterator[Tensor]:
        transposed = {
            id(layer.weight) for layer in self.layers if isinstance(layer, QuantizedConv1D)
        }
        floats = ((_wide(p), id(p) in transposed) for p in self.model.parameters())
        return (p.t() if turned else p for p, turned in floats)

    def buffers(self) -> Iterator[Tensor]:
        named = ((layer, *each) for layer in self.layers for each in layer.named_buffers())
        own = {
            id(buffer)
            for layer, name, buffer in named
            if name.partition(".")[0] in layer._own_names
        }
        return (buffer for buffer in self.model.buffers() if id(buffer) not in own)


def _wide(parameter: Tensor) -> Tensor:
    """The values in float32; codes stay codes until an operator reads them."""
    return parameter.detach().to(torch.float32)


def _refuse_codes(module: nn.Module, name: str, averaged: Any) -> None:
    """Refuse ``AveragedModel`` of one-byte weights, as it takes its copy of the model."""
    if isinstance(module, AveragedModel) and name == "module":
        found = next(
            (own for own, p in averaged.named_parameters() if isinstance(p, FP8Tensor)), None
        )
        if found is not None:
            raise TypeError(
                f"AveragedModel would average {found!r} in codes, where small changes are rounded "
                f"away: use "
                "fp8manifold.averaged_model(model), whose average is in float32"
            )


register_module_module_registration_hook(_refuse_codes)
