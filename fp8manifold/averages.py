"""Running averages of quantised weights, in float32.

An average moves by fractions of a step of the grid: in codes it would not move at all.
So ``AveragedModel`` of a quantised model is refused (``_refuse_codes``), and
``averaged_model`` makes one whose module has ordinary layers. At each update
``_AsFloats`` shows the model's parameters to it as such layers have them.
"""

import copy
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim.swa_utils import AveragedModel

from fp8manifold._ranks import sharded_modules, share_of
from fp8manifold.nn._linear import QuantizedConv1D, QuantizedLinear
from fp8manifold.nn._surgery import dequantize_model
from fp8manifold.tensor import FP8Tensor

__all__ = ["averaged_model"]

_OPTIONS: Final = ("device", "avg_fn", "multi_avg_fn", "use_buffers")
"""Options of ``AveragedModel``."""
_SHARD_BOTH: Final = (
    "call averaged_model before fully_shard, then fully_shard on the average's module as on the "
    "model"
)


def averaged_model(model: nn.Module, **options: Any) -> AveragedModel:
    r"""Make an ``AveragedModel`` of a quantised model, with the average in float32.

    .. math:: a \leftarrow a + (w - a) / (n + 1)

    ``AveragedModel(model)`` of ``torch.optim.swa_utils`` itself is refused, because
    averages in codes stall. To quantise the average, call :func:`quantize_model` on its
    ``module``. Under ``fully_shard`` each process averages its rows.

    Args:
        model: the model, which is not changed. In the average its quantised layers are
            ordinary layers.
        options: ``device``, ``avg_fn`` and ``multi_avg_fn`` of ``AveragedModel``.

    Returns:
        The average; NaN, Inf and -0 are averaged as floats are, and a model without
        parameters has an empty one.

    Raises:
        TypeError: ``model`` is not an ``nn.Module``; an unknown option.
        ValueError: ``use_buffers=True``; a model that ``fully_shard`` has cut into
            rows; in ``update_parameters`` a model that is cut into other rows than the
            average.

    Example:
        >>> import torch, fp8manifold as fm
        >>> layers = nn.Sequential(nn.Linear(4, 2))
        >>> model = fm.quantize_model(layers, "E4M3", "codes", rounding="nearest")
        >>> average = averaged_model(model)
        >>> average.update_parameters(model)
        >>> torch.equal(average.module[0].weight, model[0].weight)
        True

    Source: Izmailov et al. 2018 (stochastic weight averaging).
    """
    for name in options:
        if name not in _OPTIONS:
            raise TypeError(
                f"averaged_model has no option {name!r}: it has {', '.join(_OPTIONS)}, such as "
                "multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.999)"
            )
    if options.get("use_buffers"):
        raise ValueError(
            "use_buffers=True is not supported: quantised layers have buffers that the average "
            "lacks"
        )
    if sharded_modules(model):
        raise ValueError(
            f"averaged_model can't copy a model that fully_shard has cut into rows: {_SHARD_BOTH}"
        )
    return _Average(dequantize_model(copy.deepcopy(model)).float(), **options)


class _Average(AveragedModel):
    """An average whose module has weights only.

    It lacks the scales, counts and manifolds of the model's layers.
    """

    def update_parameters(self, model: nn.Module) -> None:
        """Take a model's parameters into the average.

        Buffers are copied, except for those of quantised layers.
        """
        floats = _AsFloats(model)
        sharded = (*sharded_modules(model), *sharded_modules(self.module))
        for module in sharded:
            # What is written into rows that a forward pass has left whole would be lost
            module.reshard()
        if sharded:
            self._check_rows(floats)
        # AveragedModel asks for parameters and buffers only
        super().update_parameters(floats)  # type: ignore[arg-type]

    def _check_rows(self, floats: "_AsFloats") -> None:
        """Raise ValueError if a parameter has other rows in the average."""
        averages = self.module.named_parameters()
        for (name, average), weight in zip(averages, floats.parameters(), strict=True):
            if _rows_key(average) != _rows_key(weight):
                raise ValueError(
                    f"{name!r} has other rows in the average than in the model: {_SHARD_BOTH}"
                )


def _rows_key(parameter: Tensor) -> tuple[Any, ...] | None:
    """Return a key of the rows that this process has; None for a whole parameter."""
    share = share_of(parameter)
    return None if share is None else (share.shape, share.mesh, tuple(share.placements))


class _AsFloats:
    """Parameters and buffers of a model, as if its layers were dequantised.

    They come in the order and shapes of the dequantised model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.layers = [module for module in model.modules() if isinstance(module, QuantizedLinear)]

    def parameters(self) -> Iterator[Tensor]:
        # transformers' Conv1D has its weight transposed
        transposed = {
            id(layer.weight) for layer in self.layers if isinstance(layer, QuantizedConv1D)
        }
        for parameter in self.model.parameters():
            # codes stay codes until an operator reads them
            values = parameter.detach().to(torch.float32)
            yield values.t() if id(parameter) in transposed else values

    def buffers(self) -> Iterator[Tensor]:
        buffers_of_layers = set()
        for layer in self.layers:
            for name, buffer in layer.named_buffers():
                if name.partition(".")[0] in layer._own_names:
                    buffers_of_layers.add(id(buffer))
        for buffer in self.model.buffers():
            if id(buffer) not in buffers_of_layers:
                yield buffer


def _refuse_codes(module: nn.Module, name: str, averaged: Any) -> None:
    """Refuse ``AveragedModel`` of one-byte weights, where it takes its copy of them."""
    if not isinstance(module, AveragedModel) or name != "module":
        return
    for name_of_weight, parameter in averaged.named_parameters():
        if isinstance(parameter, FP8Tensor):
            raise TypeError(
                f"AveragedModel would average {name_of_weight!r} in codes, where small changes are "
                "rounded away: use fp8manifold.averaged_model(model), whose average is in float32"
            )


register_module_module_registration_hook(_refuse_codes)
